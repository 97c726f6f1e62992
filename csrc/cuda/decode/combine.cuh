// From row states to results: the token lanes of a block are merged through shared memory, and
// units that several blocks share through scratch, by whichever block comes last. Both add up in
// a fixed order, so that the result does not depend on who comes when.
#pragma once

#include "merge_places.cuh"
#include "results.cuh"
#include "tile.cuh"

namespace paged_attn::cuda {

// The same pointer, which the compiler then keeps in registers. Otherwise it loads the pointer's
// base from the params again behind each condition that a load through it has, one after the other,
// before the first of the loads.
template <typename T>
__device__ __forceinline__ T* in_registers(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, bool kPlain>
class Combiner : private MergePlaces<T, C, kHeadDim, kRings, kRowTiles> {
  using Places = MergePlaces<T, C, kHeadDim, kRings, kRowTiles>;

 public:
  using Math = TileMath<T, C, kHeadDim>;
  using State = RowState<Math::kFragments>;
  static constexpr int kFragments = Math::kFragments;
  using Places::groups;
  using typename Places::Shared;

  __device__ __forceinline__ Combiner(const DeviceParams& params, uint8_t* rings, int ring_bytes,
                                      Shared& shared, uint64_t* group_barrier, int head_lane,
                                      int token_lane, int row_tile, int lane)
      : Places(params, rings, ring_bytes, shared, head_lane, token_lane, row_tile, lane),
        results_(params, lane),
        group_barrier_(group_barrier) {
    if (lane == 0) this->own_cut_ends() = 0;
    __syncwarp();
  }

  // Batch-invariant: takes in the state of a leaf that more of this warp's follow in the chunk.
  __device__ __forceinline__ void keep_leaf(const State& state) {
    keep(state, this->leaf_buffer(token_lane_));
    has_leaves_ = true;
  }

  // Takes in the states of a segment or, batch-invariant, of a chunk of it, one of each warp of the
  // head lane; the first `lanes_used` token lanes have one. `held_slot`: a slot of this warp's ring
  // that it may write to, unless there are leaf buffers. Ends with a barrier of the head lane
  // unless one sum is all there is.
  __device__ __forceinline__ void finish(const State& state, const RowTile& rows, int lanes_used,
                                         int held_slot, const Target& target) {
    // One sum and nothing to add it to.
    if (lanes_used <= 1 && params_.leaves_a_lane_shift == 0 &&
        (kPlain || !(target.joins() || target.stays()))) {
      if (token_lane_ != 0) return;
      const auto to = results_.destination(rows, state.stats, target);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) results_.emit(to, i, state.out[i]);
      results_.emit_stats(rows, state.stats, target);
      return;
    }
    if (token_lane_ < lanes_used) {
      if (lane_ == 0 && row_tile_ == 0) {
        shared_.held_slots[this->ring_index(token_lane_)] = held_slot;
      }
      keep(state, params_.has_leaf_buffers
                      ? this->leaf_buffer(token_lane_)
                      : this->state_in(this->ring_index(token_lane_), held_slot));
      has_leaves_ = false;
    }
    group_barrier_.wait();
    if (params_.max_chunks > 0) {
      finish_chunk(rows, lanes_used, target);
    } else {
      merge_lanes(rows, lanes_used, target);
    }
    group_barrier_.wait();
  }

  // Notes what the share holds of a unit that is not whole in one segment; returns where the
  // segment's result goes, or that of its first chunk.
  __device__ __forceinline__ Target begin_part(const Share& share, const Segment& segment,
                                               bool is_last_chunk) {
    const int first_tile = first_tile_of(params_, segment.sequence);
    const bool begins_here = segment.first == first_tile;
    const bool in_chunks = params_.max_chunks > 0;
    if (in_chunks && segment.is_whole(params_)) {
      return Target::of_chunks(0, true, true, is_last_chunk);
    }
    const int chunk_shift = in_chunks ? chunk_shift_of(params_, segment.sequence) : 0;
    const auto chunks = [&](int begin, int end) {
      return (end - begin + (1 << chunk_shift) - 1) >> chunk_shift;
    };
    if (lane_ == 0) this->own_cut_ends() |= 1 << begins_here;
    __syncwarp();
    if (token_lane_ == 0 && row_tile_ == 0 && lane_ < 2) {
      CutUnit& cut = shared_.cuts[head_lane_][begins_here];
      cut.blocks[lane_] = share.block_of(lane_ == 0 ? segment.unit_begin : segment.unit_last);
      if (lane_ == 0) {
        cut.segment = segment;
        cut.chunks = chunks(segment.first, segment.end);
        cut.all_chunks = chunks(first_tile, end_tile_of(segment.sequence));
      }
    }
    if (!in_chunks) return {this->part_of(blockIdx.x, begins_here), false};
    const int part =
        this->chunk_part_of(share.block_of(segment.unit_begin), chunks(first_tile, segment.first));
    return Target::of_chunks(part, false, begins_here, is_last_chunk);
  }

  // Once, when all segments are done: announces this block's parts, so that whoever announces a
  // unit's last part merges it. Not earlier: a release while loads are in flight would wait for
  // them.
  __device__ __forceinline__ void announce_parts() {
    if (this->own_cut_ends() == 0) return;
    group_barrier_.wait();
    if (token_lane_ == 0 && row_tile_ == 0 && lane_ < 2) {
      bool last = false;
      if (this->own_cut_ends() >> lane_ & 1) {
        const CutUnit& cut = shared_.cuts[head_lane_][lane_];
        const int counter = cut.blocks[0] * params_.head_lanes + head_lane_;
        const bool in_chunks = params_.max_chunks > 0;
        const int count = in_chunks ? cut.chunks : 1;
        const int all = in_chunks ? cut.all_chunks : cut.blocks[1] - cut.blocks[0] + 1;
        if (in_chunks && lane_ == 1) params_.prefix_chunks[counter] = count;
        last = arrive(params_.arrivals + counter, count) + count == all;
      }
      shared_.is_last[lane_][head_lane_] = last;
    }
    group_barrier_.wait();
  }

  // The unit cut by this end of the share if it is this block that merges it, else null.
  __device__ __forceinline__ const CutUnit* unit_to_merge(int end) const {
    const bool mine = (this->own_cut_ends() >> end & 1) != 0 && shared_.is_last[end][head_lane_];
    return mine ? &shared_.cuts[head_lane_][end] : nullptr;
  }

  // Adds up the blocks' parts of a unit into its rows. Each warp does its own fragments.
  __device__ __forceinline__ void merge_parts(const CutUnit& cut, const RowTile& rows) const {
    if (params_.max_chunks > 0) {
      fold_chunks(cut, rows);
    } else if (this->fragments_a_warp() == 1) {
      merge_parts_of<1>(cut, rows);
    } else if (kFragments > 4 && this->fragments_a_warp() > 4) {
      merge_parts_of<8>(cut, rows);
    } else {
      merge_parts_of<4>(cut, rows);
    }
  }

 private:
  // Leaves a warp's state where the others of its head lane find it, added to what they find there
  // already.
  __device__ __forceinline__ void keep(const State& state, float4* out) const {
    RowStats& kept = shared_.states[warp_index(token_lane_)][lane_ & 3];
    RowStats stats = state.stats;
    Fold fold;
    const bool adds = can_keep_leaves(kHeadDim) && has_leaves_;
    if (adds) {
      RowStats before = kept;
      fold = Fold(before, stats, params_.scale_log2);
      stats = before;
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      out[i * 32 + lane_] = adds ? fold(out[i * 32 + lane_], state.out[i]) : state.out[i];
    }
    if (lane_ < 4) kept = stats;
    __syncwarp();
  }

  // Adds up the token lanes' states, by fragments.
  __device__ __forceinline__ void merge_lanes(const RowTile& rows, int lanes_used,
                                              const Target& target) const {
    // Lane l looks after token lane l / 4: its factor, and where its state lies.
    const int mine = lane_ >> 2;
    RowStats of_lane[1];
    float2 factor[1];
    of_lane[0].clear();
    int offset = 0;
    if (mine < lanes_used) {
      of_lane[0] = shared_.states[warp_index(mine)][lane_ & 3];
      offset = static_cast<int>(reinterpret_cast<const uint8_t*>(this->held_state(mine)) - rings_);
    }
    RowStats stats;
    stats.clear();
    stats.max = max_over_tokens(of_lane[0].max);
    stats.add(of_lane, factor, params_.scale_log2);
    const auto to = results_.destination(rows, stats, target);
#pragma unroll 1
    for (int i = this->first_fragment(); i < this->first_fragment() + this->own_fragments(); ++i) {
      float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int t = 0; t < kRings; ++t) {
        const float2 f = shuffle(factor[0], t * 4 + (lane_ & 3));
        const uint8_t* out = rings_ + __shfl_sync(~0u, offset, t * 4);
        if (t < lanes_used) {
          add_scaled(total, reinterpret_cast<const float4*>(out)[i * 32 + lane_], f);
        }
      }
      results_.emit(to, i, total);
    }
    if (token_lane_ == 0) results_.emit_stats(rows, stats, target);
  }

  // Batch-invariant: the leaves of a chunk, and the unit's chunks before it. However many token
  // lanes share the leaves, the sums are those of its first half one after another and those of its
  // second, and then these two.
  __device__ __forceinline__ void finish_chunk(const RowTile& rows, int lanes_used,
                                               const Target& target) {
    const auto fold_lanes = [&](int fragment, int begin, int end, RowStats& stats) {
      const auto state = [&](int t) { return shared_.states[warp_index(t)][lane_ & 3]; };
      const auto output = [&](int t) {
        return (params_.has_leaf_buffers ? this->leaf_buffer(t)
                                         : this->held_state(t))[fragment * 32 + lane_];
      };
      stats = state(begin);
      float4 total = output(begin);
#pragma unroll 1
      for (int t = begin + 1; t < end; ++t) {
        total = Fold(stats, state(t), params_.scale_log2)(total, output(t));
      }
      return total;
    };
    const auto fold_leaves = [&](int fragment, RowStats& stats) {
      const int half = (params_.token_lanes + 1) / 2;
      float4 total = fold_lanes(fragment, 0, min(half, lanes_used), stats);
      if (lanes_used > half) {
        RowStats more;
        const float4 second = fold_lanes(fragment, half, lanes_used, more);
        total = Fold(stats, more, params_.scale_log2)(total, second);
      }
      return total;
    };
    RowStats stats;
    stats.clear();
#pragma unroll 1
    for (int i = this->first_fragment(); i < this->first_fragment() + this->own_fragments(); ++i) {
      float4 total = fold_leaves(i, stats);
      if (target.joins()) {
        const RowStats leaves = stats;
        stats = shared_.unit_stats[warp_index(token_lane_)][lane_ & 3];
        total = Fold(stats, leaves, params_.scale_log2)(this->unit_sums()[i * 32 + lane_], total);
      }
      if (target.stays()) {
        this->unit_sums()[i * 32 + lane_] = total;
      } else {
        results_.emit(results_.destination(rows, stats, target), i, total);
      }
    }
    if (target.stays()) {
      __syncwarp();
      if (lane_ < 4) shared_.unit_stats[warp_index(token_lane_)][lane_] = stats;
      __syncwarp();
    } else if (token_lane_ == 0) {
      results_.emit_stats(rows, stats, target);
    }
  }

  // Batch-invariant: the first block's chunks, which it has folded, then the others one by one.
  __device__ __forceinline__ void fold_chunks(const CutUnit& cut, const RowTile& rows) const {
    constexpr int kRound = 8;  // loads under way of each kind
    const int first_block = cut.blocks[0];
    const int prefix =
        __ldcg(params_.prefix_chunks + first_block * params_.head_lanes + head_lane_);
#pragma unroll 1
    for (int i = this->first_fragment(); i < this->first_fragment() + this->own_fragments(); ++i) {
      RowStats stats = results_.load_stats(this->chunk_part_of(first_block, 0));
      float4 total = results_.load_output(rows, this->chunk_part_of(first_block, 0), i);
#pragma unroll 1
      for (int begin = prefix; begin < cut.all_chunks; begin += kRound) {
        RowStats each[kRound];
        float4 outs[kRound];
#pragma unroll
        for (int k = 0; k < kRound; ++k) {
          const int part = this->chunk_part_of(first_block, min(begin + k, cut.all_chunks - 1));
          each[k] = results_.load_stats(part);
          outs[k] = results_.load_output(rows, part, i);
        }
#pragma unroll
        for (int k = 0; k < kRound; ++k) {
          if (begin + k < cut.all_chunks) {
            total = Fold(stats, each[k], params_.scale_log2)(total, outs[k]);
          }
        }
      }
      results_.emit(results_.destination(rows, stats, Target{}), i, total);
      if (token_lane_ == 0 && i == 0) results_.emit_stats(rows, stats, Target{});
    }
  }

  // kEach fragments at a time, and as many parts as keep 16 loads under way.
  template <int kEach>
  __device__ __forceinline__ void merge_parts_of(const CutUnit& cut, const RowTile& rows) const {
    constexpr int kRound = 16, kPartsALoad = kRound / kEach;
    const bool has_rows = rows.exists(2 * (lane_ & 3));
#pragma unroll 1
    for (int done = 0; done < this->own_fragments(); done += kEach) {
      const int left = has_rows ? this->own_fragments() - done : 0;
      RowState<kEach> total;
      total.clear();
      const float4* const outputs =
          in_registers(params_.partial_outputs + (this->first_fragment() + done) * 32 + lane_);
#pragma unroll 1
      for (int first = cut.blocks[0]; first <= cut.blocks[1]; first += kRound) {
        const int count = min(kRound, cut.blocks[1] - first + 1);
        // Block first's part as if its unit began before it, and how far it is to the next block's.
        // Only in the unit's first block does it begin, and that is part 0 of the first round.
        const int place = this->part_of(first, false),
                  step = this->part_of(1, false) - this->part_of(0, false);
        const int begins_here =
            first == cut.blocks[0] ? this->part_of(0, true) - this->part_of(0, false) : 0;
        RowStats each[kRound / 8];
        float2 factors[kRound / 8];
#pragma unroll
        for (int h = 0; h < kRound / 8; ++h) {
          const int i = h * 8 + (lane_ >> 2);
          each[h].clear();
          if (i < count) {
            const int part = place + i * step + (i == 0 ? begins_here : 0);
            each[h] = results_.load_stats(part);
          }
        }
#pragma unroll 1
        for (int begin = 0; begin < count; begin += kPartsALoad) {
          float4 loaded[kPartsALoad][kEach];
#pragma unroll
          for (int i = 0; i < kPartsALoad; ++i) {
            const int part = place + (begin + i) * step + (i == 0 && begin == 0 ? begins_here : 0);
            const float4* from = in_registers(outputs + part * kFragments * 32);
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
      const auto to = results_.destination(rows, total.stats, Target{});
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (done + k < this->own_fragments())
          results_.emit(to, this->first_fragment() + done + k, total.out[k]);
      }
      if (token_lane_ == 0 && done == 0) results_.emit_stats(rows, total.stats, Target{});
    }
  }

  using Places::group;
  using Places::head_lane_;
  using Places::lane_;
  using Places::params_;
  using Places::rings_;
  using Places::row_tile_;
  using Places::shared_;
  using Places::token_lane_;
  using Places::warp_index;

  Results<T, C, kHeadDim> results_;
  GroupBarrier group_barrier_;
  bool has_leaves_ = false;  // of the chunk in work, in this warp's leaf buffer
};

}  // namespace paged_attn::cuda
