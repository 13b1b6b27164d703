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

// The weight of a head's sink beside weights that are reduced by `highest`, in base 2. Sinks are fp32 (wide) or T.
template <typename T>
__device__ __forceinline__ float sink_weight(const void* sinks, bool wide, int head, float highest) {
  const float sink = wide ? static_cast<const float*>(sinks)[head] : float(static_cast<const T*>(sinks)[head]);
  return exp2f(sink * 1.4426950408889634f - highest);
}

// Two fp8 numbers, in the low bytes, as fp16, which holds them exactly.
template <__nv_fp8_interpretation_t FORMAT>
__device__ __forceinline__ uint32_t widen(uint32_t two) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), FORMAT);
  return uint32_t(h.x) | uint32_t(h.y) << 16;
}

}  // namespace lazy
