// The schedule of a decode batch: which block reads which keys for which query rows. plan_decode.cuh builds it, on
// the device and once per step, from nothing but the arguments of the op.
//
// A "run" is a stretch of a request's row in kv_indices with one rotation: a chunk segment, or the text. Runs are cut into
// tiles; no tile straddles two runs. Segments of one id (at least 0) list the same slots; if reading these once for all
// users saves enough, they form a "group". What is left of a request are its private runs. An "item" is a span of tiles
// of one request's private runs, or of one group for as many of its users as fit. It writes one partial result per user
// and head; the merge kernel combines those of a request.
//
// A "unit" is what a block does before it asks for more: one or several items. The private runs and the groups whose
// users fit into one item are laid out on a line, which is cut into spans, one unit each. Most of it goes into as many
// long spans as blocks run at once, so that few items are cut, since each cut costs a partial result of every user. Some
// private runs, which have one user, go into short spans, which are taken last, so that blocks end together.
// Groups with more users than fit are "crowded". They come first, as units of one item; those of the same keys are
// neighbours, so that only one of them reads these from memory. The line then has more short spans, for blocks that come
// to it at different times. Some blocks take units from the front, the others from the back, until they meet: crowded
// units are held up by the L2 cache, the line by memory. Without crowded units all take them from the back.
//
// Where a group comes on the line is decided by atomics and varies from step to step, and with it where items are cut: a
// result can differ in its last bit where chunks are shared.
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
  int first, count, filled;  // items: where they begin, how many, how many are there already
};

struct alignas(16) Item {
  int begin, end, offset;  // what is left of the run that its first tile lies in
  int run;                 // the run after that
  int num_tiles;
  int user, num_users;
  int partial;  // place of its first user's result; the next user's follows
};

struct alignas(16) Unit {
  Item item;          // the first, none if it has no tiles
  int others, count;  // the items after it: where they begin, how many
};

struct Use {
  short entry, rank;  // of a segment: its chunk in the hash table, and its place among the chunk's users
};

struct alignas(16) Parts {
  int first, count;  // of a request: the entries of part_ids that name its partial results
  int tiles, runs;   // private ones
  int place;         // on the line
};

struct Group {
  int id;  // of its segments; EMPTY: no entry
  int num_users;
  int begin, end;             // one user's run
  int partial, pieces, user;  // where its results and users begin
  int place;                  // on the line
  int shared;
};

struct PlanHeader {
  unsigned long long taken;  // see UnitQueue
  int num_units;
  int front_blocks;
  int is_wide;  // whether any item has more than NARROW_ROWS query rows
  int num_items, num_groups, num_shared_users, num_shared_partials, num_private_partials, num_parts;
  int line, private_line;      // of the groups, and of the requests before them: tiles, and what stands for fixed costs
  int crowded, crowded_units;  // tiles of groups with more users than fit, times items; their units
};

// Who takes which (unit, group of heads) pair. Blocks up to front_blocks take pairs from the front, the others from the
// back. Each has one from the start, then counts in `taken` what it came back for, so that a block which finds nothing
// left takes no place from another: 1 at the front, 2^32 at the back.
struct UnitQueue {
  int num_pairs, front_blocks, num_blocks;

  __host__ __device__ bool at_front(int block) const { return block < front_blocks; }
  __host__ __device__ unsigned long long count(int block) const { return at_front(block) ? 1ull : 1ull << 32; }
  // Both return num_pairs or more if none is left; taken: before this block counted itself.
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
  int span;              // tiles of a unit, or 0 for the best
  int min_saved_tokens;  // (users - 1) * tokens from which a chunk is read once for all
};

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How the warps of a block divide its work: each has one kv head, some query rows of it, and some keys of every tile. A
// block has several heads, since those of a key are neighbours in memory. Where items are wide, a block has half as many
// heads (if it has the warps for all of them otherwise), two warps with half of the rows for each, and twice as many keys
// to a warp, so that a warp has more to do at a time.
struct Geometry {
  int num_warps;       // that compute, at most
  int key_groups;      // warps with the same head and rows
  int heads[2];        // of a block, where all items are narrow, and where not
  int head_groups[2];  // blocks that it takes for all heads
  int tile[2];         // keys

  static constexpr int warps(int head_dim) { return head_dim <= 128 ? 8 : 4; }
  // Query rows of one kv head that a wide item can have: what the registers of two warps hold.
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

// Sizes and places of everything in the workspace, from static shapes. Places are offsets in 4-byte words.
struct PlanLayout {
  static constexpr int SPANS_PER_BLOCK = 6;  // at most
  // Uses of chunks that can be read for several requests at once, and ids that are told apart; the rest is read for
  // each request by itself. Both are held in a Use.
  static constexpr int MAX_SHARED_USERS = 8192, MAX_TABLE_SIZE = 32768;

  int tile[2], head_groups[2];  // as in Geometry
  int max_cuts[2];              // through groups of the line, where all items are narrow, and where not
  int group_size, users_per_item;
  int num_blocks;  // resident at once
  int table_size;  // of groups, at most
  int max_spans, max_shared_users, max_shared_partials, max_units, max_items, max_partials;
  int64_t users, units, spans, items, runs, uses, parts, part_ids, groups, shared_groups, states, outs;
  int64_t num_words;

  static PlanLayout make(int bs, int max_segments, int num_qo_heads, int num_kv_heads, int head_dim,
                         int num_multiprocessors) {
    PlanLayout p;
    const Geometry g = Geometry::make(num_kv_heads, head_dim);
    int64_t segments = int64_t(bs) * max_segments;
    p.group_size = num_qo_heads / num_kv_heads;
    p.users_per_item = Geometry::max_rows(head_dim) / p.group_size;
    p.num_blocks = num_multiprocessors;
    for (int i = 0; i < 2; ++i) p.tile[i] = g.tile[i], p.head_groups[i] = g.head_groups[i];
    p.max_spans = SPANS_PER_BLOCK * p.num_blocks;
    p.max_shared_users = int(std::min<int64_t>(segments, MAX_SHARED_USERS));
    // Every cut adds an item, and a partial result for each of its users: no more of them than make a narrow item where
    // all items are narrow. A crowded group is cut by a block's share of all tiles, so these have a cut per taker.
    p.max_shared_partials = 0;
    for (int i = 0; i < 2; ++i) {
      const int takers = p.takers(i), users = i ? p.users_per_item : NARROW_ROWS / p.group_size;
      p.max_cuts[i] = std::min((SPANS_PER_BLOCK / 2 + 1) * takers + SPANS_PER_BLOCK / 2, p.max_spans);
      if (segments) p.max_shared_partials = std::max(p.max_shared_partials, (p.max_cuts[i] + takers) * users);
    }
    p.max_shared_partials += p.max_shared_users;
    p.max_partials = p.max_shared_partials + bs + p.max_spans;
    p.max_units = p.max_spans + p.takers(false) + p.max_shared_users;
    p.max_items = p.max_units + p.max_shared_users + bs;
    p.table_size = 32;
    while (p.table_size < 2 * segments && p.table_size < MAX_TABLE_SIZE) p.table_size *= 2;
    int64_t at = (sizeof(PlanHeader) / 4 + 3) / 4 * 4;  // everything lies at multiples of 16 bytes
    auto take = [&at](int64_t count, int64_t bytes) {
      int64_t begin = at;
      at += (count * bytes / 4 + 3) / 4 * 4;
      return begin;
    };
    p.users = take(bs + p.max_shared_users, sizeof(User));
    p.units = take(p.max_units, sizeof(Unit));
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

  // Blocks that can take a unit each, where all items are narrow, and where not.
  __host__ __device__ int takers(bool is_wide) const {
    const int blocks = num_blocks / head_groups[is_wide];
    return blocks > 1 ? blocks : 1;
  }
};

// The workspace, typed.
struct Plan {
  PlanHeader* header;
  User* users;  // of the private items, one per request; then of the groups
  Unit* units;  // header->num_units of them
  Span* spans;  // of the line
  Item* items;
  Run* runs;      // max_segments + 1 per request
  Use* uses;      // [bs, max_segments]
  Parts* parts;   // [bs]
  int* part_ids;  // partial results, those of a request together
  Group* groups;  // open-addressed hash table
  int* shared_groups;  // entries of it, header->num_groups of them
  float2* states;      // [partials, key_groups, num_qo_heads]: maximum in base 2, sum of weights
  void* outs;          // [partials, key_groups, num_qo_heads, head_dim]: averages in q's type

  Plan(int* workspace, const PlanLayout& at)
      : header(reinterpret_cast<PlanHeader*>(workspace)),
        users(reinterpret_cast<User*>(workspace + at.users)),
        units(reinterpret_cast<Unit*>(workspace + at.units)),
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
