// Division by a number that only the host knows, as a multiplication. Source: Granlund and
// Montgomery, "Division by invariant integers using multiplication", PLDI 1994, figure 4.1.
#pragma once

#include <cstdint>
#include <initializer_list>

#ifdef __CUDACC__
#define PAGED_ATTN_HOST_DEVICE __host__ __device__
#else
#define PAGED_ATTN_HOST_DEVICE
#endif

namespace paged_attn::cuda {

struct Divisor {
  uint32_t multiplier;
  uint32_t shift;

  Divisor() = default;
  // 1 <= d < 2^31.
  constexpr explicit Divisor(int64_t d) : multiplier(0), shift(0) {
    while (int64_t{1} << shift < d) ++shift;
    multiplier = static_cast<uint32_t>(((((int64_t{1} << shift) - d) << 32) / d) + 1);
  }

  // n / d, rounded down, for 0 <= n < 2^31.
  constexpr PAGED_ATTN_HOST_DEVICE int32_t quotient(int32_t n) const {
    const auto m = static_cast<uint32_t>(n);
    const auto high = static_cast<uint32_t>((static_cast<uint64_t>(m) * multiplier) >> 32);
    return static_cast<int32_t>((high + m) >> shift);
  }
};

// Of a power of 2.
constexpr PAGED_ATTN_HOST_DEVICE int log2_of(int power) {
  int log2 = 0;
  while (1 << log2 < power) ++log2;
  return log2;
}

// Checked where it is compiled: quotients next to multiples, small and large.
constexpr bool divides_like(int64_t d) {
  const Divisor divisor(d);
  for (int64_t near :
       {int64_t{0}, d, 7 * d, 1000 * d, (int64_t{1} << 30) / d * d, 0x7fffffff / d * d}) {
    for (int64_t n = near - 1; n <= near + 1; ++n) {
      if (n < 0 || n > 0x7fffffff) continue;
      if (divisor.quotient(static_cast<int32_t>(n)) != n / d) return false;
    }
  }
  return true;
}
static_assert(divides_like(1) && divides_like(2) && divides_like(3) && divides_like(5) &&
              divides_like(7) && divides_like(12) && divides_like(16) && divides_like(71) &&
              divides_like(127) && divides_like(4097) && divides_like(0x40000001) &&
              divides_like(0x7fffffff));

}  // namespace paged_attn::cuda
