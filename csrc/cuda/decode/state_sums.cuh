// Sums of states, which may be token lanes' or blocks' parts: of each piece that is this warp's, in
// a fixed order, so that the result does not depend on who comes when.
#pragma once

#include "merge_places.cuh"
#include "results.cuh"

namespace paged_attn::cuda {

template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, Variant kVariant>
class StateSums : protected MergePlaces<T, C, kHeadDim, kRings, kRowTiles> {
  using Places = MergePlaces<T, C, kHeadDim, kRings, kRowTiles>;

 public:
  using Places::Places;

 protected:
  using Places::kPieceFloats;
  using Places::kPiecesARow;
  using Places::kWidth;
  using Places::lane_;
  using Places::params_;
  using Places::token_lane_;
  using typename Places::Piece;
  using Result = Results<T, kHeadDim, kWidth>;
  using Destination = typename Result::Destination;

  __device__ __forceinline__ int row_of(int own) const { return this->piece(own) / kPiecesARow; }

  // This warp's piece `own` of a sum, all of whose rows are `row`'s. `place`: where in a carried
  // sum.
  __device__ __forceinline__ void write(const typename Result::Row& row, int own, int place,
                                        Piece& outputs, const Destination& to) const {
    const int piece = this->piece(own);
    outputs.scale(row.factor);
    if (to.outputs == nullptr) {
      results_.write(row, piece % kPiecesARow * kPieceFloats + lane_ * kWidth, outputs);
    } else {
      outputs.store(to.outputs + (to.is_carried ? place : piece) * kPieceFloats + lane_ * kWidth);
    }
  }

  // Adds up `count` states, each weighed by what it saw: of this warp's pieces [first, end). They
  // are few more often than not.
  template <int kMost, typename SumsOf, typename OutputsOf>
  __device__ __forceinline__ void add_up(const RowTile& rows, int first, int end, int count,
                                         const SumsOf& sums_of, const OutputsOf& outputs_of,
                                         const Destination& to) const {
    constexpr int kFew = 4;
    if (kVariant != Variant::kOne && count <= kFew) {
      add_up_to<kFew>(rows, first, end, count, sums_of, outputs_of, to);
    } else {
      add_up_to<kMost>(rows, first, end, count, sums_of, outputs_of, to);
    }
  }

  // Batch-invariant: adds up states [begin, end) of a piece in their order.
  template <typename SumsOf, typename OutputsOf>
  __device__ __forceinline__ Piece fold(int own, int begin, int end, RowSums& sums,
                                        const SumsOf& sums_of, const OutputsOf& outputs_of) const {
    sums = sums_of(begin, row_of(own));
    Piece total = outputs_of(begin, own);
#pragma unroll 1
    for (int i = begin + 1; i < end; ++i) {
      const Fold step(sums, sums_of(i, row_of(own)), params_.scale_log2);
      total.take_in(outputs_of(i, own), step);
    }
    return total;
  }

  Result results_{this->params_};

 private:
  template <int kMost, typename SumsOf, typename OutputsOf>
  __device__ __forceinline__ void add_up_to(const RowTile& rows, int first, int end, int count,
                                            const SumsOf& sums_of, const OutputsOf& outputs_of,
                                            const Destination& to) const {
    constexpr int kEach = (kMost + 3) / 4;
    // Lane l looks after row l % 8 of every fourth state from l / 8 on.
    const int own_row = lane_ & 7;
    RowSums each[kEach];
    float weights[kEach];
    RowSums total = RowSums::none();
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = j * 4 + (lane_ >> 3);
      each[j] = i < count ? sums_of(i, own_row) : RowSums::none();
      total.max = fmaxf(total.max, each[j].max);
    }
    total.max = fmaxf(total.max, __shfl_xor_sync(~0u, total.max, 8));
    total.max = fmaxf(total.max, __shfl_xor_sync(~0u, total.max, 16));
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      weights[j] = weight_of_difference(each[j].max, total.max, params_.scale_log2);
      total.sum = fmaf(weights[j], each[j].sum, total.sum);
      total.exact_sum = fmaf(weights[j], each[j].exact_sum, total.exact_sum);
    }
#pragma unroll
    for (int distance = 8; distance < 32; distance *= 2) {
      total.sum += __shfl_xor_sync(~0u, total.sum, distance);
      total.exact_sum += __shfl_xor_sync(~0u, total.exact_sum, distance);
    }
    const bool writes = lane_ < 8 && (to.is_carried || (token_lane_ == 0 && first == 0));
    const auto finished = results_.finish_row(rows, own_row, total, writes, to);
#pragma unroll 1
    for (int own = first; own < end; ++own) {
      const int row = row_of(own);
      Piece sum{};
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (j * 4 >= count) break;
        Piece outputs[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (j * 4 + i < count) outputs[i] = outputs_of(j * 4 + i, own);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum.add(outputs[i], __shfl_sync(~0u, weights[j], i * 8 + row));
        }
      }
      write(finished.of_lane(row), own, own - first, sum, to);
    }
  }
};

}  // namespace paged_attn::cuda
