// Thin wrappers over the Hopper (sm_90a) instructions that the attention kernels need: asynchronous copies, mbarriers,
// named barriers, register reallocation, and warpgroup matrix products with A in registers and B in shared memory.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace lazy::hopper {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- copies ----

// 16 bytes from global to shared memory past L1; zeros where not valid, without reading.
__device__ __forceinline__ void copy_async_16(uint32_t smem, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async_16(uint32_t smem, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_async_4(uint32_t smem, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(global), "r"(valid ? 4 : 0) : "memory");
}

// What L2 does with what a copy leaves there: drops it before all else, or after all else.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_last() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A box of a three-dimensional tensor, by TMA; its bytes count towards what the barrier expects.
__device__ __forceinline__ void copy_box(uint32_t smem, const CUtensorMap* tensor, int x, int y, int z,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(smem),
      "l"(tensor), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Makes a group of this thread's copies since the last one; waits for all groups but the last PENDING.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

// ---- barriers ----

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One lane arrives for its warp, once all of its lanes are done. racecheck of compute-sanitizer seems to order by an
// arrival only what the arriving lane itself has accessed, and would then report what the others did even where
// __syncwarp comes in between. Hence a build for it in which every lane arrives for itself; test/kernel/sanitize.py sees
// first what the tool makes of either.
#ifdef LAZY_EVERY_LANE_ARRIVES
constexpr int ARRIVALS_OF_WARP = 32;
#else
constexpr int ARRIVALS_OF_WARP = 1;
#endif

__device__ __forceinline__ void arrive_for_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane < ARRIVALS_OF_WARP) arrive(barrier);
}

// Arrives, and lets the barrier wait for this many bytes of copied boxes too.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives once all earlier cp.async of this thread have landed; the thread goes on at once.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Orders shared memory that cp.async or ordinary stores wrote before the tensor cores' reads of it.
__device__ __forceinline__ void fence_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int REGISTERS>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Programmatic dependent launch: let the next kernel of the stream start, and wait for the previous one's results.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- numbers ----

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x ln(2) / 2); tanh.approx.f32 has eleven bits only.
__device__ __forceinline__ float tanh_exp2(float x) { return 1.f - __fdividef(2.f, 1.f + exp2_approx(x)); }

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t packed) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
  } else {
    return __half22float2(*reinterpret_cast<__half2*>(&packed));
  }
}

// ---- warpgroup matrix products ----

// Descriptor of a B tile in 128-byte-swizzled shared memory: rows of 128 bytes, whose 16-byte chunk c of row r lies at
// chunk c ^ (r % 8), in groups of 8 rows that follow each other. Tiles wider than 128 bytes are blocks of such columns.
// This is the descriptor's low word: the address, and for MN-major tiles the bytes between column blocks. Steps within
// the tile are added as bytes / 16 (32 bytes along K in a K-major tile, rows in an MN-major one), one instruction each.
// The high word: 128-byte swizzle, groups of 8 rows 1024 bytes apart.
constexpr uint32_t SWIZZLED_ROWS = 1u << 30 | 1024 >> 4;

__device__ __forceinline__ uint32_t tile_descriptor(uint32_t smem, uint32_t column_stride) {
  return column_stride >> 4 << 16 | smem >> 4;
}

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads or writes of these registers across this point.
template <int N>
__device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(uint32_t (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

#define LAZY_D8(d, i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define LAZY_D32(d, i) LAZY_D8(d, i), LAZY_D8(d, i + 8), LAZY_D8(d, i + 16), LAZY_D8(d, i + 24)
#define LAZY_R32_0                                                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
  "%27,%28,%29,%30,%31"
#define LAZY_R32_1                                                                                           \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63"
#define LAZY_MMA_64(type)                                                                             \
  asm volatile(                                                                                       \
      "{.reg .pred accumulate; .reg .b64 b; setp.ne.b32 accumulate, %37, 0; mov.b64 b, {%36, %39};\n" \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" LAZY_R32_0                     \
      "},"                                                                                            \
      " {%32, %33, %34, %35}, b, accumulate, 1, 1, %38;}\n"                                           \
      : LAZY_D32(d, 0)                                                                                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(MN_MAJOR), "n"(SWIZZLED_ROWS))
#define LAZY_MMA_128(type)                                                                            \
  asm volatile(                                                                                       \
      "{.reg .pred accumulate; .reg .b64 b; setp.ne.b32 accumulate, %69, 0; mov.b64 b, {%68, %71};\n" \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" LAZY_R32_0 "," LAZY_R32_1     \
      "}, {%64, %65, %66, %67}, b, accumulate, 1, 1, %70;}\n"                                         \
      : LAZY_D32(d, 0), LAZY_D32(d, 32)                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate), "n"(MN_MAJOR), "n"(SWIZZLED_ROWS))

// d (+)= a b for a [64, 16] in the registers of a warpgroup and b [16, N] in shared memory, in fp32; asynchronous. A
// thread holds, of its warp's 16 rows, rows g and g + 8 with g = lane / 4: d[4 j + 0, 1] are columns 8 j + 2 (lane % 4)
// + 0, 1 of row g and d[4 j + 2, 3] those of row g + 8; a[0], a[1] are columns 2 (lane % 4) + 0, 1 of rows g and g + 8,
// and a[2], a[3] the same 8 columns on. So products become the next product's a by packing pairs.
template <typename T, bool MN_MAJOR>
__device__ __forceinline__ void mma(float (&d)[32], const uint32_t (&a)[4], uint32_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    LAZY_MMA_64("bf16");
  } else {
    LAZY_MMA_64("f16");
  }
}
template <typename T, bool MN_MAJOR>
__device__ __forceinline__ void mma(float (&d)[64], const uint32_t (&a)[4], uint32_t b, int accumulate) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    LAZY_MMA_128("bf16");
  } else {
    LAZY_MMA_128("f16");
  }
}

#undef LAZY_D8
#undef LAZY_D32
#undef LAZY_R32_0
#undef LAZY_R32_1
#undef LAZY_MMA_64
#undef LAZY_MMA_128

}  // namespace lazy::hopper
