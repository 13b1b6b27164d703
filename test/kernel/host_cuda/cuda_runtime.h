// Enough of CUDA to run a kernel of one cluster on the host: threads take turns in a random order, each running up to a
// barrier or, at times, to an atomic operation.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
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
inline Index threadIdx;  // of the thread whose turn it is
struct float2 {
  float x, y;
};
using std::max;
using std::min;

inline ucontext_t contexts[NUM_THREADS], caller;
inline std::vector<int> ready;
inline std::mt19937 order;

inline ucontext_t* next_turn() {
  if (ready.empty()) {
    std::puts("a barrier is not reached by all");
    std::exit(1);
  }
  std::swap(ready[order() % ready.size()], ready.back());
  threadIdx.x = ready.back();
  ready.pop_back();
  return &contexts[threadIdx.x];
}

inline void pause() {
  const int here = threadIdx.x;
  swapcontext(&contexts[here], next_turn());
}

inline void pause_at_times() {
  if (order() % 4) return;
  ready.push_back(threadIdx.x);
  pause();
}

struct Barrier {
  size_t count;
  std::vector<int> waiting{};

  void arrive_and_wait() {
    waiting.push_back(threadIdx.x);
    if (waiting.size() == count) {
      ready.insert(ready.end(), waiting.begin(), waiting.end());
      waiting.clear();
    }
    pause();
  }
};

inline Barrier& cluster_barrier() {
  static Barrier barrier{NUM_THREADS};
  return barrier;
}

struct Warp {
  Barrier barrier{32};
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

inline int atomicAdd(int* at, int x) {
  pause_at_times();
  return std::exchange(*at, *at + x);
}
inline int atomicCAS(int* at, int expected, int x) {
  pause_at_times();
  return *at == expected ? std::exchange(*at, x) : *at;
}

inline std::function<void()> program;
inline int running;

inline void run_thread() {
  program();
  if (--running) setcontext(next_turn());
}

// Runs kernel(arguments...) in NUM_THREADS threads.
template <typename Kernel, typename... Arguments>
void run(Kernel kernel, Arguments... arguments) {
  constexpr size_t STACK = 1 << 16;
  static std::vector<char> stacks(NUM_THREADS * STACK);
  program = [=] { kernel(arguments...); };
  running = NUM_THREADS;
  for (int i = 0; i < NUM_THREADS; ++i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = &stacks[i * STACK];
    contexts[i].uc_stack.ss_size = STACK;
    contexts[i].uc_link = &caller;
    makecontext(&contexts[i], run_thread, 0);
    ready.push_back(i);
  }
  swapcontext(&caller, next_turn());
}
