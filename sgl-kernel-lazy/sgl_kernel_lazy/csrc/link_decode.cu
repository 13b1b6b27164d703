// Binding of link_decode.cuh.
#include "link_decode.cuh"

#include "binding.h"

namespace {

using lazy::check_aligned;
using lazy::data;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

void link_decode(TensorView q, TensorView k_cache, TensorView v_cache, TensorView kv_indices, TensorView num_segments,
                 int64_t max_segments, TensorView cos_sin_cache, TensorView workspace, TensorView out,
                 Optional<TensorView> lse, double sm_scale, double v_scale, int64_t num_multiprocessors) {
  check_aligned("q", q, 4);
  check_aligned("k_cache", k_cache, 16);
  check_aligned("v_cache", v_cache, 16);
  check_aligned("cos_sin_cache", cos_sin_cache, 8);
  check_aligned("out", out, 8);
  lazy::DecodeArgs args{};
  args.q = q.data_ptr();
  args.k_cache = k_cache.data_ptr();
  args.v_cache = v_cache.data_ptr();
  args.out = out.data_ptr();
  args.lse = lse ? data<float>(*lse) : nullptr;
  args.kv_indices = data<int>(kv_indices);
  args.cos_sin_cache = data<float>(cos_sin_cache);
  args.num_segments = data<int>(num_segments);
  args.bs = q.size(0);
  args.max_segments = max_segments;
  args.num_qo_heads = q.size(1);
  args.num_kv_heads = k_cache.size(1);
  args.stride_q_row = q.stride(0);
  args.stride_q_head = q.stride(1);
  args.stride_k_slot = k_cache.stride(0);
  args.stride_k_head = k_cache.stride(1);
  args.stride_v_slot = v_cache.stride(0);
  args.stride_v_head = v_cache.stride(1);
  args.stride_out_row = out.stride(0);
  args.stride_out_head = out.stride(1);
  args.stride_lse_row = lse ? (*lse).stride(0) : 0;
  args.stride_position = cos_sin_cache.stride(0);
  args.scale_log2 = sm_scale * 1.4426950408889634;
  args.v_scale = v_scale;
  auto layout = lazy::PlanLayout::make(args.bs, max_segments, args.num_qo_heads, args.num_kv_heads, lazy::HEAD_DIM,
                                       num_multiprocessors);
  int* space = lazy::checked_workspace(workspace, layout.num_words);
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  cudaError_t error = lazy::link_decode(args, space, layout, num_multiprocessors, get_stream(q.device()));
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << "link_decode: " << cudaGetErrorString(error);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(link_decode, link_decode);
