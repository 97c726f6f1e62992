// The online softmax of one warp's tile of query rows: lane l keeps rows 2 * (l % 4) and the next,
// as the two halves of float2.
#pragma once

#include <cuda_runtime.h>

#include "heuristics.h"

namespace paged_attn::cuda {

__device__ __forceinline__ float2 larger(float2 a, float2 b) {
  return make_float2(fmaxf(a.x, b.x), fmaxf(a.y, b.y));
}

// 2^(a - b) for a <= b. Minus infinity both: nothing was seen yet, and nothing it stays.
__device__ __forceinline__ float2 exp2_of_difference(float2 a, float2 b) {
  return make_float2(b.x == -INFINITY ? 0.f : exp2f(a.x - b.x),
                     b.y == -INFINITY ? 0.f : exp2f(a.y - b.y));
}

__device__ __forceinline__ void scale_rows(float4& o, float2 factor) {
  o = make_float4(o.x * factor.x, o.y * factor.y, o.z * factor.x, o.w * factor.y);
}

__device__ __forceinline__ void add_scaled(float4& total, float4 o, float2 factor) {
  total = make_float4(fmaf(factor.x, o.x, total.x), fmaf(factor.y, o.y, total.y),
                      fmaf(factor.x, o.z, total.z), fmaf(factor.y, o.w, total.w));
}

__device__ __forceinline__ float2 shuffle(float2 x, int source) {
  return make_float2(__shfl_sync(~0u, x.x, source), __shfl_sync(~0u, x.y, source));
}

// Maximum and sum over the 8 lanes that share rows.
__device__ __forceinline__ float2 max_over_tokens(float2 x) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    x = larger(
        x, make_float2(__shfl_xor_sync(~0u, x.x, distance), __shfl_xor_sync(~0u, x.y, distance)));
  }
  return x;
}

__device__ __forceinline__ float2 sum_over_tokens(float2 x) {
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    x = make_float2(x.x + __shfl_xor_sync(~0u, x.x, distance),
                    x.y + __shfl_xor_sync(~0u, x.y, distance));
  }
  return x;
}

struct RowStats {
  float2 max;  // a reference that no s exceeds by more than kSlack; -inf: no key yet
  float2 sum;  // of the weights 2^(s - max) as V was multiplied by them, rounded to its dtype
  // Of the weights before rounding. Dividing by the rounded ones' sum keeps a mean of equal rows
  // exact; the logarithm is asked for to 1e-5, which rounding to 8 bits would miss.
  float2 exact_sum;

  __device__ __forceinline__ void clear() {
    max = make_float2(-INFINITY, -INFINITY);
    sum = exact_sum = make_float2(0, 0);
  }

  // Takes in the stats of eight others, one of each 4 lanes; returns the factor of this lane's.
  __device__ __forceinline__ float2 merge_over_lanes(const RowStats& other) {
    const float2 new_max = larger(max, max_over_tokens(other.max));
    const float2 own = exp2_of_difference(max, new_max);
    const float2 factor = exp2_of_difference(other.max, new_max);
    max = new_max;
    const float2 more =
        sum_over_tokens(make_float2(factor.x * other.sum.x, factor.y * other.sum.y));
    sum = make_float2(fmaf(own.x, sum.x, more.x), fmaf(own.y, sum.y, more.y));
    const float2 exact_more =
        sum_over_tokens(make_float2(factor.x * other.exact_sum.x, factor.y * other.exact_sum.y));
    exact_sum =
        make_float2(fmaf(own.x, exact_sum.x, exact_more.x), fmaf(own.y, exact_sum.y, exact_more.y));
    return factor;
  }
};

template <int kFragments>
struct RowState {
  float4 out[kFragments];  // sum of the weights times V
  RowStats stats;          // sums are this lane's tokens' alone until reduce()

  // Rescaling only when a maximum grew by more than this saves almost all of it. Weights are then
  // at most 2^kSlack, far from overflow in fp16.
  static constexpr float kSlack = 8.f;

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) out[i] = make_float4(0, 0, 0, 0);
    stats.clear();
  }

  // The weights 2^(s * scale - max) of a tile, `max` raised first if its scaled scores (-inf where
  // a key is not seen) ask for it. The product is not rounded before the difference is taken: far
  // from 0 its own rounding would change weights by percents, while that of `max` is common to them
  // all.
  __device__ __forceinline__ float4 weights(float4 s, float4 scaled, float scale) {
    const float2 top = make_float2(fmaxf(scaled.x, scaled.z), fmaxf(scaled.y, scaled.w));
    if (__any_sync(~0u, top.x > stats.max.x + kSlack || top.y > stats.max.y + kSlack)) {
      raise_max(larger(stats.max, max_over_tokens(top)));
    }
    // Any finite reference will do for a row that saw no key yet.
    const float2 reference = make_float2(stats.max.x == -INFINITY ? 0.f : stats.max.x,
                                         stats.max.y == -INFINITY ? 0.f : stats.max.y);
    return make_float4(exp2f(fmaf(s.x, scale, -reference.x)), exp2f(fmaf(s.y, scale, -reference.y)),
                       exp2f(fmaf(s.z, scale, -reference.x)),
                       exp2f(fmaf(s.w, scale, -reference.y)));
  }

  __device__ __forceinline__ void add_exact(float4 p) {
    stats.exact_sum = make_float2(stats.exact_sum.x + (p.x + p.z), stats.exact_sum.y + (p.y + p.w));
  }

  __device__ __forceinline__ void add_rounded(float4 p) {
    stats.sum = make_float2(stats.sum.x + (p.x + p.z), stats.sum.y + (p.y + p.w));
  }

  __device__ __forceinline__ void raise_max(float2 new_max) {
    const float2 factor = exp2_of_difference(stats.max, new_max);
    stats.max = new_max;
    stats.sum = make_float2(stats.sum.x * factor.x, stats.sum.y * factor.y);
    stats.exact_sum = make_float2(stats.exact_sum.x * factor.x, stats.exact_sum.y * factor.y);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) scale_rows(out[i], factor);
  }

  __device__ __forceinline__ void reduce() {
    stats.sum = sum_over_tokens(stats.sum);
    stats.exact_sum = sum_over_tokens(stats.exact_sum);
  }

  __device__ __forceinline__ void poison() { stats.sum = stats.exact_sum = make_float2(NAN, NAN); }
};

}  // namespace paged_attn::cuda
