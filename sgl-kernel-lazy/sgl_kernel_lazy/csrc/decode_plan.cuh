// The schedule of a decode batch: which block reads which keys for which query rows. plan_decode.cuh builds it once per
// step, on the device, from the arguments of the op alone.
//
// A "run" is a stretch of a request's row in kv_indices with one rotation: a chunk segment, or the text. Runs are cut
// into tiles; no tile straddles two runs. Segments of one id (at least 0) list the same slots; if reading these once
// for all users saves enough, they form a "group". The other runs of a request are private. An "item" is a span of
// tiles of one request's private runs, or of one group for as many of its users as fit. It writes one partial result
// per user and head; the merge kernel combines the partial results of each request.
//
// A "task" is one or several items that a block processes before it takes the next task. The private runs and the
// groups whose users fit into one item are laid out on a strip, which is cut into spans, one task each. Most of the
// strip goes into as many long spans as blocks run at once: that cuts few items, and each cut costs a partial result
// per user. Some private runs, which have one user each, go into short spans. These are taken last and even out when
// blocks end.
//
// Groups with more users than fit into one item are "large". Their tasks have one item each and come first; those over
// the same keys are neighbours, so that memory is read once and L2 serves the rest. The strip then has more short
// spans, for blocks that reach it at different times. Some blocks take tasks from the front, the others from the back,
// until they meet, since large tasks are bound by L2 and the strip by memory. Without large tasks all blocks start at
// the back.
//
// Atomics decide where a group lies on the strip, and thereby where items are cut: where chunks are shared, a result
// can differ in its last bit from step to step.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace lazy {

constexpr int EMPTY = -1;
constexpr int NARROW_ROWS = 8;  // query rows of one kv head that a narrow item can have

struct Run {
  int begin, end;  // positions in kv_indices
  int offset;      // rotation, where it is the same for all users; else 0
  int first_tile;  // tiles in the runs before this one
};

struct User {
  int request;
  int offset;  // rotation on top of the run's
};

struct Span {
  int first, count, filled;  // items: the first, how many, how many have been written
};

struct alignas(16) Item {
  int begin, end, offset;  // of the run that holds the first tile, from that tile on
  int run;                 // the next one
  int num_tiles;
  int user, num_users;
  int partial;  // of its first user; those of the other users follow
};

struct alignas(16) Task {
  Item item;          // the first; without tiles: none
  int others, count;  // the other items: the first, how many
};

struct Use {
  short entry, rank;  // of a segment: its chunk in the hash table, and its rank among the chunk's users
};

struct alignas(16) Parts {
  int first, count;  // of a request: the elements of part_ids that name its partial results
  int tiles, runs;   // its private ones
  int place;         // on the strip
};

struct Group {
  int id;  // of its segments; EMPTY: the place in the table is free
  int num_users;
  int begin, end;             // of one user's run
  int partial, pieces, user;  // the first partial result, how many per user, the first user
  int place;                  // on the strip
  int shared;
};

struct PlanHeader {
  unsigned long long taken;  // see TaskQueue
  int num_tasks;
  int front_blocks;
  int is_wide;  // whether any item has more than NARROW_ROWS query rows
  int num_items, num_groups, num_shared_users, num_shared_partials, num_private_partials, num_parts;
  int strip, private_strip;      // length of the groups' part, and of the requests' before it: tiles and fixed costs
  int large_tiles, large_tasks;  // of large groups; a tile counts once per item
};

// Which block takes which (task, group of heads) pair. Blocks below front_blocks take pairs from the front, the others
// from the back. Each starts with one pair and claims more atomically through `taken`, which counts claims at the front
// in its low and those at the back in its high 32 bits: a claim at one end that finds nothing takes nothing from the
// other.
struct TaskQueue {
  int num_pairs, front_blocks, num_blocks;

  __host__ __device__ bool at_front(int block) const { return block < front_blocks; }
  __host__ __device__ unsigned long long count(int block) const { return at_front(block) ? 1ull : 1ull << 32; }
  // The pair to begin with, and the next one, given `taken` before this claim; num_pairs or more: there is none.
  __host__ __device__ int first(int block) const {
    return at_front(block) ? block : num_pairs - 1 - (block - front_blocks);
  }
  __host__ __device__ int next(int block, unsigned long long taken) const {
    const int front = front_blocks + int(taken), back = num_blocks - front_blocks + int(taken >> 32);
    return front + back >= num_pairs ? num_pairs : at_front(block) ? front : num_pairs - 1 - back;
  }
};

struct PlanArgs {
  const int *kv_indptr, *num_segments, *segment_ends, *segment_offsets, *segment_ids;
  int bs, max_segments, stride_ends, stride_offsets, stride_ids;
  int span;              // tiles of a task; 0: as is best
  int min_saved_tokens;  // (users - 1) * tokens from which a chunk is read once for all
};

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How the warps of a block divide its work: each has one kv head, some of its query rows, and some keys of every tile.
// A block has several heads, since the heads of a KV token are neighbours in memory. Where items are wide, it has half
// as many heads (if it could have twice as many at all), two warps per head with half of the rows each, and a warp has
// twice as many keys, which gives it more work between waits.
struct Geometry {
  int num_warps;   // that compute, at most
  int key_groups;  // warps with the same head and rows
  // Where all items are narrow, and where not:
  int heads[2];        // of a block
  int head_groups[2];  // blocks that it takes for all heads
  int tile[2];         // keys of a tile

  static constexpr int warps(int head_dim) { return head_dim <= 128 ? 8 : 4; }
  // Query rows of one kv head that a wide item can have: as many as the registers of two warps hold.
  static constexpr int max_rows(int head_dim) { return head_dim <= 128 ? 32 : 16; }

  static Geometry make(int num_kv_heads, int head_dim) {
    Geometry g{warps(head_dim)};
    int heads = std::min(num_kv_heads, g.num_warps / 2);
    while (num_kv_heads % heads) --heads;
    g.key_groups = g.num_warps / 2 / heads;
    g.heads[0] = num_kv_heads % (2 * heads) ? heads : 2 * heads;
    g.heads[1] = heads;
    for (int i = 0; i < 2; ++i) {
      g.head_groups[i] = num_kv_heads / g.heads[i];
      g.tile[i] = 16 * (1 + i) * g.key_groups;
    }
    return g;
  }
};

// Sizes and places of everything in the workspace, from static shapes alone. Places are offsets in 4-byte words.
struct PlanLayout {
  static constexpr int SPANS_PER_BLOCK = 6;  // at most
  // At most this many uses of chunks are read together with others, and this many ids looked up; what exceeds it is
  // read for each request by itself. Both fit into a Use.
  static constexpr int MAX_SHARED_USERS = 8192, MAX_TABLE_SIZE = 32768;

  int tile[2], head_groups[2];  // as in Geometry
  int max_cuts[2];              // through groups on the strip, as above
  int group_size, users_per_item;
  int num_blocks;  // resident at once
  int table_size;  // of groups, at most
  int max_spans, max_shared_users, max_shared_partials, max_tasks, max_items, max_partials;
  int64_t users, tasks, spans, items, runs, uses, parts, part_ids, groups, shared_groups, states, outs;
  int64_t num_words;

  static PlanLayout make(int bs, int max_segments, int num_qo_heads, int num_kv_heads, int head_dim, int num_sms) {
    PlanLayout p;
    const Geometry g = Geometry::make(num_kv_heads, head_dim);
    int64_t segments = int64_t(bs) * max_segments;
    p.group_size = num_qo_heads / num_kv_heads;
    p.users_per_item = Geometry::max_rows(head_dim) / p.group_size;
    p.num_blocks = num_sms;
    for (int i = 0; i < 2; ++i) p.tile[i] = g.tile[i], p.head_groups[i] = g.head_groups[i];
    p.max_spans = SPANS_PER_BLOCK * p.num_blocks;
    p.max_shared_users = int(std::min<int64_t>(segments, MAX_SHARED_USERS));
    // Every cut adds an item and a partial result per user: of a narrow item, where all items are. Large groups are cut
    // into pieces of a block's share of all tiles, so at most once per taker.
    p.max_shared_partials = 0;
    for (int i = 0; i < 2; ++i) {
      const int takers = p.takers(i), users = i ? p.users_per_item : NARROW_ROWS / p.group_size;
      p.max_cuts[i] = std::min((SPANS_PER_BLOCK / 2 + 1) * takers + SPANS_PER_BLOCK / 2, p.max_spans);
      if (segments) p.max_shared_partials = std::max(p.max_shared_partials, (p.max_cuts[i] + takers) * users);
    }
    p.max_shared_partials += p.max_shared_users;
    p.max_partials = p.max_shared_partials + bs + p.max_spans;
    p.max_tasks = p.max_spans + p.takers(false) + p.max_shared_users;
    p.max_items = p.max_tasks + p.max_shared_users + bs;
    p.table_size = 32;
    while (p.table_size < 2 * segments && p.table_size < MAX_TABLE_SIZE) p.table_size *= 2;
    int64_t at = (sizeof(PlanHeader) / 4 + 3) / 4 * 4;  // everything begins at a multiple of 16 bytes
    auto take = [&at](int64_t count, int64_t bytes) {
      int64_t begin = at;
      at += (count * bytes / 4 + 3) / 4 * 4;
      return begin;
    };
    p.users = take(bs + p.max_shared_users, sizeof(User));
    p.tasks = take(p.max_tasks, sizeof(Task));
    p.spans = take(p.max_spans, sizeof(Span));
    p.items = take(p.max_items, sizeof(Item));
    p.runs = take(segments + bs, sizeof(Run));
    p.uses = take(segments, sizeof(Use));
    p.parts = take(bs, sizeof(Parts));
    p.part_ids = take(p.max_partials, sizeof(int));
    p.groups = take(p.table_size, sizeof(Group));
    p.shared_groups = take(p.max_shared_users / 2 + 1, sizeof(int));
    int64_t results = int64_t(p.max_partials) * g.key_groups * num_qo_heads;
    p.states = take(results, 2 * sizeof(float));
    p.outs = take(results * head_dim, 2);
    p.num_words = at;
    return p;
  }

  // Tasks that blocks can work on at once, each with all heads.
  __host__ __device__ int takers(bool is_wide) const {
    const int blocks = num_blocks / head_groups[is_wide];
    return blocks > 1 ? blocks : 1;
  }
};

// The workspace with types.
struct Plan {
  PlanHeader* header;
  User* users;  // of private items, one per request, then of groups
  Task* tasks;  // header->num_tasks of them
  Span* spans;
  Item* items;
  Run* runs;           // max_segments + 1 per request
  Use* uses;           // [bs, max_segments]
  Parts* parts;        // [bs]
  int* part_ids;       // partial results, grouped by request
  Group* groups;       // open-addressed hash table
  int* shared_groups;  // places in it, header->num_groups of them
  float2* states;      // [partials, key_groups, num_qo_heads]: maximum in base 2, sum of weights
  void* outs;          // [partials, key_groups, num_qo_heads, head_dim]: averages in q's type

  Plan(int* workspace, const PlanLayout& at)
      : header(reinterpret_cast<PlanHeader*>(workspace)),
        users(reinterpret_cast<User*>(workspace + at.users)),
        tasks(reinterpret_cast<Task*>(workspace + at.tasks)),
        spans(reinterpret_cast<Span*>(workspace + at.spans)),
        items(reinterpret_cast<Item*>(workspace + at.items)),
        runs(reinterpret_cast<Run*>(workspace + at.runs)),
        uses(reinterpret_cast<Use*>(workspace + at.uses)),
        parts(reinterpret_cast<Parts*>(workspace + at.parts)),
        part_ids(workspace + at.part_ids),
        groups(reinterpret_cast<Group*>(workspace + at.groups)),
        shared_groups(workspace + at.shared_groups),
        states(reinterpret_cast<float2*>(workspace + at.states)),
        outs(workspace + at.outs) {}
};

}  // namespace lazy
