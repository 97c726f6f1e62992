// Where sums go: to parts in scratch as they are, or normalised to the rows of out and lse.
#pragma once

#include "mma_fp8.cuh"
#include "rows.cuh"
#include "softmax.cuh"

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

// As one warp writes them, its lanes laid out as mma.cuh says.
template <typename T, typename C, int kHeadDim>
class Results {
 public:
  using Math = TileMath<T, C, kHeadDim>;
  static constexpr int kFragments = Math::kFragments;

  __device__ __forceinline__ Results(const DeviceParams& params, int lane)
      : params_(params), lane_(lane) {}

  __device__ __forceinline__ RowStats load_stats(int part) const {
    const float2* stats = params_.partial_states + (part * 4 + (lane_ & 3)) * 3;
    return {__ldcg(stats), __ldcg(stats + 1), __ldcg(stats + 2)};
  }

  // Of rows that do not exist a part holds nothing.
  __device__ __forceinline__ float4 load_output(const RowTile& rows, int part, int fragment) const {
    if (!rows.exists(2 * (lane_ & 3))) return make_float4(0, 0, 0, 0);
    return __ldcg(params_.partial_outputs + (part * kFragments + fragment) * 32 + lane_);
  }

  // Where fragments go: to scratch as they are, or normalised to this lane's row of out.
  struct Destination {
    bool is_part;
    float4* scratch;  // null: none of this lane's rows exists
    T* out_row;       // null: there is none
    float2 factor;
  };

  __device__ __forceinline__ Destination destination(const RowTile& rows, const RowStats& stats,
                                                     const Target& target) const {
    Destination to{!target.to_rows(), nullptr, nullptr, make_float2(0, 0)};
    if (to.is_part) {
      if (rows.exists(2 * (lane_ & 3))) {
        to.scratch = params_.partial_outputs + target.part() * kFragments * 32 + lane_;
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
                                             const Target& target) const {
    if (lane_ >= 4) return;
    if (!target.to_rows()) {
      float2* to = params_.partial_states + (target.part() * 4 + lane_) * 3;
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

 private:
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
    constexpr float kLn2 = 0.69314718055994531f, kLog2E = 1.44269504088896340f;
    // The logit that all weights are relative to. Those of a row that saw no key, or only scores of
    // -inf, are all 0. Products and sums are spelled out, for this is compiled into several places.
    const bool sees_no_key = max == -INFINITY;
    float reference = sees_no_key ? 0.f : __fmul_rn(max, __fmul_rn(params_.scale_log2, kLn2));
    float keys_weight = 1, sink_weight = 0;
    if (p.sinks != nullptr) {
      const int row = 2 * (lane_ & 3) + r;
      const float sink = rows.exists(row) ? sink_of<T>(p, rows.head(params_, row)) : -INFINITY;
      if (sink != -INFINITY) {
        const float top = sees_no_key ? sink : fmaxf(reference, sink);
        keys_weight = sees_no_key ? 0.f : power_of_2(__fmul_rn(__fsub_rn(reference, top), kLog2E));
        sink_weight = sees_no_key ? 1.f : power_of_2(__fmul_rn(__fsub_rn(sink, top), kLog2E));
        reference = top;
      }
    }
    const float sum = fmaf(keys_weight, r == 0 ? stats.sum.x : stats.sum.y, sink_weight);
    const float exact_sum =
        fmaf(keys_weight, r == 0 ? stats.exact_sum.x : stats.exact_sum.y, sink_weight);
    RowResult result;
    result.factor = sum == 0 ? 0.f : __fdividef(keys_weight, sum);
    if (p.v_scale.data != nullptr && result.factor != 0) {
      const int64_t last = p.num_kv_heads - 1;  // a spare head lane asks for more
      result.factor *=
          __ldcg(p.v_scale.data + min(static_cast<int64_t>(rows.kv_head), last) * p.v_scale.stride);
    }
    result.lse = fmaf(log2f(exact_sum), kLn2, reference);
    return result;
  }

  const DeviceParams& params_;
  int lane_;
};

}  // namespace paged_attn::cuda
