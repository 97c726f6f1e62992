// Where the merges keep what: in shared memory behind the rings, and in scratch.
#pragma once

#include "mma_fp8.cuh"
#include "schedule.cuh"
#include "softmax.cuh"

namespace paged_attn::cuda {

// A unit that this block shares with others.
struct CutUnit {
  Segment segment;
  int blocks[2];  // the first and the last
  int chunks;     // batch-invariant: of the unit that this block has
  int all_chunks;
};

// As one warp sees it.
template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles>
class MergePlaces {
 public:
  static constexpr int kFragments = TileMath<T, C, kHeadDim>::kFragments;
  static constexpr int kWarps = kRings * kRowTiles;
  static constexpr int kSlotBytes = slot_bytes(kHeadDim, sizeof(T), sizeof(C), kRowTiles);

  // Behind the rings in shared memory.
  struct Shared {
    RowStats states[kWarps][4];
    RowStats unit_stats[kWarps][4];  // of the chunks in the unit's sums; each warp has them
    int held_slots[kRings];
    // Of each head lane: the unit that the share's begin cuts and the one that its end cuts.
    CutUnit cuts[kRings][2];
    bool is_last[2][kRings];
    // Of each warp. Bit 0: the share begins within a unit; bit 1: it ends within one.
    uint8_t cut_ends[kWarps];
  };

  __device__ __forceinline__ MergePlaces(const DeviceParams& params, uint8_t* rings, int ring_bytes,
                                         Shared& shared, int head_lane, int token_lane,
                                         int row_tile, int lane)
      : params_(params),
        rings_(rings),
        ring_bytes_(ring_bytes),
        shared_(shared),
        head_lane_(head_lane),
        token_lane_(token_lane),
        row_tile_(row_tile),
        lane_(lane) {}

  // Parts of one block lie so many apart.
  __device__ __forceinline__ int groups() const { return params_.head_lanes * kRowTiles; }

 protected:
  // Where in scratch a block keeps its part of a cut unit: of one that begins there, or before.
  __device__ __forceinline__ int part_of(int block, bool begins_here) const {
    return (block * 2 + begins_here) * groups() + group();
  }

  // The same for a chunk of the unit that begins in a block.
  __device__ __forceinline__ int chunk_part_of(int block, int chunk) const {
    return (2 * static_cast<int>(gridDim.x) + block * params_.max_chunks + chunk) * groups() +
           group();
  }

  // Merging is shared out by fragments: this warp's first and how many.
  __device__ __forceinline__ int fragments_a_warp() const {
    return (kFragments + params_.token_lanes - 1) >> params_.token_lanes_shift;
  }
  __device__ __forceinline__ int first_fragment() const { return token_lane_ * fragments_a_warp(); }
  __device__ __forceinline__ int own_fragments() const {
    return max(0, min(fragments_a_warp(), kFragments - first_fragment()));
  }

  __device__ __forceinline__ int group() const { return head_lane_ * kRowTiles + row_tile_; }
  __device__ __forceinline__ int ring_index(int token_lane) const {
    return (head_lane_ << params_.token_lanes_shift) + token_lane;
  }
  __device__ __forceinline__ int warp_index(int token_lane) const {
    return ring_index(token_lane) * kRowTiles + row_tile_;
  }
  __device__ __forceinline__ uint8_t& own_cut_ends() const {
    return shared_.cut_ends[warp_index(token_lane_)];
  }
  // Where token lanes' states lie: in the slots that their rings hold, or behind all that else is
  // in shared memory.
  __device__ __forceinline__ float4* state_in(int ring, int slot) const {
    return reinterpret_cast<float4*>(rings_ + ring * ring_bytes_ + slot * kSlotBytes) +
           row_tile_ * kFragments * 32;
  }
  __device__ __forceinline__ float4* held_state(int token_lane) const {
    const int ring = ring_index(token_lane);
    return state_in(ring, shared_.held_slots[ring]);
  }
  __device__ __forceinline__ float4* leaf_buffer(int token_lane) const {
    return reinterpret_cast<float4*>(rings_ + kRings * ring_bytes_ +
                                     merge_bytes(kRings, kRowTiles)) +
           warp_index(token_lane) * kFragments * 32;
  }
  // Of the head lane's unit; without room there in a part that is not used otherwise.
  __device__ __forceinline__ float4* unit_sums() const {
    if (!params_.has_unit_buffers) {
      return params_.partial_outputs + part_of(blockIdx.x, true) * kFragments * 32;
    }
    return leaf_buffer(0) - warp_index(0) * kFragments * 32 +
           ((params_.has_leaf_buffers ? kWarps : 0) + group()) * kFragments * 32;
  }

  const DeviceParams& params_;
  uint8_t* rings_;
  int ring_bytes_;
  Shared& shared_;
  int head_lane_, token_lane_, row_tile_, lane_;
};

}  // namespace paged_attn::cuda
