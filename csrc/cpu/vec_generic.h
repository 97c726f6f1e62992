// Four floats in the compiler's vector extension: what every machine has.
#pragma once

#include <cstring>

namespace paged_attn::cpu {
namespace {

using Vec = float __attribute__((vector_size(16)));
using IntVec = int32_t __attribute__((vector_size(16)));
using ShortVec = uint16_t __attribute__((vector_size(8)));
using ByteVec = uint8_t __attribute__((vector_size(4)));
constexpr int kWidth = 4;

// Rows times tokens of logits, and rows times vectors of output, that are accumulated at once.
constexpr int tokens_at_once(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
constexpr int columns_at_once(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec as_float(IntVec bits) {
  Vec x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline IntVec as_int(Vec x) {
  IntVec bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
template <typename Elements>
inline IntVec load_bits(const void* p) {
  Elements bits;
  std::memcpy(&bits, p, sizeof(bits));
  return __builtin_convertvector(bits, IntVec);
}

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline Vec half_from_bits(IntVec bits) {
  const IntVec sign = (bits & 0x8000) << 16;
  const IntVec magnitude = bits & 0x7fff;
  const IntVec normal = (magnitude << 13) + ((127 - 15) << 23);
  // Subnormals: with the exponent of 2^-14 they are off by exactly that.
  const Vec offset = broadcast(6.103515625e-05f);
  const IntVec subnormal = as_int(as_float((magnitude << 13) + ((127 - 14) << 23)) - offset);
  const IntVec special = (magnitude << 13) | 0x7f800000;
  const IntVec is_subnormal = magnitude < 0x0400;
  const IntVec is_special = magnitude >= 0x7c00;
  return as_float(sign | (is_subnormal & subnormal) | (is_special & special) |
                  (~(is_subnormal | is_special) & normal));
}
inline Vec load(const Half* p) { return half_from_bits(load_bits<ShortVec>(p)); }
inline Vec load(const BFloat16* p) { return as_float(load_bits<ShortVec>(p) << 16); }
// fp8 takes the way over half, of which float8_e5m2 is the upper byte.
inline Vec load(const Float8E5M2* p) { return half_from_bits(load_bits<ByteVec>(p) << 8); }
inline Vec load(const Float8E4M3* p) {
  // One bit of exponent less than half, of a bias that is less by 8. All ones is its only NaN: one
  // more would carry into the bit that half has more.
  const IntVec bytes = load_bits<ByteVec>(p);
  const IntVec bits = (bytes & 0x80) << 8 | (bytes & 0x7f) << 7;
  return half_from_bits(bits | ((bits + 0x80) & 0x4000)) * broadcast(256.0f);
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof(x)); }

inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec select(IntVec mask, Vec a, Vec b) {
  return as_float((mask & as_int(a)) | (~mask & as_int(b)));
}
// b where either is NaN.
inline Vec max(Vec a, Vec b) { return select(a > b, a, b); }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) { return as_float(~(x < limit) & as_int(y)); }
// a where x < limit, else b.
inline Vec where_less(Vec x, Vec limit, Vec a, Vec b) { return select(x < limit, a, b); }
// 2^n, where n is an integer in [-126, 127] held in the low bits of x's mantissa.
inline Vec exponent_from_mantissa(Vec x) {
  // Unsigned: the bits above the exponent are shifted out.
  using UnsignedVec = uint32_t __attribute__((vector_size(16)));
  UnsignedVec bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, sizeof(power));
  return power;
}
// Where rest, what is left of a division, is not zero and the quotient's last bit is clear: the
// quotient's neighbour in the direction of rest.
inline Vec odd_where_inexact(Vec quotient, Vec rest) {
  const IntVec bits = as_int(quotient);
  const IntVec step = ((bits ^ as_int(rest)) >> 31) | 1;
  const IntVec inexact = (rest < 0.0f) | (rest > 0.0f);
  return as_float(bits + (step & inexact & ((bits & 1) - 1)));
}
inline Vec divide(Vec a, Vec b) { return a / b; }
inline Vec division_rest(Vec a, Vec quotient, Vec b) {
  // In double the product is exact.
  using DoubleVec = double __attribute__((vector_size(32)));
  const DoubleVec rest =
      __builtin_convertvector(a, DoubleVec) -
      __builtin_convertvector(quotient, DoubleVec) * __builtin_convertvector(b, DoubleVec);
  return __builtin_convertvector(rest, Vec);
}

inline float sum(Vec x) { return (x[0] + x[1]) + (x[2] + x[3]); }
inline float largest(Vec x) {
  const float low = x[0] > x[1] ? x[0] : x[1];
  const float high = x[2] > x[3] ? x[2] : x[3];
  return low > high ? low : high;
}
inline void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  p[0] = sum(a);
  p[1] = sum(b);
  p[2] = sum(c);
  p[3] = sum(d);
}

// Eight elements at a time: the step of every head dim.
template <typename T>
inline void widen8(const T* from, float* to) {
  store(to, load(from));
  store(to + 4, load(from + 4));
}

inline void narrow8(const float* from, float* to) { std::memcpy(to, from, 8 * sizeof(float)); }
inline void narrow8(const float* from, Half* to) {
  for (int i = 0; i < 8; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    const uint32_t sign = (bits >> 16) & 0x8000;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
      magnitude = 0x7e00;
    } else if (magnitude >= 0x477ff000) {  // rounds to 65536 or more
      magnitude = 0x7c00;
    } else if (magnitude >= 0x38800000) {
      magnitude = (magnitude + 0xfff + ((magnitude >> 13) & 1) - ((127 - 15) << 23)) >> 13;
    } else {
      // Subnormal: adding 0.5 makes the unit in the last place 2^-24, which is half's.
      float x;
      std::memcpy(&x, &magnitude, sizeof(x));
      x += 0.5f;
      std::memcpy(&magnitude, &x, sizeof(x));
      magnitude -= 0x3f000000;
    }
    to[i].bits = static_cast<uint16_t>(sign | magnitude);
  }
}
inline void narrow8(const float* from, BFloat16* to) {
  for (int i = 0; i < 8; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i].bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
}

}  // namespace
}  // namespace paged_attn::cpu
