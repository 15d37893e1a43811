// Newton-Schulz on stacks of matrices, f16 or bf16 with sums in f32: one launch computes all products
// of an iteration. They are of three kinds:
//
//   symmetric:        D = alpha · A·Bᵀ + from_a · A + from_b · B + diagonal · I,  D symmetric, n × n
//   apply:            D = alpha · A·B + from_b · B,                      A n × n, B and D n × m
//   apply_transposed: D = the transpose of that, m × n
//
// `symmetric` serves R = X Xᵀ (A = B = X, n × m) and the products of symmetric, commuting A and B.
// It computes the tiles on and below the diagonal. Of what lies above, as many blocks of each row are stored
// as the schedule's tiles need (`Work::near`), since the rows of a tile turn to reading down the columns at
// one block of K; the rest is read from below the diagonal, transposed. So D equals its transpose bit for bit.
// In Newton-Schulz what is added is always one of the factors. Its tile passes through shared memory
// as a part of the sum over K, and is picked up there: nothing else is loaded.
//
// All matrices are row-major with a pitch of a multiple of 16 bytes. Each stack has one tensor map
// (columns, rows, matrices of the stack), with boxes of 64 × 64 × 1 elements in the 128-byte
// swizzle. Reads beyond an edge give zeros, writes there are dropped, so any n and m will do, up to
// 65535 blocks of 64.
//
// Two blocks make a cluster, which works off a list of pairs of tiles (`Task`), one tile a block.
// The host deals the pairs of all products to the clusters. A tile has 128 rows, 64 for each of two
// consumer warpgroups, and 64, 128, 160, 192 or 256 columns; `Shape` tells of others. Where the two
// tiles of a pair start at the same column they share B: each block loads half of it for both. A tile
// on the diagonal may be narrower than what it loads. One warp of a third warpgroup issues all loads,
// two where tiles have 64 columns, through a ring of stages with 64 of K each.
//
// A product of one matrix waits for others of the same matrix and for nothing else, so the matrices
// of a batch need not keep step. `left` counts, for each matrix and product, the warpgroups' parts of
// tiles that are not stored yet; a loader waits until those of the products before are zero. Lists
// are in an order in which nobody waits for itself, and all clusters run at once (a cooperative
// launch), so none waits forever. Without `left` nobody waits or counts: then a launch has only
// products that wait for those of earlier launches.
//
// A sum over K has the same order in any tile, so D does not depend on how the tiles are dealt.

#include "loads.cuh"
#include "ring.cuh"
#include "stores.cuh"
#include "tasks.cuh"
#include "wgmma.cuh"

namespace {

using namespace hopper;

// acc (64 × kColumns, a part of the accumulators) += factor · these columns of the block, or of its
// transpose, from the 16 · `first`-th on.
template <class T, bool kTransposed, int kColumns>
__device__ __forceinline__ void add_columns(float* acc, const Fragments& at, uint32_t block,
                                            int first, float factor) {
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    const int c = first + i;
    uint32_t f[4];
    load_fragments<kTransposed>(f, kTransposed ? at.mirrored(block, c) : at.straight(block, c));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack(f[j], T{});
      acc[8 * i + 2 * j] = fmaf(factor, pair.x, acc[8 * i + 2 * j]);
      acc[8 * i + 2 * j + 1] = fmaf(factor, pair.y, acc[8 * i + 2 * j + 1]);
    }
  }
}

// Consecutive columns of 64 rows: where they lie in D, and their first blocks of A and B in a stage.
struct Part {
  int row, column;
  uint32_t a, b;
};

// What a warpgroup computes of a tile; of a `kQuads` one that is two parts.
__device__ __forceinline__ Part part_of(const Tile& tile, int warpgroup, int index) {
  const uint32_t w = warpgroup, first = 2 * w;
  if (tile.shape == Shape::kStrips) {
    const int column = tile.row + warpgroup * 2 * kBlock;
    return {column + kBlock, column, first + 1, first};
  }
  if (tile.shape == Shape::kQuads) {
    const int at = tile.row + (2 * warpgroup + index) * 2 * kBlock;
    return {at, at, first + index, first + index};
  }
  const int row = tile.row + warpgroup * kBlock;
  if (tile.shape == Shape::kTwins) return {row, row, w, w};
  if (tile.shape == Shape::kHalf) return {row, tile.column, 0, 1};
  return {row, tile.column, w, kWarpgroups};
}

// What a warpgroup does for one tile: `kParts` times `kColumns` columns.
template <class T, Op kOp, int kColumns, int kParts = 1, class Ring>
__device__ __forceinline__ void compute(Ring& ring, Staging& staging, const Fragments& at,
                                        const TensorMap* map_d, const Task& task,
                                        const Scalars& s, int near) {
  constexpr bool kSymmetric = kOp == Op::kSymmetric;
  const int place = task.place;
  Part parts[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) parts[p] = part_of(task.tile, warp_index() / 4, p);
  const float ratio_a = s.from_a / s.alpha, ratio_b = s.from_b / s.alpha;
  const bool has_a = kSymmetric && s.from_a != 0, has_b = s.from_b != 0;
  const bool releases = threadIdx.x % kWarpgroupThreads < 2;
  const uint32_t peer = threadIdx.x % kWarpgroupThreads;

  float acc[kParts][kColumns / 2];
  const auto pin_all = [&] {
#pragma unroll
    for (int p = 0; p < kParts; ++p) pin(acc[p]);
  };
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[p][i] = 0;
  }
  uint32_t previous = 0;
  int k = 0;
  // K runs down the columns of A, or along its rows, and so for B.
  const auto sum_until = [&](int end, auto a_is_down, auto b_is_down) {
    constexpr bool kADown = decltype(a_is_down)::value, kBDown = decltype(b_is_down)::value;
    for (; k < end; ++k) {
      barrier_wait(ring.full(), ring.parity);
      pin_all();
      products_begin();
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const uint64_t a = describe<kADown>(ring.block(parts[p].a));
        const uint64_t b = describe<kBDown>(ring.block(parts[p].b));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          multiply<T, kADown, kBDown>(acc[p], a + i * step_of_k<kADown>(),
                                      b + i * step_of_k<kBDown>());
        }
      }
      products_commit();
      if (k == 0) {
        staging.tell();
        __syncwarp();
      }
      // What is added lies where K is one of the tile's columns (of A) or of its rows (of B).
      const auto adds_a = [&](const Part& part) {
        const int a_column = k * kBlock - part.column;
        return has_a && -kBlock < a_column && a_column < kColumns;
      };
      const auto adds_b = [&](const Part& part) { return has_b && k == part.row / kBlock; };
      bool adds = false;
#pragma unroll
      for (int p = 0; p < kParts; ++p) adds = adds || adds_a(parts[p]) || adds_b(parts[p]);
      if (adds) {
        products_wait<0>();
        pin_all();
        // Columns that lie in one block of A.
        constexpr int kOfBlock = kColumns % kBlock == 0 ? kBlock : kBlock / 2;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const Part& part = parts[p];
#pragma unroll
          for (int c = 0; c < kColumns; c += kOfBlock) {
            const int of_a = c - (k * kBlock - part.column);
            if (adds_a(part) && 0 <= of_a && of_a < kBlock) {
              add_columns<T, kADown, kOfBlock>(acc[p] + c / 2, at, ring.block(part.a), of_a / 16,
                                              ratio_a);
            }
            if (adds_b(part)) {
              add_columns<T, !kBDown, kOfBlock>(acc[p] + c / 2, at,
                                                ring.block(part.b + c / kBlock), c % kBlock / 16,
                                                ratio_b);
            }
          }
        }
        pin_all();
        warpgroup_sync(staging.barrier);  // all have read: one thread may release the stage for all
      }
      products_wait<1>();
      if (k > 0 && releases) barrier_arrive(previous, peer);
      previous = ring.empty();
      ring.advance();
    }
  };
  in_order_of_k<kSymmetric>(task, sum_until);
  products_wait<0>();
  pin_all();
  if (releases) barrier_arrive(previous, peer);

  // Of 160 columns the last two blocks overlap, and store the same where they do.
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    const int row = parts[p].row;
#pragma unroll
    for (int c = 0; c < kColumns; c += kBlock) {
      const int from = min(c, kColumns - kBlock), column = parts[p].column + from;
      if (!kSymmetric || column <= row) {
        store_block<T, kOp>(acc[p] + from / 2, at, staging, map_d, row, column, place, s, near);
      }
    }
  }
}

// What a warpgroup does that has no part of a tile.
template <class Ring>
__device__ __forceinline__ void stand_by(Ring& ring, Staging& staging, int k_blocks) {
  const uint32_t thread = threadIdx.x % kWarpgroupThreads;
  for (int k = 0; k < k_blocks; ++k) {
    barrier_wait(ring.full(), ring.parity);
    if (k == 0) {
      staging.tell();
      __syncwarp();
    }
    if (thread < 2) barrier_arrive(ring.empty(), thread);
    ring.advance();
  }
}

// The next narrower tiles, or 0.
__host__ __device__ constexpr int narrower(int columns, bool symmetric) {
  switch (columns) {
    case 256: return 192;
    case 192: return symmetric ? 160 : 128;
    case 160: return 128;
    case 128: return 64;
    default: return 0;
  }
}

// The columns of a part of a tile that its rows need, not less than a block: of a symmetric product those
// up to the diagonal.
__device__ __forceinline__ int columns_of(const Tile& tile, Op op, int warpgroup) {
  const int columns = 32 * tile.halves;
  if (op != Op::kSymmetric) return columns;
  const Part part = part_of(tile, warpgroup, 0);
  return max(min(columns, part.row + kBlock - part.column), kBlock);
}

// `compute` for so many columns of a part, at most `kColumns`.
template <class T, Op kOp, int kColumns, class Ring>
__device__ __forceinline__ void compute_any(Ring& ring, Staging& staging, const Fragments& at,
                                            const TensorMap* map_d, const Task& task,
                                            const Scalars& s, int near, int columns) {
  if constexpr (kColumns == 0) {
    __trap();
  } else if (columns == kColumns) {
    compute<T, kOp, kColumns>(ring, staging, at, map_d, task, s, near);
  } else {
    constexpr int kNext = narrower(kColumns, kOp == Op::kSymmetric);
    compute_any<T, kOp, kNext>(ring, staging, at, map_d, task, s, near, columns);
  }
}

// Tiles of all shapes whose blocks fit a stage.
template <class T, int kBlocks>
__device__ __forceinline__ void iterate(const Maps& maps, const Work& work) {
  constexpr int kMaxColumns = kBlocks == 6 ? 256 : kBlocks == 4 ? 128 : 64;
  // For tiles of 64 columns two are faster (README.md).
  constexpr int kLoaders = kBlocks == 3 ? 2 : 1;
  static_assert(kLoaders == 1 || kBlocks <= kMostBoxes);
  extern __shared__ uint8_t raw[];
  Ring<kBlocks> ring{
      same_in_all_lanes((shared_address(raw) + kAlignment - 1) / kAlignment * kAlignment)};
  const uint32_t rank = cluster_rank();
  Asked asked(work, cluster_index(), rank);
  const int warpgroup = warp_index() / 4;

  if (warp_index() == 0 && elect()) {
    for (int i = 0; i < kMaps; ++i) prefetch_map(&maps.of[i]);
    for (Ring<kBlocks> r = ring; r.parity == 0; r.advance()) {
      barrier_init(r.full(), kLoaders);  // each arrives, and one tells how many bytes will come
      barrier_init(r.empty(), 2 * kWarpgroups);  // the consumers of both blocks
    }
    barrier_init_fence();
  }
  cluster_sync();
  List list(work, rank, asked);

  if (warpgroup == kWarpgroups) {
    give_registers<56>();  // with 40 what was asked for would be spilled, and waited for at once
    const int loader = warp_index() - 4 * kWarpgroups;
    if (loader < kLoaders) {
      if constexpr (kLoaders == 2) {
        load_operand(ring, maps, work, list, rank, loader == 0);
      } else {
        load(ring, maps, work, list, rank);
      }
    }
  } else {
    take_registers<224>();  // what is left to each of two
    const uint32_t thread = threadIdx.x % kWarpgroupThreads;
    const Fragments at(thread);
    Staging staging{ring.shared + ring.kStagingAt + warpgroup * kStagingBytes,
                    1u + warpgroup, warp_index() % 4 == 0};
    do {
      const Task task = same_in_all_lanes(list.task);
      list.load_next();
      const Tile& tile = task.tile;
      const Scalars s = work.products[tile.product].scalars;
      const TensorMap* map_d = &maps.of[task.d];
      const int columns = columns_of(tile, task.op, warpgroup);
      const bool stands_by = tile.shape == Shape::kHalf && warpgroup > 0;
      if (stands_by) {
        stand_by(ring, staging, task.k_blocks);
      } else if (tile.shape == Shape::kQuads) {
        if constexpr (kBlocks >= 4) {
          compute<T, Op::kSymmetric, kBlock, 2>(ring, staging, at, map_d, task, s, work.near);
        } else {
          __trap();
        }
      } else if (task.op == Op::kSymmetric) {
        compute_any<T, Op::kSymmetric, kMaxColumns>(ring, staging, at, map_d, task, s, work.near,
                                                    columns);
      } else if (task.op == Op::kApply) {
        compute_any<T, Op::kApply, kMaxColumns>(ring, staging, at, map_d, task, s, work.near,
                                                columns);
      } else {
        compute_any<T, Op::kApplyTransposed, kMaxColumns>(ring, staging, at, map_d, task, s,
                                                          work.near, columns);
      }
      if (work.left != nullptr && !stands_by) {
        staging.untold = work.left + int64_t{tile.matrix} * work.product_count + tile.product;
        staging.tell_unless_full(ring.full(), ring.parity);
        __syncwarp();
      }
    } while (list.advance());
    staging.tell();
    staging.end();
  }
  cluster_sync();  // until then the peer may arrive at this block's barriers
}

}  // namespace

// Launch: cooperative with `left`; clusters of 2 blocks of 384 threads, at most as many as fit at once (66 on an
// H200), each with a pair at least; shared memory of 230464, 230496 and 230528 bytes for the kernels named
// 6, 4 and 3 after the blocks of a stage.
#define ITERATE_KERNEL(name, type, blocks, bytes)                                          \
  static_assert(Ring<blocks>::kSharedBytes == bytes);                                       \
  extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)       \
      name(const __grid_constant__ Maps maps, const __grid_constant__ Work work) {          \
    iterate<type, blocks>(maps, work);                                                      \
  }

ITERATE_KERNEL(newton_schulz_iterate_f16_6, __half, 6, 230464)
ITERATE_KERNEL(newton_schulz_iterate_f16_4, __half, 4, 230496)
ITERATE_KERNEL(newton_schulz_iterate_f16_3, __half, 3, 230528)
ITERATE_KERNEL(newton_schulz_iterate_bf16_6, __nv_bfloat16, 6, 230464)
ITERATE_KERNEL(newton_schulz_iterate_bf16_4, __nv_bfloat16, 4, 230496)
ITERATE_KERNEL(newton_schulz_iterate_bf16_3, __nv_bfloat16, 3, 230528)
