// The instructions of compute capability 9.0a that the products use, one function each.
//
// Shared memory is addressed by 32-bit addresses of the shared window (`shared_address`).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace hopper {

// A `CUtensorMap`, which the host encodes and hands over by value.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Transaction barriers ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialized barriers visible to the cluster and to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives at the same barrier of the block `rank` of this cluster. It says that reads are done, so
// it need not make writes visible to the cluster, which would cost a fence of the whole device.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether a phase is over, without waiting.
__device__ __forceinline__ bool barrier_is_done(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- Counts in global memory ----

// Takes one from a count, after all that this thread has written or knows to be written.
__device__ __forceinline__ void take_one(uint32_t* count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(~0u) : "memory");
}

// Waits until a count is zero; then all that was written before it was taken from is seen.
__device__ __forceinline__ void wait_for_zero(const uint32_t* count) {
  uint32_t left;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(left) : "l"(count) : "memory");
  } while (left != 0);
}

// ---- Clusters, warpgroups, grids ----

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// Waits for all threads of the cluster. It orders no writes: that would take a fence of the whole
// device, a microsecond or more where stores are under way.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// A value that is the same in all lanes, through a shuffle, so that the compiler knows it to be.
__device__ __forceinline__ uint32_t same_in_all_lanes(uint32_t value) {
  return __shfl_sync(~0u, value, 0);
}

// Index of the warp in the block.
__device__ __forceinline__ int warp_index() {
  return static_cast<int>(same_in_all_lanes(threadIdx.x / 32));
}

// True in one lane of a converged warp, always the same. Copies are issued under it: under another
// condition the compiler, which cannot know that one lane is left, loops over the lanes.
__device__ __forceinline__ bool elect() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// A barrier of the 128 threads of one warpgroup; `id` from 1.
__device__ __forceinline__ void warpgroup_sync(uint32_t id) {
  asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Waits until the kernels before this one have ended and their writes are visible, and only then lets the
// next one start: so when a kernel starts, all but the last one ahead of it have ended.
__device__ __forceinline__ void take_turn() {
  asm volatile(
      "griddepcontrol.wait;\n"
      "griddepcontrol.launch_dependents;" ::
          : "memory");
}

// ---- Loads that are asked for early ----

// Loads 32 bytes, aligned to 16, of what no kernel writes. The compiler would put a plain load off, or use what it brings
// at once. This one is issued about here, ahead of barriers that follow, and nothing waits for it before `pin_words`.
__device__ __forceinline__ void load_words(uint32_t (&words)[8], const void* from) {
  asm volatile(
      "ld.global.v4.u32 {%0, %1, %2, %3}, [%8];\n"
      "ld.global.v4.u32 {%4, %5, %6, %7}, [%8 + 16];"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]), "=r"(words[4]),
        "=r"(words[5]), "=r"(words[6]), "=r"(words[7])
      : "l"(from));
}

// The same, of one word.
__device__ __forceinline__ void load_word(uint32_t& word, const void* from) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(from));
}

// Keeps the compiler from using words, and so waiting for them, ahead of this point.
template <int kCount>
__device__ __forceinline__ void pin_words(uint32_t (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(words[i])::"memory");
}

// ---- Bulk copies ----

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at (column, row, matrix) to `to`; its bytes count at `barrier`.
__device__ __forceinline__ void load_box(uint32_t to, const TensorMap* map, uint32_t barrier,
                                         int column, int row, int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// The same, to the same place in both blocks of a cluster of two, counted at the barrier of each.
__device__ __forceinline__ void load_box_to_both(uint32_t to, const TensorMap* map,
                                                 uint32_t barrier, int column, int row,
                                                 int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(matrix), "h"(uint16_t{3})
      : "memory");
}

// Stores a box; what lies outside of the tensor is left out. Closes a group of its own.
__device__ __forceinline__ void store_box(const TensorMap* map, uint32_t from, int column, int row,
                                          int matrix) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(from), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}

// Waits until at most `kPending` of this thread's stores still read shared memory.
template <int kPending>
__device__ __forceinline__ void wait_for_reads_of_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's stores are done.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders what this thread has seen in any memory and what the copy engine reads or writes there.
__device__ __forceinline__ void fence_for_copy_engine_everywhere() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Orders this thread's writes to shared memory before what the copy engine reads there.
__device__ __forceinline__ void fence_for_copy_engine() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Fragments ----
//
// 8 × 8 elements of 16 bits; lane l holds two of row l / 4, from column 2 (l % 4).

// Four fragments; lane l gives the address of row l % 8 of fragment l / 8.
template <bool kTransposed>
__device__ __forceinline__ void load_fragments(uint32_t (&f)[4], uint32_t address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                 : "r"(address)
                 : "memory");
  }
}

template <bool kTransposed>
__device__ __forceinline__ void store_fragments(uint32_t address, const uint32_t (&f)[4]) {
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address),
                 "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address),
                 "r"(f[0]), "r"(f[1]), "r"(f[2]), "r"(f[3])
                 : "memory");
  }
}

__device__ __forceinline__ uint32_t transpose_fragment(uint32_t f) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(f));
  return transposed;
}

__device__ __forceinline__ float2 unpack(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

__device__ __forceinline__ float2 unpack(uint32_t pair, __nv_bfloat16) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  const __half2 pair = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(pair);
}

}  // namespace hopper
