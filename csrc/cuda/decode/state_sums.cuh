// Sums of states, which may be token lanes' or blocks' parts: of each row that is this warp's, in a
// fixed order, so that the result does not depend on who comes when.
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
  using Places::kWidth;
  using Places::lane_;
  using Places::params_;
  using typename Places::RowOutputs;
  using Result = Results<T, kHeadDim, kWidth>;
  using Destination = typename Result::Destination;

  // Adds up `count` states of this warp's row `own`, each weighed by what it saw. A few at a time,
  // whose loads are then under way together.
  template <typename SumsOf, typename OutputsOf>
  __device__ __forceinline__ RowOutputs add_up(int own, int count, RowSums& sums,
                                               const SumsOf& sums_of,
                                               const OutputsOf& outputs_of) const {
    constexpr int kFew = 4;
    const int row = this->row_of(own);
    sums = RowSums::none();
    RowOutputs total{};
#pragma unroll 1
    for (int first = 0; first < count; first += kFew) {
      RowSums more[kFew];
      RowOutputs outputs[kFew] = {};
      float max = sums.max;
#pragma unroll
      for (int i = 0; i < kFew; ++i) {
        more[i] = RowSums::none();
        if (first + i < count) {
          more[i] = sums_of(first + i, row);
          outputs[i] = outputs_of(first + i, own);
        }
        max = fmaxf(max, more[i].max);
      }
      const float keep = weight_of_difference(sums.max, max, params_.scale_log2);
      sums = {max, keep * sums.sum, keep * sums.exact_sum, 0};
      total.scale(keep);
#pragma unroll
      for (int i = 0; i < kFew; ++i) {
        const float weight = weight_of_difference(more[i].max, max, params_.scale_log2);
        sums.sum = fmaf(weight, more[i].sum, sums.sum);
        sums.exact_sum = fmaf(weight, more[i].exact_sum, sums.exact_sum);
        total.add(outputs[i], weight);
      }
    }
    return total;
  }

  // Batch-invariant: adds up states [begin, end) of a row in their order.
  template <typename SumsOf, typename OutputsOf>
  __device__ __forceinline__ RowOutputs fold(int own, int begin, int end, RowSums& sums,
                                             const SumsOf& sums_of,
                                             const OutputsOf& outputs_of) const {
    sums = sums_of(begin, this->row_of(own));
    RowOutputs total = outputs_of(begin, own);
#pragma unroll 1
    for (int i = begin + 1; i < end; ++i) {
      const Fold step(sums, sums_of(i, this->row_of(own)), params_.scale_log2);
      total.take_in(outputs_of(i, own), step);
    }
    return total;
  }

  // Writes this warp's rows [first, end); `sum_of` gives the outputs of one, and its sums.
  template <typename SumOf>
  __device__ __forceinline__ void write_rows(const RowTile& rows, int first, int end,
                                             const Destination& to, const SumOf& sum_of) const {
#pragma unroll 1
    for (int own = first; own < end; ++own) {
      RowSums sums;
      RowOutputs outputs = sum_of(own, sums);
      // What is carried lies where it was read.
      __syncwarp();
      write_row(rows, own, own - first, sums, outputs, to);
    }
  }

  // `place`: where in a carried sum.
  __device__ __forceinline__ void write_row(const RowTile& rows, int own, int place,
                                            const RowSums& sums, RowOutputs& outputs,
                                            const Destination& to) const {
    const int row = this->row_of(own);
    const auto finished = results_.finish_row(rows, row, sums, lane_ == 0, to);
    outputs.scale(finished.factor);
    if (to.outputs == nullptr) {
      results_.write(finished, lane_ * kWidth, outputs);
    } else {
      outputs.store(to.outputs + (to.is_carried ? place : row) * kHeadDim + lane_ * kWidth);
    }
  }

  Result results_{this->params_};
};

}  // namespace paged_attn::cuda
