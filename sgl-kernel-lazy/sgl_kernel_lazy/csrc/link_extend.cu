// Binding of link_extend.cuh. Configured by macros: LAZY_DTYPE (of q and out), LAZY_KV_FP8 (1: e4m3 caches, 2: e5m2,
// 0: as q), LAZY_HEAD_DIM, LAZY_ROTARY_DIM, LAZY_IS_NEOX, LAZY_WINDOWED, LAZY_CAPPED.
#include "link_extend.cuh"

#include "binding.h"

namespace {

using lazy::check_aligned;
using lazy::data;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

using KV = std::conditional_t<LAZY_KV_FP8 == 0, LAZY_DTYPE,
                              std::conditional_t<LAZY_KV_FP8 == 1, __nv_fp8_e4m3, __nv_fp8_e5m2>>;
template <int NUM_CONSUMERS, int BLOCKS_PER_SM = 1>
using Traits = lazy::extend::LinkExtendTraits<LAZY_DTYPE, KV, LAZY_HEAD_DIM, LAZY_ROTARY_DIM, LAZY_IS_NEOX != 0,
                                              LAZY_WINDOWED != 0, LAZY_CAPPED != 0, NUM_CONSUMERS, BLOCKS_PER_SM>;
using Large = Traits<2>;
using Small = Traits<LAZY_HEAD_DIM <= 128 ? 1 : 2>;  // one consumer has no room for all columns of a wider head
// For short windows: as many blocks on an SM as registers allow, but for a few spilled bytes.
constexpr int BLOCKS_PER_SM = LAZY_HEAD_DIM == 64 ? 3 : 2;
using Short = std::conditional_t<LAZY_WINDOWED != 0 && LAZY_HEAD_DIM <= 128, Traits<1, BLOCKS_PER_SM>, Small>;

bool is_wide(TensorView t) { return t.dtype().bits == 64; }

// partial_out and partial_lse are given where requests may be split.
void link_extend(TensorView q, TensorView k_cache, TensorView v_cache, TensorView qo_indptr, TensorView q_positions,
                 TensorView kv_indptr, TensorView kv_indices, TensorView kv_positions, TensorView num_segments,
                 TensorView segment_ends, TensorView segment_offsets, TensorView cos_sin_cache,
                 Optional<TensorView> sinks, TensorView out, Optional<TensorView> lse, Optional<TensorView> partial_out,
                 Optional<TensorView> partial_lse, int64_t block_m, int64_t block_n, int64_t max_items, int64_t num_sms,
                 double sm_scale, double v_scale, int64_t window, double logit_cap) {
  check_aligned("q", q, 16);
  check_aligned("k_cache", k_cache, 16);
  check_aligned("v_cache", v_cache, 16);
  check_aligned("cos_sin_cache", cos_sin_cache, 16);
  check_aligned("out", out, 16);
  lazy::extend::LinkExtendParams params{};
  params.q = q.data_ptr();
  params.k_cache = k_cache.data_ptr();
  params.v_cache = v_cache.data_ptr();
  params.sinks = sinks ? (*sinks).data_ptr() : nullptr;
  params.out = out.data_ptr();
  params.lse = lse ? data<float>(*lse) : nullptr;
  params.partial_out = partial_out ? data<float>(*partial_out) : nullptr;
  params.partial_lse = partial_lse ? data<float>(*partial_lse) : nullptr;
  params.qo_indptr = data<int>(qo_indptr);
  params.q_positions = q_positions.data_ptr();
  params.kv_indptr = data<int>(kv_indptr);
  params.kv_indices = kv_indices.data_ptr();
  params.kv_positions = data<int>(kv_positions);
  params.num_segments = data<int>(num_segments);
  params.segment_ends = data<int>(segment_ends);
  params.segment_offsets = data<int>(segment_offsets);
  params.cos_sin_cache = data<float>(cos_sin_cache);
  params.stride_q_row = q.stride(0);
  params.stride_q_head = q.stride(1);
  params.stride_k_slot = k_cache.stride(0);
  params.stride_k_head = k_cache.stride(1);
  params.stride_v_slot = v_cache.stride(0);
  params.stride_v_head = v_cache.stride(1);
  params.stride_out_row = out.stride(0);
  params.stride_out_head = out.stride(1);
  params.stride_lse_row = lse ? (*lse).stride(0) : 0;
  params.stride_ends = segment_ends.stride(0);
  params.stride_offsets = segment_offsets.stride(0);
  params.stride_position = cos_sin_cache.stride(0);
  params.bs = num_segments.size(0);
  params.num_kv_heads = k_cache.size(1);
  params.group = q.size(1) / params.num_kv_heads;
  params.max_segments = segment_ends.size(1);
  params.window = window;
  params.max_items = max_items;
  params.max_partials = partial_out ? (*partial_out).size(0) : 0;
  params.num_sms = num_sms;
  params.wide_indices = is_wide(kv_indices);
  params.wide_positions = is_wide(q_positions);
  params.wide_sinks = sinks && (*sinks).dtype().bits == 32;
  params.scale_log2 = (LAZY_CAPPED ? logit_cap : sm_scale) * 1.4426950408889634;
  params.cap_scale = LAZY_CAPPED ? sm_scale / logit_cap * 2.8853900817779268 : 0.0;
  params.v_scale = v_scale;
  tvm::ffi::CUDADeviceGuard guard(q.device().device_id);
  const cudaStream_t stream = get_stream(q.device());
  const auto launch = block_m == Large::BLOCK_M   ? lazy::extend::launch_link_extend<Large>
                      : block_n == Small::BLOCK_N ? lazy::extend::launch_link_extend<Small>
                                                  : lazy::extend::launch_link_extend<Short>;
  const cudaError_t error = launch(params, stream);
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << "link_extend: " << cudaGetErrorString(error);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(link_extend, link_extend);
