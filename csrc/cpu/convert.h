// Rows of one storage type from rows of another, through fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "piece.h"
#include "vec_generic.h"

namespace paged_attn::cpu {
namespace {

// To the nearest, ties to even; saturates at kLargest (fp32 bits), NaN stays NaN. In signed
// integers, which every processor compares side by side.
template <int kExponent, int kMantissa, int32_t kLargest>
inline uint8_t round_to_fp8(float x) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  // Adding a power of two whose unit in the last place is fp8's smallest number rounds to it.
  constexpr int32_t kRounder = (127 + 23 + 1 - kBias - kMantissa) << 23;
  constexpr int32_t kSmallestNormal = (127 + 1 - kBias) << 23;
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const int32_t sign = (bits >> 24) & 0x80;
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t finite = magnitude < kLargest ? magnitude : kLargest;
  const int32_t normal =
      (finite + (1 << (kDropped - 1)) - 1 + ((finite >> kDropped) & 1) - ((127 - kBias) << 23)) >>
      kDropped;
  float tiny, rounder;
  std::memcpy(&tiny, &finite, sizeof(tiny));
  std::memcpy(&rounder, &kRounder, sizeof(rounder));
  tiny += rounder;
  int32_t subnormal;
  std::memcpy(&subnormal, &tiny, sizeof(subnormal));
  subnormal -= kRounder;
  const int32_t rounded = finite < kSmallestNormal ? subnormal : normal;
  return static_cast<uint8_t>(sign | (magnitude > 0x7f800000 ? 0x7f : rounded));
}

inline void narrow8(const float* from, Float8E4M3* to) {
  for (int i = 0; i < 8; ++i) to[i].bits = round_to_fp8<4, 3, 0x43e00000>(from[i]);  // 448
}
inline void narrow8(const float* from, Float8E5M2* to) {
  for (int i = 0; i < 8; ++i) to[i].bits = round_to_fp8<5, 2, 0x47600000>(from[i]);  // 57344
}

}  // namespace
}  // namespace paged_attn::cpu
