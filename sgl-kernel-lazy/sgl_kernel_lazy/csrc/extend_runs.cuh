// The runs of KV tokens that a work item of link_extend walks, as one warp of its block lists them.
#pragma once

#include <climits>
#include <cstdint>

#include "plan_extend.cuh"

namespace lazy::extend {

// `wide_*`: int64 instead of int32.
struct ExtendRows : ExtendBatch {
  const int *kv_positions, *segment_ends, *segment_offsets;
  const void* q_positions;
  int64_t stride_ends, stride_offsets;
  int max_segments;
  bool wide_positions;
};

// Consecutive KV tokens [begin, end) of a request with one offset; every row of the block sees [begin, full).
struct __align__(16) Run {
  int begin, end, full, offset;
};

__device__ __forceinline__ int load_integer(const void* array, int64_t i, bool wide) {
  return wide ? static_cast<int>(static_cast<const int64_t*>(array)[i]) : static_cast<const int*>(array)[i];
}

__device__ __forceinline__ int inclusive_sum(int value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// One warp lists the runs of this work item in shared memory, cut to what the rows see and to the split's share of
// tiles. Positions ascend strictly within a run, so the token i places after the first is at least i positions after
// it, and the token i places before the last at least i before: bounds of what is seen, exact without gaps.
template <int BLOCK_N, int PARTS>
__device__ __forceinline__ int2 list_runs(const ExtendRows& p, const WorkItem& item, int first_token, int last_token,
                                          Run* runs, int lane) {
  int oldest = INT_MAX, newest = -1;
  for (int token = first_token + lane; token <= last_token; token += 32) {
    const int position = load_integer(p.q_positions, token, p.wide_positions);
    oldest = min(oldest, position), newest = max(newest, position);
  }
  oldest = __reduce_min_sync(~0u, oldest), newest = __reduce_max_sync(~0u, newest);
  const int row_begin = p.kv_indptr[item.b], row_length = p.kv_indptr[item.b + 1] - row_begin;
  const int segments = p.num_segments[item.b];
  const int* ends = p.segment_ends + item.b * p.stride_ends;
  const int* offsets = p.segment_offsets + item.b * p.stride_offsets;

  int num_runs = 0, num_tiles = 0, carried_end = 0;
  for (int base = 0; base < PARTS * (segments + 2); base += 32) {
    const int i = (base + lane) / PARTS;
    const int listed_end = i < p.max_segments ? ends[i] : 0;  // loaded beside num_segments, used within it
    int end = i < segments ? listed_end : row_length;
    // The text is two runs, cached and new; the new tokens close the row.
    if (i == segments) end = row_length - item.qo_length;
    int begin = __shfl_up_sync(~0u, end, PARTS);
    if (lane < PARTS) begin = carried_end;
    if (i == segments) end = max(end, begin);
    if (i == segments + 1) begin = max(begin, row_length - item.qo_length);
    carried_end = __shfl_sync(~0u, end, 31);
    Run run{begin, begin, begin, 0};
    if (i < segments + 2 && begin < end) {
      const int first = p.kv_positions[row_begin + begin], last = p.kv_positions[row_begin + end - 1];
      const int length = end - begin;
      run.end = begin + min(max(newest - first + 1, 0), length);
      if (last <= oldest) {
        run.full = run.end;
      } else if (last - first == length - 1) {
        run.full = begin + min(max(oldest - first + 1, 0), length);
      }
      run.offset = i < segments ? offsets[i] : 0;
      if constexpr (PARTS == 2) {
        run.begin = min(begin + min(max(oldest - p.window - last + length, 0), length), run.end);
        // From here on every row sees what the window's beginning leaves.
        const int entered = begin + min(max(newest - p.window + 1 - first, 0), length);
        const int tiles_before = (max(entered - run.begin, 0) + BLOCK_N - 1) / BLOCK_N;
        const int second_part = min(run.begin + tiles_before * BLOCK_N, run.end);
        if (lane % 2 == 0) {
          run.end = second_part, run.full = run.begin;
        } else {
          run.begin = second_part;
        }
      }
    }
    const int tiles = (run.end - run.begin + BLOCK_N - 1) / BLOCK_N;
    const unsigned seen = __ballot_sync(~0u, tiles > 0);
    if (tiles > 0) runs[num_runs + __popc(seen & ((1u << lane) - 1))] = run;
    num_runs += __popc(seen);
    num_tiles += __reduce_add_sync(~0u, tiles);
  }
  __syncwarp();
  if (item.num_splits == 1) return make_int2(num_runs, num_tiles);

  const int low = static_cast<int64_t>(num_tiles) * item.split / item.num_splits;
  const int high = static_cast<int64_t>(num_tiles) * (item.split + 1) / item.num_splits;
  int kept = 0, tiles_before = 0;
  for (int base = 0; base < num_runs; base += 32) {
    Run run = base + lane < num_runs ? runs[base + lane] : Run{0, 0, 0, 0};
    __syncwarp();
    const int tiles = (run.end - run.begin + BLOCK_N - 1) / BLOCK_N;
    const int until = tiles_before + inclusive_sum(tiles, lane), from = until - tiles;
    run.end = min(run.end, run.begin + max(high - from, 0) * BLOCK_N);
    run.begin += max(low - from, 0) * BLOCK_N;
    const bool mine = run.begin < run.end;
    const unsigned seen = __ballot_sync(~0u, mine);
    if (mine) runs[kept + __popc(seen & ((1u << lane) - 1))] = run;
    kept += __popc(seen);
    tiles_before = __shfl_sync(~0u, until, 31);
    __syncwarp();
  }
  return make_int2(kept, high - low);
}

// Walks the tiles of the listed runs.
struct TileCursor {
  const Run* next;
  Run run;  // run.begin moves on to the current tile

  __device__ __forceinline__ explicit TileCursor(const Run* runs) : next(runs + 1), run(*runs) {}
  template <int BLOCK_N>
  __device__ __forceinline__ void advance() {
    run.begin += BLOCK_N;
    if (run.begin >= run.end) run = *next++;
  }
  template <int BLOCK_N>
  __device__ __forceinline__ bool masked() const {
    return run.begin + BLOCK_N > run.full;
  }
};

}  // namespace lazy::extend
