// Binding of plan_decode.cuh.
#include "plan_decode.cuh"

#include "binding.h"

namespace {

using lazy::data;
using tvm::ffi::TensorView;

// 4-byte words of a workspace that serves up to bs requests of up to max_segments segments.
int64_t workspace_words(int64_t bs, int64_t max_segments, int64_t num_qo_heads, int64_t num_kv_heads, int64_t head_dim,
                        int64_t num_sms) {
  return lazy::PlanLayout::make(bs, max_segments, num_qo_heads, num_kv_heads, head_dim, num_sms).num_words;
}

void plan_decode(TensorView workspace, TensorView kv_indptr, TensorView num_segments, TensorView segment_ends,
                 TensorView segment_offsets, TensorView segment_ids, int64_t num_qo_heads, int64_t num_kv_heads,
                 int64_t head_dim, int64_t num_sms, int64_t min_saved_tokens, int64_t span) {
  lazy::PlanArgs args{};
  args.kv_indptr = data<int>(kv_indptr);
  args.num_segments = data<int>(num_segments);
  args.segment_ends = data<int>(segment_ends);
  args.segment_offsets = data<int>(segment_offsets);
  args.segment_ids = data<int>(segment_ids);
  args.bs = num_segments.size(0);
  args.max_segments = segment_ends.size(1);
  args.stride_ends = segment_ends.stride(0);
  args.stride_offsets = segment_offsets.stride(0);
  args.stride_ids = segment_ids.stride(0);
  args.span = span;
  args.min_saved_tokens = min_saved_tokens;
  auto layout = lazy::PlanLayout::make(args.bs, args.max_segments, num_qo_heads, num_kv_heads, head_dim, num_sms);
  int* space = lazy::checked_workspace(workspace, layout.num_words);
  tvm::ffi::CUDADeviceGuard guard(workspace.device().device_id);
  lazy::plan_kernel<<<lazy::PLAN_BLOCKS, lazy::PLAN_THREADS, 0, get_stream(workspace.device())>>>(
      args, lazy::Plan(space, layout), layout);
  cudaError_t error = cudaGetLastError();
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << "plan_decode: " << cudaGetErrorString(error);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_words, workspace_words);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_decode, plan_decode);
