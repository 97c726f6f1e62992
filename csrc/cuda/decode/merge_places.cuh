// Where the merges keep what: in shared memory behind the rings, and in scratch. A state is the
// sums of a warp's rows: RowSums of each, and its outputs, row by row. They are added up by rows,
// of which each lane has some neighbouring outputs.
#pragma once

#include "mma_fp8.cuh"
#include "rows.cuh"
#include "softmax.cuh"

namespace paged_attn::cuda {

// A unit that this block shares with others.
struct alignas(16) CutUnit {
  RowTile rows;  // of row tile 0
  int first_block;
  int own_parts;  // this block has so many: one or, batch-invariant, its chunks
  int all_parts;
};

// Where the parts of a unit are in scratch.
struct Parts {
  int count;
  int first;
  int others;
  int step;

  __device__ __forceinline__ int operator[](int i) const {
    return i == 0 ? first : others + i * step;
  }
};

// A unit to merge, and how a warp does.
struct Merge {
  RowTile rows;
  Parts parts;
  RowSums* sums;  // half of the warp's ring
  float* outputs;
  int own_rows;
  int rows_at_once, most;  // so many of them and of the parts at a time
};

// One lane's outputs of a row.
template <int kWidth>
struct alignas(kWidth < 4 ? 4 * kWidth : 16) Outputs {
  float values[kWidth];

  __device__ __forceinline__ static Outputs load(const float* from) {
    return *reinterpret_cast<const Outputs*>(from);
  }
  __device__ __forceinline__ void store(float* to) const {
    *reinterpret_cast<Outputs*>(to) = *this;
  }

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (float& value : values) value *= factor;
  }
  __device__ __forceinline__ void add(const Outputs& more, float weight) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = fmaf(weight, more.values[i], values[i]);
  }
  __device__ __forceinline__ void take_in(const Outputs& more, const Fold& fold) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = fold(values[i], more.values[i]);
  }
};

// As one warp sees it.
template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles>
class MergePlaces {
 public:
  static constexpr int kWarps = kRings * kRowTiles;
  static constexpr int kSlotBytes = slot_bytes(kHeadDim, sizeof(T), sizeof(C), kRowTiles);
  static constexpr int kWidth = kHeadDim / 32;
  static constexpr int kStateFloats = kTileRows * kHeadDim;
  using RowOutputs = Outputs<kWidth>;

  // Behind the rings in shared memory.
  struct Shared {
    RowSums states[kWarps][kTileRows];
    RowSums unit_sums[kWarps][kTileRows];  // of the unit's chunks so far; each warp has them
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

  // Among the units that blocks share: of the one that begins in a block and ends in another.
  __device__ __forceinline__ int unit_index(int first_block) const {
    return first_block * params_.head_lanes + head_lane_;
  }

  // Merging is shared out by rows: every token_lanes-th is this warp's.
  __device__ __forceinline__ int own_rows(const RowTile& rows) const {
    const int others = params_.token_lanes - 1 - token_lane_;
    return (rows.count() + others) >> params_.token_lanes_shift;
  }
  __device__ __forceinline__ int row_of(int own) const {
    return token_lane_ + (own << params_.token_lanes_shift);
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

  // Where the outputs of token lanes' states lie: in the slots that their rings hold, or behind all
  // that else is in shared memory. Of rows 2 i and 2 i + 1 groups of 8 are permuted, so that the
  // lanes that write a fragment write to different banks (fp8: two at most to one).
  __device__ __forceinline__ float* state_in(int ring, int slot) const {
    return reinterpret_cast<float*>(rings_ + ring * ring_bytes_ + slot * kSlotBytes) +
           row_tile_ * kStateFloats;
  }
  __device__ __forceinline__ float* state_buffer(int token_lane) const {
    return reinterpret_cast<float*>(rings_ + kRings * ring_bytes_ +
                                    merge_bytes(kRings, kRowTiles)) +
           warp_index(token_lane) * kStateFloats;
  }
  __device__ __forceinline__ const float* kept_outputs(int token_lane) const {
    if (params_.has_state_buffers) return state_buffer(token_lane);
    const int ring = ring_index(token_lane);
    return state_in(ring, shared_.held_slots[ring]);
  }
  __device__ __forceinline__ static int permuted(int row, int place) {
    return place ^ ((row >> 1 & 3) << 3);
  }

  // The batch-invariant sum of the head lane's unit; without room there in a part that is not used
  // otherwise.
  __device__ __forceinline__ float* unit_outputs() const {
    if (!params_.has_unit_buffers) {
      return params_.partial_outputs + part_of(blockIdx.x, true) * kStateFloats;
    }
    return state_buffer(0) - warp_index(0) * kStateFloats +
           ((params_.has_state_buffers ? kWarps : 0) + group()) * kStateFloats;
  }

  // This warp's part of its ring.
  __device__ __forceinline__ uint8_t* ring_part() const {
    return rings_ + ring_index(token_lane_) * ring_bytes_ +
           row_tile_ * ring_part_bytes(ring_bytes_, kRowTiles);
  }

  const DeviceParams& params_;
  uint8_t* rings_;
  int ring_bytes_;
  Shared& shared_;
  int head_lane_, token_lane_, row_tile_, lane_;
};

}  // namespace paged_attn::cuda
