// The online softmax of one warp's tile of query rows: lane l keeps rows 2 * (l % 4) and the next,
// as the two halves of float2.
#pragma once

#include <cuda_runtime.h>

#include "heuristics.h"

namespace paged_attn::cuda {

__device__ __forceinline__ float2 larger(float2 a, float2 b) {
  return make_float2(fmaxf(a.x, b.x), fmaxf(a.y, b.y));
}

// 2^x to within 2 units in the last place; results below the smallest normal number become 0.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 2^((a - b) * scale) for a <= b; 0 for a = -inf, also when b is no more.
__device__ __forceinline__ float weight_of_difference(float a, float b, float scale) {
  return a == -INFINITY ? 0.f : power_of_2((a - b) * scale);
}

__device__ __forceinline__ float2 weight_of_difference(float2 a, float2 b, float scale) {
  return make_float2(weight_of_difference(a.x, b.x, scale), weight_of_difference(a.y, b.y, scale));
}

__device__ __forceinline__ void scale_rows(float4& o, float2 factor) {
  o = make_float4(o.x * factor.x, o.y * factor.y, o.z * factor.x, o.w * factor.y);
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
  float2 max;  // a reference that no score exceeds by more than params.slack; -inf: no key yet
  float2 sum;  // of the weights 2^((s - max) * scale) as V was multiplied by them: rounded
  // Of the weights before rounding. Dividing by the rounded ones' sum keeps a mean of equal rows
  // exact; the logarithm is asked for to 1e-5, which rounding to 8 bits would miss.
  float2 exact_sum;

  __device__ __forceinline__ void clear() {
    max = make_float2(-INFINITY, -INFINITY);
    sum = exact_sum = make_float2(0, 0);
  }
};

// One row's, as it is kept for others to add up.
struct alignas(16) RowSums {
  float max;
  float sum;
  float exact_sum;
  float unused;

  __device__ __forceinline__ static RowSums none() { return {-INFINITY, 0, 0, 0}; }
};

// Adds sums of further keys to sums so far: both are multiplied by powers of 2 that bring them to
// the greater of their references. The order of such steps decides the last bits, so the
// instructions are spelled out.
struct Fold {
  float keep;
  float take;

  Fold() = default;
  __device__ __forceinline__ Fold(RowSums& sums, const RowSums& more, float scale) {
    const float max = fmaxf(sums.max, more.max);
    keep = weight_of_difference(sums.max, max, scale);
    take = weight_of_difference(more.max, max, scale);
    sums.max = max;
    sums.sum = (*this)(sums.sum, more.sum);
    sums.exact_sum = (*this)(sums.exact_sum, more.exact_sum);
  }

  __device__ __forceinline__ float operator()(float total, float more) const {
    return __fmaf_rn(take, more, __fmul_rn(keep, total));
  }
};

template <int kFragments>
struct RowState {
  float4 out[kFragments];  // sum of the weights times V
  RowStats stats;          // sums are this lane's tokens' alone until reduce()

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kFragments; ++i) out[i] = make_float4(0, 0, 0, 0);
    stats.clear();
  }

  // The weights 2^((s - max) * scale) of a tile, `max` raised first if a score exceeds it by more
  // than `slack`, which rarely happens. The difference comes before the product: far from 0 a
  // product's rounding would change weights by percents.
  __device__ __forceinline__ float4 weights(float4 s, float scale, float slack) {
    const float2 top = make_float2(fmaxf(s.x, s.z), fmaxf(s.y, s.w));
    if (__any_sync(~0u, top.x > stats.max.x + slack || top.y > stats.max.y + slack)) {
      raise_max(larger(stats.max, max_over_tokens(top)), scale);
    }
    // Any finite reference will do for a row that saw no key yet.
    const float2 reference = make_float2(stats.max.x == -INFINITY ? 0.f : stats.max.x,
                                         stats.max.y == -INFINITY ? 0.f : stats.max.y);
    return make_float4(
        power_of_2((s.x - reference.x) * scale), power_of_2((s.y - reference.y) * scale),
        power_of_2((s.z - reference.x) * scale), power_of_2((s.w - reference.y) * scale));
  }

  __device__ __forceinline__ void add_exact(float4 p) {
    stats.exact_sum = make_float2(stats.exact_sum.x + (p.x + p.z), stats.exact_sum.y + (p.y + p.w));
  }

  __device__ __forceinline__ void add_rounded(float4 p) {
    stats.sum = make_float2(stats.sum.x + (p.x + p.z), stats.sum.y + (p.y + p.w));
  }

  __device__ __forceinline__ void raise_max(float2 new_max, float scale) {
    const float2 factor = weight_of_difference(stats.max, new_max, scale);
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
