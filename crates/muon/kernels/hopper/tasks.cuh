// What blocks work off, as the host lays it out (src/cuda/hopper/steps.rs): tasks, and the products that they are of.
#pragma once

#include <stddef.h>
#include <string.h>

#include <type_traits>

#include "hopper.cuh"

namespace hopper {

// `kApplyTransposed` is for matrices with more rows than columns, which are iterated as transposes.
enum class Op : uint8_t { kSymmetric, kApply, kApplyTransposed };

// Where a device has about as many blocks as a product has tiles, some are of another shape than 128
// rows of the same columns, so that each block gets as much. All but `kHalf` are of products with
// A = B, and A is all that they load:
//   kHalf:   64 rows and 64 columns, which the first warpgroup computes
//   kTwins:  two of 64 × 64 on the diagonal, one after the other, one for each warpgroup
//   kStrips: two of 64 × 128 that end with the diagonal's block, 128 rows apart, one for each warpgroup
//   kQuads:  four of 64 × 64 on the diagonal, 128 rows apart, two for each warpgroup
enum class Shape : uint8_t { kWhole, kHalf, kTwins, kStrips, kQuads };

// The part of D that a block computes: of a `kWhole` one 128 rows from `row`, 32 · `halves` columns from
// `column`; multiples of 64, but for tiles of 160 columns, which are only of symmetric products, and
// left of all blocks on the diagonal. What lies outside of D is not stored. `shared` is how many blocks
// of 64 columns of B the pair loads together, enough for both, or 0 where each block loads its own; the
// pair is of one shape then, so that B lies at the same place in both.
struct alignas(16) Tile {
  int row;
  int column;
  int matrix;
  uint16_t product;
  uint8_t halves : 4;
  Shape shape : 4;
  uint8_t shared;
};

// `alpha` is not zero.
struct Scalars {
  float alpha;
  float from_a;
  float from_b;
  float diagonal;
};

constexpr int kMostWaits = 3;

// A product of all matrices. `waits` tells which products of the same matrix must be stored before, or -1.
struct alignas(16) Product {
  Scalars scalars;
  int waits[kMostWaits];
};

// An operand of a tile that the launch before does not store.
enum class Early : uint8_t { kNeither, kA, kB };

// A tile, with what it takes of its product to load and to store it. `a`, `b` and `d` are indices of
// maps; D is neither A nor B. `k_blocks` is the number of columns of A in blocks of 64, rounded up,
// `place` that of the matrix in D's stack. Before its block `a_down` K runs along the rows of A, from there
// on down its columns; so for B with `b_down`, which is never later. `early` is of a block's first tile.
struct alignas(16) Task {
  Tile tile;
  Op op : 4;
  Early early : 4;
  uint8_t a, b, d;
  int k_blocks;
  int place;
  uint32_t down;  // a_down and, in the upper half, b_down: one register, where two would be spilled

  __device__ __forceinline__ int a_down() const { return down & 0xFFFF; }
  __device__ __forceinline__ int b_down() const { return down >> 16; }
};

// As the host lays them out.
static_assert(sizeof(Tile) == 16 && sizeof(Product) == 32 && sizeof(Task) == 32 &&
              offsetof(Task, down) == 28);

// X, Y, R, Z, Q, T, S, and the results of wide and of tall matrices.
constexpr int kMaps = 9;

struct Maps {
  TensorMap of[kMaps];
};

// What the host made ready, ahead of any launch, but for what is in `left`.
struct Work {
  const Product* products;
  int product_count;
  int near;           // so many blocks right of the diagonal's are stored (src/hopper/triangle.rs)
  const Task* tasks;  // in pairs: the first ones of all clusters, then those that follow them
  const int* rest;    // the second pair of each cluster, and the number of all
  uint32_t* left;     // product_count for each matrix, or none
};

// The first task of a block, and which pairs follow, asked for but not looked at before there is a `List`: where a
// launch follows another, its blocks wait for these loads, and make their barriers meanwhile. No load needs what
// another one brings.
struct Asked {
  uint32_t task[sizeof(Task) / 4];
  uint32_t pairs[2];  // that follow: the first, and the one after the last

  __device__ __forceinline__ Asked(const Work& work, uint32_t cluster, uint32_t rank) {
    load_words(task, work.tasks + 2 * cluster + rank);
    load_word(pairs[0], work.rest + cluster);
    load_word(pairs[1], work.rest + cluster + 1);
  }
};

// A task, known to the compiler to be the same in all lanes, so that what loops over it is as well.
__device__ __forceinline__ Task same_in_all_lanes(const Task& task) {
  uint32_t words[sizeof(Task) / 4];
  memcpy(words, &task, sizeof(Task));
#pragma unroll
  for (uint32_t& word : words) word = same_in_all_lanes(word);
  Task same;
  memcpy(&same, words, sizeof(Task));
  return same;
}

// A block's tasks, one after the other.
struct List {
  const Task* tasks;
  uint32_t pair, end;  // the next pair, and the one after the last
  Task task, next;

  __device__ __forceinline__ List(const Work& work, uint32_t rank, Asked& asked)
      : tasks(work.tasks + rank) {
    pin_words(asked.task);
    pin_words(asked.pairs);
    memcpy(&task, asked.task, sizeof(Task));
    pair = asked.pairs[0];
    end = asked.pairs[1];
  }
  __device__ __forceinline__ void load_next() {
    if (pair < end) next = tasks[2 * pair];
  }
  __device__ __forceinline__ bool advance() {
    if (pair == end) return false;
    task = next;
    pair += 1;
    return true;
  }
};

// Calls `until(end, whether K runs down A, whether down B)` for the parts of the sum over K, one after the
// other. Down X of QX it always runs, so the first part is of symmetric products alone.
template <bool kMayBeSymmetric, class Until>
__device__ __forceinline__ void in_order_of_k(const Task& task, const Until& until) {
  constexpr std::false_type along;
  constexpr std::true_type down;
  if constexpr (kMayBeSymmetric) until(min(task.k_blocks, task.b_down()), along, along);
  until(min(task.k_blocks, task.a_down()), along, down);
  until(task.k_blocks, down, down);
}

}  // namespace hopper
