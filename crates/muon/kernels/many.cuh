// Many tensors in one launch: tables that are arguments, of which all together have 4 KiB, and a block for each chunk of
// a tensor. The tables are those of src/cuda/many.rs.
#pragma once
#include "numbers.cuh"

constexpr u32 TENSORS = 120;   // of a launch
constexpr u32 THREADS = 256;   // of a block, as src/cuda/launch.rs has it

struct Addresses { u64 of[TENSORS]; };
struct Dtypes { u32 of[TENSORS]; };
struct Scalars { float of[TENSORS]; };

// How tensors are cut.
struct Chunks {
    u64 lengths[TENSORS];
    // The first block of each tensor, and at `count` the end of all.
    u32 firsts[TENSORS + 1];
    u32 count;
    // Elements of a block.
    u32 chunk;
};
static_assert(sizeof(Chunks) == 12 * TENSORS + 16, "as src/cuda/many.rs has it");

// What this block goes over.
struct Chunk {
    u32 tensor;
    u64 start;
    u32 n;

    __device__ __forceinline__ explicit Chunk(const Chunks& chunks) {
        // The last tensor that begins at or before this block; empty ones have no block.
        u32 low = 0, high = chunks.count;
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (chunks.firsts[middle] <= blockIdx.x) low = middle; else high = middle;
        }
        tensor = low;
        start = static_cast<u64>(blockIdx.x - chunks.firsts[low]) * chunks.chunk;
        n = min(static_cast<u64>(chunks.chunk), chunks.lengths[low] - start);
    }

    template <class T> __device__ __forceinline__ T* of(const Addresses& tensors) const {
        return reinterpret_cast<T*>(tensors.of[tensor]) + start;
    }

    // f(i, Width) for all elements of the chunk, whose pointers these are: in packs of N where all of them allow it.
    template <u32 N, class F, class... T> __device__ __forceinline__ void each(F f, const T*... pointers) const {
        const bool is_wide = (is_aligned<N>(pointers) && ...);
        const u32 packs = is_wide ? n / N : 0;
#pragma unroll 4
        for (u32 pack = threadIdx.x; pack < packs; pack += THREADS) f(pack * N, Width<N>());
#pragma unroll 4
        for (u32 i = packs * N + threadIdx.x; i < n; i += THREADS) f(i, Width<1>());
    }
};
