// Decode over cached chunks: each block walks the tiles of one item of the plan for one kv head, rotates its queries
// where a run with another offset begins, and writes partial results; a second kernel merges those of each request.
//
// Scores are computed transposed, S^T = K Q^T and O^T = V^T P^T with mma.m16n8k16, so that keys (or head dimensions)
// fill the 16 rows and only the 8 columns are query rows: four query heads waste half a tile, not three quarters. The
// four warps divide an item's rows (up to 16 each, 8 for wide heads) and, where rows are few, the keys of each tile.
// Keys and values stream through a ring of STAGES tiles by cp.async, with the cos/sin row of each run that begins. What
// bounds a block is how many instructions a tile takes, so blocks share a multiprocessor and do no more than they must.
//
// Configured by macros: LAZY_DTYPE (of q and out), LAZY_KV_FP8 (1: e4m3 caches, 2: e5m2, 0: as q), LAZY_HEAD_DIM,
// LAZY_ROTARY_DIM, LAZY_IS_NEOX.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "decode_plan.cuh"

namespace lazy {

struct DecodeArgs {
  const void *q, *k_cache, *v_cache;
  void* out;
  float* lse;  // null: not wanted
  const int* kv_indices;
  const float* cos_sin_cache;
  const int* num_segments;
  int bs, max_segments, num_qo_heads, num_kv_heads;
  int64_t stride_q_row, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head;
  int64_t stride_out_row, stride_out_head, stride_lse_row, stride_position;
  float scale_log2;  // sm_scale (times the keys' scale) in base 2
  float v_scale;
};

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory.
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same, or zeros where there is nothing to copy.
__device__ inline void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void copy_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline uint32_t transpose_matrix(uint32_t x) {
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
  return x;
}
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <typename T>
struct Pair;  // two values of T in 32 bits, and the product of tiles of them
template <>
struct Pair<__nv_bfloat16> {
  static __device__ uint32_t pack(float x, float y) {
    __nv_bfloat162 v = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<uint32_t&>(v);
  }
  static __device__ float2 unpack(uint32_t v) { return __bfloat1622float2(reinterpret_cast<__nv_bfloat162&>(v)); }
  static __device__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
template <>
struct Pair<__half> {
  static __device__ uint32_t pack(float x, float y) {
    __half2 v = __floats2half2_rn(x, y);
    return reinterpret_cast<uint32_t&>(v);
  }
  static __device__ float2 unpack(uint32_t v) { return __half22float2(reinterpret_cast<__half2&>(v)); }
  static __device__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

using QType = LAZY_DTYPE;
constexpr bool FP8 = LAZY_KV_FP8 != 0;
// fp8 values are widened to fp16, which holds them exactly, and multiplied as such.
using MmaType = std::conditional_t<FP8, __half, QType>;
using Mma = Pair<MmaType>;
constexpr int HEAD_DIM = LAZY_HEAD_DIM, ROTARY_DIM = LAZY_ROTARY_DIM;
constexpr bool IS_NEOX = LAZY_IS_NEOX;
constexpr int DEPTH = HEAD_DIM / 16;                    // 16-wide steps along a head
constexpr int ROW_BYTES = HEAD_DIM * (FP8 ? 1 : 2);     // of one key
constexpr int ROW_PITCH = ROW_BYTES + 16;               // eight rows of an 8x8 matrix lie in different banks
constexpr int TILE_BYTES = TILE * ROW_PITCH, STAGE_BYTES = 2 * TILE_BYTES;
constexpr int ROTATION_BYTES = ROTARY_DIM * 4;
constexpr int NUM_WARPS = 4, NUM_THREADS = 32 * NUM_WARPS;
constexpr int ROW_COPIES = ROW_BYTES / 16, ROWS_PER_PASS = NUM_THREADS / ROW_COPIES, PASSES = TILE / ROWS_PER_PASS;
constexpr int WIDE = HEAD_DIM <= 128 ? 2 : 1;           // 8-row column tiles per warp, at most
// Tiles in a ring, and blocks on a multiprocessor: items of few rows need few registers, so more blocks fit.
constexpr int stages(bool wide) { return HEAD_DIM <= 128 && !wide ? 2 : 3; }
constexpr int shared_bytes(bool wide) { return stages(wide) * (STAGE_BYTES + ROTATION_BYTES); }
constexpr int blocks_per_multiprocessor(bool wide) { return HEAD_DIM > 128 ? 1 : wide ? 2 : NARROW_BLOCKS; }
static_assert(NUM_THREADS % ROW_COPIES == 0 && TILE % ROWS_PER_PASS == 0);
// The partial outputs of all warps fit into the ring.
static_assert(stages(false) * STAGE_BYTES >= NUM_WARPS * 8 * HEAD_DIM * 4);
static_assert(stages(true) * STAGE_BYTES >= NUM_WARPS * 8 * WIDE * HEAD_DIM * 4);
static_assert(ROTARY_DIM % (FP8 ? 32 : 16) == 0 && ROTARY_DIM <= HEAD_DIM && HEAD_DIM % 32 == 0);

// The dimension that a thread holds in element `half` (0, 1) of register `r` (0, 1) at depth step `step`. With fp8 a
// thread's four dimensions of a step lie together; both operands agree on that, so the product does not care.
__device__ inline int held_dim(int step, int r) {
  int quad = threadIdx.x % 4;
  return 16 * step + (FP8 ? 4 * quad + 2 * r : 8 * r + 2 * quad);
}

// A query row's registers, rotated back by the position whose cos/sin row is `table` (null: not at all), in float32 and
// rounded once.
__device__ inline void load_query(uint32_t (&regs)[DEPTH][2], const QType* row, bool valid, const float* table) {
#pragma unroll
  for (int i = 0; i < 2 * DEPTH; ++i) {
    regs[i / 2][i % 2] = valid ? *reinterpret_cast<const uint32_t*>(row + held_dim(i / 2, i % 2)) : 0;
  }
  if (table) {
    if constexpr (IS_NEOX) {
      constexpr int HALF = ROTARY_DIM / 2, APART = HALF / 8;  // registers i and i + APART hold the pairs
#pragma unroll
      for (int i = 0; i < APART; ++i) {
        uint32_t &low = regs[i / 2][i % 2], &high = regs[(i + APART) / 2][(i + APART) % 2];
        const int dim = held_dim(i / 2, i % 2);
        float2 c = *reinterpret_cast<const float2*>(table + dim);
        float2 s = *reinterpret_cast<const float2*>(table + HALF + dim);
        float2 x = Pair<QType>::unpack(low), y = Pair<QType>::unpack(high);
        low = Pair<MmaType>::pack(x.x * c.x + y.x * s.x, x.y * c.y + y.y * s.y);
        high = Pair<MmaType>::pack(y.x * c.x - x.x * s.x, y.y * c.y - x.y * s.y);
      }
    } else {
#pragma unroll
      for (int i = 0; i < ROTARY_DIM / 8; ++i) {
        uint32_t& both = regs[i / 2][i % 2];
        const int pair = held_dim(i / 2, i % 2) / 2;
        float c = table[pair], s = table[ROTARY_DIM / 2 + pair];
        float2 x = Pair<QType>::unpack(both);
        both = Pair<MmaType>::pack(x.x * c + x.y * s, x.y * c - x.x * s);
      }
    }
  }
  if constexpr (!std::is_same_v<QType, MmaType>) {
#pragma unroll
    for (int i = 0; i < 2 * DEPTH; ++i) {
      if (table && 16 * (i / 2) < ROTARY_DIM) continue;  // converted above
      float2 x = Pair<QType>::unpack(regs[i / 2][i % 2]);
      regs[i / 2][i % 2] = Pair<MmaType>::pack(x.x, x.y);
    }
  }
}

__device__ inline uint32_t widen(uint32_t two_fp8) {
#if LAZY_KV_FP8
  __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(two_fp8), LAZY_KV_FP8 == 1 ? __NV_E4M3 : __NV_E5M2);
  return uint32_t(h.x) | uint32_t(h.y) << 16;
#else
  return two_fp8;
#endif
}

// One warp's online softmax over 8 N query rows.
template <int N>
struct State {
  uint32_t q[N][DEPTH][2];
  float acc[N][DEPTH][4];
  float reference[N][2], sum[N][2];  // in base 2; of the weights of this thread's keys

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) reference[n][c] = -INFINITY, sum[n][c] = 0.f;
#pragma unroll
      for (int d = 0; d < DEPTH; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][d][i] = 0.f;
    }
  }

  // The state after also seeing the `count` (at least 1) first of 16 keys and values, which begin at row `row`.
  __device__ void see(uint32_t keys, uint32_t values, int row, int count, float scale_log2) {
    const int lane = threadIdx.x % 32;
    float s[N][4] = {};
#pragma unroll
    for (int step = 0; step < DEPTH; ++step) {
      uint32_t k[4];
      if constexpr (FP8) {
        if (step % 2 == 0) {
          uint32_t wide[4];  // two steps: keys 0-7 and 8-15 of each
          load_matrices(wide, keys + (row + (lane & 15)) * ROW_PITCH + (step + (lane >> 4)) * 16);
          uint32_t first[4] = {widen(wide[0] & 0xffff), widen(wide[1] & 0xffff), widen(wide[0] >> 16),
                               widen(wide[1] >> 16)};
          uint32_t second[4] = {widen(wide[2] & 0xffff), widen(wide[3] & 0xffff), widen(wide[2] >> 16),
                                widen(wide[3] >> 16)};
#pragma unroll
          for (int n = 0; n < N; ++n) {
            Mma::mma(s[n], first, q[n][step]);
            Mma::mma(s[n], second, q[n][step + 1]);
          }
        }
      } else {
        load_matrices(k, keys + (row + (lane & 15)) * ROW_PITCH + (2 * step + (lane >> 4)) * 16);
#pragma unroll
        for (int n = 0; n < N; ++n) Mma::mma(s[n], k, q[n][step]);
      }
    }
    if (count < 16) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (lane / 4 + (i / 2) * 8 >= count) s[n][i] = -INFINITY;
    }
    // Weights are relative to a reference that needs not be the maximum: it follows only where a score is so far above
    // that its weight would exceed 2^8, which seldom happens and saves the reductions over keys.
    bool above = false;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) above |= fmaxf(s[n][c], s[n][c + 2]) * scale_log2 > reference[n][c] + 8.f;
    if (__any_sync(~0u, above)) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float most = fmaxf(s[n][c], s[n][c + 2]);
#pragma unroll
          for (int d = 4; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
          // A column follows its own scores alone, whatever rows it shares the warp with.
          most *= scale_log2;
          if (most <= reference[n][c] + 8.f) continue;
          float decay = exp2_fast(reference[n][c] - most);
          reference[n][c] = most;
          sum[n][c] *= decay;
#pragma unroll
          for (int d = 0; d < DEPTH; ++d) acc[n][d][c] *= decay, acc[n][d][c + 2] *= decay;
        }
      }
    }
    uint32_t p[N][2];
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] = exp2_fast(s[n][i] * scale_log2 - reference[n][i % 2]);
        sum[n][i % 2] += s[n][i];
      }
      p[n][0] = transpose_matrix(Mma::pack(s[n][0], s[n][1]));
      p[n][1] = transpose_matrix(Mma::pack(s[n][2], s[n][3]));
    }
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      uint32_t v[4];
      if constexpr (FP8) {
        if (d % 2 == 0) {
          // Matrices: keys 0-7 and 8-15 of step d, then of step d + 1; a unit is a pair of neighbouring dimensions.
          uint32_t wide[4];
          load_matrices_transposed(wide, values + (row + (lane & 15)) * ROW_PITCH + (d + (lane >> 4)) * 16);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t low = __byte_perm(wide[2 * half], 0, 0x3120), high = __byte_perm(wide[2 * half + 1], 0, 0x3120);
            uint32_t a[4] = {widen(low & 0xffff), widen(low >> 16), widen(high & 0xffff), widen(high >> 16)};
#pragma unroll
            for (int n = 0; n < N; ++n) Mma::mma(acc[n][d + half], a, p[n]);
          }
        }
      } else {
        load_matrices_transposed(v, values + (row + (lane & 7) + ((lane >> 4) << 3)) * ROW_PITCH +
                                        (2 * d + ((lane >> 3) & 1)) * 16);
#pragma unroll
        for (int n = 0; n < N; ++n) Mma::mma(acc[n][d], v, p[n]);
      }
    }
  }

  // Adds up the sums, of which each thread holds those of its keys.
  __device__ void finish() {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int d = 4; d < 32; d *= 2) sum[n][c] += __shfl_xor_sync(~0u, sum[n][c], d);
  }
};

// The dimension of element i of acc[.][d].
__device__ inline int out_dim(int d, int i) {
  int row = threadIdx.x % 32 / 4;
  return 16 * d + (FP8 ? 2 * row + i / 2 : row + 8 * (i / 2));
}

// Steps through the tiles of an item.
struct Walker {
  const Run* runs;
  int begin, end, offset, run, left;  // as in Item; left: tiles
  bool enters = true;                 // whether this tile is the first of its item in its run

  __device__ Walker(const Plan& plan, const Item& item)
      : runs(plan.runs), begin(item.begin), end(item.end), offset(item.offset), run(item.run), left(item.num_tiles) {}
  __device__ int count() const { return min(TILE, end - begin); }
  __device__ void step() {
    if (--left == 0) return;
    begin += TILE;
    enters = begin >= end;
    if (enters) {
      Run next = runs[run++];
      begin = next.begin, end = next.end, offset = next.offset;
    }
  }
};

// One item for one kv head. KEY_WARPS warps divide the keys of each tile among them, for the same 8 N rows; the others
// have other rows.
template <int N, int KEY_WARPS, int STAGES>
__device__ void attend(const DecodeArgs& a, const Plan& plan, const Item& item, int kv_head, unsigned char* smem) {
  struct TileInfo {
    int count, offset;
    bool enters;
  };
  __shared__ TileInfo infos[STAGES];
  __shared__ __align__(16) int slots[STAGES][TILE];
  __shared__ float2 states[NUM_WARPS * 8 * N];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group_size = a.num_qo_heads / a.num_kv_heads, num_rows = item.num_users * group_size;
  const int first_row = warp / KEY_WARPS * 8 * N, first_key = warp % KEY_WARPS * 16;
  const uint32_t stages = shared_address(smem);

  // What this thread copies: one 16-byte block of PASSES rows, which lie together. Their slots come through a ring of
  // their own, STAGES - 1 tiles before they are needed, and not through registers, whose load a warp would wait for.
  constexpr int ELEMENT = FP8 ? 1 : 2;
  const int copy_row = threadIdx.x / ROW_COPIES * PASSES, copy_block = threadIdx.x % ROW_COPIES * 16;
  const char* k_base = static_cast<const char*>(a.k_cache) + kv_head * a.stride_k_head * ELEMENT + copy_block;
  const char* v_base = static_cast<const char*>(a.v_cache) + kv_head * a.stride_v_head * ELEMENT + copy_block;
  const uint32_t k_stride = a.stride_k_slot * ELEMENT, v_stride = a.stride_v_slot * ELEMENT;
  Walker to_look_up(plan, item), to_copy(plan, item);
  int look_up_stage = 0, copy_stage = 0;
  auto look_up = [&] {
    if (to_look_up.left == 0) return;
    if (threadIdx.x < to_look_up.count()) {
      copy_async_4(shared_address(slots[look_up_stage] + threadIdx.x), a.kv_indices + to_look_up.begin + threadIdx.x);
    }
    look_up_stage = look_up_stage + 1 == STAGES ? 0 : look_up_stage + 1;
    to_look_up.step();
  };
  auto copy = [&] {
    if (to_copy.left) {
      const int count = to_copy.count();
      const uint32_t keys = stages + copy_stage * STAGE_BYTES + copy_row * ROW_PITCH + copy_block;
      const uint32_t values = keys + TILE_BYTES;
      const int* of = slots[copy_stage] + copy_row;
      if (count == TILE) {
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
          const uint64_t slot = uint32_t(of[i]);
          copy_async(keys + i * ROW_PITCH, k_base + slot * k_stride);
          copy_async(values + i * ROW_PITCH, v_base + slot * v_stride);
        }
      } else {  // zeros behind the last value, which a weight of zero would not hide
#pragma unroll
        for (int i = 0; i < PASSES; ++i) {
          const bool valid = copy_row + i < count;
          const uint64_t slot = valid ? uint32_t(of[i]) : 0;
          copy_async(keys + i * ROW_PITCH, k_base + slot * k_stride, valid);
          copy_async(values + i * ROW_PITCH, v_base + slot * v_stride, valid);
        }
      }
      if (to_copy.enters && to_copy.offset && threadIdx.x < ROTATION_BYTES / 16) {
        copy_async(stages + STAGES * STAGE_BYTES + copy_stage * ROTATION_BYTES + threadIdx.x * 16,
                   a.cos_sin_cache + to_copy.offset * a.stride_position + threadIdx.x * 4);
      }
      if (threadIdx.x == 0) infos[copy_stage] = TileInfo{count, to_copy.offset, to_copy.enters};
      copy_stage = copy_stage + 1 == STAGES ? 0 : copy_stage + 1;
      to_copy.step();
    }
    look_up();
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) look_up();
  commit_copies();
  wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) copy();

  State<N> state;
  state.clear();
  const QType* rows[N];
  int offsets[N];  // the users' own
#pragma unroll
  for (int n = 0; n < N; ++n) {
    int row = min(first_row + 8 * n + lane / 4, num_rows - 1);
    User user = plan.users[item.user + row / group_size];
    offsets[n] = user.offset;
    rows[n] = static_cast<const QType*>(a.q) + user.request * a.stride_q_row +
              (kv_head * group_size + row % group_size) * a.stride_q_head;
  }
  const bool works = first_row < num_rows;
  int stage = 0, rotated_by = -1;
  for (int i = 0; i < item.num_tiles; ++i) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    copy();  // into the stage that everyone has left
    const TileInfo tile = infos[stage];
    const uint32_t keys = stages + stage * STAGE_BYTES, values = keys + TILE_BYTES;
    if (works) {
      if (tile.enters && tile.offset != rotated_by) {
        rotated_by = tile.offset;
        const float* rotation = reinterpret_cast<const float*>(smem + STAGES * STAGE_BYTES + stage * ROTATION_BYTES);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float* table = tile.offset  ? rotation
                               : offsets[n] ? a.cos_sin_cache + offsets[n] * a.stride_position
                                            : nullptr;
          load_query(state.q[n], rows[n], first_row + 8 * n + lane / 4 < num_rows, table);
        }
      }
#pragma unroll 1
      for (int key = first_key; key < tile.count; key += 16 * KEY_WARPS) {
        state.see(keys, values, key, tile.count - key, a.scale_log2);
      }
    }
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  state.finish();
  wait_copies<0>();
  __syncthreads();  // the stages are free now

  // Merge what the warps with the same rows saw. A row's dimensions are stored rotated by 8 per pair of rows, so that
  // the writes of a warp, 8 dimensions of 4 row pairs, meet different banks.
  float* outs = reinterpret_cast<float*>(smem);  // [warp][8 N rows][dim]
  auto dim_place = [](int row, int dim) { return (dim + 4 * (row & ~1)) % HEAD_DIM; };
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = 8 * n + 2 * (lane % 4) + i % 2;
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        outs[(warp * 8 * N + row) * HEAD_DIM + dim_place(row, out_dim(d, i))] = state.acc[n][d][i];
      }
      if (lane < 4 && i < 2) states[warp * 8 * N + row] = make_float2(state.reference[n][i], state.sum[n][i]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_rows * (HEAD_DIM / 4); i += NUM_THREADS) {
    const int row = i / (HEAD_DIM / 4), dim = i % (HEAD_DIM / 4) * 4;
    const int in_warp = row % (8 * N), at = row / (8 * N) * KEY_WARPS * 8 * N + in_warp;
    float most = -INFINITY, sum = 0.f;
#pragma unroll
    for (int w = 0; w < KEY_WARPS; ++w) most = fmaxf(most, states[at + w * 8 * N].x);
    float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < KEY_WARPS; ++w) {
      float2 part = states[at + w * 8 * N];
      float weight = exp2_fast(part.x - most);
      float4 o = *reinterpret_cast<float4*>(outs + (at + w * 8 * N) * HEAD_DIM + dim_place(in_warp, dim));
      out.x += weight * o.x, out.y += weight * o.y, out.z += weight * o.z, out.w += weight * o.w;
      sum += weight * part.y;
    }
    int64_t place = int64_t(item.partial + row / group_size) * a.num_qo_heads + kv_head * group_size +
                    row % group_size;
    *reinterpret_cast<float4*>(plan.outs + place * HEAD_DIM + dim) = out;
    if (dim == 0) plan.states[place] = make_float2(most, sum);
  }
}

// A resident grid, whose blocks take (item, kv head) after (item, kv head). The kv heads of an item come one after
// another and are read at the same time, since their keys are neighbours in memory. Narrow items have up to NARROW_ROWS
// query rows.
template <bool IS_WIDE>
__global__ void __launch_bounds__(NUM_THREADS, blocks_per_multiprocessor(IS_WIDE))
    link_decode_kernel(DecodeArgs a, Plan plan) {
  extern __shared__ __align__(128) unsigned char smem[];
  constexpr int STAGES = stages(IS_WIDE);
  asm volatile("griddepcontrol.launch_dependents;");
  const Item* items = IS_WIDE ? plan.wide_items : plan.items;
  const int num_units = (IS_WIDE ? plan.header->num_wide_items : plan.header->num_items) * a.num_kv_heads;
  int* next_unit = IS_WIDE ? &plan.header->next_wide_unit : &plan.header->next_unit;
  __shared__ int next;
  for (int unit = blockIdx.x; unit < num_units;) {
    if (threadIdx.x == 0) next = gridDim.x + atomicAdd(next_unit, 1);
    const Item item = items[unit / a.num_kv_heads];
    const int kv_head = unit % a.num_kv_heads;
    if constexpr (IS_WIDE) {
      const int num_rows = item.num_users * (a.num_qo_heads / a.num_kv_heads);
      if (num_rows <= 8 * WIDE) {
        attend<WIDE, 4, STAGES>(a, plan, item, kv_head, smem);
      } else if (num_rows <= 16 * WIDE) {
        attend<WIDE, 2, STAGES>(a, plan, item, kv_head, smem);
      } else {
        attend<WIDE, 1, STAGES>(a, plan, item, kv_head, smem);
      }
    } else {
      attend<1, 4, STAGES>(a, plan, item, kv_head, smem);
    }
    unit = next;
    __syncthreads();
  }
  // The narrow kernel starts beside the wide one; it must not be taken for complete before that is.
  if constexpr (!IS_WIDE) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// One query head of one request: the merged result of its pieces. Groups of HEAD_DIM / 4 threads take pieces in turn.
__global__ void __launch_bounds__(NUM_THREADS) merge_kernel(DecodeArgs a, Plan plan) {
  constexpr int LANES = HEAD_DIM / 4, TEAMS = NUM_THREADS / LANES;
  __shared__ float4 outs[TEAMS][LANES];
  __shared__ float2 states[TEAMS];
  const int head = blockIdx.x, b = blockIdx.y, team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (head == 0 && b == 0 && threadIdx.x == 0) plan.header->next_unit = plan.header->next_wide_unit = 0;  // next layer
  float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
  float most = -INFINITY, sum = 0.f;
  auto add = [&](float2 state, float4 part) {
    float higher = fmaxf(most, state.x);
    float decay = exp2_fast(most - higher), weight = exp2_fast(state.x - higher);
    most = higher;
    sum = sum * decay + weight * state.y;
    out.x = out.x * decay + weight * part.x;
    out.y = out.y * decay + weight * part.y;
    out.z = out.z * decay + weight * part.z;
    out.w = out.w * decay + weight * part.w;
  };
  auto add_pieces = [&](const Pieces& pieces, int from, int by) {
#pragma unroll 4
    for (int i = from; i < pieces.count; i += by) {
      int64_t at = int64_t(pieces.first + i * pieces.stride) * a.num_qo_heads + head;
      add(plan.states[at], reinterpret_cast<const float4*>(plan.outs)[at * LANES + lane]);
    }
  };
  const int num_segments = a.num_segments[b];
  for (int s = team; s < num_segments; s += TEAMS) {
    add_pieces(plan.segment_pieces[int64_t(b) * a.max_segments + s], 0, 1);
  }
  add_pieces(plan.private_pieces[b], team, TEAMS);
  outs[team][lane] = out;
  if (lane == 0) states[team] = make_float2(most, sum);
  __syncthreads();
  if (team) return;
#pragma unroll
  for (int t = 1; t < TEAMS; ++t) {
    if (states[t].x > -INFINITY) add(states[t], outs[t][lane]);
  }
  // A request without entries gives zeros and -inf.
  float share = sum > 0.f ? a.v_scale / sum : 0.f;
  QType* to = static_cast<QType*>(a.out) + b * a.stride_out_row + head * a.stride_out_head + 4 * lane;
  reinterpret_cast<uint2*>(to)[0] = make_uint2(Pair<QType>::pack(out.x * share, out.y * share),
                                               Pair<QType>::pack(out.z * share, out.w * share));
  if (a.lse && lane == 0) {
    a.lse[b * a.stride_lse_row + head] = sum > 0.f ? (most + log2f(sum)) * 0.6931471805599453f : -INFINITY;
  }
}

static cudaError_t launch(void (*kernel)(DecodeArgs, Plan), dim3 grid, int shared, bool overlaps, cudaStream_t stream,
                          const DecodeArgs& args, const Plan& plan) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(NUM_THREADS);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlaps;
  return cudaLaunchKernelEx(&config, kernel, args, plan);
}

static cudaError_t link_decode(const DecodeArgs& args, int* workspace, const PlanLayout& layout,
                               int num_multiprocessors, cudaStream_t stream) {
  constexpr auto LIMIT = cudaFuncAttributeMaxDynamicSharedMemorySize;
  static const cudaError_t fits[2] = {
      cudaFuncSetAttribute(link_decode_kernel<false>, LIMIT, shared_bytes(false)),
      cudaFuncSetAttribute(link_decode_kernel<true>, LIMIT, shared_bytes(true)),
  };
  if (fits[0] || fits[1]) return fits[0] ? fits[0] : fits[1];
  const Plan plan(workspace, layout);
  // Each kernel may start while the one before it runs, and waits for it where it must.
  const bool has_wide = args.max_segments > 0 || args.num_qo_heads > 8 * args.num_kv_heads;
  if (has_wide) {
    dim3 grid(num_multiprocessors * blocks_per_multiprocessor(true));
    if (auto error = launch(link_decode_kernel<true>, grid, shared_bytes(true), false, stream, args, plan)) {
      return error;
    }
  }
  dim3 grid(num_multiprocessors * blocks_per_multiprocessor(false));
  if (auto error = launch(link_decode_kernel<false>, grid, shared_bytes(false), has_wide, stream, args, plan)) {
    return error;
  }
  return launch(merge_kernel, dim3(args.num_qo_heads, args.bs), 0, true, stream, args, plan);
}

}  // namespace lazy
