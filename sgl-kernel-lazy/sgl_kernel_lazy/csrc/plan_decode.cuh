// Builds the plan of a decode batch, which decode_plan.cuh describes, in one cluster of PLAN_BLOCKS blocks.
#pragma once

#include <cooperative_groups.h>

#include "decode_plan.cuh"

namespace lazy {

constexpr int PLAN_BLOCKS = 8, PLAN_THREADS = 1024;  // one cluster

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

// Where segment s of a row of `length` KV tokens ends; the text, which comes last, ends with the row. Rows that pad a
// batch may have segments beyond their end, which are cut off.
__device__ inline int segment_end(const int* ends, int num_segments, int s, int length) {
  return s < 0 ? 0 : s < num_segments ? min(ends[s], length) : length;
}

constexpr int MAX_PROBES = 64;

// The place of this id in the table, inserted now if it is new. EMPTY if there is no room, which is then so for every
// segment of this id, as places are never freed.
__device__ inline int find_or_insert(Group* groups, int table_size, int id) {
  unsigned at = unsigned(id) * 2654435769u;
  at ^= at >> 15;
  for (int probe = 0; probe < MAX_PROBES; ++probe, ++at) {
    at &= table_size - 1;
    const int seen = atomicCAS(&groups[at].id, EMPTY, id);
    if (seen == EMPTY || seen == id) return at;
  }
  return EMPTY;
}

// What an item costs besides its tiles, in tiles: loading and rotating queries and writing results.
__device__ inline int fixed_cost(int num_users) { return 1 + num_users / 4; }

// A block's share of so many tiles.
__device__ inline int share_of(int tiles, const PlanHeader& header, const PlanLayout& layout) {
  return max(ceil_div(tiles, layout.takers(header.is_wide)), 1);
}

// How the strip is cut: its first `edge` tiles into short spans, the rest into long ones.
struct Cuts {
  int edge, short_span, long_span;

  __device__ int num_short() const { return edge / short_span; }
  __device__ int count(int strip) const { return num_short() + ceil_div(max(strip - edge, 0), long_span); }
  __device__ int begin(int span) const {
    return span < num_short() ? span * short_span : edge + (span - num_short()) * long_span;
  }
  __device__ int span_at(int place) const {
    return place < edge ? place / short_span : num_short() + (place - edge) / long_span;
  }
};

constexpr int SHORT_SPAN = 3;             // tiles: the fewest whose copies should hide an item's fixed cost
constexpr int MIN_SHARE_WITH_SHORT = 40;  // tiles: below that, short spans cost more than they even out

// A long span for each of `takers` blocks that start at the back. The short ones are for whoever is free: blocks that
// have finished the large tasks, and at the end all blocks, since some get more of the memory's bandwidth than others.
__device__ inline Cuts cut(int strip, int share, int takers, const PlanHeader& header, const PlanLayout& layout) {
  const int room = layout.max_spans / 2;  // for short spans, and for long ones
  if (header.large_tiles) {
    const int long_span = max(6 * share / 7, ceil_div(strip, room)), rest = max(strip - takers * long_span, 0);
    // These may cut groups: at most half of SPANS_PER_BLOCK for each block that can take one.
    const int most = max(room / layout.head_groups[header.is_wide], 1);
    const int short_span = max(ceil_div(share, 16), ceil_div(rest, most));
    return Cuts{ceil_div(rest, short_span) * short_span, short_span, long_span};
  }
  // Short spans are for requests alone: each cut through a group costs a result per user.
  const bool with_short = header.num_groups && share >= MIN_SHARE_WITH_SHORT;
  const int rest = with_short ? min(strip / 12, header.private_strip) : 0;
  const int short_span = max(SHORT_SPAN, ceil_div(rest, room)), edge = rest / short_span * short_span;
  return Cuts{edge, short_span, max(ceil_div(strip - edge, max(takers, 1)), ceil_div(strip, room))};
}

// One cluster. A warp takes a request, and its lanes the segments.
__global__ void __cluster_dims__(PLAN_BLOCKS) __launch_bounds__(PLAN_THREADS)
    plan_kernel(PlanArgs a, Plan plan, PlanLayout layout) {
  const auto cluster = cooperative_groups::this_cluster();
  const int thread = cluster.thread_rank(), num_threads = cluster.num_threads();
  const int lane = thread % 32, warp = thread / 32, num_warps = num_threads / 32;
  PlanHeader& header = *plan.header;
  if (thread == 0) header = PlanHeader{0, 0, 0, layout.group_size > NARROW_ROWS};
  int sum = 0;  // in every warp, so that none waits for another
  for (int b = lane; b < a.bs; b += 32) sum += a.num_segments[b];
  sum = warp_sum(sum);
  int table_size = 32;
  while (table_size < 2 * sum && table_size < layout.table_size) table_size *= 2;
  for (int i = thread; i < table_size; i += num_threads) plan.groups[i] = Group{EMPTY};
  cluster.sync();

  // Insert every segment under its id. A row ends with the query's own token, which is in no chunk: a segment that
  // reaches the end is left over in a row that pads the batch, and may list other slots than its id stands for.
  for (int b = warp; b < a.bs; b += num_warps) {
    const int* ends = a.segment_ends + int64_t(b) * a.stride_ends;
    const int* ids = a.segment_ids + int64_t(b) * a.stride_ids;
    const int num_segments = a.num_segments[b], row = a.kv_indptr[b], length = a.kv_indptr[b + 1] - row;
    for (int s = lane; s < num_segments; s += 32) {
      int begin = segment_end(ends, num_segments, s - 1, length), end = segment_end(ends, num_segments, s, length);
      Use use{EMPTY, 0};
      if (end > begin && end < length && ids[s] >= 0) {
        use.entry = find_or_insert(plan.groups, table_size, ids[s]);
      }
      if (use.entry != EMPTY) {
        Group& group = plan.groups[use.entry];
        const int rank = atomicAdd(&group.num_users, 1);
        if (rank == 0) group.begin = row + begin, group.end = row + end;
        use.rank = min(rank, PlanLayout::MAX_SHARED_USERS);  // a chunk with more users is not shared
      }
      plan.uses[int64_t(b) * a.max_segments + s] = use;
    }
  }
  cluster.sync();

  // Choose those that are worth sharing, while the workspace has room.
  for (int i = thread; i < table_size; i += num_threads) {
    Group& group = plan.groups[i];
    const int users = group.num_users, tokens = group.end - group.begin;
    if (users < 2 || (users - 1) * tokens < a.min_saved_tokens) continue;
    const int user = atomicAdd(&header.num_shared_users, users);
    if (user + users > layout.max_shared_users) continue;
    group.shared = 1;
    group.user = a.bs + user;
    plan.shared_groups[atomicAdd(&header.num_groups, 1)] = i;
    if (min(users, layout.users_per_item) * layout.group_size > NARROW_ROWS) header.is_wide = 1;
  }
  cluster.sync();
  const int tile = layout.tile[header.is_wide];
  for (int i = thread; i < header.num_groups; i += num_threads) {
    Group& group = plan.groups[plan.shared_groups[i]];
    const int users = group.num_users, tiles = ceil_div(group.end - group.begin, tile);
    if (users <= layout.users_per_item) {
      group.place = atomicAdd(&header.strip, fixed_cost(users) + tiles) + fixed_cost(users);
    } else {
      atomicAdd(&header.large_tiles, ceil_div(users, layout.users_per_item) * tiles);
    }
  }

  // List the private runs.
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
        if (s < num_segments) {  // else it is the text
          offset = offsets[s];
          Use& use = plan.uses[int64_t(b) * a.max_segments + s];
          if (use.entry != EMPTY && plan.groups[use.entry].shared) {
            plan.users[plan.groups[use.entry].user + use.rank] = User{b, offset};
            end = begin;
          } else {
            use.entry = EMPTY;
          }
        }
      }
      int tiles = end > begin ? ceil_div(end - begin, tile) : 0;
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
      plan.users[b] = User{b, 0};
      plan.parts[b] = Parts{0, 0, num_tiles, num_runs};
      if (num_tiles) atomicAdd(&header.private_strip, fixed_cost(1) + num_tiles);
    }
  }
  cluster.sync();

  // Make the tasks of large groups.
  const int strip = header.strip + header.private_strip, share = share_of(strip + header.large_tiles, header, layout);
  const int large_piece = max(a.span ? a.span : share, ceil_div(header.large_tiles, layout.takers(header.is_wide)));
  Span* spans = plan.spans;
  for (int i = thread; i < layout.max_spans; i += num_threads) spans[i] = Span{0, 0, 0};
  for (int i = thread; i < header.num_groups; i += num_threads) {
    Group& group = plan.groups[plan.shared_groups[i]];
    const int users = group.num_users, tiles = ceil_div(group.end - group.begin, tile);
    if (users <= layout.users_per_item) continue;
    const int length = ceil_div(tiles, ceil_div(tiles, large_piece)), pieces = ceil_div(tiles, length);
    group.pieces = pieces;
    group.partial = atomicAdd(&header.num_shared_partials, users * pieces);
    const int items = pieces * ceil_div(users, layout.users_per_item);
    int task = atomicAdd(&header.large_tasks, items);
    for (int p = 0; p < pieces; ++p) {
      for (int first = 0; first < users; first += layout.users_per_item) {
        plan.tasks[task++] =
            Task{{group.begin + p * length * tile, group.end, 0, 0, min(length, tiles - p * length), group.user + first,
                  min(layout.users_per_item, users - first), group.partial + p * users + first}};
      }
    }
  }
  cluster.sync();

  // As few blocks at the front as finish all large tasks in their share of the time, in whole rounds: a task that
  // begins late ends late.
  const int blocks = layout.num_blocks, head_groups = layout.head_groups[header.is_wide];
  const int rounds = header.large_tiles ? max(int(int64_t(share) * header.large_tasks / header.large_tiles), 1) : 1;
  const int front_blocks = min(ceil_div(header.large_tasks * head_groups, rounds), blocks);
  const Cuts cuts = a.span ? Cuts{0, 1, max(a.span, ceil_div(strip, layout.max_cuts[header.is_wide]))}
                           : cut(strip, share, (blocks - front_blocks) / head_groups, header, layout);
  const int num_spans = cuts.count(strip), num_tasks = header.large_tasks + num_spans;
  if (thread == 0) {
    header.num_tasks = num_tasks;
    // All blocks where the two ends would overlap.
    header.front_blocks = num_tasks * head_groups < blocks ? blocks : front_blocks;
  }

  // Count the pieces of the other groups, and of requests, that each span holds.
  for (int i = thread; i < header.num_groups; i += num_threads) {
    Group& group = plan.groups[plan.shared_groups[i]];
    const int users = group.num_users, tiles = ceil_div(group.end - group.begin, tile);
    if (users > layout.users_per_item) continue;
    group.place += header.private_strip;
    const int first = cuts.span_at(group.place), last = cuts.span_at(group.place + tiles - 1);
    for (int at = first; at <= last; ++at) atomicAdd(&spans[at].count, 1);
    group.pieces = last - first + 1;
    group.partial = atomicAdd(&header.num_shared_partials, users * group.pieces);
  }
  for (int b = warp; b < a.bs; b += num_warps) {
    Parts& parts = plan.parts[b];
    // Requests lie before the groups, in their order, so that without groups every step is alike.
    int before = 0, num_parts = 0;
    for (int i = lane; i < b; i += 32) before += plan.parts[i].tiles ? fixed_cost(1) + plan.parts[i].tiles : 0;
    before = warp_sum(before);
    if (lane == 0) parts.place = before + fixed_cost(1);
    __syncwarp();
    if (parts.tiles) {
      const int first = cuts.span_at(parts.place), last = cuts.span_at(parts.place + parts.tiles - 1);
      for (int i = first + lane; i <= last; i += 32) atomicAdd(&spans[i].count, 1), ++num_parts;
    }
    num_parts = warp_sum(num_parts);
    if (lane == 0) parts.count = num_parts;
  }
  cluster.sync();
  for (int i = thread; i < num_spans; i += num_threads) {
    const int first = atomicAdd(&header.num_items, spans[i].count);
    spans[i].first = first;
    plan.tasks[header.large_tasks + i] = Task{{}, first, max(spans[i].count - 1, 0)};
  }
  cluster.sync();

  // Make the items of the spans, and list the partial results of each request.
  auto add = [&](int span, const Item& item) {
    const int place = atomicAdd(&spans[span].filled, 1);
    if (place == 0) plan.tasks[header.large_tasks + span].item = item;
    else plan.items[spans[span].first + place - 1] = item;
  };
  for (int i = thread; i < header.num_groups; i += num_threads) {
    const Group& group = plan.groups[plan.shared_groups[i]];
    const int users = group.num_users, tiles = ceil_div(group.end - group.begin, tile);
    if (users > layout.users_per_item) continue;
    for (int p = 0; p < group.pieces; ++p) {
      const int at = cuts.span_at(group.place) + p;
      const int begin = max(cuts.begin(at) - group.place, 0), end = min(cuts.begin(at + 1) - group.place, tiles);
      add(at,
          Item{group.begin + begin * tile, group.end, 0, 0, end - begin, group.user, users, group.partial + p * users});
    }
  }
  for (int b = warp; b < a.bs; b += num_warps) {
    const Parts parts = plan.parts[b];
    const int num_segments = a.num_segments[b], pieces = parts.count;
    int num_shared = 0;
    for (int s = lane; s < num_segments; s += 32) {
      const int entry = plan.uses[int64_t(b) * a.max_segments + s].entry;
      if (entry != EMPTY) num_shared += plan.groups[entry].pieces;
    }
    num_shared = warp_sum(num_shared);
    int partial = 0, part = 0;
    if (lane == 0) {
      partial = layout.max_shared_partials + atomicAdd(&header.num_private_partials, pieces);
      part = atomicAdd(&header.num_parts, pieces + num_shared);
      plan.parts[b].first = part;
      plan.parts[b].count = pieces + num_shared;
    }
    partial = __shfl_sync(~0u, partial, 0);
    part = __shfl_sync(~0u, part, 0);
    for (int p = lane; p < pieces; p += 32) {
      const int at = cuts.span_at(parts.place) + p;
      const int begin = max(cuts.begin(at) - parts.place, 0), end = min(cuts.begin(at + 1) - parts.place, parts.tiles);
      // The run that holds the first tile: the last one that does not begin after it.
      const Run* run = plan.runs + int64_t(b) * (a.max_segments + 1);
      for (int runs = parts.runs; runs > 1;) {
        int half = runs / 2;
        if (run[half].first_tile <= begin) run += half, runs -= half;
        else runs = half;
      }
      add(at, Item{run->begin + (begin - run->first_tile) * tile, run->end, run->offset, int(run + 1 - plan.runs),
                   end - begin, b, 1, partial + p});
      plan.part_ids[part + p] = partial + p;
    }
    part += pieces;
    for (int base = 0; base < num_segments; base += 32) {
      const int s = base + lane;
      const Use use = s < num_segments ? plan.uses[int64_t(b) * a.max_segments + s] : Use{EMPTY, 0};
      const int count = use.entry == EMPTY ? 0 : plan.groups[use.entry].pieces, up_to = warp_inclusive_scan(count);
      for (int p = 0; p < count; ++p) {
        const Group& group = plan.groups[use.entry];
        plan.part_ids[part + up_to - count + p] = group.partial + p * group.num_users + use.rank;
      }
      part += __shfl_sync(~0u, up_to, 31);
    }
  }
  // The decode kernel may start as soon as this one exits, and reads the plan before it waits for anything.
  __threadfence();
}

}  // namespace lazy
