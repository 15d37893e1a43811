// From accumulators to D: rounded, transposed where that is stored too, and copied out by blocks.
#pragma once

#include "ring.cuh"
#include "tasks.cuh"
#include "wgmma.cuh"

namespace hopper {

// Where a lane finds its row of the four fragments that make 16 × 16 elements of a block: those of
// rows 16 r and columns 16 c (`straight`), or of rows 16 c and columns 16 r, transposed, so that
// the lane's values are the same (`mirrored`). r is the warp of the warpgroup.
struct Fragments {
  uint32_t straight_row, straight_unit, mirrored_row, mirrored_unit;

  __device__ explicit Fragments(uint32_t thread) {
    const uint32_t warp = thread / 32, row = thread % 8, fragment = thread % 32 / 8;
    const uint32_t lower = fragment % 2, right = fragment / 2;
    straight_row = (16 * warp + 8 * lower + row) * 128;
    straight_unit = (right ^ row) * 16;
    mirrored_row = (8 * right + row) * 128;
    mirrored_unit = ((2 * warp + lower) ^ row) * 16;
  }
  __device__ uint32_t straight(uint32_t block, uint32_t c) const {
    return block + straight_row + (straight_unit ^ 32 * c);
  }
  __device__ uint32_t mirrored(uint32_t block, uint32_t c) const {
    return block + mirrored_row + 2048 * c + mirrored_unit;
  }
};

// One of two staging blocks of a warpgroup after the other: write it between `begin` and `store`.
// One lane of the first warp stores, and tells when a tile is stored.
struct Staging {
  uint32_t shared;
  uint32_t barrier;
  bool first_warp;
  uint32_t next = 0;
  uint32_t* untold = nullptr;  // of which one is to be taken, once the stores so far are seen by all

  __device__ __forceinline__ uint32_t begin() {
    if (first_warp && elect()) wait_for_reads_of_stores<1>();
    warpgroup_sync(barrier);
    return shared + next * kBlockBytes;
  }
  __device__ __forceinline__ void store(const TensorMap* map, int column, int row, int matrix) {
    fence_for_copy_engine();
    warpgroup_sync(barrier);
    if (first_warp && elect()) store_box(map, shared + next * kBlockBytes, column, row, matrix);
    next ^= 1;
  }
  // Stores take a while, so this is put off until the next tile is under way; but not where that one
  // is not loaded yet, since what it waits for may in the end be this.
  __device__ __forceinline__ void tell_unless_full(uint32_t full, uint32_t parity) {
    if (first_warp && elect() && untold != nullptr && !barrier_is_done(full, parity)) tell_now();
  }
  __device__ __forceinline__ void tell() {
    if (first_warp && elect() && untold != nullptr) tell_now();
    untold = nullptr;
  }
  __device__ __forceinline__ void end() {
    if (first_warp && elect()) wait_for_reads_of_stores<0>();
  }
  __device__ __forceinline__ void tell_now() {
    wait_for_stores();
    fence_for_copy_engine_everywhere();
    take_one(untold);
    untold = nullptr;
  }
};

// The value at column 2 (l % 4) + {0, 1} of row l / 4 from `f` on and below the diagonal of a
// fragment, from its transpose above.
__device__ __forceinline__ uint32_t mirror_lower(uint32_t f) {
  const uint32_t transposed = transpose_fragment(f);
  const uint32_t lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
  const uint32_t low = column > row ? transposed : f;
  const uint32_t high = column + 1 > row ? transposed : f;
  return __byte_perm(low, high, 0x7610);
}

// Rounds a 64 × 64 part of the accumulators and stores it at (row, column); its transpose at (column, row)
// as well within `near` blocks of the diagonal of a symmetric D, and instead for `kApplyTransposed`.
template <class T, Op kOp>
__device__ __forceinline__ void store_block(const float* acc, const Fragments& at,
                                            Staging& staging, const TensorMap* map, int row,
                                            int column, int matrix, const Scalars& s, int near) {
  const int warp = threadIdx.x % kWarpgroupThreads / 32, lane = threadIdx.x % 32;
  const bool on_diagonal = kOp == Op::kSymmetric && row == column;
  uint32_t f[4][4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = s.alpha * acc[8 * c + 2 * i], y = s.alpha * acc[8 * c + 2 * i + 1];
      if (on_diagonal && c == warp && (i == 0 || i == 3)) {
        if (lane / 4 == 2 * (lane % 4)) x += s.diagonal;
        if (lane / 4 == 2 * (lane % 4) + 1) y += s.diagonal;
      }
      f[c][i] = pack(x, y, T{});
    }
  }
  if (!on_diagonal) {
    if constexpr (kOp != Op::kApplyTransposed) {
      const uint32_t block = staging.begin();
#pragma unroll
      for (int c = 0; c < 4; ++c) store_fragments<false>(at.straight(block, c), f[c]);
      staging.store(map, column, row, matrix);
    }
    if (kOp == Op::kApplyTransposed ||
        (kOp == Op::kSymmetric && row - column < (near + 1) * kBlock)) {
      const uint32_t transposed = staging.begin();
#pragma unroll
      for (int c = 0; c < 4; ++c) store_fragments<true>(at.mirrored(transposed, c), f[c]);
      staging.store(map, row, column, matrix);
    }
    return;
  }
  const uint32_t block = staging.begin();
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (c < warp) {
      store_fragments<false>(at.straight(block, c), f[c]);
      store_fragments<true>(at.mirrored(block, c), f[c]);
    } else if (c == warp) {
      f[c][0] = mirror_lower(f[c][0]);
      f[c][2] = transpose_fragment(f[c][1]);
      f[c][3] = mirror_lower(f[c][3]);
      store_fragments<false>(at.straight(block, c), f[c]);
    }
  }
  staging.store(map, column, row, matrix);
}

}  // namespace hopper
