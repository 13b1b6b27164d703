// The schedule of a decode batch: which block reads which keys for which query rows. decode_planner.cuh builds it, on
// the device and once per step, from nothing but the arguments of the op.
//
// A "run" is a stretch of a request's row in kv_indices with one rotation: a chunk segment, or the text. Runs are cut
// into tiles of TILE keys; no tile straddles two runs. Segments of one length that end in the same slot are the
// same cached chunk (a segment begins where its chunk begins, and what leads to a slot never changes); if reading it
// once for all its users saves enough, they form a "group". What is left of a request are its private runs. An "item" is what one block does
// for one kv head: a span of tiles, of one request's private runs or of one group for some of its users. Each item
// writes one partial result per user and head; the merge kernel combines those of a request.
//
// Where an item, a user or a partial result is placed is decided by atomics and varies from step to step. A result can
// vary with it in its last bit, since an item divides the keys of a tile by how many users it has.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace lazy {

constexpr int TILE = 64;
constexpr int NARROW_ROWS = 8, NARROW_BLOCKS = 3;  // query rows of a narrow item; blocks per multiprocessor
constexpr int EMPTY = -1;

struct Run {
  int begin, end;  // positions in kv_indices
  int offset;      // rotation, where it is the same for all users; else 0
  int first_tile;  // tiles in the runs before this one
};

struct User {
  int request;
  int offset;  // rotation on top of the run's
};

struct Item {
  int begin, end, offset;  // what is left of the run that its first tile lies in
  int run;                 // the run after that
  int num_tiles;
  int user, num_users;
  int partial;  // place of its first user's result; the next user's follows
};

struct Pieces {
  int first, stride, count;  // partial results first, first + stride, ...
  int unused;
};

struct Group {
  unsigned long long key;  // length and last slot of the chunk; NO_KEY: no entry
  int num_users;
  int begin, end;             // one user's run
  int partial, pieces, user;  // where its results and users begin
  int shared;
};
constexpr unsigned long long NO_KEY = ~0ull;

struct PlanHeader {
  int num_items, num_wide_items, next_unit, next_wide_unit;  // units: (item, kv head) that no block has taken
  int num_groups, num_shared_users, num_shared_partials, num_private_partials;
  int private_tiles, unused[3];
  unsigned long long best_piece;  // cost and length of the best pieces
};

struct PlanArgs {
  const int *kv_indptr, *kv_indices, *num_segments, *segment_ends, *segment_offsets;
  int bs, max_segments, stride_ends, stride_offsets;
  int num_qo_heads, num_kv_heads, users_per_item, num_blocks;  // blocks: resident at once
  int piece;             // tiles of a piece, or 0 for the best
  int min_saved_tokens;  // (users - 1) * tokens from which a chunk is read once for all
};

__host__ __device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Query rows (user, head in group) that one item can hold.
__host__ __device__ inline int max_rows(int head_dim) { return head_dim <= 128 ? 64 : 32; }

// Sizes and places of everything in the workspace, from static shapes. Places are offsets in 4-byte words.
struct PlanLayout {
  static constexpr int MOST_WAVES = 12;

  int users_per_item, num_blocks, most_pieces, max_shared_users, max_shared_partials, max_items, max_partials;
  int64_t users, items, wide_items, runs, segment_pieces, private_pieces, groups, shared_groups, states, outs;
  int64_t num_words;

  static PlanLayout make(int bs, int max_segments, int num_qo_heads, int num_kv_heads, int head_dim,
                         int num_multiprocessors) {
    PlanLayout p;
    int64_t segments = int64_t(bs) * max_segments;
    p.users_per_item = max_rows(head_dim) / (num_qo_heads / num_kv_heads);
    p.num_blocks = num_multiprocessors * (head_dim <= 128 ? NARROW_BLOCKS : 1);
    p.most_pieces = MOST_WAVES * ceil_div(p.num_blocks, num_kv_heads);
    p.max_shared_users = int(std::min<int64_t>(segments, 8192));
    p.max_shared_partials = segments ? p.users_per_item * p.most_pieces + p.max_shared_users : 0;
    p.max_partials = p.max_shared_partials + p.most_pieces + bs;
    p.max_items = 2 * p.most_pieces + p.max_shared_users + bs;
    int64_t table_size = 32;
    while (table_size < 2 * segments) table_size *= 2;
    int64_t at = (sizeof(PlanHeader) / 4 + 3) / 4 * 4;  // everything lies at multiples of 16 bytes
    auto take = [&at](int64_t count, int64_t bytes) {
      int64_t begin = at;
      at += (count * bytes / 4 + 3) / 4 * 4;
      return begin;
    };
    p.users = take(bs + p.max_shared_users, sizeof(User));
    p.items = take(p.max_items, sizeof(Item));
    p.wide_items = take(p.max_items, sizeof(Item));
    p.runs = take(segments + bs, sizeof(Run));
    p.segment_pieces = take(segments, sizeof(Pieces));
    p.private_pieces = take(bs, sizeof(Pieces));
    p.groups = take(table_size, sizeof(Group));
    p.shared_groups = take(segments / 2 + 1, sizeof(int));
    p.states = take(int64_t(p.max_partials) * num_qo_heads, 2 * sizeof(float));
    p.outs = take(int64_t(p.max_partials) * num_qo_heads * head_dim, sizeof(float));
    p.num_words = at;
    return p;
  }
};

// The workspace, typed.
struct Plan {
  PlanHeader* header;
  User* users;  // of the private items, one per request; then of the groups
  Item* items;  // of up to NARROW_ROWS query rows
  Item* wide_items;
  Run* runs;  // max_segments + 1 per request
  Pieces* segment_pieces;  // [bs, max_segments]; count 0 for a private segment
  Pieces* private_pieces;  // [bs]
  Group* groups;           // open-addressed hash table
  int* shared_groups;      // entries of it, header->num_groups of them
  float2* states;          // [partials, num_qo_heads]: maximum in base 2, sum of weights
  float* outs;             // [partials, num_qo_heads, head_dim], not normalised

  Plan(int* workspace, const PlanLayout& at)
      : header(reinterpret_cast<PlanHeader*>(workspace)),
        users(reinterpret_cast<User*>(workspace + at.users)),
        items(reinterpret_cast<Item*>(workspace + at.items)),
        wide_items(reinterpret_cast<Item*>(workspace + at.wide_items)),
        runs(reinterpret_cast<Run*>(workspace + at.runs)),
        segment_pieces(reinterpret_cast<Pieces*>(workspace + at.segment_pieces)),
        private_pieces(reinterpret_cast<Pieces*>(workspace + at.private_pieces)),
        groups(reinterpret_cast<Group*>(workspace + at.groups)),
        shared_groups(workspace + at.shared_groups),
        states(reinterpret_cast<float2*>(workspace + at.states)),
        outs(reinterpret_cast<float*>(workspace + at.outs)) {}
};

}  // namespace lazy
