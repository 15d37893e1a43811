// A block's shared memory: the stages that loads fill and sums take from, then what is on its way out, then
// the stages' barriers.
#pragma once

#include "hopper.cuh"

namespace hopper {

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

}  // namespace hopper
