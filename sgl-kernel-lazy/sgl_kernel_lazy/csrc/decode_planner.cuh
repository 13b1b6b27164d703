// Builds the plan of a decode batch, in one cluster of PLAN_BLOCKS blocks; decode_plan.cuh says what it is.
#pragma once

#include <cooperative_groups.h>

#include "decode_plan.cuh"

namespace lazy {

constexpr int PLAN_BLOCKS = 8, PLAN_THREADS = 1024;  // one cluster
constexpr int MAX_PIECE = 64;                        // tiles

__device__ inline int warp_sum(int x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__device__ inline int warp_inclusive_scan(int x) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int y = __shfl_up_sync(~0u, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

// Where segment s of a row of `length` entries ends; the text, which comes last, ends with the row. Rows that pad a batch
// may have segments beyond their end: those are cut.
__device__ inline int segment_end(const int* ends, int num_segments, int s, int length) {
  return s < 0 ? 0 : s < num_segments ? min(ends[s], length) : length;
}

// Index of the table entry of this key, entered now if it is new.
__device__ inline int find_or_enter(Group* groups, int table_size, int length, int last_slot) {
  const unsigned long long key = (unsigned long long)(length) << 32 | unsigned(last_slot);
  unsigned at = unsigned(last_slot) * 2654435769u + unsigned(length);
  at ^= at >> 15;
  for (;; ++at) {
    at &= table_size - 1;
    unsigned long long seen = atomicCAS(&groups[at].key, NO_KEY, key);
    if (seen == NO_KEY || seen == key) return at;
  }
}

// What it costs to run `units` pieces of `length` tiles, in the time that a tile takes while all blocks are busy. A
// piece has a fixed cost, and beyond one wave the last ones run alone.
__device__ inline float cost_of(int units, int num_blocks, float length) {
  const float PER_PIECE = 2.f, ALONE = 0.5f;
  const float waves = float(units) / num_blocks;
  return (waves <= 1.f ? 1.f : waves + ALONE) * (length + PER_PIECE);
}

// One cluster. A warp takes a request, its lanes the segments.
__global__ void __cluster_dims__(PLAN_BLOCKS) __launch_bounds__(PLAN_THREADS)
    plan_kernel(PlanArgs a, Plan plan, PlanLayout layout) {
  const auto cluster = cooperative_groups::this_cluster();
  const int thread = cluster.thread_rank(), num_threads = cluster.num_threads();
  const int lane = thread % 32, warp = thread / 32, num_warps = num_threads / 32;
  const int group_size = a.num_qo_heads / a.num_kv_heads;
  PlanHeader& header = *plan.header;
  if (thread == 0) header = PlanHeader{0, 0, 0, 0, 0, 0, 0, 0, 0, {}, ~0ull};
  int sum = 0;  // every block by itself, so that none waits
  for (int b = lane; b < a.bs; b += 32) sum += a.num_segments[b];
  sum = warp_sum(sum);
  int table_size = 32;
  while (table_size < 2 * sum) table_size *= 2;
  for (int i = thread; i < table_size; i += num_threads) plan.groups[i] = Group{NO_KEY};
  cluster.sync();

  // Enter every segment under its length and the last slot it names.
  for (int b = warp; b < a.bs; b += num_warps) {
    const int* ends = a.segment_ends + int64_t(b) * a.stride_ends;
    const int num_segments = a.num_segments[b], row = a.kv_indptr[b], length = a.kv_indptr[b + 1] - row;
    for (int s = lane; s < num_segments; s += 32) {
      int begin = segment_end(ends, num_segments, s - 1, length), end = segment_end(ends, num_segments, s, length);
      Pieces entry{EMPTY, 0, 0, 0};  // until the groups are known: table entry, rank among its users
      if (end > begin) {
        entry.first = find_or_enter(plan.groups, table_size, end - begin, a.kv_indices[row + end - 1]);
        Group& group = plan.groups[entry.first];
        entry.stride = atomicAdd(&group.num_users, 1);
        if (entry.stride == 0) group.begin = row + begin, group.end = row + end;
      }
      plan.segment_pieces[int64_t(b) * a.max_segments + s] = entry;
    }
  }
  cluster.sync();

  // Which of them are worth sharing.
  for (int i = thread; i < table_size; i += num_threads) {
    Group& group = plan.groups[i];
    int users = group.num_users, tokens = group.end - group.begin;
    if (users >= 2 && (users - 1) * tokens >= a.min_saved_tokens) {
      group.shared = 1;
      plan.shared_groups[atomicAdd(&header.num_groups, 1)] = i;
    }
  }
  cluster.sync();
  for (int b = warp; b < a.bs; b += num_warps) {
    const int* ends = a.segment_ends + int64_t(b) * a.stride_ends;
    const int num_segments = a.num_segments[b], length = a.kv_indptr[b + 1] - a.kv_indptr[b];
    int tiles = 0;
    for (int s = lane; s <= num_segments; s += 32) {  // the text comes last
      int begin = segment_end(ends, num_segments, s - 1, length), end = segment_end(ends, num_segments, s, length);
      int entry = s < num_segments ? plan.segment_pieces[int64_t(b) * a.max_segments + s].first : EMPTY;
      if (end > begin && (entry == EMPTY || !plan.groups[entry].shared)) tiles += ceil_div(end - begin, TILE);
    }
    tiles = warp_sum(tiles);
    if (lane == 0) plan.private_pieces[b].first = tiles;
  }
  cluster.sync();

  // The best length of a piece: each warp tries some.
  for (int piece = warp + 1; piece <= MAX_PIECE; piece += num_warps) {
    int pieces = 0;
    for (int b = lane; b < a.bs; b += 32) pieces += ceil_div(plan.private_pieces[b].first, piece);
    for (int i = lane; i < header.num_groups; i += 32) {
      const Group& group = plan.groups[plan.shared_groups[i]];
      pieces += ceil_div(ceil_div(group.end - group.begin, TILE), piece) * ceil_div(group.num_users, a.users_per_item);
    }
    pieces = warp_sum(pieces);
    if (lane == 0 && pieces <= layout.most_pieces) {
      float cost = cost_of(pieces * a.num_kv_heads, a.num_blocks, piece);
      atomicMin(&header.best_piece, (unsigned long long)(__float_as_uint(cost)) << 32 | unsigned(piece));
    }
  }
  cluster.sync();
  int piece = a.piece ? a.piece : header.best_piece == ~0ull ? MAX_PIECE : int(header.best_piece & 0xffffffff);

  // The groups' items, while the workspace has room.
  for (int i = thread; i < header.num_groups; i += num_threads) {
    Group& group = plan.groups[plan.shared_groups[i]];
    const int users = group.num_users, tiles = ceil_div(group.end - group.begin, TILE);
    const int length = ceil_div(tiles, ceil_div(tiles, piece)), pieces = ceil_div(tiles, length);
    const int user = atomicAdd(&header.num_shared_users, users);
    const int partial = atomicAdd(&header.num_shared_partials, users * pieces);
    group.shared = user + users <= layout.max_shared_users && partial + users * pieces <= layout.max_shared_partials;
    if (!group.shared) continue;
    group.user = a.bs + user;
    group.partial = partial;
    group.pieces = pieces;
    const int full = users / a.users_per_item, rest = users % a.users_per_item;
    const bool narrow_rest = rest * group_size <= NARROW_ROWS;
    int narrow = 0, wide = 0;
    if (rest && narrow_rest) narrow = atomicAdd(&header.num_items, pieces);
    if (full || !narrow_rest) wide = atomicAdd(&header.num_wide_items, pieces * (full + !narrow_rest));
    for (int p = 0; p < pieces; ++p) {
      for (int first = 0; first < users; first += a.users_per_item) {
        Item& item = first / a.users_per_item == full && narrow_rest ? plan.items[narrow++] : plan.wide_items[wide++];
        item = Item{group.begin + p * length * TILE,
                    group.end,
                    0,
                    0,
                    min(length, tiles - p * length),
                    group.user + first,
                    min(a.users_per_item, users - first),
                    partial + p * users + first};
      }
    }
  }
  cluster.sync();

  // Private runs, and where each shared segment finds its results.
  for (int b = warp; b < a.bs; b += num_warps) {
    const int* ends = a.segment_ends + int64_t(b) * a.stride_ends;
    const int* offsets = a.segment_offsets + int64_t(b) * a.stride_offsets;
    Run* runs = plan.runs + int64_t(b) * (a.max_segments + 1);
    const int num_segments = a.num_segments[b], row = a.kv_indptr[b], length = a.kv_indptr[b + 1] - row;
    int num_runs = 0, num_tiles = 0;
    for (int base = 0; base <= num_segments; base += 32) {
      int s = base + lane, begin = 0, end = 0, offset = 0;
      if (s <= num_segments) {
        begin = segment_end(ends, num_segments, s - 1, length);
        end = segment_end(ends, num_segments, s, length);
        if (s < num_segments) {
          offset = offsets[s];
          Pieces& entry = plan.segment_pieces[int64_t(b) * a.max_segments + s];
          if (entry.first != EMPTY && plan.groups[entry.first].shared) {
            const Group& group = plan.groups[entry.first];
            plan.users[group.user + entry.stride] = User{b, offset};
            entry = Pieces{group.partial + entry.stride, group.num_users, group.pieces, 0};
            end = begin;
          }
        }
      }
      int tiles = end > begin ? ceil_div(end - begin, TILE) : 0;
      unsigned present = __ballot_sync(~0u, tiles > 0);
      int up_to = warp_inclusive_scan(tiles);
      if (tiles) {
        int at = num_runs + __popc(present & ((1u << lane) - 1));
        runs[at] = Run{row + begin, row + end, offset, num_tiles + up_to - tiles};
      }
      num_runs += __popc(present);
      num_tiles += __shfl_sync(~0u, up_to, 31);
    }
    if (lane == 0) {
      plan.private_pieces[b] = Pieces{num_tiles, num_runs, 0, 0};
      atomicAdd(&header.private_tiles, num_tiles);
    }
  }
  cluster.sync();
  piece = max(piece, ceil_div(header.private_tiles, layout.most_pieces));
  for (int b = warp; b < a.bs; b += num_warps) {
    const int tiles = plan.private_pieces[b].first, num_runs = plan.private_pieces[b].stride;
    __syncwarp();
    const int length = tiles ? ceil_div(tiles, ceil_div(tiles, piece)) : 1, pieces = ceil_div(tiles, length);
    int item = 0, partial = 0;
    if (lane == 0) {
      // Groups that found no room have counted beyond theirs.
      partial = layout.max_shared_partials + atomicAdd(&header.num_private_partials, pieces);
      item = atomicAdd(group_size <= NARROW_ROWS ? &header.num_items : &header.num_wide_items, pieces);
      plan.users[b] = User{b, 0};
      plan.private_pieces[b] = Pieces{partial, 1, pieces, 0};
    }
    partial = __shfl_sync(~0u, partial, 0);
    item = __shfl_sync(~0u, item, 0);
    for (int p = lane; p < pieces; p += 32) {
      // The run that holds the first tile: the last that does not begin after it.
      const Run* run = plan.runs + int64_t(b) * (a.max_segments + 1);
      for (int runs = num_runs; runs > 1;) {
        int half = runs / 2;
        if (run[half].first_tile <= p * length) run += half, runs -= half;
        else runs = half;
      }
      Item* items = group_size <= NARROW_ROWS ? plan.items : plan.wide_items;
      items[item + p] = Item{run->begin + (p * length - run->first_tile) * TILE,
                             run->end,
                             run->offset,
                             int(run + 1 - plan.runs),
                             min(length, tiles - p * length),
                             b,
                             1,
                             partial + p};
    }
  }
}

}  // namespace lazy
