// Enough of CUDA to run one warp's code on the host: lanes take turns, each running up to the next exchange.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __align__ alignas
using std::max;
using std::min;

struct int2 {
  int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

inline int lane = 0;
inline unsigned exchanged[2][32];
inline int turn[32];
inline ucontext_t contexts[32], caller;
inline std::function<void(int)> lane_program;

inline void run_warp(std::function<void(int)> program) {
  static std::vector<char> stacks(32 << 16);
  lane_program = std::move(program);
  for (int i = 0; i < 32; ++i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = &stacks[i << 16];
    contexts[i].uc_stack.ss_size = 1 << 16;
    contexts[i].uc_link = i < 31 ? &contexts[i + 1] : &caller;
    turn[i] = 0;
    makecontext(&contexts[i], [] { lane_program(lane = lane % 32), ++lane; }, 0);
  }
  lane = 0;
  swapcontext(&caller, &contexts[0]);
}

// All lanes' values of this exchange, valid until the next exchange but one.
template <typename T>
const unsigned* exchange(T x) {
  const int here = lane;
  unsigned* values = exchanged[turn[here]++ % 2];
  std::memcpy(&values[here], &x, 4);
  lane = (here + 1) % 32;
  swapcontext(&contexts[here], &contexts[lane]);
  lane = here;
  return values;
}
template <typename T>
T value(unsigned bits) {
  T x;
  std::memcpy(&x, &bits, 4);
  return x;
}
template <typename T>
T __shfl_sync(unsigned, T x, int from) {
  return value<T>(exchange(x)[from % 32]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  const int to = lane ^ mask;
  return value<T>(exchange(x)[to]);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int by) {
  const int from = max(lane - by, 0);
  return lane < by ? (exchange(x), x) : value<T>(exchange(x)[from]);
}
inline unsigned __ballot_sync(unsigned, bool here) {
  const unsigned* values = exchange(unsigned(here));
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= values[i] << i;
  return bits;
}
inline int __reduce_add_sync(unsigned, int x) {
  const unsigned* values = exchange(x);
  unsigned sum = 0;
  for (int i = 0; i < 32; ++i) sum += values[i];
  return sum;
}
inline int __reduce_max_sync(unsigned, int x) {
  const unsigned* values = exchange(x);
  int highest = values[0];
  for (int i = 1; i < 32; ++i) highest = max(highest, int(values[i]));
  return highest;
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  const unsigned* values = exchange(x);
  return *std::min_element(values, values + 32);
}

inline void __syncwarp() { exchange(0); }

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline int __float2int_ru(float x) { return int(std::ceil(x)); }
inline int __float_as_int(float x) { return value<int>(value<unsigned>(*reinterpret_cast<unsigned*>(&x))); }
inline unsigned __float_as_uint(float x) { return __float_as_int(x); }
inline float __int_as_float(int x) { return value<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
