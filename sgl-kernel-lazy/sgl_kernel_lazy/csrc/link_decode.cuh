// Decode over cached chunks for Hopper: each block processes the tiles of the plan's items one after another, rotates
// the queries where a run with another offset begins, and writes partial results; a second kernel merges those of each
// request.
//
//   producer warps  copy the keys and values of a tile into a ring in shared memory. The heads of a KV token lie
//                   together in the cache, so one TMA instruction copies all of a block's (2 KB for 8 heads of 128
//                   in 16 bits). A warp issues copies one by one and slowly, hence four warps share them. They run
//                   ahead of the others, across items, by as many tiles as the ring holds.
//   computing warps have one kv head each, and their keys of every tile, so that they exchange nothing. Wide items, of
//                   many query rows, have two warps per head and blocks of half as many heads. Scores are computed
//                   transposed, S^T = K Q^T and O^T = V^T P^T with mma.m16n8k16: keys (or head dimensions) fill the 16
//                   rows and query rows only the 8 columns, so four query heads waste half a tile, not three quarters.
//
// Memory takes longer for a tile than a warp does, so the ring hides what a warp does when an item or a run begins
// (loading and rotating queries) or ends (writing results).
//
// Configured by macros: LAZY_DTYPE (of q and out), LAZY_KV_FP8 (1: e4m3 caches, 2: e5m2, 0: as q), LAZY_HEAD_DIM,
// LAZY_ROTARY_DIM, LAZY_IS_NEOX, LAZY_CAPPED (whether there is a logit cap).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "decode_plan.cuh"
#include "hopper.cuh"
#include "operands.cuh"

namespace lazy {

using namespace hopper;

// A kind of plan: of narrow items alone, or with wide ones too.
struct Mode {
  CUtensorMap k_cache, v_cache;        // [slots, lines of 128 bytes, bytes]: a box holds a block's heads of a slot
  int heads, head_groups, row_groups;  // of a block; blocks for all heads; warps with the same head and keys
  int tile, key_lines, num_stages;     // of the ring: keys per tile, lines from key to key, tiles
};

struct DecodeArgs {
  const void* q;
  const void* sinks;  // [num_qo_heads]; null: none
  void* out;
  float* lse;  // null: not wanted
  const int* kv_indices;
  const float* cos_sin_cache;
  Mode modes[2];  // narrow, wide
  int key_groups;
  int bs, num_qo_heads, num_kv_heads;
  int64_t stride_q_row, stride_q_head;
  int64_t stride_out_row, stride_out_head, stride_lse_row, stride_position;
  float scale_log2;  // sm_scale (times the keys' scale) in base 2; of capped scores the cap
  float v_scale;
  bool wide_sinks;  // fp32 instead of q's type
  float cap_scale;  // what scores are multiplied by before `tanh_exp2`
};

__device__ inline uint32_t transpose_matrix(uint32_t x) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
  return x;
}

// c += a b for a [16, 16] and b [16, 8], in fp32.
template <typename T>
__device__ inline void mma_16x8(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

using QType = LAZY_DTYPE;
constexpr bool FP8 = LAZY_KV_FP8 != 0;
// fp8 is widened to fp16, which holds it exactly, and multiplied as such.
using MmaType = std::conditional_t<FP8, __half, QType>;
constexpr auto FP8_FORMAT = LAZY_KV_FP8 == 2 ? __NV_E5M2 : __NV_E4M3;
constexpr int HEAD_DIM = LAZY_HEAD_DIM, ROTARY_DIM = LAZY_ROTARY_DIM;
constexpr bool IS_NEOX = LAZY_IS_NEOX, CAPPED = LAZY_CAPPED;
constexpr int DEPTH = HEAD_DIM / 16;                 // 16-wide steps along a head
constexpr int ROW_BYTES = HEAD_DIM * (FP8 ? 1 : 2);  // of one head of a key
constexpr int LINE = 128, LINES = ROW_BYTES > LINE ? ROW_BYTES / LINE : 1;
constexpr int NUM_WARPS = Geometry::warps(HEAD_DIM), MAX_ROWS = Geometry::max_rows(HEAD_DIM);
constexpr int WIDE = MAX_ROWS / 16;  // columns of 8 query rows per warp of a wide item; 1 of a narrow one
constexpr int WARPGROUP = 128, NUM_THREADS = 32 * NUM_WARPS + WARPGROUP;  // the last warpgroup copies
constexpr int MAX_STAGES = 8;
constexpr int SHARED_BYTES = 227 * 1024;
static_assert(ROTARY_DIM % (FP8 ? 32 : 16) == 0 && ROTARY_DIM <= HEAD_DIM && HEAD_DIM % 32 == 0);

// The dimension in the low half of a thread's register r (0, 1) at a depth step; the high half holds the next one. With
// fp8 a thread's four dimensions of a step lie together: both operands permute them alike, so products stay the same.
__device__ inline int held_dim(int step, int r) {
  int quad = threadIdx.x % 4;
  return 16 * step + (FP8 ? 4 * quad + 2 * r : 8 * r + 2 * quad);
}

// A query row's registers as stored, zeros if it is not valid.
__device__ inline void load_query(uint32_t (&regs)[DEPTH][2], const QType* row, bool valid) {
#pragma unroll
  for (int i = 0; i < 2 * DEPTH; ++i) {
    regs[i / 2][i % 2] = valid ? *reinterpret_cast<const uint32_t*>(row + held_dim(i / 2, i % 2)) : 0;
  }
}

// The registers rotated back by the position whose cos/sin row is `table`; null: not rotated.
__device__ inline void rotate_query(uint32_t (&regs)[DEPTH][2], const float* table) {
  if (table) {
    if constexpr (IS_NEOX) {
      constexpr int HALF = ROTARY_DIM / 2, APART = HALF / 8;  // registers i and i + APART hold the pairs
#pragma unroll
      for (int i = 0; i < APART; ++i) {
        uint32_t &low = regs[i / 2][i % 2], &high = regs[(i + APART) / 2][(i + APART) % 2];
        const int dim = held_dim(i / 2, i % 2);
        rotate_back<QType, MmaType>(low, high, *reinterpret_cast<const float2*>(table + dim),
                                    *reinterpret_cast<const float2*>(table + HALF + dim));
      }
    } else {
#pragma unroll
      for (int i = 0; i < ROTARY_DIM / 8; ++i) {
        const int pair = held_dim(i / 2, i % 2) / 2;
        rotate_back<QType, MmaType>(regs[i / 2][i % 2], table[pair], table[ROTARY_DIM / 2 + pair]);
      }
    }
  }
  if constexpr (!std::is_same_v<QType, MmaType>) {
#pragma unroll
    for (int i = 0; i < 2 * DEPTH; ++i) {
      if (table && 16 * (i / 2) < ROTARY_DIM) continue;  // converted above
      float2 x = unpack<QType>(regs[i / 2][i % 2]);
      regs[i / 2][i % 2] = pack<MmaType>(x.x, x.y);
    }
  }
}

// Shared address of 16 bytes of a tile, which begin at a multiple of 16 in the key's row. TMA puts block b of line l of
// shared memory at b ^ l % 8. Keys are an odd number of lines apart, so the blocks of eight keys lie in different
// banks.
__device__ inline uint32_t block_address(uint32_t tile, int key_lines, int key, int byte) {
  const int line = key * key_lines + byte / LINE;
  return tile + line * LINE + ((byte / 16 ^ line) & 7) * 16;
}

// One warp's online softmax over 8 N query rows, of 16 H keys at a time.
template <int N, int H>
struct State {
  uint32_t q[N][DEPTH][2];
  float acc[N][DEPTH][4];
  float shift[N][2], sum[N][2];  // what scores are reduced by, in base 2; the weights of this thread's keys

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) shift[n][c] = -INFINITY, sum[n][c] = 0.f;
#pragma unroll
      for (int d = 0; d < DEPTH; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][d][i] = 0.f;
    }
  }

  // Adds the first `count` (at least 1) of the 16 H keys and values that begin at `key` in their tiles and at `byte` in
  // their rows. Values behind the last are weighted with zero, but must be numbers.
  __device__ void see(uint32_t keys, uint32_t values, int key_lines, int key, int byte, int count, float scale_log2,
                      float cap_scale) {
    const int lane = threadIdx.x % 32;
    uint32_t blocks[H][LINES];  // this thread's first block in each line of the row
    float s[H][N][4] = {};
#pragma unroll
    for (int h = 0; h < H; ++h)
#pragma unroll
      for (int i = 0; i < LINES; ++i) {
        blocks[h][i] = block_address(keys, key_lines, key + 16 * h + (lane & 15), byte + i * LINE + (lane >> 4) * 16);
      }
#pragma unroll
    for (int i = 0; i < ROW_BYTES / 32; ++i) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
        uint32_t loaded[4];
        load_matrices(loaded, blocks[h][i / 4] ^ i % 4 * 32);
        auto multiply = [&](int step, const uint32_t (&k)[4]) {
#pragma unroll
          for (int n = 0; n < N; ++n) mma_16x8<MmaType>(s[h][n], k, q[n][step]);
        };
        if constexpr (FP8) {  // two steps: keys 0-7 and 8-15 of each
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t a = loaded[2 * half], b = loaded[2 * half + 1];
            multiply(2 * i + half, {widen<FP8_FORMAT>(a & 0xffff), widen<FP8_FORMAT>(b & 0xffff),
                                    widen<FP8_FORMAT>(a >> 16), widen<FP8_FORMAT>(b >> 16)});
          }
        } else {
          multiply(i, loaded);
        }
      }
    }
    if constexpr (CAPPED) {
#pragma unroll
      for (int h = 0; h < H; ++h)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) s[h][n][i] = tanh_exp2(s[h][n][i] * cap_scale);
    }
    if (count < 16 * H) {
#pragma unroll
      for (int h = 0; h < H; ++h)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (16 * h + lane / 4 + (i / 2) * 8 >= count) s[h][n][i] = -INFINITY;
    }
    // The shift need not be the maximum: it is raised only where a weight would exceed 2^8, which seldom happens. That
    // saves the reductions over keys.
    auto highest = [&](int n, int c) {
      float most = fmaxf(s[0][n][c], s[0][n][c + 2]);
#pragma unroll
      for (int h = 1; h < H; ++h) most = fmaxf(most, fmaxf(s[h][n][c], s[h][n][c + 2]));
      return most * scale_log2;
    };
    bool above = false;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) above |= highest(n, c) > shift[n][c] + 8.f;
    if (__any_sync(~0u, above)) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float most = highest(n, c);
#pragma unroll
          for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
          // A row's shift depends on its own scores alone, whatever rows it shares the warp with.
          if (most <= shift[n][c] + 8.f) continue;
          float decay = exp2_approx(shift[n][c] - most);
          shift[n][c] = most;
          sum[n][c] *= decay;
#pragma unroll
          for (int d = 0; d < DEPTH; ++d) acc[n][d][c] *= decay, acc[n][d][c + 2] *= decay;
        }
      }
    }
    uint32_t p[H][N][2];
#pragma unroll
    for (int h = 0; h < H; ++h) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[h][n][i] = exp2_approx(s[h][n][i] * scale_log2 - shift[n][i % 2]);
          sum[n][i % 2] += s[h][n][i];
        }
        p[h][n][0] = transpose_matrix(pack<MmaType>(s[h][n][0], s[h][n][1]));
        p[h][n][1] = transpose_matrix(pack<MmaType>(s[h][n][2], s[h][n][3]));
      }
      // Matrices: keys 0-7 and 8-15, of two blocks. With fp8, pairs of neighbouring dimensions are transposed as one.
      const int value = key + 16 * h + (FP8 ? lane & 15 : (lane & 7) + (lane >> 4) * 8),
                block = lane >> (FP8 ? 4 : 3) & 1;
#pragma unroll
      for (int i = 0; i < LINES; ++i)
        blocks[h][i] = block_address(values, key_lines, value, byte + i * LINE + block * 16);
    }
#pragma unroll
    for (int i = 0; i < ROW_BYTES / 32; ++i) {
#pragma unroll
      for (int h = 0; h < H; ++h) {
        uint32_t loaded[4];
        load_matrices_transposed(loaded, blocks[h][i / 4] ^ i % 4 * 32);
        auto add = [&](int d, const uint32_t (&v)[4]) {
#pragma unroll
          for (int n = 0; n < N; ++n) mma_16x8<MmaType>(acc[n][d], v, p[h][n]);
        };
        if constexpr (FP8) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t a = __byte_perm(loaded[2 * half], 0, 0x3120),
                           b = __byte_perm(loaded[2 * half + 1], 0, 0x3120);
            add(2 * i + half, {widen<FP8_FORMAT>(a & 0xffff), widen<FP8_FORMAT>(a >> 16), widen<FP8_FORMAT>(b & 0xffff),
                               widen<FP8_FORMAT>(b >> 16)});
          }
        } else {
          add(i, loaded);
        }
      }
    }
  }

  // Adds up the sums of all threads' keys.
  __device__ void finish() {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum[n][c] += __shfl_xor_sync(~0u, sum[n][c], d);
  }
};

// A tile's description, for the computing warps.
struct __align__(16) Tile {
  int offset;                   // rotation of the keys
  int partial;                  // of the item
  short count;                  // keys
  short head_group, num_users;  // of the item; no users: the end of all work
  bool is_first, is_last;       // of the item
};

// Shared memory: a header and a ring of tiles, which both sides go round in the same order.
extern __shared__ __align__(1024) unsigned char shared_memory[];
constexpr int MAX_USERS = MAX_ROWS;
struct Header {
  Tile tiles[MAX_STAGES];
  User users[MAX_STAGES][MAX_USERS];                                    // of the item that begins with a tile
  uint64_t announced[MAX_STAGES], full[MAX_STAGES], empty[MAX_STAGES];  // barriers
  int next_task;
};
constexpr int HEADER_BYTES = (sizeof(Header) + 1023) / 1024 * 1024;  // swizzling repeats after 1024

struct Ring {
  int num_stages, tile_bytes;  // of keys, and as many of values
  int stage = 0, phase = 0;

  __device__ explicit Ring(const Mode& mode)
      : num_stages(mode.num_stages), tile_bytes(mode.tile * mode.key_lines * LINE) {}
  static __device__ Header& header() { return *reinterpret_cast<Header*>(shared_memory); }
  __device__ Tile& tile() const { return header().tiles[stage]; }
  __device__ User* users() const { return header().users[stage]; }
  // Barriers: the tile is described; its keys and values are here; they have been read.
  __device__ uint32_t announced() const { return smem_address(header().announced) + 8 * stage; }
  __device__ uint32_t full() const { return smem_address(header().full) + 8 * stage; }
  __device__ uint32_t empty() const { return smem_address(header().empty) + 8 * stage; }
  __device__ uint32_t keys() const { return smem_address(shared_memory) + HEADER_BYTES + 2 * stage * tile_bytes; }
  __device__ uint32_t values() const { return keys() + tile_bytes; }
  __device__ void step() {
    if (++stage == num_stages) stage = 0, phase ^= 1;
  }
  // Says that this warp has read the stage.
  __device__ void release() const { arrive_for_warp(empty(), threadIdx.x % 32); }
};

// Copies every tile of every task of this block. All threads of the warpgroup follow the tiles; each copies the keys or
// the values of one or two slots.
__device__ void produce(const DecodeArgs& a, const Plan& plan, const Mode& mode) {
  const int thread = threadIdx.x % WARPGROUP, place = thread % 32 * 4 + thread / 32;  // neighbours in different warps
  const int row = place / 2, is_value = place % 2, group_bytes = mode.heads * ROW_BYTES;
  const TaskQueue queue{plan.header->num_tasks * mode.head_groups, plan.header->front_blocks, int(gridDim.x)};
  const int large_pairs = plan.header->large_tasks * mode.head_groups;
  // The keys of a large group should stay in L2 until all of its blocks have read them. Other keys are read by one
  // block, unless their chunk is too short to be grouped, and make room for these and for the partial results.
  const uint64_t read_again = evict_last(), read_once = evict_first();
  constexpr int ROWS = WARPGROUP / 2;  // slots copied at once; a tile has at most twice as many
  constexpr int NO_SLOT = -1;          // outside of the cache: TMA writes zeros
  Ring ring(mode);
  int& next_task = ring.header().next_task;

  // A tile, and what this thread loads for it: its slots, and a user where an item begins.
  struct Next {
    Tile tile;
    bool is_large;
    int slots[2];
    User user;
  };
  int task = queue.first(blockIdx.x), head_group = 0, left_items = 0, at_item = 0, left_tiles = 0;
  bool is_new = true;  // task
  Item item{};
  auto load_next = [&](Next& next) {
    bool begins = false;
    if (left_tiles) {
      item.begin += mode.tile;
      if (item.begin >= item.end) {
        const Run run = plan.runs[item.run++];
        item.begin = run.begin, item.end = run.end, item.offset = run.offset;
      }
    } else {
      while (left_tiles == 0) {
        if (left_items) {
          item = plan.items[at_item++];
          --left_items;
        } else {
          if (!is_new) {
            wait_for_prerequisites();  // for the counter, which the previous kernel resets
            if (thread == 0) {
              next_task = queue.next(blockIdx.x, atomicAdd(&plan.header->taken, queue.count(blockIdx.x)));
            }
            named_sync(1, WARPGROUP);
            task = next_task;
            named_sync(1, WARPGROUP);
          }
          is_new = false;
          if (task >= queue.num_pairs) return false;
          head_group = task % mode.head_groups;
          const Task& taken = plan.tasks[task / mode.head_groups];
          item = taken.item, at_item = taken.others, left_items = taken.count;
        }
        left_tiles = item.num_tiles;
      }
      begins = true;
    }
    const int count = min(mode.tile, item.end - item.begin);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      next.slots[i] = row + i * ROWS < count ? a.kv_indices[item.begin + row + i * ROWS] : NO_SLOT;
    }
    next.is_large = task < large_pairs;
    if (begins && thread < item.num_users) next.user = plan.users[item.user + thread];
    next.tile = Tile{item.offset,           item.partial, short(count),     short(head_group),
                     short(item.num_users), begins,       --left_tiles == 0};
    return true;
  };
  auto copy = [&](const Next& next) {
    wait(ring.empty(), ring.phase ^ 1);
    if (next.tile.is_first) {
      if (thread < next.tile.num_users) ring.users()[thread] = next.user;
      __syncwarp();
    }
    if (thread < ARRIVALS_OF_WARP) {
      if (thread == 0) ring.tile() = next.tile;
      arrive(ring.announced());
      // Where no item begins, only full is waited for: it must not complete before all lanes have announced the tile.
      if constexpr (ARRIVALS_OF_WARP > 1) __syncwarp();
      if (thread == 0) arrive_expecting(ring.full(), next.tile.count ? 2 * mode.tile * group_bytes : 0);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (next.tile.count && row + i * ROWS < mode.tile) {
        copy_box((is_value ? ring.values() : ring.keys()) + (row + i * ROWS) * mode.key_lines * LINE,
                 is_value ? &mode.v_cache : &mode.k_cache, 0, next.tile.head_group * group_bytes / LINE, next.slots[i],
                 ring.full(), next.is_large ? read_again : read_once);
      }
    }
    ring.step();
  };
  // A tile's slots are loaded before the previous tile is copied, so that they have arrived when it is its turn.
  Next one{}, other{};
  bool more = load_next(one);
  wait_for_prerequisites();  // the plan is complete before; keys and values may not be
  while (more) {
    more = load_next(other);
    copy(one);
    if (!more) break;
    more = load_next(one);
    copy(other);
  }
  copy(Next{});
}

// Computes one item, whose first tile has been announced, for 8 N of its query rows and 16 H keys of every tile. The
// ring is then past its last tile.
template <int N, int H>
__device__ void attend(const DecodeArgs& a, const Plan& plan, const Mode& mode, Ring& ring, int head, int first_row,
                       int key_group) {
  const int lane = threadIdx.x % 32, group_size = a.num_qo_heads / a.num_kv_heads;
  const Tile item = ring.tile();
  const int first_head = (item.head_group * mode.heads + head) * group_size;
  const int num_rows = item.num_users * group_size;
  State<N, H> state;
  User users[N];  // of the rows whose queries this thread holds
#pragma unroll
  for (int n = 0; n < N; ++n) users[n] = ring.users()[min(first_row + 8 * n + lane / 4, num_rows - 1) / group_size];
  auto rotate = [&](int offset) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int row = first_row + 8 * n + lane / 4;
      load_query(state.q[n],
                 static_cast<const QType*>(a.q) + users[n].request * a.stride_q_row +
                     (first_head + row % group_size) * a.stride_q_head,
                 row < num_rows);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int position = offset + users[n].offset;  // one of the two is 0
      rotate_query(state.q[n], position ? a.cos_sin_cache + position * a.stride_position : nullptr);
    }
  };
  int rotated_by = item.offset;
  rotate(rotated_by);
  state.clear();  // not sooner: the loads use its registers
  wait(ring.full(), ring.phase);
  for (;;) {
    const Tile tile = ring.tile();
    if (tile.offset != rotated_by) {
      rotated_by = tile.offset;
      rotate(rotated_by);
    }
    const int count = tile.count - 16 * H * key_group;
    if (count > 0 && first_row < num_rows) {
      state.see(ring.keys(), ring.values(), mode.key_lines, 16 * H * key_group, head * ROW_BYTES, count, a.scale_log2,
                a.cap_scale);
    }
    ring.release();
    ring.step();
    if (tile.is_last) break;
    wait(ring.full(), ring.phase);
  }
  state.finish();
  // Written as averages in q's type. Registers hold columns, which are transposed into rows.
  QType* outs = static_cast<QType*>(plan.outs);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    auto place_of = [&](int row) {
      const int64_t partial = int64_t(item.partial + row / group_size) * a.key_groups + key_group;
      return partial * a.num_qo_heads + first_head + row % group_size;
    };
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = first_row + 8 * n + 2 * (lane % 4) + c;
      if (lane < 4 && row < num_rows) {
        plan.states[place_of(row)] = make_float2(state.shift[n][c], state.sum[n][c]);
      }
    }
    const float share[2] = {state.sum[n][0] > 0.f ? 1.f / state.sum[n][0] : 0.f,
                            state.sum[n][1] > 0.f ? 1.f / state.sum[n][1] : 0.f};
    const int row = first_row + 8 * n + lane / 4;
    QType* to = outs + (row < num_rows ? place_of(row) * HEAD_DIM : 0);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const float* acc = state.acc[n][d];
      const uint32_t low = transpose_matrix(pack<QType>(acc[0] * share[0], acc[1] * share[1]));
      const uint32_t high = transpose_matrix(pack<QType>(acc[2] * share[0], acc[3] * share[1]));
      if (row >= num_rows) continue;
      if constexpr (FP8) {  // even and odd dimensions
        *reinterpret_cast<uint2*>(to + 16 * d + 4 * (lane % 4)) =
            make_uint2(__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
      } else {
        *reinterpret_cast<uint32_t*>(to + 16 * d + 2 * (lane % 4)) = low;
        *reinterpret_cast<uint32_t*>(to + 16 * d + 8 + 2 * (lane % 4)) = high;
      }
    }
  }
}

__device__ void consume(const DecodeArgs& a, const Plan& plan, const Mode& mode, bool is_wide) {
  const int warp = threadIdx.x / 32, head = warp % mode.heads, group = warp / mode.heads;
  wait_for_prerequisites();  // for the queries
  for (Ring ring(mode);;) {
    wait(ring.announced(), ring.phase);
    if (ring.tile().num_users == 0) return;
    if (is_wide) {
      attend<WIDE, 2>(a, plan, mode, ring, head, group % 2 * 8 * WIDE, group / 2);
    } else {
      attend<1, 1>(a, plan, mode, ring, head, 0, group);
    }
  }
}

// One block per SM, which takes pairs of a task and a group of heads, see TaskQueue.
__global__ void __launch_bounds__(NUM_THREADS, 1) link_decode_kernel(const __grid_constant__ DecodeArgs a, Plan plan) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < MAX_STAGES; ++i) {
      init_barrier(smem_address(Ring::header().announced + i), ARRIVALS_OF_WARP);
      init_barrier(smem_address(Ring::header().full + i), 1);
    }
  }
  launch_dependents();
  const bool is_wide = plan.header->is_wide;
  const Mode& mode = a.modes[is_wide];
  const int num_computing = mode.heads * mode.row_groups * a.key_groups;
  if (threadIdx.x == 0) {
    for (int i = 0; i < MAX_STAGES; ++i) {
      init_barrier(smem_address(Ring::header().empty + i), num_computing * ARRIVALS_OF_WARP);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (warp >= NUM_WARPS) {
    if constexpr (NUM_WARPS == 8) shrink_registers<56>();
    produce(a, plan, mode);
  } else {
    if constexpr (NUM_WARPS == 8) grow_registers<224>();
    if (warp < num_computing) consume(a, plan, mode, is_wide);
  }
}

// Below every score, and finite, so that -inf can be subtracted.
constexpr float LOWEST = -1e30f;

// Merges the partial results of one query head of one request, by one warp or several. Where one warp is enough, a
// block has several heads, by threadIdx.y. Teams of HEAD_DIM / 8 threads take turns with the results.
constexpr int MAX_MERGE_THREADS = 512, MERGED_HEADS = 4;  // of a block
__global__ void __launch_bounds__(MAX_MERGE_THREADS, 2) merge_kernel(const __grid_constant__ DecodeArgs a, Plan plan) {
  constexpr int VECTOR = 8, LANES = HEAD_DIM / VECTOR, TEAMS = 32 / LANES;  // teams of a warp
  constexpr int AT_ONCE = 4;                                                // loads of a thread in flight
  static_assert(32 % (AT_ONCE * TEAMS) == 0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
  const int head = blockIdx.x * blockDim.y + threadIdx.y, b = blockIdx.y, key_groups = a.key_groups;
  launch_dependents();
  if (head >= a.num_qo_heads) return;  // with several heads to a block, no warp waits for another
  float out[VECTOR] = {}, most = LOWEST, sum = 0.f;
  // values: times their scale, weighted sums
  auto add = [&](float2 state, float scale, const float (&values)[VECTOR]) {
    const float higher = fmaxf(most, state.x);
    const float decay = exp2_approx(most - higher), weight = exp2_approx(state.x - higher);
    most = higher;
    sum = sum * decay + weight * state.y;
    scale *= weight;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) out[i] = out[i] * decay + scale * values[i];
  };
  const Parts parts = plan.parts[b];
  const int count = parts.count * key_groups;
  const uint4* averages = static_cast<const uint4*>(plan.outs) + lane % LANES;
  for (int base = warp; base < count; base += 32 * num_warps) {
    // Each lane looks up the place of one result.
    const int mine = base + lane * num_warps, left = ceil_div(count - base, num_warps);
    int place = 0;
    if (mine < count) place = plan.part_ids[parts.first + mine / key_groups] * key_groups + mine % key_groups;
    wait_for_prerequisites();  // for the results; the plan is complete before
    for (int first = 0; first < min(left, 32); first += AT_ONCE * TEAMS) {
      float2 states[AT_ONCE];
      uint4 packed[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int which = first + i * TEAMS + lane / LANES;
        const int64_t at = int64_t(__shfl_sync(~0u, place, which)) * a.num_qo_heads + head;
        const bool valid = which < left;
        states[i] = valid ? plan.states[at] : make_float2(-INFINITY, 0.f);
        packed[i] = valid ? averages[at * LANES] : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const uint32_t pairs[] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
        float values[VECTOR];
#pragma unroll
        for (int j = 0; j < VECTOR / 2; ++j) {
          const float2 both = unpack<QType>(pairs[j]);
          values[2 * j] = both.x, values[2 * j + 1] = both.y;
        }
        add(states[i], states[i].y, values);
      }
    }
  }
  wait_for_prerequisites();
  if (head == 0 && b == 0 && threadIdx.x == 0) plan.header->taken = 0;  // for the next layer
#pragma unroll
  for (int step = LANES; step < 32; step *= 2) {
    const float2 state = make_float2(__shfl_xor_sync(~0u, most, step), __shfl_xor_sync(~0u, sum, step));
    float values[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) values[i] = __shfl_xor_sync(~0u, out[i], step);
    add(state, 1.f, values);
  }
  if (num_warps > 1) {
    float4* outs = reinterpret_cast<float4*>(shared_memory);                   // [warps, 2, LANES]
    float2* states = reinterpret_cast<float2*>(outs + num_warps * 2 * LANES);  // [warps]
    if (lane < LANES) {
      outs[warp * 2 * LANES + lane] = make_float4(out[0], out[1], out[2], out[3]);
      outs[(warp * 2 + 1) * LANES + lane] = make_float4(out[4], out[5], out[6], out[7]);
    }
    if (lane == 0) states[warp] = make_float2(most, sum);
    __syncthreads();
    if (warp) return;
    for (int w = 1; w < num_warps; ++w) {
      const float4 low = outs[w * 2 * LANES + lane % LANES], high = outs[(w * 2 + 1) * LANES + lane % LANES];
      add(states[w], 1.f, {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w});
    }
  }
  if (lane >= LANES) return;
  // A request without KV tokens gives zeros and -inf.
  const float total = a.sinks && sum > 0.f ? sum + sink_weight<QType>(a.sinks, a.wide_sinks, head, most) : sum;
  const float share = sum > 0.f ? a.v_scale / total : 0.f;
  QType* to = static_cast<QType*>(a.out) + b * a.stride_out_row + head * a.stride_out_head + VECTOR * lane;
  *reinterpret_cast<uint4*>(to) =
      make_uint4(pack<QType>(out[0] * share, out[1] * share), pack<QType>(out[2] * share, out[3] * share),
                 pack<QType>(out[4] * share, out[5] * share), pack<QType>(out[6] * share, out[7] * share));
  if (a.lse && lane == 0) {
    a.lse[b * a.stride_lse_row + head] = sum > 0.f ? (most + log2f(sum)) * 0.6931471805599453f : -INFINITY;
  }
}

// Each kernel may start while the previous one runs, and waits for it where it reads its results.
static cudaError_t launch(void (*kernel)(const DecodeArgs, Plan), dim3 grid, dim3 threads, int shared,
                          cudaStream_t stream, const DecodeArgs& args, const Plan& plan) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, plan);
}

static cudaError_t link_decode(DecodeArgs args, int* workspace, const PlanLayout& layout, int num_sms,
                               cudaStream_t stream) {
  static const cudaError_t fits =
      cudaFuncSetAttribute(link_decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
  if (fits) return fits;
  const Plan plan(workspace, layout);
  const Geometry geometry = Geometry::make(args.num_kv_heads, HEAD_DIM);
  args.key_groups = geometry.key_groups;
  for (int wide = 0; wide < 2; ++wide) {
    const int key_lines = geometry.heads[wide] * ROW_BYTES / LINE | 1;
    Mode& mode = args.modes[wide];
    mode.heads = geometry.heads[wide], mode.head_groups = geometry.head_groups[wide], mode.row_groups = 1 + wide;
    mode.tile = geometry.tile[wide], mode.key_lines = key_lines;
    mode.num_stages = std::min(MAX_STAGES, (SHARED_BYTES - HEADER_BYTES) / (2 * mode.tile * key_lines * LINE));
  }
  if (auto error = launch(link_decode_kernel, num_sms, NUM_THREADS, SHARED_BYTES, stream, args, plan)) {
    return error;
  }
  // Few requests have many partial results each: use as many warps per head as the device has room for.
  int warps = MAX_MERGE_THREADS / 32;
  while (warps > 1 && int64_t(32) * warps * args.num_qo_heads * args.bs > 2 * MAX_MERGE_THREADS * num_sms) {
    warps /= 2;
  }
  const int heads = warps == 1 ? MERGED_HEADS : 1;
  const int shared = warps == 1 ? 0 : warps * (HEAD_DIM * sizeof(float) + sizeof(float2));
  return launch(merge_kernel, dim3(ceil_div(args.num_qo_heads, heads), args.bs), dim3(32 * warps, heads), shared,
                stream, args, plan);
}

}  // namespace lazy
