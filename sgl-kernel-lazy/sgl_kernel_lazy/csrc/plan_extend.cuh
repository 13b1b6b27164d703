// Which rows and KV tokens a block of link_extend works on. Only the device knows the lengths, so one warp of each
// block computes the plan from them, which takes less time than launching a kernel that computes it once.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lazy::extend {

// A number from 1 that the host knows. Dividing numbers from 0 by it takes three instructions, not thirty.
struct Divisor {
  int value;
  uint32_t factor;  // 2^shift / value, rounded up, which is exact enough for dividends below 2^31
  int shift;

  Divisor(int value = 1) : value(value), shift(31) {
    while (uint64_t{1} << (shift - 31) < uint64_t(value)) ++shift;
    factor = ((uint64_t{1} << shift) + value - 1) / value;
  }
  __device__ __forceinline__ operator int() const { return value; }
  friend __device__ __forceinline__ int operator/(int n, const Divisor& d) {
    return static_cast<uint64_t>(static_cast<uint32_t>(n)) * d.factor >> d.shift;
  }
  friend __device__ __forceinline__ int operator%(int n, const Divisor& d) { return n - n / d * d.value; }
};

struct ExtendBatch {
  const int *qo_indptr, *kv_indptr, *num_segments;
  Divisor group;
  int bs, num_kv_heads;
  int window;        // positions that a row sees, its own included; INT_MAX: all before it
  int max_items;     // at least the number of work items without splits
  int max_partials;  // how many items of requests with splits there is room for
  int num_sms;
};

// The same in every kernel, whatever the compiler makes of a division there.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// The requests of a batch, 32 at a time, one per lane.
template <int BLOCK_M, int BLOCK_N>
struct Requests {
  int qo_begin, qo_length, row_tiles;
  int tiles;  // of KV tokens, as estimated for the mean row tile
  int items;  // work items without splits

  __device__ __forceinline__ Requests(const ExtendBatch& batch, int b) : qo_begin(0), qo_length(0), tiles(0) {
    int kv_length = 0, segments = 0;
    if (b < batch.bs) {
      qo_begin = batch.qo_indptr[b];
      qo_length = batch.qo_indptr[b + 1] - qo_begin;
      kv_length = batch.kv_indptr[b + 1] - batch.kv_indptr[b];
      segments = batch.num_segments[b];
    }
    row_tiles = (qo_length * batch.group + BLOCK_M - 1) / BLOCK_M;
    // Half of the new text is hidden from the mean row, and half of a run's last tile is empty. Under a window, a tile
    // of rows sees few runs.
    const int seen = max(kv_length - qo_length / 2, 0);
    if (qo_length > 0) {
      tiles = seen <= batch.window ? (seen + BLOCK_N - 1) / BLOCK_N + segments / 2 + 1
                                   : (batch.window + BLOCK_M / batch.group + BLOCK_N - 1) / BLOCK_N + 1;
    }
    items = row_tiles * batch.num_kv_heads;
  }
};

__device__ __forceinline__ float splits_of(float tiles, float splits_per_tile) {
  return fmaxf(1.0f, ceilf(__fmul_rn(tiles, splits_per_tile)));
}

// How finely requests are split: one of n tiles is cut into n * splits_per_tile parts, rounded up. All blocks must
// arrive at the same result, those of merge_kernel too, hence the explicit rounding.
template <int BLOCK_M, int BLOCK_N>
__device__ __forceinline__ float plan_splits(const ExtendBatch& batch, const Requests<BLOCK_M, BLOCK_N>& first,
                                             int lane) {
  // In tiles, as measured on an H200: to begin and end an item, and to merge.
  constexpr float ITEM = 2.0f, MERGE = 2.0f;
  if (batch.max_partials == 0) return 0.0f;
  int longest = __reduce_max_sync(~0u, first.tiles), work = __reduce_add_sync(~0u, first.tiles * first.items);
  for (int base = 32; base < batch.bs; base += 32) {
    const Requests<BLOCK_M, BLOCK_N> next(batch, base + lane);
    longest = max(longest, __reduce_max_sync(~0u, next.tiles));
    work += __reduce_add_sync(~0u, next.tiles * next.items);
  }
  const float per_sm = reciprocal(batch.num_sms), share = __fmul_rn(work, per_sm);
  if (longest <= share) return 0.0f;  // no request would keep an SM busy after the others are done
  if (batch.bs > 32) {
    // Too many to rate candidates. With items no longer than an SM's share, splitting adds at most num_sms items, and
    // at most twice as many have partial results.
    return longest > __fadd_rn(share, ITEM + MERGE) ? __fmul_rn(0.999f, reciprocal(share)) : 0.0f;
  }
  // The candidates cut the longest request into 1 to 131 parts, one candidate per lane. Each is rated by a lower bound
  // of the time, in tiles: the longest item, an SM's share of the work, and the rounds that the longest items take.
  const int beyond = max(lane - 15, 0);
  const float parts = lane + 1 + beyond * beyond * 99 / 256;
  const float splits_per_tile = __fmul_rn(__fmul_rn(parts, 0.9999f), reciprocal(longest));
  const float full = __fmul_rn(longest, reciprocal(parts)), nearly_full = __fmul_rn(full, 0.95f);
  float items = 0.0f, partials = 0.0f, full_items = 0.0f;
#pragma unroll 4
  for (int i = 0; i < batch.bs; ++i) {
    const float tiles = __shfl_sync(~0u, first.tiles, i), unsplit = __shfl_sync(~0u, first.items, i);
    const float splits = splits_of(tiles, splits_per_tile);
    const float count = __fmul_rn(unsplit, splits);
    items = __fadd_rn(items, count);
    if (splits > 1.0f) partials = __fadd_rn(partials, count);
    if (tiles > __fmul_rn(nearly_full, splits)) full_items = __fadd_rn(full_items, count);
  }
  const float mean = __fmaf_rn(__fmul_rn(items, ITEM), per_sm, share);
  const float rounds = ceilf(__fmul_rn(__fadd_rn(full_items, -0.5f), per_sm));
  float time = fmaxf(fmaxf(__fadd_rn(ceilf(full), ITEM), mean), __fmul_rn(rounds, __fadd_rn(nearly_full, ITEM)));
  if (partials > 0.0f) time = __fadd_rn(time, MERGE);
  const bool fits = lane == 0 || items <= batch.max_items && partials <= batch.max_partials;
  const int best = __reduce_min_sync(~0u, fits ? __float_as_uint(time) & ~31u | lane : ~0u) % 32;
  return best == 0 ? 0.0f : __shfl_sync(~0u, splits_per_tile, best);
}

// The work item of a block; num_splits is 0 where there is none. Of each 32 requests the longer items come first. Those
// of one request and kv head follow each other, so that its K and V are read while in L2, and its last rows come first,
// which see the most.
struct WorkItem {
  int b, tile, split, num_splits, kv_head, qo_begin, qo_length;
  int row_tiles;  // of the request
  int partial;    // where partial rows are stored, in blocks of BLOCK_M; the next split's are row_tiles blocks further

  // For a whole warp. With SPLIT_ONLY, index counts the row tiles of requests with splits, and the first split is
  // found.
  template <int BLOCK_M, int BLOCK_N, bool SPLIT_ONLY = false>
  __device__ __forceinline__ void find(const ExtendBatch& batch, int index, int lane) {
    num_splits = 0;
    Requests<BLOCK_M, BLOCK_N> requests(batch, lane);
    const float splits_per_tile = plan_splits(batch, requests, lane);
    int partials_before = 0;  // of other groups of 32 requests
    for (int base = 0; base < batch.bs; base += 32) {
      if (base > 0) requests = Requests<BLOCK_M, BLOCK_N>(batch, base + lane);
      const float splits = splits_of(requests.tiles, splits_per_tile);
      const float length = __fmul_rn(requests.tiles, reciprocal(splits));
      const int items = requests.items * static_cast<int>(splits), partials = splits > 1.0f ? items : 0;
      const int counted = !SPLIT_ONLY ? items : splits > 1.0f ? requests.items : 0;
      int before = 0, own_partials_before = 0;
#pragma unroll 4
      for (int i = 0; i < min(batch.bs - base, 32); ++i) {
        const float other_length = __shfl_sync(~0u, length, i);
        const int other_counted = __shfl_sync(~0u, counted, i), other_partials = __shfl_sync(~0u, partials, i);
        if (other_length > length || other_length == length && i < lane) {
          before += other_counted, own_partials_before += other_partials;
        }
      }
      const unsigned owners = __ballot_sync(~0u, index >= before && index < before + counted);
      if (owners) {
        const int owner = __ffs(owners) - 1;
        b = base + owner;
        qo_begin = __shfl_sync(~0u, requests.qo_begin, owner);
        qo_length = __shfl_sync(~0u, requests.qo_length, owner);
        row_tiles = __shfl_sync(~0u, requests.row_tiles, owner);
        num_splits = __shfl_sync(~0u, static_cast<int>(splits), owner);
        index -= __shfl_sync(~0u, before, owner);
        const int of_head = index / row_tiles;
        tile = row_tiles - 1 - index % row_tiles;
        split = SPLIT_ONLY ? 0 : of_head % num_splits;
        kv_head = SPLIT_ONLY ? of_head : of_head / num_splits;
        partial = partials_before + __shfl_sync(~0u, own_partials_before, owner) +
                  (kv_head * num_splits + split) * row_tiles + tile;
        return;
      }
      index -= __reduce_add_sync(~0u, counted);
      partials_before += __reduce_add_sync(~0u, partials);
    }
  }
};

}  // namespace lazy::extend
