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

#include <string.h>

#include "hopper.cuh"
#include "wgmma.cuh"

namespace {

using namespace hopper;

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
  for (uint32_t& word : words) word = hopper::same_in_all_lanes(word);
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

constexpr int kBlock = 64;  // side of what a tensor map's box holds
constexpr uint32_t kBlockBytes = kBlock * kBlock * 2;
constexpr int kWarpgroups = 2;  // that compute
constexpr int kWarpgroupThreads = 128;
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
constexpr uint32_t kStagingBytes = 2 * kBlockBytes;  // a warpgroup: two blocks on their way out
constexpr uint32_t kAlignment = 1024;  // of a block in the 128-byte swizzle

// The ring of stages, as each of its users walks it, and what follows it in shared memory. A stage has
// `kBlocks` blocks: those of A that a tile needs, then those of B. The smaller the tiles, the more
// stages fit, and the more are needed: a stage lasts less long.
template <int kBlocks>
struct Ring {
  static constexpr uint32_t kStageBytes = kBlocks * kBlockBytes;
  static constexpr uint32_t kStages = 192 * 1024 / kStageBytes;
  static constexpr uint32_t kStagingAt = kStages * kStageBytes;
  static constexpr uint32_t kBarriersAt = kStagingAt + kWarpgroups * kStagingBytes;
  static constexpr uint32_t kSharedBytes = kBarriersAt + kStages * 16 + kAlignment;

  uint32_t shared;
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t block(uint32_t index) const {
    return shared + stage * kStageBytes + index * kBlockBytes;
  }
  __device__ uint32_t full() const { return shared + kBarriersAt + stage * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ void advance() {
    stage += 1;
    if (stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

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
      hopper::same_in_all_lanes((shared_address(raw) + kAlignment - 1) / kAlignment * kAlignment)};
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
