// Shared by the bindings. Python has checked shapes, dtypes and devices; what a kernel needs besides is checked here.
#pragma once

#include "tvm_ffi_utils.h"

namespace lazy {

template <typename T>
T* data(tvm::ffi::TensorView t) {
  return static_cast<T*>(t.data_ptr());
}

inline void check_aligned(const char* name, tvm::ffi::TensorView t, int64_t bytes) {
  const int64_t element = t.dtype().bits / 8;
  bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % bytes == 0;
  for (int i = 0; i + 1 < t.ndim(); ++i) aligned = aligned && (t.size(i) <= 1 || t.stride(i) * element % bytes == 0);
  TVM_FFI_CHECK(aligned, ValueError) << name << ": expected rows that begin at multiples of " << bytes << " bytes";
}

inline int* checked_workspace(tvm::ffi::TensorView workspace, int64_t num_words) {
  TVM_FFI_CHECK(workspace.numel() >= num_words, ValueError)
      << "workspace: expected at least " << num_words << " elements for this batch, got " << workspace.numel();
  return static_cast<int*>(workspace.data_ptr());
}

}  // namespace lazy
