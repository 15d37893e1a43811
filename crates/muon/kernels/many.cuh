// Many tensors in one launch: tables that are arguments, of which all together have 4 KiB, and a block for each chunk of
// a tensor. As src/cuda/many.rs has them.
#pragma once
#include "numbers.cuh"

constexpr u32 TENSORS = 120;   // of a launch
constexpr u32 THREADS = 256;   // of a block

struct Addresses { u64 of[TENSORS]; };
struct Lengths { u64 of[TENSORS]; };
struct Dtypes { u32 of[TENSORS]; };
// The first block of each tensor, and at `count` the end of all.
struct Firsts { u32 of[TENSORS + 1]; };

// The last tensor that begins at or before this block; empty ones have no block.
__device__ __forceinline__ u32 tensor_of_block(const Firsts& firsts, u32 count) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (firsts.of[middle] <= blockIdx.x) low = middle; else high = middle;
    }
    return low;
}
