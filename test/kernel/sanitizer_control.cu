// What a sanitizer must be able to tell apart before its report on the kernels counts: a ring whose slots are released
// as in link_decode.cuh, by one lane's arrival on an mbarrier after __syncwarp (with -DLAZY_EVERY_LANE_ARRIVES, by
// every lane's), and, with -DBROKEN, the same ring with slots that are released before they are read.
#include <cstdio>

#include "hopper.cuh"

namespace lazy {

using namespace hopper;

constexpr int STAGES = 8, CONSUMERS = 4, SLOTS = 200;

struct Slot {
  int number, filler[7];
};

__global__ void ring(int* sums) {
  __shared__ Slot slots[STAGES];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      init_barrier(smem_address(full + i), 1);
      init_barrier(smem_address(empty + i), CONSUMERS * ARRIVALS_OF_WARP);
    }
    fence_barrier_init();
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < SLOTS; ++i) {
    const int stage = i % STAGES, phase = i / STAGES % 2;
    if (warp == CONSUMERS) {
      wait(smem_address(empty + stage), phase ^ 1);
      if (lane == 0) {
        slots[stage] = Slot{i};
        arrive(smem_address(full + stage));
      }
    } else {
      auto release = [&] {
        __syncwarp();
        arrive_for_warp(smem_address(empty + stage), lane);
      };
      wait(smem_address(full + stage), phase);
#ifdef BROKEN
      release();
#endif
      sum += *static_cast<volatile int*>(&slots[stage].number);
#ifndef BROKEN
      release();
#endif
    }
  }
  if (warp < CONSUMERS) sums[threadIdx.x] = sum;
}

}  // namespace lazy

int main() {
  using namespace lazy;
  int* sums;
  cudaMallocManaged(&sums, 32 * CONSUMERS * sizeof(int));
  ring<<<1, 32 * (CONSUMERS + 1)>>>(sums);
  if (cudaError_t error = cudaDeviceSynchronize()) {
    std::printf("%s\n", cudaGetErrorString(error));
    return 1;
  }
#ifdef BROKEN
  return 0;  // whatever it has read: what counts is the tool's exit status
#else
  return sums[0] != SLOTS * (SLOTS - 1) / 2;
#endif
}
