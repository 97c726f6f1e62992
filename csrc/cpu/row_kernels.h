// Whole rows of a head: cache writes that change the type or the scale, and merges of attention
// states. Included by the isa files only, through decode_kernel.h.
#pragma once

#include "isa.h"
#include "rows.h"

namespace paged_attn::cpu {
namespace {

// Floats to the nearest, ties to even; saturates at kLargest (fp32 bits), NaN stays NaN. In the
// compiler's vectors of signed integers, as wide as the instruction set's, but no more than eight.
constexpr int kFp8Lanes = kWidth < 8 ? kWidth : 8;

template <int kExponent, int kMantissa, int32_t kLargest>
inline void round_to_fp8(const float* from, void* to) {
  using Floats = float __attribute__((vector_size(4 * kFp8Lanes)));
  using Ints = int32_t __attribute__((vector_size(4 * kFp8Lanes)));
  using Shorts = uint16_t __attribute__((vector_size(2 * kFp8Lanes)));
  using Bytes = uint8_t __attribute__((vector_size(kFp8Lanes)));
  constexpr int kDropped = 23 - kMantissa;
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr int32_t kSmallestNormal = (127 + 1 - kBias) << 23;
  constexpr int32_t kRebias = (127 - kBias) << 23;
  Ints bits;
  __builtin_memcpy(&bits, from, sizeof(bits));
  const Ints magnitude = bits & 0x7fffffff;
  const Ints is_small = magnitude < kLargest;
  const Ints finite = (is_small & magnitude) | (~is_small & kLargest);
  const Ints is_odd = (finite >> kDropped) & 1;
  const Ints normal = (finite + ((1 << (kDropped - 1)) - 1 - kRebias) + is_odd) >> kDropped;
  // Adding a power of two whose unit in the last place is fp8's smallest number rounds to it.
  const Ints rounder = Ints{} + ((127 + 23 + 1 - kBias - kMantissa) << 23);
  Floats sum, power;
  __builtin_memcpy(&sum, &finite, sizeof(sum));
  __builtin_memcpy(&power, &rounder, sizeof(power));
  sum += power;
  Ints subnormal;
  __builtin_memcpy(&subnormal, &sum, sizeof(subnormal));
  subnormal -= rounder;
  const Ints is_subnormal = finite < kSmallestNormal;
  const Ints rounded = (is_subnormal & subnormal) | (~is_subnormal & normal);
  const Ints is_nan = magnitude > 0x7f800000;
  const Ints code = ((bits >> 24) & 0x80) | (is_nan & 0x7f) | (~is_nan & rounded);
  // By way of 16 bits: straight to 8, compilers take the elements one by one.
  const Shorts shorts = __builtin_convertvector(code, Shorts);
  const Bytes bytes = __builtin_convertvector(shorts, Bytes);
  __builtin_memcpy(to, &bytes, sizeof(bytes));
}
inline void narrow8(const float* from, Float8E4M3* to) {
  for (int i = 0; i < 8; i += kFp8Lanes) round_to_fp8<4, 3, 0x43e00000>(from + i, to + i);  // 448
}
inline void narrow8(const float* from, Float8E5M2* to) {
  for (int i = 0; i < 8; i += kFp8Lanes) round_to_fp8<5, 2, 0x47600000>(from + i, to + i);  // 57344
}

template <typename From, typename To>
void convert_row(const void* from, float scale, int64_t head_dim, void* to) {
  const From* row = static_cast<const From*>(from);
  To* stored = static_cast<To*>(to);
  for (int64_t d = 0; d < head_dim; d += 8) {
    float x[8];
    widen8(row + d, x);
    for (float& element : x) element /= scale;
    narrow8(x, stored + d);
  }
}

template <typename T>
void merge_row(const StateShare* shares, int64_t num_shares, float factor, int64_t head_dim,
               void* out) {
  constexpr int kStep = 32;
  constexpr int kVecs = kStep / kWidth;
  T* merged = static_cast<T*>(out);
  for (int64_t d = 0; d < head_dim; d += kStep) {
    // Rows need not be multiples of a step, nor of a vector.
    const int64_t count = smaller(kStep, head_dim - d);
    T padded[kStep];
    Vec sums[kVecs];
    // -0 changes no number that is added to it, 0 one: -0.
    for (Vec& sum : sums) sum = broadcast(num_shares > 0 ? -0.0f : 0.0f);
    for (int64_t i = 0; i < num_shares; ++i) {
      const T* row = static_cast<const T*>(shares[i].row) + d;
      if (count < kStep) {
        __builtin_memset(padded, 0, sizeof(padded));
        __builtin_memcpy(padded, row, count * sizeof(T));
        row = padded;
      }
      const Vec weight = broadcast(shares[i].weight);
      for (int v = 0; v < kVecs; ++v) sums[v] = fma(weight, load(row + v * kWidth), sums[v]);
    }
    float values[kStep];
    for (int v = 0; v < kVecs; ++v) store(values + v * kWidth, mul(sums[v], broadcast(factor)));
    T* to = count < kStep ? padded : merged + d;
    for (int i = 0; i < kStep; i += 8) narrow8(values + i, to + i);
    if (count < kStep) __builtin_memcpy(merged + d, padded, count * sizeof(T));
  }
}

}  // namespace
}  // namespace paged_attn::cpu
