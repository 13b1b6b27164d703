// Prefill of new text over cached chunks (link_extend) for Hopper; framework-free.
//
// A block of threads owns one work item: BLOCK_M packed rows (token, query head of the group) of one request and one kv
// head, over one split of the KV tokens that these rows see; plan_extend.cuh decides which. The KV tokens of a request
// form runs: its chunk segments, its cached text, its new text. A run is cut to what the newest row sees and walked in
// tiles of BLOCK_N tokens; a tile never straddles runs, so all of its keys share one rotation offset. Tiles that every
// row sees in full need no mask.
//
//   producer warpgroup   gathers the rows of K and V of each tile through kv_indices with 16-byte asynchronous copies
//                        into swizzled shared memory, two or three tiles deep; beside K the positions (masked tiles)
//                        and the cos/sin row (another offset). The copies themselves arrive on the tile's mbarrier. fp8
//                        lands in every other 16 bytes of its tile; each thread widens what it copied in place, while
//                        the next tile is on its way, and then arrives.
//   consumer warpgroups  own 64 rows each; one without rows does nothing. The queries R(-offset) q are the register
//                        operand of S = Q K^T: rotated from the stored ones in shared memory whenever the offset
//                        changes, in fp32, rounded once. A warpgroup's softmax overlaps with its O += P V of the
//                        previous tile, and with the other warpgroup's products: two named barriers make them
//                        alternate. For heads of 256 a warpgroup's registers hold half of the output's columns: two own
//                        the same rows, and both compute the scores.
//
// Items of a request with splits write normalised rows and base-2 lse to fp32 buffers, which merge_kernel combines.
#pragma once

#include "extend_runs.cuh"
#include "hopper.cuh"
#include "merge_splits.cuh"
#include "operands.cuh"

namespace lazy::extend {

// Everything is counted in elements, not bytes. `wide_*`: int64 instead of int32.
struct LinkExtendParams : ExtendRows {
  const void *q, *k_cache, *v_cache;
  const void* sinks;  // [num_qo_heads]; null: none
  void* out;
  float* lse;          // may be null
  float* partial_out;  // [max_partials, BLOCK_M, HEAD_DIM]: of work items of requests with splits
  float* partial_lse;  // [max_partials, BLOCK_M]
  const void* kv_indices;
  const float* cos_sin_cache;
  int64_t stride_q_row, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head;
  int64_t stride_out_row, stride_out_head, stride_lse_row, stride_position;
  bool wide_indices, wide_sinks;  // sinks: fp32 instead of T
  float scale_log2;               // sm_scale * log2(e), positive; of capped scores the cap's
  float v_scale;                  // of fp8 values
  float cap_scale;                // what scores are multiplied by before `tanh_exp2`
};

// T: of q and out.  KV: of the caches, T or fp8.  WINDOWED: whether rows see a window only.  CAPPED: whether there is a
// logit cap.  BLOCKS_PER_SM: several hide each other's latency where items have few tiles.
template <typename T_, typename KV_, int HEAD_DIM_, int ROTARY_DIM_, bool IS_NEOX_, bool WINDOWED_, bool CAPPED_,
          int NUM_CONSUMERS_, int BLOCKS_PER_SM_ = 1>
struct LinkExtendTraits {
  using T = T_;
  using KV = KV_;
  static constexpr bool FP8 = sizeof(KV) == 1;
  static_assert(FP8 || std::is_same_v<KV, T>);
  // fp8 is widened to fp16, which holds it exactly, and multiplied as such; so queries are rounded to fp16.
  using MmaType = std::conditional_t<FP8, __half, T>;
  static constexpr int HEAD_DIM = HEAD_DIM_, ROTARY_DIM = ROTARY_DIM_, NUM_CONSUMERS = NUM_CONSUMERS_;
  static constexpr int BLOCKS_PER_SM = BLOCKS_PER_SM_;
  static constexpr bool IS_NEOX = IS_NEOX_, WINDOWED = WINDOWED_, CAPPED = CAPPED_;
  // A run that a window enters is listed in two: the tiles that only some rows see at its beginning, and the rest.
  static constexpr int RUN_PARTS = WINDOWED ? 2 : 1;
  static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256);
  static_assert(ROTARY_DIM % 16 == 0 && ROTARY_DIM <= HEAD_DIM);
  // The columns of the output that a consumer has, and into how many such parts they are divided.
  static constexpr int OUT_DIM = HEAD_DIM < 128 ? HEAD_DIM : 128, OUT_PARTS = HEAD_DIM / OUT_DIM;
  static_assert(NUM_CONSUMERS % OUT_PARTS == 0 && !(FP8 && OUT_PARTS > 1));
  static constexpr int BLOCK_M = 64 * NUM_CONSUMERS / OUT_PARTS;
  static constexpr int BLOCK_N = OUT_PARTS > 1 || BLOCKS_PER_SM > 1 ? 64 : 128, K_STAGES = 2, V_STAGES = 3;
  static constexpr int WARPGROUP = 128, NUM_THREADS = WARPGROUP * (1 + NUM_CONSUMERS);
  // Of a thread, at the launch; then the producer leaves to the consumers what it does not need, unless all have plenty.
  static constexpr int REGISTERS = 65536 / (BLOCKS_PER_SM * NUM_THREADS) / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = BLOCKS_PER_SM > 2 ? 32 : OUT_PARTS > 1 ? 40 : 56;
  static constexpr int CONSUMER_REGISTERS =
      (REGISTERS * (1 + NUM_CONSUMERS) - PRODUCER_REGISTERS) / NUM_CONSUMERS / 8 * 8;
  static constexpr bool REALLOCATED = REGISTERS < 255;

  static constexpr int TILE_BYTES = BLOCK_N * HEAD_DIM * 2;
  static constexpr int COLUMN_BYTES = BLOCK_N * 128;  // one block of 64 columns of a K or V tile
  static constexpr int PART_BYTES = OUT_DIM / 64 * COLUMN_BYTES;
  static constexpr int K_OFFSET = BLOCK_M * HEAD_DIM * 2;
  static constexpr int V_OFFSET = K_OFFSET + K_STAGES * TILE_BYTES;
  static constexpr int POSITIONS_OFFSET = V_OFFSET + V_STAGES * TILE_BYTES;
  static constexpr int TABLE_OFFSET = POSITIONS_OFFSET + K_STAGES * BLOCK_N * 4;
  static constexpr int BARRIERS_OFFSET = TABLE_OFFSET + K_STAGES * ROTARY_DIM * 4;
  static constexpr int WORK_OFFSET = BARRIERS_OFFSET + 2 * (K_STAGES + V_STAGES) * 8;
  static constexpr int ROWS_OFFSET = WORK_OFFSET + 48;
  static constexpr int RUNS_OFFSET = ROWS_OFFSET + WARPGROUP * 4;
  static constexpr int ALIGNMENT = 1024;

  static int smem_bytes(int max_segments) { return ALIGNMENT + RUNS_OFFSET + RUN_PARTS * (max_segments + 2) * 16; }
};

template <typename Traits>
struct SharedMemory {
  uint32_t base;
  __device__ __forceinline__ uint32_t q() const { return base; }
  __device__ __forceinline__ uint32_t k(int stage) const {
    return base + Traits::K_OFFSET + stage * Traits::TILE_BYTES;
  }
  __device__ __forceinline__ uint32_t v(int stage) const {
    return base + Traits::V_OFFSET + stage * Traits::TILE_BYTES;
  }
  __device__ __forceinline__ uint32_t positions(int stage) const {
    return base + Traits::POSITIONS_OFFSET + stage * Traits::BLOCK_N * 4;
  }
  __device__ __forceinline__ uint32_t table(int stage) const {
    return base + Traits::TABLE_OFFSET + stage * Traits::ROTARY_DIM * 4;
  }
  __device__ __forceinline__ uint32_t barrier(int i) const { return base + Traits::BARRIERS_OFFSET + i * 8; }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return barrier(Traits::K_STAGES + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(2 * Traits::K_STAGES + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const {
    return barrier(2 * Traits::K_STAGES + Traits::V_STAGES + stage);
  }
};

__device__ __forceinline__ float2 load_float2(uint32_t smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem));
  return v;
}
__device__ __forceinline__ float load_float(uint32_t smem) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem));
  return v;
}
__device__ __forceinline__ int2 load_int2(uint32_t smem) {
  int2 v;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem));
  return v;
}

__device__ __forceinline__ uint4 load_uint4(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(smem)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_uint4(uint32_t smem, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// The stage and phase of a ring of NUM_STAGES buffers.
template <int NUM_STAGES>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == NUM_STAGES) stage = 0, phase ^= 1;
  }
};

// Eight fp8 numbers as fp16.
template <typename KV>
__device__ __forceinline__ uint4 widen(uint32_t low, uint32_t high) {
  constexpr auto FORMAT = std::is_same_v<KV, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;
  return make_uint4(lazy::widen<FORMAT>(low), lazy::widen<FORMAT>(low >> 16), lazy::widen<FORMAT>(high),
                    lazy::widen<FORMAT>(high >> 16));
}

template <typename Traits>
__device__ __forceinline__ void produce(const LinkExtendParams& p, const WorkItem& item, const Run* runs, int num_tiles,
                                        SharedMemory<Traits> smem, int thread) {
  using namespace lazy::hopper;
  using KV = typename Traits::KV;
  constexpr int BLOCK_N = Traits::BLOCK_N, VECTOR = 16 / sizeof(KV);
  constexpr int CHUNKS = Traits::OUT_DIM / VECTOR;  // of 16 bytes in a row, or in a part of it
  constexpr int ROWS_PER_WARP = 32 / CHUNKS;        // in one copy instruction
  constexpr int ROWS_PER_STEP = 4 * ROWS_PER_WARP;  // a multiple of 8, or the swizzle would depend on the step
  static_assert(ROWS_PER_STEP % 8 == 0 && BLOCK_N % ROWS_PER_STEP == 0 && BLOCK_N <= 128);
  const int warp = thread / 32, lane = thread % 32;
  // With fp8, eight neighbouring lanes have four chunks of two rows: the even chunks of an even row of the tile, to
  // which they copy, lie in other banks than those of the odd row behind it.
  const int chunk = Traits::FP8 ? lane % 4 + lane / (4 * ROWS_PER_WARP) * 4 : lane % CHUNKS;
  const int row_of_warp = Traits::FP8 ? lane / 4 % ROWS_PER_WARP : lane / CHUNKS;
  // Each lane knows the slot of at most one of its warp's rows.
  const int own_row = lane / ROWS_PER_WARP * ROWS_PER_STEP + warp * ROWS_PER_WARP + lane % ROWS_PER_WARP;
  const int copied_row = warp * ROWS_PER_WARP + row_of_warp, tile_chunk = chunk * (Traits::FP8 ? 2 : 1);
  const uint32_t copied_to =
      tile_chunk / 8 * Traits::COLUMN_BYTES + copied_row * 128 + (tile_chunk % 8 ^ copied_row % 8) * 16;
  const int64_t row_begin = p.kv_indptr[item.b];
  const int64_t k_first = item.kv_head * p.stride_k_head + chunk * VECTOR;
  const int64_t v_first = item.kv_head * p.stride_v_head + chunk * VECTOR;
  const char* k_rows = static_cast<const char*>(p.k_cache) + k_first * sizeof(KV);
  const char* v_rows = static_cast<const char*>(p.v_cache) + v_first * sizeof(KV);
  // Offsets count 16 bytes, so that 32 bits of them reach 64 GiB and an address is one multiply-add, as long as the
  // compiler does not see through the base.
  asm("" : "+l"(k_rows), "+l"(v_rows));
  const uint32_t k_stride = p.stride_k_slot / VECTOR, v_stride = p.stride_v_slot / VECTOR;

  auto slot_of = [&](const TileCursor& tile) {
    const int kv_token = tile.run.begin + own_row;
    return own_row < BLOCK_N && kv_token < tile.run.end
               ? load_integer(p.kv_indices, row_begin + kv_token, p.wide_indices)
               : 0;
  };
  // The lanes hand their rows' offsets around through shared memory: four at a time, where shuffles would take as long
  // as the copies.
  constexpr int STEPS = BLOCK_N / ROWS_PER_STEP;
  static_assert((STEPS == 2 || STEPS % 4 == 0) && STEPS * ROWS_PER_WARP <= 32);
  const uint32_t warp_offsets = smem.base + Traits::ROWS_OFFSET + warp * 32 * 4;
  const uint32_t own_offset_at = warp_offsets + (lane % ROWS_PER_WARP * STEPS + lane / ROWS_PER_WARP) * 4;
  const uint32_t offsets_at = warp_offsets + row_of_warp * STEPS * 4;
  auto copy_rows = [&](uint32_t to, const char* rows, uint32_t own_offset, int kv_tokens, auto whole) {
    __syncwarp();
    if (own_row < BLOCK_N) asm volatile("st.shared.b32 [%0], %1;" ::"r"(own_offset_at), "r"(own_offset) : "memory");
    __syncwarp();
    uint32_t offset[STEPS];
    if constexpr (STEPS == 2) {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(offset[0]), "=r"(offset[1]) : "r"(offsets_at) : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < STEPS; i += 4) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(offset[i]), "=r"(offset[i + 1]), "=r"(offset[i + 2]), "=r"(offset[i + 3])
                     : "r"(offsets_at + i * 4)
                     : "memory");
      }
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const char* from = rows + static_cast<uint64_t>(offset[i]) * 16;
      const uint32_t row_to = to + copied_to + i * ROWS_PER_STEP * 128;
#pragma unroll
      for (int part = 0; part < Traits::OUT_PARTS; ++part) {
        const uint32_t part_to = row_to + part * Traits::PART_BYTES;
        if constexpr (decltype(whole)::value) {
          copy_async_16(part_to, from + part * CHUNKS * 16);
        } else {
          copy_async_16(part_to, from + part * CHUNKS * 16, copied_row + i * ROWS_PER_STEP < kv_tokens);
        }
      }
    }
  };
  auto copy_tile = [&](uint32_t to, const char* rows, uint32_t own_offset, int kv_tokens) {
    if (kv_tokens >= BLOCK_N) {
      copy_rows(to, rows, own_offset, kv_tokens, std::true_type());
    } else {
      copy_rows(to, rows, own_offset, kv_tokens, std::false_type());
    }
  };
  // Widens what this thread has copied to a tile: each chunk fills itself and the next.
  auto widen_tile = [&](uint32_t tile) {
    constexpr int AT_ONCE = STEPS < 4 ? STEPS : 4;
#pragma unroll
    for (int i = 0; i < STEPS; i += AT_ONCE) {
      uint4 narrow[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) narrow[j] = load_uint4(tile + copied_to + (i + j) * ROWS_PER_STEP * 128);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const uint32_t rows = tile + (i + j) * ROWS_PER_STEP * 128;
        store_uint4(rows + copied_to, widen<KV>(narrow[j].x, narrow[j].y));
        store_uint4(rows + (copied_to ^ 16), widen<KV>(narrow[j].z, narrow[j].w));
      }
    }
  };
  uint32_t narrow_tile = 0, narrow_full = 0;  // copied but not widened yet, and its barrier; 0: none
  auto widen_last = [&] {
    if (narrow_tile == 0) return;
    widen_tile(narrow_tile);
    fence_tensor_cores();
    arrive(narrow_full);
  };
  // After a tile's copies were issued: this thread arrives on its barrier once they have landed.
  auto announce = [&](uint32_t to, uint32_t full) {
    if constexpr (Traits::FP8) {
      commit_copies();
      wait_copy_groups<1>();  // for the tile before
      widen_last();
      narrow_tile = to, narrow_full = full;
    } else {
      arrive_after_copies(full);
    }
  };

  Ring<Traits::K_STAGES> k_ring;
  Ring<Traits::V_STAGES> v_ring;
  TileCursor tile(runs);
  int table_offset = 0;  // by which the consumers have rotated
  int slot = slot_of(tile), kv_tokens = 0, last_slot = 0, last_kv_tokens = 0;
  for (int n = 0; n <= num_tiles; ++n) {
    int next_slot = 0;
    if (n < num_tiles) {
      const Run run = tile.run;
      kv_tokens = run.end - run.begin;
      const bool masked = tile.masked<BLOCK_N>(), rotated = run.offset != table_offset && run.offset != 0;
      table_offset = run.offset;
      if (n + 1 < num_tiles) {
        tile.advance<BLOCK_N>();
        next_slot = slot_of(tile);
      }
      wait(smem.k_empty(k_ring.stage), k_ring.phase ^ 1);
      if (rotated && thread < Traits::ROTARY_DIM / 4) {
        const float* row = p.cos_sin_cache + run.offset * p.stride_position;
        copy_async_16(smem.table(k_ring.stage) + thread * 16, row + thread * 4);
      }
      if (masked && own_row < BLOCK_N) {
        const int kv_token = min(run.begin + own_row, run.end - 1);
        copy_async_4(smem.positions(k_ring.stage) + own_row * 4, p.kv_positions + row_begin + kv_token, true);
      }
      copy_tile(smem.k(k_ring.stage), k_rows, slot * k_stride, kv_tokens);
      announce(smem.k(k_ring.stage), smem.k_full(k_ring.stage));
      k_ring.advance();
    }
    if (n > 0) {
      wait(smem.v_empty(v_ring.stage), v_ring.phase ^ 1);
      copy_tile(smem.v(v_ring.stage), v_rows, last_slot * v_stride, last_kv_tokens);
      announce(smem.v(v_ring.stage), smem.v_full(v_ring.stage));
      v_ring.advance();
    }
    last_slot = slot, last_kv_tokens = kv_tokens;
    slot = next_slot;
  }
  wait_copies();
  if constexpr (Traits::FP8) widen_last();
}

// The stored queries of a warp's 16 rows as register operands, rotated back by the table row if rotated.
template <typename Traits>
__device__ __forceinline__ void load_queries(uint32_t (&q)[Traits::HEAD_DIM / 16][4], uint32_t q_smem, uint32_t table,
                                             bool rotated, int lane) {
  using namespace lazy::hopper;
  using T = typename Traits::MmaType;
  constexpr int OCTETS = Traits::ROTARY_DIM / 8, HALF = Traits::ROTARY_DIM / 2;
  const int row = lane % 16;
#pragma unroll
  for (int k = 0; k < Traits::HEAD_DIM / 16; ++k) {
    const int chunk = 2 * k + lane / 16;
    load_matrices(q[k], q_smem + row * Traits::HEAD_DIM * 2 + (chunk ^ row % 8) * 16);
  }
  if (!rotated) return;
  const int pair = lane % 4;
  // Registers of octet i hold dimensions 8 i + 2 pair + 0, 1.
  if constexpr (Traits::IS_NEOX) {
#pragma unroll
    for (int i = 0; i < OCTETS / 2; ++i) {
      const float2 cos = load_float2(table + (8 * i + 2 * pair) * 4);
      const float2 sin = load_float2(table + (HALF + 8 * i + 2 * pair) * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int partner = i + OCTETS / 2;
        rotate_back<T>(q[i / 2][i % 2 * 2 + r], q[partner / 2][partner % 2 * 2 + r], cos, sin);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < OCTETS; ++i) {
      const float cos = load_float(table + (4 * i + pair) * 4), sin = load_float(table + (HALF + 4 * i + pair) * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) rotate_back<T>(q[i / 2][i % 2 * 2 + r], cos, sin);
    }
  }
}

template <typename Traits>
__device__ __forceinline__ void consume(const LinkExtendParams& p, const WorkItem& item, const Run* runs, int num_tiles,
                                        SharedMemory<Traits> smem, int warpgroup, int thread, bool alternate) {
  using namespace lazy::hopper;
  using T = typename Traits::T;
  using MmaType = typename Traits::MmaType;
  constexpr int HEAD_DIM = Traits::HEAD_DIM, BLOCK_N = Traits::BLOCK_N;
  constexpr int OUT_DIM = Traits::OUT_DIM, OUT_PARTS = Traits::OUT_PARTS;
  const int warp = thread / 32, lane = thread % 32, part = warpgroup % OUT_PARTS;
  const int first_row = warpgroup / OUT_PARTS * 64 + warp * 16;  // of this warp's 16 rows, in the block
  const int first_packed = item.tile * Traits::BLOCK_M + first_row;
  const uint32_t q_smem = smem.q() + first_row * HEAD_DIM * 2;

  float o[OUT_DIM / 2], s[BLOCK_N / 2];
  uint32_t q[HEAD_DIM / 16][4], weights[BLOCK_N / 16][4];
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.0f, 0.0f}, correction[2];
  int q_position[2];
#pragma unroll
  for (int i = 0; i < OUT_DIM / 2; ++i) o[i] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int packed = first_packed + lane / 4 + 8 * r;
    q_position[r] = packed < item.qo_length * p.group
                        ? load_integer(p.q_positions, item.qo_begin + packed / p.group, p.wide_positions)
                        : -1;
  }

  auto issue_scores = [&](int stage) {
    const uint32_t tile = tile_descriptor(smem.k(stage), 0);
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; ++k) {
      mma<MmaType, false>(s, q[k], tile + (k / 4 * Traits::COLUMN_BYTES + k % 4 * 32) / 16, k > 0);
    }
    mma_commit();
  };
  auto issue_output = [&](int stage) {
    const uint32_t tile = tile_descriptor(smem.v(stage) + part * Traits::PART_BYTES, Traits::COLUMN_BYTES);
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) mma<MmaType, true>(o, weights[k], tile + k * 16 * 128 / 16, 1);
    mma_commit();
  };
  auto mask = [&](int stage, int kv_tokens) {
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
      const int column = 8 * j + lane % 4 * 2;
      const int2 position = load_int2(smem.positions(stage) + column * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (column >= kv_tokens || position.x > q_position[r]) s[4 * j + 2 * r] = -INFINITY;
        if (column + 1 >= kv_tokens || position.y > q_position[r]) s[4 * j + 2 * r + 1] = -INFINITY;
        if constexpr (Traits::WINDOWED) {
          if (position.x <= q_position[r] - p.window) s[4 * j + 2 * r] = -INFINITY;
          if (position.y <= q_position[r] - p.window) s[4 * j + 2 * r + 1] = -INFINITY;
        }
      }
    }
  };
  // Maxima are capped, scores where their weights are computed: before, wgmma would have to wait for it.
  auto capped = [&](float score) {
    if constexpr (Traits::CAPPED) return score == -INFINITY ? score : tanh_exp2(score * p.cap_scale);
    return score;
  };
  // Scores to unnormalised weights; correction is the factor for everything summed so far. Maxima and sums are kept in
  // four parts, since only one warp of a scheduler does this at a time and would wait for its own results.
  auto softmax = [&] {
    float highest[2][4], sum[2][4] = {}, zero[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) highest[r][i] = fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]);
    }
#pragma unroll
    for (int j = 4; j < BLOCK_N / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        highest[r][j % 4] = fmaxf(highest[r][j % 4], fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = fmaxf(fmaxf(highest[r][0], highest[r][1]), fmaxf(highest[r][2], highest[r][3]));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
      all = fmaxf(row_max[r], capped(fmaxf(all, __shfl_xor_sync(~0u, all, 2))));
      // A row that has seen nothing yet keeps weights of exp2(-inf) = 0.
      zero[r] = all == -INFINITY ? 0.0f : all * p.scale_log2;
      correction[r] = exp2_approx(row_max[r] * p.scale_log2 - zero[r]);
      row_max[r] = all;
    }
#pragma unroll
    for (int j = 0; j < BLOCK_N / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        x = exp2_approx(capped(x) * p.scale_log2 - zero[i / 2]);
        sum[i / 2][j % 2 * 2 + i % 2] += x;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] = row_sum[r] * correction[r] + ((sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]));
    }
  };
  auto round_weights = [&] {
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[k][i] = pack<MmaType>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    }
  };
  auto release = [&](uint32_t barrier) { arrive_for_warp(barrier, lane); };

  if (num_tiles > 0) {
    Ring<Traits::K_STAGES> k_ring;
    Ring<Traits::V_STAGES> v_ring;
    TileCursor tile(runs);
    int q_offset = tile.run.offset;

    wait(smem.k_full(k_ring.stage), k_ring.phase);
    fence_tensor_cores();
    load_queries<Traits>(q, q_smem, smem.table(k_ring.stage), q_offset != 0, lane);
    pin(s);
    mma_fence();
    issue_scores(k_ring.stage);
    mma_wait<0>();
    pin(s);
    if (tile.masked<BLOCK_N>()) mask(k_ring.stage, tile.run.end - tile.run.begin);
    release(smem.k_empty(k_ring.stage));
    k_ring.advance();
    softmax();
    round_weights();

    if (alternate && warpgroup == 1) named_arrive(1, 256);  // the other warpgroup goes first
    for (int n = 1; n < num_tiles; ++n) {
      tile.advance<BLOCK_N>();
      wait(smem.k_full(k_ring.stage), k_ring.phase);
      fence_tensor_cores();
      if (tile.run.offset != q_offset) {
        q_offset = tile.run.offset;
        load_queries<Traits>(q, q_smem, smem.table(k_ring.stage), q_offset != 0, lane);
      }
      if (alternate) named_sync(1 + warpgroup, 256);
      pin(s);
      mma_fence();
      issue_scores(k_ring.stage);
#pragma unroll
      for (int i = 0; i < OUT_DIM / 2; ++i) o[i] *= correction[i / 2 % 2];
      wait(smem.v_full(v_ring.stage), v_ring.phase);
      fence_tensor_cores();
      pin(o);
      mma_fence();
      issue_output(v_ring.stage);
      if (alternate && (warpgroup == 0 || n + 1 < num_tiles)) named_arrive(2 - warpgroup, 256);
      mma_wait<1>();
      pin(s);
      if (tile.masked<BLOCK_N>()) mask(k_ring.stage, tile.run.end - tile.run.begin);
      release(smem.k_empty(k_ring.stage));
      k_ring.advance();
      softmax();
      if (row_sum[0] == -1.0f) __nanosleep(1);  // never; without a branch here the softmax is moved behind the wait
      mma_wait<0>();
      pin(o);
      release(smem.v_empty(v_ring.stage));
      v_ring.advance();
      round_weights();
    }
    wait(smem.v_full(v_ring.stage), v_ring.phase);
    fence_tensor_cores();
#pragma unroll
    for (int i = 0; i < OUT_DIM / 2; ++i) o[i] *= correction[i / 2 % 2];
    pin(o);
    mma_fence();
    issue_output(v_ring.stage);
    mma_wait<0>();
    pin(o);
  }

  const bool split = item.num_splits > 1;
  const int num_packed = item.qo_length * p.group;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = row_sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float lse = sum > 0.0f ? row_max[r] * p.scale_log2 + log2f(sum) : -INFINITY;
    const int packed = first_packed + lane / 4 + 8 * r;
    const int token = item.qo_begin + packed / p.group, head = item.kv_head * p.group + packed % p.group;
    if (p.sinks != nullptr && !split && sum > 0.0f && packed < num_packed) {
      sum += sink_weight<T>(p.sinks, p.wide_sinks, head, row_max[r] * p.scale_log2);
    }
    float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
    if constexpr (Traits::FP8) scale *= p.v_scale;
#pragma unroll
    for (int j = 0; j < OUT_DIM / 8; ++j) o[4 * j + 2 * r] *= scale, o[4 * j + 2 * r + 1] *= scale;
    if (packed >= num_packed) continue;
    if (split) {
      const int64_t row = static_cast<int64_t>(item.partial) * Traits::BLOCK_M + first_row + lane / 4 + 8 * r;
      if (part == 0 && lane % 4 == 0) p.partial_lse[row] = lse;
      if (num_tiles > 0) {
        float2* to = reinterpret_cast<float2*>(p.partial_out + row * HEAD_DIM + part * OUT_DIM) + lane % 4;
#pragma unroll
        for (int j = 0; j < OUT_DIM / 8; ++j) to[4 * j] = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
    } else if (p.lse != nullptr && part == 0 && lane % 4 == 0) {
      p.lse[token * p.stride_lse_row + head] = lse * 0.6931471805599453f;
    }
  }
  if (split) return;
  // Through the warp's own query rows in shared memory, so that whole rows, or parts of them, are written.
  if (OUT_PARTS > 1) {
    named_sync(3, Traits::WARPGROUP * Traits::NUM_CONSUMERS);  // the other part's warps read the queries too
  } else {
    __syncwarp();
  }
  constexpr int CHUNKS = OUT_DIM / 8;
#pragma unroll
  for (int j = 0; j < CHUNKS; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane / 4 + 8 * r;
      const uint32_t at = q_smem + row * HEAD_DIM * 2 + (part * CHUNKS + j ^ row % 8) * 16 + lane % 4 * 4;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pack<T>(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]))
                   : "memory");
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * CHUNKS; i += 32) {
    const int row = i / CHUNKS, chunk = part * CHUNKS + i % CHUNKS, packed = first_packed + row;
    if (packed < num_packed) {
      uint4 v;
      const uint32_t at = q_smem + row * HEAD_DIM * 2 + (chunk ^ row % 8) * 16;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(at)
                   : "memory");
      const int64_t token = item.qo_begin + packed / p.group, head = item.kv_head * p.group + packed % p.group;
      T* to = static_cast<T*>(p.out) + token * p.stride_out_row + head * p.stride_out_head + chunk * 8;
      *reinterpret_cast<uint4*>(to) = v;
    }
  }
}

// What one warp of a block finds out for all.
struct Work {
  WorkItem item;
  int num_tiles;
};
static_assert(sizeof(Work) <= 48);

template <typename Traits>
__global__ void __launch_bounds__(Traits::NUM_THREADS, Traits::BLOCKS_PER_SM)
    link_extend_kernel(const __grid_constant__ LinkExtendParams p) {
  using namespace lazy::hopper;
  using T = typename Traits::T;
  extern __shared__ char dynamic_smem[];
  const uint32_t unaligned = smem_address(dynamic_smem);
  const SharedMemory<Traits> smem{(unaligned + Traits::ALIGNMENT - 1) / Traits::ALIGNMENT * Traits::ALIGNMENT};
  char* generic = dynamic_smem + (smem.base - unaligned);
  Run* runs = reinterpret_cast<Run*>(generic + Traits::RUNS_OFFSET);
  Work* work = reinterpret_cast<Work*>(generic + Traits::WORK_OFFSET);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int warpgroup = warp / 4, thread = threadIdx.x % Traits::WARPGROUP;

  if (warp == 0) {
    WorkItem item{};
    item.find<Traits::BLOCK_M, Traits::BLOCK_N>(p, blockIdx.x, lane);
    if (lane == 0) work->item = item;
  }
  __syncthreads();
  const WorkItem item = work->item;
  if (item.num_splits == 0) return;
  const int num_packed = item.qo_length * p.group;
  // A consumer none of whose rows exist does nothing.
  const int rows = num_packed - item.tile * Traits::BLOCK_M;
  const int num_consumers = Traits::OUT_PARTS == 1 && rows <= 64 ? 1 : Traits::NUM_CONSUMERS;
  if (warp == 0) {
    const int first = item.tile * Traits::BLOCK_M, last = min(first + Traits::BLOCK_M, num_packed) - 1;
    const int2 listed = list_runs<Traits::BLOCK_N, Traits::RUN_PARTS>(p, item, item.qo_begin + first / p.group,
                                                                      item.qo_begin + last / p.group, runs, lane);
    if (lane == 0) work->num_tiles = listed.y;
  } else if (warp == 1 && lane == 0) {
    for (int stage = 0; stage < Traits::K_STAGES; ++stage) {
      init_barrier(smem.k_full(stage), Traits::WARPGROUP);
      init_barrier(smem.k_empty(stage), 4 * num_consumers * ARRIVALS_OF_WARP);
    }
    for (int stage = 0; stage < Traits::V_STAGES; ++stage) {
      init_barrier(smem.v_full(stage), Traits::WARPGROUP);
      init_barrier(smem.v_empty(stage), 4 * num_consumers * ARRIVALS_OF_WARP);
    }
    fence_barrier_init();
  } else if (warpgroup > 0 && (warp - 4) * 16 < Traits::BLOCK_M) {
    // Each consumer warp brings its own 16 rows; of those that share rows one does.
    constexpr int CHUNKS = Traits::HEAD_DIM / 8;
    const int first_row = (warp - 4) * 16;
#pragma unroll
    for (int i = lane; i < 16 * CHUNKS; i += 32) {
      const int row = first_row + i / CHUNKS, chunk = i % CHUNKS, packed = item.tile * Traits::BLOCK_M + row;
      const bool valid = packed < num_packed;
      const int64_t token = item.qo_begin + (valid ? packed / p.group : 0);
      const int64_t head = item.kv_head * p.group + (valid ? packed % p.group : 0);
      copy_async_16(smem.q() + row * Traits::HEAD_DIM * 2 + (chunk ^ row % 8) * 16,
                    static_cast<const T*>(p.q) + token * p.stride_q_row + head * p.stride_q_head + chunk * 8, valid);
    }
    wait_copies();
    if constexpr (!std::is_same_v<T, typename Traits::MmaType>) {
#pragma unroll
      for (int i = lane; i < 16 * CHUNKS; i += 32) {
        const int row = first_row + i / CHUNKS, chunk = i % CHUNKS;
        const uint32_t at = smem.q() + row * Traits::HEAD_DIM * 2 + (chunk ^ row % 8) * 16;
        const uint4 x = load_uint4(at);
        auto convert = [](uint32_t two) {
          const float2 v = unpack<T>(two);
          return pack<typename Traits::MmaType>(v.x, v.y);
        };
        store_uint4(at, make_uint4(convert(x.x), convert(x.y), convert(x.z), convert(x.w)));
      }
    }
  }
  __syncthreads();
  const int num_tiles = work->num_tiles;
  if (warpgroup == 0) {
    if constexpr (Traits::REALLOCATED) shrink_registers<Traits::PRODUCER_REGISTERS>();
    if (num_tiles > 0) produce<Traits>(p, item, runs, num_tiles, smem, thread);
  } else {
    if constexpr (Traits::REALLOCATED) grow_registers<Traits::CONSUMER_REGISTERS>();
    if (warpgroup <= num_consumers) {
      consume<Traits>(p, item, runs, num_tiles, smem, warpgroup - 1, thread, num_consumers == 2);
    }
  }
  launch_dependents();
}

// out[row] = sum_i 2^(lse_i - lse) partial_out[i, row] over the splits that saw anything. A warp merges one row of a
// row tile, MERGED_ROWS to a block; the grid goes round the row tiles of requests with splits.
constexpr int MERGED_ROWS = 8;

template <typename Traits>
__global__ void __launch_bounds__(32 * MERGED_ROWS, 4) merge_kernel(const __grid_constant__ LinkExtendParams p) {
  using T = typename Traits::T;
  constexpr int HEAD_DIM = Traits::HEAD_DIM, BLOCK_M = Traits::BLOCK_M, VECTOR = HEAD_DIM / 32;
  constexpr int BLOCKS = BLOCK_M / MERGED_ROWS;  // of a row tile
  __shared__ WorkItem shared_item;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x % BLOCKS * MERGED_ROWS + warp;
  for (int index = blockIdx.x / BLOCKS;; index += gridDim.x / BLOCKS) {
    if (warp == 0) {
      WorkItem item{};
      item.find<BLOCK_M, Traits::BLOCK_N, true>(p, index, lane);
      if (lane == 0) shared_item = item;
    }
    __syncthreads();
    const WorkItem item = shared_item;
    __syncthreads();
    hopper::wait_for_prerequisites();
    if (item.num_splits == 0) return;
    const int packed = item.tile * BLOCK_M + row;
    if (packed >= item.qo_length * p.group) continue;
    const int64_t first = static_cast<int64_t>(item.partial) * BLOCK_M + row, stride = item.row_tiles * BLOCK_M;
    float highest = -INFINITY, sum = 0.0f, acc[VECTOR] = {};
    merge_splits(p.partial_out, p.partial_lse, first, stride, item.num_splits, lane, acc, sum, highest);
    const int64_t token = item.qo_begin + packed / p.group, head = item.kv_head * p.group + packed % p.group;
    float total = sum;
    if (p.sinks != nullptr && sum > 0.0f) total += sink_weight<T>(p.sinks, p.wide_sinks, head, highest);
    const float scale = sum > 0.0f ? 1.0f / total : 0.0f;
    uint32_t rounded[VECTOR / 2];
#pragma unroll
    for (int j = 0; j < VECTOR / 2; ++j) rounded[j] = hopper::pack<T>(acc[2 * j] * scale, acc[2 * j + 1] * scale);
    T* to = static_cast<T*>(p.out) + token * p.stride_out_row + head * p.stride_out_head + lane * VECTOR;
#pragma unroll
    for (int j = 0; j < VECTOR / 2; ++j) reinterpret_cast<uint32_t*>(to)[j] = rounded[j];
    if (p.lse != nullptr && lane == 0) {
      p.lse[token * p.stride_lse_row + head] = sum > 0.0f ? (highest + log2f(sum)) * 0.6931471805599453f : -INFINITY;
    }
  }
}

// Blocks beyond the last work item return at once.
template <typename Traits>
cudaError_t launch_link_extend(const LinkExtendParams& p, cudaStream_t stream) {
  const int smem_bytes = Traits::smem_bytes(p.max_segments);
  auto kernel = link_extend_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.max_items, Traits::NUM_THREADS, smem_bytes, stream>>>(p);
  if (p.max_partials > 0) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    // Row tiles in at least two parts, and no more blocks than run at once.
    const int row_tiles = min(min(p.max_items - p.max_partials / 2, p.max_partials / 2), p.num_sms / 4);
    config.gridDim = dim3(row_tiles * (Traits::BLOCK_M / MERGED_ROWS));
    config.blockDim = dim3(32 * MERGED_ROWS);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, merge_kernel<Traits>, p);
    if (error != cudaSuccess) return error;
  }
  return cudaGetLastError();
}

}  // namespace lazy::extend
