// From row states to results: the token lanes of a block are merged through shared memory, and
// units that several blocks share through scratch, by whichever block comes last. Both add up in
// a fixed order, so that the result does not depend on who comes when.
#pragma once

#include "state_sums.cuh"
#include "tile.cuh"

namespace paged_attn::cuda {

template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, Variant kVariant>
class Combiner : private StateSums<T, C, kHeadDim, kRings, kRowTiles, kVariant> {
  using Sums = StateSums<T, C, kHeadDim, kRings, kRowTiles, kVariant>;
  using Sums::kStateFloats;
  using Sums::kWidth;
  using typename Sums::Destination;
  using typename Sums::RowOutputs;

 public:
  using Math = TileMath<T, C, kHeadDim>;
  using State = RowState<Math::kFragments>;
  using Sums::groups;
  using typename Sums::Shared;

  // So many rows find room beside the sums of the parts.
  static constexpr int places_in(int bytes) {
    return (bytes - kMostParts * kTileRows * static_cast<int>(sizeof(RowSums))) /
           (kHeadDim * static_cast<int>(sizeof(float)));
  }
  static constexpr int kMostParts = 16;

  __device__ __forceinline__ Combiner(const DeviceParams& params, uint8_t* rings, int ring_bytes,
                                      Shared& shared, uint64_t* group_barrier, int head_lane,
                                      int token_lane, int row_tile, int lane)
      : Sums(params, rings, ring_bytes, shared, head_lane, token_lane, row_tile, lane),
        group_barrier_(group_barrier) {
    if (lane == 0) this->own_cut_ends() = 0;
    __syncwarp();
  }

  // Batch-invariant: takes in the state of a leaf that more of this warp's follow in the chunk.
  __device__ __forceinline__ void keep_leaf(const State& state, const RowTile& rows) {
    keep(state, rows, this->state_buffer(token_lane_));
    has_leaves_ = true;
  }

  // Takes in the states of a segment or, batch-invariant, of a chunk of it, one of each warp of the
  // head lane; the first `lanes_used` token lanes have one. `held_slot`: a slot of this warp's ring
  // that it may write to, unless there are state buffers.
  __device__ __forceinline__ void finish(const State& state, const RowTile& rows, int lanes_used,
                                         int held_slot, const Target& target) {
    // Where only the next states are written over the last ones, nobody waited behind these.
    if (kVariant != Variant::kOne && can_be_late()) meet();
    if (token_lane_ < lanes_used) {
      if (!params_.has_state_buffers && lane_ == 0 && row_tile_ == 0) {
        shared_.held_slots[this->ring_index(token_lane_)] = held_slot;
      }
      keep(state, rows,
           params_.has_state_buffers ? this->state_buffer(token_lane_)
                                     : this->state_in(this->ring_index(token_lane_), held_slot));
      has_leaves_ = false;
    }
    meet();
    const auto sums = [&](int t, int row) { return shared_.states[warp_index(t)][row]; };
    const auto outputs = [&](int t, int own) {
      const int row = this->row_of(own);
      return RowOutputs::load(this->kept_outputs(t) +
                              this->permuted(row, row * kHeadDim + lane_ * kWidth));
    };
    if (params_.max_chunks > 0) {
      finish_chunk(rows, lanes_used, sums, outputs, target);
    } else {
      this->write_rows(rows, 0, this->own_rows(rows), results_.destination(target),
                       [&](int own, RowSums& total) {
                         return this->add_up(own, lanes_used, total, sums, outputs);
                       });
    }
    if (!can_be_late()) meet();
  }

  // Notes what the share holds of a unit that is not whole in one segment; returns where the
  // segment's result goes, or that of its first chunk.
  __device__ __forceinline__ Target begin_part(const Share& share, const Segment& segment,
                                               const RowTile& rows, bool is_last_chunk) {
    const int first_tile = first_tile_of(params_, segment.sequence);
    const bool begins_here = segment.first == first_tile;
    const bool in_chunks = params_.max_chunks > 0;
    if (in_chunks && segment.is_whole(params_)) {
      return Target::of_chunks(0, true, true, is_last_chunk);
    }
    const int block = share.block_of(lane_ == 0 ? segment.unit_begin : segment.unit_last);
    const int first_block = __shfl_sync(~0u, block, 0);
    const int chunk_shift = in_chunks ? chunk_shift_of(params_, segment.sequence) : 0;
    const auto chunks = [&](int begin, int end) {
      return (end - begin + (1 << chunk_shift) - 1) >> chunk_shift;
    };
    int own_parts = 1, all_parts = __shfl_sync(~0u, block, 1) - first_block + 1;
    if (in_chunks) {
      own_parts = chunks(segment.first, segment.end);
      all_parts = chunks(first_tile, end_tile_of(segment.sequence));
    }
    if (lane_ == 0) {
      this->own_cut_ends() |= 1 << begins_here;
      if (is_leader()) {
        shared_.cuts[head_lane_][begins_here] = {rows, first_block, own_parts, all_parts};
        if (begins_here) arrivals_at(first_block).begin();
      }
    }
    __syncwarp();
    if (!in_chunks) return {this->part_of(blockIdx.x, begins_here), false};
    const int part = this->chunk_part_of(first_block, chunks(first_tile, segment.first));
    return Target::of_chunks(part, false, begins_here, is_last_chunk);
  }

  // Once, when all segments are done: announces this block's parts, and merges the units that it
  // announced the last of. Not earlier: a release while loads are in flight would wait for them.
  // Each warp adds up its own rows, by way of its ring, which is empty by then.
  __device__ __forceinline__ void merge_cut_units() {
    unsigned ends = this->own_cut_ends();
    if (ends == 0) return;
    meet();
    const bool announces = is_leader() && lane_ < 2 && (ends >> lane_ & 1);
    CutUnit cut{};
    uint64_t before = 0;
    if (announces) {
      cut = shared_.cuts[head_lane_][lane_];
      if (params_.max_chunks > 0 && lane_ == 1) {
        params_.prefix_chunks[this->unit_index(cut.first_block)] = cut.own_parts;
      }
      before = arrivals_at(cut.first_block).add(cut.own_parts);
    }
    // What is known before: all happens while the arrivals are on their way. Where chunks are, that
    // is little.
    const bool in_chunks = params_.max_chunks > 0;
    Merge first, second;
    if (!in_chunks && (ends & 1)) first = find_merge(0);
    if (!in_chunks && (ends & 2)) second = find_merge(1);
    if (is_leader() && lane_ < 2) {
      shared_.is_last[lane_][head_lane_] =
          announces && arrivals_at(cut.first_block).completes(before, cut.own_parts, cut.all_parts);
    }
    meet();
    for (int end = 0; end < 2; ++end) ends &= ~(!shared_.is_last[end][head_lane_] << end);
    if (ends == 0) return;
    // First the parts of both are sent for, then they are added up.
#pragma unroll 1
    for (int step = 0; step < 4; ++step) {
      const int end = step & 1;
      if (!(ends >> end & 1)) continue;
      merge_unit(in_chunks ? find_merge(end) : end == 0 ? first : second, step < 2);
    }
  }

 private:
  // Whether a warp may go on while others still read its state: until the next is to be kept.
  __device__ __forceinline__ bool can_be_late() const {
    return params_.has_state_buffers && params_.max_chunks == 0;
  }

  // At the unit that begins in a block.
  __device__ __forceinline__ ArrivalCounter arrivals_at(int first_block) const {
    return {params_.arrivals + this->unit_index(first_block), params_.call_number};
  }

  // Of the head lane's warps the one that speaks for all.
  __device__ __forceinline__ bool is_leader() const { return token_lane_ == 0 && row_tile_ == 0; }

  // The warps of the head lane.
  __device__ __forceinline__ void meet() {
    if (kRowTiles == 1 && params_.token_lanes == 1) {
      __syncwarp();
    } else {
      group_barrier_.wait();
    }
  }

  // Leaves a warp's state where the others of its head lane find it, added to what they find there
  // already.
  __device__ __forceinline__ void keep(const State& state, const RowTile& rows, float* out) const {
    const int row = 2 * (lane_ & 3);
    RowSums* const kept = shared_.states[warp_index(token_lane_)] + row;
    RowSums sums[2] = {{state.stats.max.x, state.stats.sum.x, state.stats.exact_sum.x, 0},
                       {state.stats.max.y, state.stats.sum.y, state.stats.exact_sum.y, 0}};
    Fold folds[2];
    const bool adds = can_keep_leaves(kHeadDim) && has_leaves_;
    if (adds) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        RowSums before = kept[r];
        folds[r] = Fold(before, sums[r], params_.scale_log2);
        sums[r] = before;
      }
      __syncwarp();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!rows.exists(row + r)) continue;
      float* const to = out + (row + r) * kHeadDim;
      const auto put = [&](int d, float x) {
        float& place = to[this->permuted(row, d)];
        place = adds ? folds[r](place, x) : x;
      };
#pragma unroll
      for (int i = 0; i < Math::kFragments; ++i) {
        const int d = i * 16 + Math::first_dim(lane_);
        put(d, r == 0 ? state.out[i].x : state.out[i].y);
        put(d + Math::kSecondDim, r == 0 ? state.out[i].z : state.out[i].w);
      }
    }
    if (lane_ < 4) {
      kept[0] = sums[0];
      kept[1] = sums[1];
    }
    __syncwarp();
  }

  // Batch-invariant: the leaves of a chunk, and the unit's chunks before it. However many token
  // lanes share the leaves, the sums are those of its first half one after another and those of its
  // second, and then these two.
  template <typename SumsOf, typename OutputsOf>
  __device__ __forceinline__ void finish_chunk(const RowTile& rows, int lanes_used,
                                               const SumsOf& sums_of, const OutputsOf& outputs_of,
                                               const Target& target) const {
    const int half = (params_.token_lanes + 1) / 2;
    const Destination to = results_.destination(target);
#pragma unroll 1
    for (int own = 0; own < this->own_rows(rows); ++own) {
      const int row = this->row_of(own);
      RowSums sums;
      RowOutputs total = this->fold(own, 0, min(half, lanes_used), sums, sums_of, outputs_of);
      if (lanes_used > half) {
        RowSums more;
        const RowOutputs second = this->fold(own, half, lanes_used, more, sums_of, outputs_of);
        total.take_in(second, Fold(sums, more, params_.scale_log2));
      }
      RowSums& unit_sums = shared_.unit_sums[warp_index(token_lane_)][row];
      float* const unit_outputs = this->unit_outputs() + row * kHeadDim + lane_ * kWidth;
      if (target.joins()) {
        const RowSums leaves = sums;
        const RowOutputs chunk = total;
        sums = unit_sums;
        total = RowOutputs::load(unit_outputs);
        total.take_in(chunk, Fold(sums, leaves, params_.scale_log2));
      }
      if (target.stays()) {
        total.store(unit_outputs);
        __syncwarp();
        if (lane_ == 0) unit_sums = sums;
      } else {
        this->write_row(rows, own, 0, sums, total, to);
      }
    }
  }

  __device__ __forceinline__ Parts parts_of(const CutUnit& cut) const {
    if (params_.max_chunks == 0) {
      return {cut.all_parts, this->part_of(cut.first_block, true),
              this->part_of(cut.first_block, false), 2 * groups()};
    }
    // The first block's chunks, which it has folded, then the others one by one.
    const int prefix = __ldcg(params_.prefix_chunks + this->unit_index(cut.first_block));
    return {1 + cut.all_parts - prefix, this->chunk_part_of(cut.first_block, 0),
            this->chunk_part_of(cut.first_block, prefix - 1), groups()};
  }

  // As many parts at a time as fit into half of this warp's ring; what they give is carried there
  // to the next. (Half even if the other end has none to merge, for how many are added up at once
  // decides the last bits.)
  __device__ __forceinline__ Merge find_merge(int end) const {
    const CutUnit& cut = shared_.cuts[head_lane_][end];
    Merge merge;
    merge.rows = cut.rows;
    merge.rows.first += row_tile_ * kTileRows;
    merge.parts = parts_of(cut);
    const int bytes = ring_part_bytes(ring_bytes_, kRowTiles) / 2;
    merge.sums = reinterpret_cast<RowSums*>(this->ring_part() + end * bytes);
    merge.outputs = reinterpret_cast<float*>(merge.sums + kMostParts * kTileRows);
    merge.own_rows = this->own_rows(merge.rows);
    merge.rows_at_once = merge.own_rows;
    merge.most = min(merge.parts.count, kMostParts);
    if (merge.rows_at_once * merge.most > places_in(bytes)) {
      merge.rows_at_once = 1;
      merge.most = min(places_in(bytes), kMostParts);
    }
    return merge;
  }

  // `sends`: only the first copies start.
  __device__ __forceinline__ void merge_unit(const Merge& merge, bool sends) const {
    const int at_once = merge.rows_at_once;
    const auto sums_of = [&](int i, int row) { return merge.sums[i * kTileRows + row]; };
#pragma unroll 1
    for (int first = 0; first < merge.own_rows; first += at_once) {
      const auto outputs_of = [&](int i, int own) {
        return RowOutputs::load(merge.outputs + (i * at_once + own - first) * kHeadDim +
                                lane_ * kWidth);
      };
#pragma unroll 1
      for (int done = 0; done < merge.parts.count;) {
        const int carried = done > 0;
        const int count = carried + min(merge.most - carried, merge.parts.count - done);
        if (sends || first + done > 0) {
          copy_parts(merge, done - carried, carried, count, first);
          if (sends) return;
        }
        done += count - carried;
        Destination to;
        if (done < merge.parts.count) to = {merge.outputs, merge.sums, true};
        wait_copies<0>();
        __syncwarp();
        // NOTE: one call for both would take a few registers too many of kernels that have none
        // left.
        const auto write = [&](const auto& sum_of) {
          this->write_rows(merge.rows, first, first + at_once, to, sum_of);
        };
        if (params_.max_chunks > 0) {
          write([&](int own, RowSums& total) {
            return this->fold(own, 0, count, total, sums_of, outputs_of);
          });
        } else {
          write([&](int own, RowSums& total) {
            return this->add_up(own, count, total, sums_of, outputs_of);
          });
        }
        __syncwarp();
      }
    }
  }

  // Parts first + [begin, end) to places [begin, end): of this warp's rows from `first_row` on as
  // many as go at once.
  __device__ __forceinline__ void copy_parts(const Merge& merge, int first, int begin, int end,
                                             int first_row) const {
    const Parts& parts = merge.parts;
    const int row = lane_ & 7;
#pragma unroll 1
    for (int i = begin + (lane_ >> 3); i < end; i += 4) {
      copy_async(shared_address(merge.sums + i * kTileRows + row),
                 params_.partial_sums + parts[first + i] * kTileRows + row, merge.rows.exists(row));
    }
    constexpr int kVectors = kHeadDim / 4;  // of a row: 16 bytes
#pragma unroll
    for (int all = 0; all < kVectors; all += 32) {
      if (all + lane_ >= kVectors) break;
#pragma unroll 1
      for (int own = 0; own < merge.rows_at_once; ++own) {
        const int d = (all + lane_) * 4;
        const float* from = params_.partial_outputs + this->row_of(first_row + own) * kHeadDim + d;
        const uint32_t step = merge.rows_at_once * kHeadDim * 4;
        uint32_t to = shared_address(merge.outputs + own * kHeadDim + d) + begin * step;
        int i = begin;
        if (first + begin == 0) {
          copy_async(to, from + parts.first * kStateFloats, true);
          to += step;
          ++i;
        }
        from += (parts.others + (first + i) * parts.step) * kStateFloats;
#pragma unroll 1
        for (; i < end; i += 4) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (i + k < end) {
              copy_async(to + k * step, from + k * parts.step * kStateFloats, true);
            }
          }
          to += 4 * step;
          from += 4 * parts.step * kStateFloats;
        }
      }
    }
    commit_copies();
  }

  using Sums::head_lane_;
  using Sums::lane_;
  using Sums::params_;
  using Sums::results_;
  using Sums::ring_bytes_;
  using Sums::row_tile_;
  using Sums::shared_;
  using Sums::token_lane_;
  using Sums::warp_index;

  GroupBarrier group_barrier_;
  bool has_leaves_ = false;  // of the chunk in work, in this warp's state buffer
};

}  // namespace paged_attn::cuda
