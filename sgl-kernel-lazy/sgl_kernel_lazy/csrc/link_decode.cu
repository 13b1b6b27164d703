// Binding of link_decode.cuh.
#include "link_decode.cuh"

#include "binding.h"

namespace {

using lazy::check_aligned;
using lazy::data;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// A cache as TMA sees it, [slots, lines, bytes of a line]; copies are swizzled by line.
CUtensorMap tensor_map(const char* name, TensorView cache, int heads_at_once) {
  constexpr int ELEMENT = lazy::ROW_BYTES / lazy::HEAD_DIM;
  check_aligned(name, cache, 16);
  TVM_FFI_CHECK(cache.size(1) == 1 || cache.stride(1) == lazy::HEAD_DIM, ValueError)
      << name << ": expected the heads of a slot one after another";
  TVM_FFI_CHECK(heads_at_once * lazy::ROW_BYTES % lazy::LINE == 0, ValueError)
      << name << ": expected a slot's heads to take a multiple of 128 bytes";
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  TVM_FFI_CHECK(encode, RuntimeError) << "link_decode: the CUDA driver knows no cuTensorMapEncodeTiled";
  const cuuint64_t sizes[] = {lazy::LINE, cuuint64_t(cache.size(1) * lazy::ROW_BYTES / lazy::LINE),
                              cuuint64_t(cache.size(0))};
  const cuuint64_t strides[] = {lazy::LINE, cuuint64_t(cache.stride(0) * ELEMENT)};
  const cuuint32_t box[] = {lazy::LINE, cuuint32_t(heads_at_once * lazy::ROW_BYTES / lazy::LINE), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, cache.data_ptr(), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_CHECK(result == CUDA_SUCCESS, RuntimeError) << name << ": no tensor map, error " << int(result);
  return map;
}

void link_decode(TensorView q, TensorView k_cache, TensorView v_cache, TensorView kv_indices, int64_t max_segments,
                 TensorView cos_sin_cache, TensorView workspace, Optional<TensorView> sinks, TensorView out,
                 Optional<TensorView> lse, double sm_scale, double v_scale, double logit_cap, int64_t num_sms) {
  check_aligned("q", q, 4);
  check_aligned("cos_sin_cache", cos_sin_cache, 8);
  check_aligned("out", out, 16);
  lazy::DecodeArgs args{};
  args.q = q.data_ptr();
  args.sinks = sinks ? (*sinks).data_ptr() : nullptr;
  args.wide_sinks = sinks && (*sinks).dtype().bits == 32;
  const lazy::Geometry geometry = lazy::Geometry::make(k_cache.size(1), lazy::HEAD_DIM);
  for (int wide = 0; wide < 2; ++wide) {
    args.modes[wide].k_cache = tensor_map("k_cache", k_cache, geometry.heads[wide]);
    args.modes[wide].v_cache = tensor_map("v_cache", v_cache, geometry.heads[wide]);
  }
  args.out = out.data_ptr();
  args.lse = lse ? data<float>(*lse) : nullptr;
  args.kv_indices = data<int>(kv_indices);
  args.cos_sin_cache = data<float>(cos_sin_cache);
  args.bs = q.size(0);
  args.num_qo_heads = q.size(1);
  args.num_kv_heads = k_cache.size(1);
  args.stride_q_row = q.stride(0);
  args.stride_q_head = q.stride(1);
  args.stride_out_row = out.stride(0);
  args.stride_out_head = out.stride(1);
  args.stride_lse_row = lse ? (*lse).stride(0) : 0;
  args.stride_position = cos_sin_cache.stride(0);
  args.scale_log2 = (lazy::CAPPED ? logit_cap : sm_scale) * 1.4426950408889634;
  args.cap_scale = lazy::CAPPED ? sm_scale / logit_cap * 2.8853900817779268 : 0.0;
  args.v_scale = v_scale;
  auto layout =
      lazy::PlanLayout::make(args.bs, max_segments, args.num_qo_heads, args.num_kv_heads, lazy::HEAD_DIM, num_sms);
  int* space = lazy::checked_workspace(workspace, layout.num_words);
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  cudaError_t error = lazy::link_decode(args, space, layout, num_sms, get_stream(q.device()));
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << "link_decode: " << cudaGetErrorString(error);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(link_decode, link_decode);
