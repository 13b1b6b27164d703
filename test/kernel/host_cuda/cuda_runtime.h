// Enough of CUDA to run a kernel of one cluster on the host: one thread per CUDA thread, with barriers to sync warps.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

constexpr int NUM_THREADS = 128;
struct Index {
  int x;
};
inline thread_local Index threadIdx;
struct float2 {
  float x, y;
};
using std::max;
using std::min;

inline std::barrier<>& cluster_barrier() {
  static std::barrier<> barrier(NUM_THREADS);
  return barrier;
}

struct Warp {
  std::barrier<> barrier{32};
  int values[32];
};
inline Warp& warp() {
  static Warp warps[NUM_THREADS / 32];
  return warps[threadIdx.x / 32];
}
inline int lane() { return threadIdx.x % 32; }
inline void __syncwarp() { warp().barrier.arrive_and_wait(); }
inline int exchange(int x, int from) {
  warp().values[lane()] = x;
  __syncwarp();
  int y = from < 0 ? x : warp().values[from % 32];
  __syncwarp();
  return y;
}
inline int __shfl_sync(unsigned, int x, int from) { return exchange(x, from); }
inline int __shfl_xor_sync(unsigned, int x, int mask) { return exchange(x, lane() ^ mask); }
inline int __shfl_up_sync(unsigned, int x, int by) { return exchange(x, lane() - by); }
inline unsigned __ballot_sync(unsigned, bool here) {
  warp().values[lane()] = here;
  __syncwarp();
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) bits |= unsigned(warp().values[i]) << i;
  __syncwarp();
  return bits;
}
inline void __threadfence() {}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline int atomicAdd(int* at, int x) { return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST); }
inline int atomicCAS(int* at, int expected, int x) {
  __atomic_compare_exchange_n(at, &expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

// Runs kernel(arguments...) in NUM_THREADS threads.
template <typename Kernel, typename... Arguments>
void run(Kernel kernel, Arguments... arguments) {
  std::vector<std::thread> threads;
  for (int i = 0; i < NUM_THREADS; ++i) {
    threads.emplace_back([=] {
      threadIdx.x = i;
      kernel(arguments...);
    });
  }
  for (auto& thread : threads) thread.join();
}
