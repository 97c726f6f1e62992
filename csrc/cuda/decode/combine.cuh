// From row states to results: the token lanes of a block are merged through shared memory, and
// units that several blocks share through scratch, by whichever block comes last. Both add up in
// a fixed order, so that the result does not depend on who comes when.
#pragma once

#include "rows.cuh"
#include "softmax.cuh"
#include "tile.cuh"

namespace paged_attn::cuda {

// A unit that this block shares with others.
struct CutUnit {
  Segment segment;
  int blocks[2];  // the first and the last
};

template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles>
class Combiner {
 public:
  static constexpr int kWhole = -1;
  using Math = TileMath<T, C, kHeadDim>;
  using State = RowState<Math::kFragments>;
  static constexpr int kFragments = Math::kFragments;
  static constexpr int kWarps = kRings * kRowTiles;
  static constexpr int kSlotBytes = slot_bytes(kHeadDim, sizeof(T), sizeof(C), kRowTiles);

  // Behind the rings in shared memory.
  struct Shared {
    RowStats states[kWarps][4];
    int held_slots[kRings];
    // Of each head lane: the unit that the share's begin cuts and the one that its end cuts.
    CutUnit cuts[kRings][2];
    bool is_last[2][kRings];
  };

  __device__ __forceinline__ Combiner(const DeviceParams& params, uint8_t* rings, int ring_bytes,
                                      Shared& shared, uint64_t* group_barrier, int head_lane,
                                      int token_lane, int row_tile, int lane)
      : params_(params),
        rings_(rings),
        ring_bytes_(ring_bytes),
        shared_(shared),
        group_barrier_(group_barrier),
        head_lane_(head_lane),
        token_lane_(token_lane),
        row_tile_(row_tile),
        lane_(lane) {}

  // Takes in the states of a segment, one of each warp of the head lane; the first `lanes_used`
  // token lanes have one. `held_slot`: a slot of this warp's ring that it may write to. `part`:
  // where in scratch the result goes, or kWhole: to the rows themselves. Ends with a barrier of the
  // head lane if it took more than one token lane.
  __device__ __forceinline__ void finish(const State& state, const RowTile& rows, int lanes_used,
                                         int held_slot, int part) {
    if (lanes_used <= 1) {
      if (token_lane_ != 0) return;
      const Destination to = destination(rows, state.stats, part);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) emit(to, i, state.out[i]);
      emit_stats(rows, state.stats, part);
      return;
    }
    if (token_lane_ < lanes_used) {
      float4* out = slot_of(ring_index(token_lane_), held_slot) + row_tile_ * kFragments * 32;
#pragma unroll
      for (int i = 0; i < kFragments; ++i) out[i * 32 + lane_] = state.out[i];
      if (lane_ < 4) shared_.states[warp_index(token_lane_)][lane_] = state.stats;
      if (lane_ == 0 && row_tile_ == 0) {
        shared_.held_slots[ring_index(token_lane_)] = held_slot;
      }
    }
    group_barrier_.wait();
    // Lane l looks after token lane l / 4: its factor, and where its state lies.
    const int mine = lane_ >> 2;
    RowStats of_lane[1];
    float2 factor[1];
    of_lane[0].clear();
    int offset = 0;
    if (mine < lanes_used) {
      of_lane[0] = shared_.states[warp_index(mine)][lane_ & 3];
      offset = ring_index(mine) * ring_bytes_ + shared_.held_slots[ring_index(mine)] * kSlotBytes +
               row_tile_ * kFragments * 512;
    }
    RowStats stats;
    stats.clear();
    stats.max = max_over_tokens(of_lane[0].max);
    stats.add(of_lane, factor, params_.scale_log2);
    const Destination to = destination(rows, stats, part);
#pragma unroll 1
    for (int i = first_fragment(); i < first_fragment() + own_fragments(); ++i) {
      float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int t = 0; t < kRings; ++t) {
        const float2 f = shuffle(factor[0], t * 4 + (lane_ & 3));
        const uint8_t* out = rings_ + __shfl_sync(~0u, offset, t * 4);
        if (t < lanes_used) {
          add_scaled(total, reinterpret_cast<const float4*>(out)[i * 32 + lane_], f);
        }
      }
      emit(to, i, total);
    }
    if (token_lane_ == 0) emit_stats(rows, stats, part);
    group_barrier_.wait();
  }

  // Notes that `segment` is a part of a unit; returns where in scratch it goes.
  __device__ __forceinline__ int begin_part(const Share& share, const Segment& segment) {
    const bool begins_here = segment.begins_unit();
    cut_ends_ |= 1 << begins_here;
    if (token_lane_ == 0 && row_tile_ == 0 && lane_ < 2) {
      CutUnit& cut = shared_.cuts[head_lane_][begins_here];
      if (lane_ == 0) cut.segment = segment;
      cut.blocks[lane_] = share.block_of(lane_ == 0 ? segment.unit_begin : segment.unit_last);
    }
    return part_of(blockIdx.x, begins_here);
  }

  // Once, when all segments are done: announces this block's parts, so that whoever announces a
  // unit's last part merges it. Not earlier: a release while loads are in flight would wait for
  // them.
  __device__ __forceinline__ void announce_parts() {
    if (cut_ends_ == 0) return;
    group_barrier_.wait();
    if (token_lane_ == 0 && row_tile_ == 0 && lane_ < 2) {
      bool last = false;
      if (cut_ends_ >> lane_ & 1) {
        const CutUnit& cut = shared_.cuts[head_lane_][lane_];
        int32_t* counter = params_.arrivals + cut.blocks[0] * params_.head_lanes + head_lane_;
        last = arrive(counter) == cut.blocks[1] - cut.blocks[0];
      }
      shared_.is_last[lane_][head_lane_] = last;
    }
    group_barrier_.wait();
  }

  // The unit cut by this end of the share if it is this block that merges it, else null.
  __device__ __forceinline__ const CutUnit* unit_to_merge(int end) const {
    const bool mine = (cut_ends_ >> end & 1) != 0 && shared_.is_last[end][head_lane_];
    return mine ? &shared_.cuts[head_lane_][end] : nullptr;
  }

  // Adds up the blocks' parts of a unit into its rows. Each warp does its own fragments.
  __device__ __forceinline__ void merge_parts(const CutUnit& cut, const RowTile& rows) const {
    if (fragments_a_warp() == 1) {
      merge_parts_of<1>(cut, rows);
    } else if (kFragments > 4 && fragments_a_warp() > 4) {
      merge_parts_of<8>(cut, rows);
    } else {
      merge_parts_of<4>(cut, rows);
    }
  }

 private:
  // kEach fragments at a time, and as many parts as keep 16 loads under way.
  template <int kEach>
  __device__ __forceinline__ void merge_parts_of(const CutUnit& cut, const RowTile& rows) const {
    constexpr int kRound = 16, kPartsALoad = kRound / kEach;
    const bool has_rows = rows.exists(2 * (lane_ & 3));
#pragma unroll 1
    for (int done = 0; done < own_fragments(); done += kEach) {
      const int left = has_rows ? own_fragments() - done : 0;
      RowState<kEach> total;
      total.clear();
#pragma unroll 1
      for (int first = cut.blocks[0]; first <= cut.blocks[1]; first += kRound) {
        const int count = min(kRound, cut.blocks[1] - first + 1);
        // Block first's part as if its unit began before it, and how far it is to the next block's.
        // Only in the unit's first block does it begin, and that is part 0 of the first round.
        const int place = part_of(first, false), step = part_of(1, false) - part_of(0, false);
        const int begins_here = first == cut.blocks[0] ? part_of(0, true) - part_of(0, false) : 0;
        RowStats each[kRound / 8];
        float2 factors[kRound / 8];
#pragma unroll
        for (int h = 0; h < kRound / 8; ++h) {
          const int i = h * 8 + (lane_ >> 2);
          each[h].clear();
          if (i < count) {
            const int part = place + i * step + (i == 0 ? begins_here : 0);
            const float2* stats = params_.partial_states + (part * 4 + (lane_ & 3)) * 3;
            each[h] = {__ldcg(stats), __ldcg(stats + 1), __ldcg(stats + 2)};
          }
        }
#pragma unroll 1
        for (int begin = 0; begin < count; begin += kPartsALoad) {
          float4 loaded[kPartsALoad][kEach];
#pragma unroll
          for (int i = 0; i < kPartsALoad; ++i) {
            const int part = place + (begin + i) * step + (i == 0 && begin == 0 ? begins_here : 0);
            const float4* from = params_.partial_outputs +
                                 (part * kFragments + first_fragment() + done) * 32 + lane_;
#pragma unroll
            for (int k = 0; k < kEach; ++k) {
              loaded[i][k] = make_float4(0, 0, 0, 0);
              if (begin + i < count && k < left) loaded[i][k] = __ldcg(from + k * 32);
            }
          }
          if (begin == 0) {
            const float2 max = max_over_tokens(larger(each[0].max, each[1].max));
            total.raise_max(larger(total.stats.max, max), params_.scale_log2);
            total.stats.add(each, factors, params_.scale_log2);
          }
#pragma unroll
          for (int i = 0; i < kPartsALoad; ++i) {
            const int source = begin + i;
            const float2 f =
                shuffle(source < 8 ? factors[0] : factors[1], (source & 7) * 4 + (lane_ & 3));
#pragma unroll
            for (int k = 0; k < kEach; ++k) add_scaled(total.out[k], loaded[i][k], f);
          }
        }
      }
      const Destination to = destination(rows, total.stats, kWhole);
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (done + k < own_fragments()) emit(to, first_fragment() + done + k, total.out[k]);
      }
      if (token_lane_ == 0 && done == 0) emit_stats(rows, total.stats, kWhole);
    }
  }

  // Where in scratch a block keeps its part of a cut unit: of one that begins there, or before.
  __device__ __forceinline__ int part_of(int block, bool begins_here) const {
    return (block * 2 + begins_here) * groups() + group();
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
  __device__ __forceinline__ int groups() const { return params_.head_lanes * kRowTiles; }
  __device__ __forceinline__ int ring_index(int token_lane) const {
    return (head_lane_ << params_.token_lanes_shift) + token_lane;
  }
  __device__ __forceinline__ int warp_index(int token_lane) const {
    return ring_index(token_lane) * kRowTiles + row_tile_;
  }
  __device__ __forceinline__ float4* slot_of(int ring, int slot) const {
    return reinterpret_cast<float4*>(rings_ + ring * ring_bytes_ + slot * kSlotBytes);
  }

  // Where fragments go: to scratch as they are, or normalised to this lane's row of out.
  struct Destination {
    bool is_part;
    float4* scratch;  // null: none of this lane's rows exists
    T* out_row;       // null: there is none
    float2 factor;
  };

  __device__ __forceinline__ Destination destination(const RowTile& rows, const RowStats& stats,
                                                     int part) const {
    Destination to{part != kWhole, nullptr, nullptr, make_float2(0, 0)};
    if (to.is_part) {
      if (rows.exists(2 * (lane_ & 3))) {
        to.scratch = params_.partial_outputs + part * kFragments * 32 + lane_;
      }
      return to;
    }
    if (rows.exists(lane_ >> 2)) {
      to.out_row = static_cast<T*>(params_.decode.out) +
                   rows.offset(params_, params_.decode.out_strides, lane_ >> 2);
    }
    to.factor = make_float2(row_result(rows, stats, 0).factor, row_result(rows, stats, 1).factor);
    return to;
  }

  // What makes a result of a row's sums.
  struct RowResult {
    float factor;  // of its outputs
    float lse;
  };

  // Of row 2 * (lane % 4) + r.
  __device__ __forceinline__ RowResult row_result(const RowTile& rows, const RowStats& stats,
                                                  int r) const {
    const DecodeParams& p = params_.decode;
    const float max = r == 0 ? stats.max.x : stats.max.y;
    // Exponents of 2 from here on. The weights of a row that saw no key are all 0.
    float reference = max == -INFINITY ? 0.f : max * params_.scale_log2;
    float keys_weight = 1, sink_weight = 0;
    if (p.sinks != nullptr) {
      constexpr float kLog2E = 1.44269504088896340f;
      const int row = 2 * (lane_ & 3) + r;
      const float sink =
          rows.exists(row) ? sink_of<T>(p, rows.head(params_, row)) * kLog2E : -INFINITY;
      if (sink > -INFINITY) {
        const float top = max == -INFINITY ? sink : fmaxf(reference, sink);
        keys_weight = power_of_2(reference - top);
        sink_weight = power_of_2(sink - top);
        reference = top;
      }
    }
    constexpr float kLn2 = 0.69314718055994531f;
    const float sum = fmaf(keys_weight, r == 0 ? stats.sum.x : stats.sum.y, sink_weight);
    const float exact_sum =
        fmaf(keys_weight, r == 0 ? stats.exact_sum.x : stats.exact_sum.y, sink_weight);
    RowResult result;
    result.factor = sum == 0 ? 0.f : __fdividef(keys_weight, sum);
    if (p.v_scale.data != nullptr && result.factor != 0) {
      const int64_t last = p.num_kv_heads - 1;  // a spare head lane asks for more
      result.factor *=
          __ldg(p.v_scale.data + min(static_cast<int64_t>(rows.kv_head), last) * p.v_scale.stride);
    }
    result.lse = (reference + log2f(exact_sum)) * kLn2;
    return result;
  }

  __device__ __forceinline__ void emit(const Destination& to, int i, float4 o) const {
    if (to.is_part) {
      if (to.scratch != nullptr) __stcg(to.scratch + i * 32, o);
    } else {
      scale_rows(o, to.factor);
      Math::store(to.out_row, i, o, static_cast<int>(params_.decode.head_dim),
                  params_.out_is_aligned, lane_);
    }
  }

  __device__ __forceinline__ void emit_stats(const RowTile& rows, const RowStats& stats,
                                             int part) const {
    if (lane_ >= 4) return;
    if (part != kWhole) {
      float2* to = params_.partial_states + (part * 4 + lane_) * 3;
      __stcg(to, stats.max);
      __stcg(to + 1, stats.sum);
      __stcg(to + 2, stats.exact_sum);
      return;
    }
    if (params_.decode.lse == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * lane_ + r;
      if (rows.exists(row)) {
        params_.decode.lse[rows.offset(params_, params_.decode.lse_strides, row)] =
            row_result(rows, stats, r).lse;
      }
    }
  }

  const DeviceParams& params_;
  uint8_t* rings_;
  int ring_bytes_;
  Shared& shared_;
  GroupBarrier group_barrier_;
  int head_lane_, token_lane_, row_tile_, lane_;
  int cut_ends_ = 0;  // bit 0: the share begins within a unit; bit 1: it ends within one
};

}  // namespace paged_attn::cuda
