// Operands in registers, two 16-bit numbers each: queries rotated back to a chunk's positions, fp8 widened.
#pragma once

#include <cuda_fp8.h>

#include "hopper.cuh"

namespace lazy {

// R(-p) of two pairs of dimensions, of which x holds the first halves and y the second, given cos and sin of their
// angles at p. Computed in float32 and rounded once.
template <typename From, typename To = From>
__device__ __forceinline__ void rotate_back(uint32_t& x, uint32_t& y, float2 cos, float2 sin) {
  const float2 a = hopper::unpack<From>(x), b = hopper::unpack<From>(y);
  x = hopper::pack<To>(a.x * cos.x + b.x * sin.x, a.y * cos.y + b.y * sin.y);
  y = hopper::pack<To>(b.x * cos.x - a.x * sin.x, b.y * cos.y - a.y * sin.y);
}

// The same of one pair of neighbouring dimensions.
template <typename From, typename To = From>
__device__ __forceinline__ void rotate_back(uint32_t& pair, float cos, float sin) {
  const float2 a = hopper::unpack<From>(pair);
  pair = hopper::pack<To>(a.x * cos + a.y * sin, a.y * cos - a.x * sin);
}

// The sink of a head: fp32, or in q's type.
template <typename T>
__device__ __forceinline__ float load_sink(const void* sinks, int head, bool wide) {
  return wide ? static_cast<const float*>(sinks)[head] : float(static_cast<const T*>(sinks)[head]);
}

// Two fp8 numbers, in the low bytes, as fp16, which holds them exactly.
template <__nv_fp8_interpretation_t FORMAT>
__device__ __forceinline__ uint32_t widen(uint32_t two) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), FORMAT);
  return uint32_t(h.x) | uint32_t(h.y) << 16;
}

}  // namespace lazy
