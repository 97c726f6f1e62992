// Where sums go: to parts in scratch as they are, or normalised to the rows of out and lse.
#pragma once

#include "merge_places.cuh"

namespace paged_attn::cuda {

// Where a segment's result goes: to the rows if it is final, else to a part in scratch; chunks may
// join the sums of their unit first, or stay there. In one register, for they are scarce where this
// is kept.
class Target {
 public:
  Target() = default;
  __device__ __forceinline__ Target(int part, bool to_rows) : packed_(part << 4 | to_rows) {}

  // Of the first chunk of several: those that add up go there together, the others to parts one
  // behind the other.
  __device__ __forceinline__ static Target of_chunks(int part, bool to_rows, bool add_up,
                                                     bool is_last) {
    Target target(part, to_rows);
    target.packed_ |= add_up << 3 | (add_up && !is_last) << 2;
    return target;
  }
  __device__ __forceinline__ Target next_chunk(int groups, bool is_last) const {
    const bool add_up = (packed_ & 8) != 0;
    Target target = of_chunks(part() + (add_up ? 0 : groups), to_rows(), add_up, is_last);
    target.packed_ |= add_up << 1;
    return target;
  }

  __device__ __forceinline__ int part() const { return packed_ >> 4; }
  __device__ __forceinline__ bool joins() const { return (packed_ & 2) != 0; }
  __device__ __forceinline__ bool stays() const { return (packed_ & 4) != 0; }
  __device__ __forceinline__ bool to_rows() const { return (packed_ & 1) != 0; }

 private:
  int packed_ = 1;  // to the rows
};

// As one warp writes them, a row at a time.
template <typename T, int kHeadDim, int kWidth>
class Results {
 public:
  __device__ __forceinline__ explicit Results(const DeviceParams& params) : params_(params) {}

  // A state that takes sums as they are, or with null the rows of out and lse.
  struct Destination {
    float* outputs = nullptr;
    RowSums* sums = nullptr;
    bool is_carried = false;  // a warp's own, which goes on with it
  };

  __device__ __forceinline__ Destination destination(const Target& target) const {
    if (target.to_rows()) return {};
    return {params_.partial_outputs + target.part() * kTileRows * kHeadDim,
            params_.partial_sums + target.part() * kTileRows, false};
  }

  // What is known of a row once its sums are.
  struct Row {
    float factor;  // that its outputs are multiplied by
    T* out;        // where they go; null: there is no such row
  };

  // `writes`: this lane also writes the row's sums, or lse.
  __device__ __forceinline__ Row finish_row(const RowTile& rows, int row, const RowSums& sums,
                                            bool writes, const Destination& to) const {
    if (!rows.exists(row)) return {0, nullptr};
    if (to.outputs != nullptr) {
      if (writes) to.sums[row] = sums;
      return {1, nullptr};
    }
    const DecodeParams& p = params_.decode;
    const Logits logits = logits_of(rows, row, sums);
    const float sum = fmaf(logits.keys_weight, sums.sum, logits.sink_weight);
    Row finished;
    finished.out = static_cast<T*>(p.out) + rows.offset(params_, p.out_strides, row);
    finished.factor = sum == 0 ? 0.f : __fdividef(logits.keys_weight, sum);
    if (p.v_scale.data != nullptr && finished.factor != 0) {
      finished.factor *= __ldcg(p.v_scale.data + rows.kv_head * p.v_scale.stride);
    }
    if (writes && p.lse != nullptr) {
      const float exact_sum = fmaf(logits.keys_weight, sums.exact_sum, logits.sink_weight);
      p.lse[rows.offset(params_, p.lse_strides, row)] =
          fmaf(log2f(exact_sum), kLn2, logits.reference);
    }
    return finished;
  }

  // This lane's outputs from head dim d on.
  __device__ __forceinline__ void write(const Row& row, int d,
                                        const Outputs<kWidth>& outputs) const {
    if (d >= params_.decode.head_dim) return;
    constexpr int kVector = kWidth < 4 ? kWidth : 4;
    struct alignas(kVector * sizeof(T)) Elements {
      T values[kVector];
    };
#pragma unroll
    for (int i = 0; i < kWidth; i += kVector) {
      Elements elements;
#pragma unroll
      for (int k = 0; k < kVector; ++k) store(outputs.values[i + k], elements.values[k]);
      if (params_.out_is_aligned) {
        *reinterpret_cast<Elements*>(row.out + d + i) = elements;
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) row.out[d + i + k] = elements.values[k];
      }
    }
  }

 private:
  static constexpr float kLn2 = 0.69314718055994531f, kLog2E = 1.44269504088896340f;

  struct Logits {
    float reference;  // that all weights are relative to
    float keys_weight;
    float sink_weight;
  };

  // Those of a row that saw no key, or only scores of -inf, are all 0. Products and sums are
  // spelled out, for this is compiled into several places.
  __device__ __forceinline__ Logits logits_of(const RowTile& rows, int row,
                                              const RowSums& sums) const {
    const bool sees_no_key = sums.max == -INFINITY;
    Logits logits{sees_no_key ? 0.f : __fmul_rn(sums.max, __fmul_rn(params_.scale_log2, kLn2)), 1,
                  0};
    if (params_.decode.sinks != nullptr) {
      const float sink = sink_of<T>(params_.decode, rows.head(params_, row));
      if (sink != -INFINITY) {
        const float top = sees_no_key ? sink : fmaxf(logits.reference, sink);
        const auto weight = [&](float logit) {
          return power_of_2(__fmul_rn(__fsub_rn(logit, top), kLog2E));
        };
        logits.keys_weight = sees_no_key ? 0.f : weight(logits.reference);
        logits.sink_weight = sees_no_key ? 1.f : weight(sink);
        logits.reference = top;
      }
    }
    return logits;
  }

  const DeviceParams& params_;
};

}  // namespace paged_attn::cuda
