// What the loading warps of a block do: wait for what a tile reads, and fill stages with it.
#pragma once

#include "ring.cuh"
#include "tasks.cuh"

namespace hopper {

// Waits until what a product of a matrix reads has been stored, and what it overwrites been read.
__device__ __forceinline__ void wait_for_products(const Work& work, const Product& product,
                                                  int matrix) {
#pragma unroll
  for (int i = 0; i < kMostWaits; ++i) {
    const int other = product.waits[i];
    if (other >= 0) wait_for_zero(work.left + int64_t{matrix} * work.product_count + other);
  }
  fence_for_copy_engine_everywhere();
}

// How many blocks of 64 × 64 a tile takes of A and of B for each 64 of K, and which of B's this half of
// the cluster loads.
struct Extent {
  int a_blocks, a_step;
  int b_blocks, b_first, b_step;

  __device__ __forceinline__ Extent(const Tile& tile, uint32_t rank) {
    const bool loads_b = tile.shape == Shape::kWhole || tile.shape == Shape::kHalf;
    const bool loads_more_of_a = tile.shape == Shape::kStrips || tile.shape == Shape::kQuads;
    a_blocks = tile.shape == Shape::kHalf ? 1 : loads_more_of_a ? 4 : 2;
    a_step = tile.shape == Shape::kQuads ? 2 * kBlock : kBlock;
    b_blocks = !loads_b ? 0 : tile.shared ? tile.shared : (tile.halves + 1) / 2;
    b_first = tile.shared ? rank : 0;
    b_step = tile.shared ? 2 : 1;
  }
  __device__ __forceinline__ uint32_t bytes() const { return (a_blocks + b_blocks) * kBlockBytes; }
};

// The product and matrix that were waited for last: the next tile of the same need not wait.
struct Awaited {
  int product = -1, matrix = -1;

  // Before the loads of a tile.
  __device__ __forceinline__ void wait(const Work& work, const Tile& tile) {
    if (work.left == nullptr || (tile.product == product && tile.matrix == matrix)) return;
    product = tile.product;
    matrix = tile.matrix;
    wait_for_products(work, work.products[product], matrix);
  }
};

// Issues the loads of all tiles, from one warp: all lanes walk, and one of them copies. For tiles wider than 64
// columns it was slower unrolled, and slower from a warp for A and one for B (README.md): so it does not use `Boxes`.
// What the first tile takes of an operand that earlier launches stored is loaded while the launch before ends.
template <class Ring>
__device__ __forceinline__ void load(Ring ring, const Maps& maps, const Work& work, List list,
                                     uint32_t rank) {
  Awaited awaited;
  list.task = same_in_all_lanes(list.task);
  const auto load_a = [&](const Ring& ring, const Extent& extent, int k, bool is_down) {
    const Tile& tile = list.task.tile;
    const TensorMap* map = &maps.of[list.task.a];
#pragma unroll 1
    for (int i = 0; i < extent.a_blocks; ++i) {
      const int across = tile.row + i * extent.a_step;
      const int column = is_down ? across : k * kBlock;
      const int row = is_down ? k * kBlock : across;
      load_box(ring.block(i), map, ring.full(), column, row, tile.matrix);
    }
  };
  const auto load_b = [&](const Ring& ring, const Extent& extent, int k, bool is_down) {
    const Tile& tile = list.task.tile;
    const TensorMap* map = &maps.of[list.task.b];
#pragma unroll 1
    for (int c = extent.b_first; c < extent.b_blocks; c += extent.b_step) {
      const int across = tile.column + c * kBlock;
      const int column = is_down ? across : k * kBlock;
      const int row = is_down ? k * kBlock : across;
      const uint32_t to = ring.block(extent.a_blocks + c);
      if (tile.shared) {
        load_box_to_both(to, map, ring.full(), column, row, tile.matrix);
      } else {
        load_box(to, map, ring.full(), column, row, tile.matrix);
      }
    }
  };
  int k = 0;
  if (list.task.early == Early::kNeither) {
    take_turn();
  } else {
    const Extent extent(list.task.tile, rank);
    const bool a_is_early = list.task.early == Early::kA;
    const int first = min(list.task.k_blocks, int{Ring::kStages});
    // No stage of a new ring need be waited for. The first one of two calls tells what both will bring.
    const auto load_first = [&](Ring at, bool of_a, auto expects) {
#pragma unroll 1
      for (int block = 0; block < first; ++block) {
        if (elect()) {
          if (expects.value) barrier_expect(at.full(), extent.bytes());
          if (of_a) {
            load_a(at, extent, block, block >= list.task.a_down());
          } else {
            load_b(at, extent, block, block >= list.task.b_down());
          }
        }
        at.advance();
      }
      return at;
    };
    load_first(ring, a_is_early, std::true_type{});
    take_turn();
    ring = load_first(ring, !a_is_early, std::false_type{});
    k = first;
  }
  while (true) {
    awaited.wait(work, list.task.tile);
    const Extent extent(list.task.tile, rank);
    const auto load_until = [&](int end, auto a_is_down, auto b_is_down) {
      for (; k < end; ++k) {
        barrier_wait(ring.empty(), ring.parity ^ 1);
        if (elect()) {
          barrier_expect(ring.full(), extent.bytes());
          load_b(ring, extent, k, b_is_down.value);  // first, since the peer waits for it too
          load_a(ring, extent, k, a_is_down.value);
        }
        ring.advance();
      }
    };
    in_order_of_k<true>(list.task, load_until);
    list.load_next();  // the ring is full, so there is time
    if (!list.advance()) return;
    list.task = same_in_all_lanes(list.task);
    k = 0;
  }
}

constexpr int kMostBoxes = 4;  // of one operand of a tile

// What a block loads of A, or of B, for each 64 of K of a tile. `across` is where the first box is along
// the dimension that is not K, `at` where it goes in a stage, in bytes; `step` and `apart` lead to the
// next one.
struct Boxes {
  const TensorMap* map;
  int count, across, step, matrix;
  uint32_t at, apart;
  int down;  // the block of K from which on it runs down the operand's columns
  bool to_both;
  bool is_early;
  uint32_t bytes;  // of both operands, which one of the loaders tells the barrier

  __device__ __forceinline__ Boxes(const Maps& maps, const Task& task, uint32_t rank, bool of_a) {
    const Tile& tile = task.tile;
    const Extent extent(tile, rank);
    matrix = tile.matrix;
    if (of_a) {
      map = &maps.of[task.a];
      count = extent.a_blocks;
      step = extent.a_step;
      at = 0;
      apart = kBlockBytes;
      across = tile.row;
      down = task.a_down();
      to_both = false;
      is_early = task.early == Early::kA;
      bytes = extent.bytes();
    } else {
      map = &maps.of[task.b];
      count = (extent.b_blocks - extent.b_first + extent.b_step - 1) / extent.b_step;
      step = extent.b_step * kBlock;
      at = (extent.a_blocks + extent.b_first) * kBlockBytes;
      apart = extent.b_step * kBlockBytes;
      across = tile.column + extent.b_first * kBlock;
      down = task.b_down();
      to_both = tile.shared > 0;
      is_early = task.early == Early::kB;
      bytes = 0;
    }
  }
  template <bool kDown, class Ring>
  __device__ __forceinline__ void load(const Ring& ring, int k) const {
    barrier_expect(ring.full(), bytes);
    const uint32_t to = ring.block(0) + at;
#pragma unroll
    for (int i = 0; i < kMostBoxes; ++i) {
      if (i >= count) break;
      const int x = kDown ? across + i * step : k * kBlock;
      const int y = kDown ? k * kBlock : across + i * step;
      if (to_both) {
        load_box_to_both(to + i * apart, map, ring.full(), x, y, matrix);
      } else {
        load_box(to + i * apart, map, ring.full(), x, y, matrix);
      }
    }
  }
};

// Issues the loads of A, or those of B, of all tiles, from one warp. What earlier launches stored is
// loaded while the launch before ends: that one waited for them before it let this one start, so it is
// in the L2, where copies read.
template <class Ring>
__device__ __forceinline__ void load_operand(Ring ring, const Maps& maps, const Work& work,
                                             List list, uint32_t rank, bool of_a) {
  Awaited awaited;
  list.task = same_in_all_lanes(list.task);
  Boxes boxes(maps, list.task, rank, of_a);
  int k = 0;
  const auto load_until = [&](int end, auto waits) {
    const auto load = [&](auto is_down) {
      if (waits.value) barrier_wait(ring.empty(), ring.parity ^ 1);
      if (elect()) boxes.template load<is_down.value>(ring, k);
      ring.advance();
    };
    for (; k < min(end, boxes.down); ++k) load(std::false_type{});
    for (; k < end; ++k) load(std::true_type{});
  };
  if (boxes.is_early) load_until(min(list.task.k_blocks, int{Ring::kStages}), std::false_type{});
  take_turn();
  while (true) {
    awaited.wait(work, list.task.tile);
    load_until(list.task.k_blocks, std::true_type{});
    list.load_next();
    if (!list.advance()) return;
    list.task = same_in_all_lanes(list.task);
    boxes = Boxes(maps, list.task, rank, of_a);
    k = 0;
  }
}

}  // namespace hopper
