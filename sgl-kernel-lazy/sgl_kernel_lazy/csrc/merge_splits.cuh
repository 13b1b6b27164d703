// Combines the normalised rows of splits by their lse, for one warp.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace lazy {

// acc = sum_i 2^(lse_i - highest) row_i and sum = sum_i 2^(lse_i - highest) over the splits, with highest the largest
// lse. rows: [.., 32 * VECTOR], lse: [..]; the first split is in this row, the next one stride rows further. A lane has
// VECTOR columns. Rows with lse = -inf are not read. acc and sum begin as 0, highest as -inf, and stay so where no
// split saw anything.
template <int VECTOR>
__device__ __forceinline__ void merge_splits(const float* rows, const float* lse, int64_t first, int64_t stride,
                                             int num_splits, int lane, float (&acc)[VECTOR], float& sum,
                                             float& highest) {
  constexpr int AT_ONCE = VECTOR > 4 ? 2 : 8;  // splits whose rows are loaded together, as registers allow
  using Loaded = std::conditional_t<VECTOR % 4 == 0, float4, float2>;
  for (int base = 0; base < num_splits; base += 32) {
    // A lane has the weight of one split.
    const float own_lse = base + lane < num_splits ? lse[first + (base + lane) * stride] : -INFINITY;
    float all = own_lse;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, step));
    all = fmaxf(all, highest);
    if (all == -INFINITY) continue;
    const float own_weight = exp2f(own_lse - all), correction = exp2f(highest - all);
    highest = all;
    sum *= correction;
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) acc[j] *= correction;
    for (int i = 0; i < min(num_splits - base, 32); i += AT_ONCE) {
      float weight[AT_ONCE], v[AT_ONCE][VECTOR] = {};
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        weight[k] = __shfl_sync(~0u, own_weight, i + k);
        const float* from = rows + (first + (base + i + k) * stride) * (32 * VECTOR) + lane * VECTOR;
#pragma unroll
        for (int j = 0; j < VECTOR; j += sizeof(Loaded) / 4) {
          if (weight[k] > 0.0f) *reinterpret_cast<Loaded*>(v[k] + j) = *reinterpret_cast<const Loaded*>(from + j);
        }
      }
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        sum += weight[k];
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) acc[j] += weight[k] * v[k][j];
      }
    }
  }
}

}  // namespace lazy
