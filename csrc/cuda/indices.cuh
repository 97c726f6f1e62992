// Loops over indices of 64 bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode/heuristics.h"

namespace paged_attn::cuda {

constexpr int kThreads = 256;

// Blocks for `total` items, one a thread in each of its rounds: enough to fill the device while
// others end, and where there are more, few rounds each.
inline unsigned blocks_for(int64_t total, const DeviceLimits& limits) {
  constexpr int64_t kRounds = 4, kMostBlocks = 1 << 30;
  const int64_t one_round = (total + kThreads - 1) / kThreads;
  const int64_t blocks = std::max((one_round + kRounds - 1) / kRounds,
                                  std::min<int64_t>(one_round, 8 * int64_t{limits.num_sms}));
  return static_cast<unsigned>(std::min(blocks, kMostBlocks));
}

// n / d for n >= 0, d >= 1. NOTE: 64 bits wide a division takes a hundred instructions, four times
// as many as 32 bits wide, and nearly all indices fit in those.
__device__ __forceinline__ int64_t quotient(int64_t n, int64_t d) {
  if (((n | d) >> 32) == 0) return static_cast<uint32_t>(n) / static_cast<uint32_t>(d);
  return n / d;
}

// The same by a number that the host knows, as a multiplication. Source: Granlund and Montgomery,
// "Division by invariant integers using multiplication", PLDI 1994, theorem 4.2 with N = 63.
struct IndexDivisor {
  uint64_t multiplier;  // 2^(63 + shift) / d, rounded to the next integer above
  int shift;            // the least with 2^shift >= d

  IndexDivisor() = default;
  explicit IndexDivisor(int64_t d) : shift(0) {
    while (int64_t{1} << shift < d) ++shift;
    multiplier = static_cast<uint64_t>((static_cast<unsigned __int128>(1) << (63 + shift)) / d + 1);
  }

  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    return static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(n) << 1, multiplier) >> shift);
  }
};

}  // namespace paged_attn::cuda
