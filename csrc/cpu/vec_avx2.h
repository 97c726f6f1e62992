// Eight floats in an AVX2 register. Included by isa/avx2.cpp only.
#pragma once

namespace paged_attn::cpu {
namespace {

using Vec = __m256;
constexpr int kWidth = 8;

// Rows times tokens of logits, and rows times vectors of output, that are accumulated at once:
// at least 8 chains hide the latency of two FMAs a cycle, and 16 registers hold no more than 12.
constexpr int tokens_at_once(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }
constexpr int columns_at_once(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline Vec load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const BFloat16* p) {
  // One shuffle, where widening and shifting would be two steps: the low half takes elements 0 to 3
  // of the eight, the high half 4 to 7, each into the upper bytes of a float.
  const __m256i bits =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i places =
      _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1, -1,
                       10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
  return _mm256_castsi256_ps(_mm256_shuffle_epi8(bits, places));
}
// fp8 takes the way over half, of which float8_e5m2 is the upper byte.
inline __m128i load_fp8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline Vec load(const Float8E5M2* p) {
  return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), load_fp8(p)));
}
inline Vec load(const Float8E4M3* p) {
  // One bit of exponent less than half, of a bias that is less by 8. All ones is its only NaN: one
  // more would carry into the bit that half has more.
  const __m128i sign_and_magnitude = _mm_set1_epi16(static_cast<int16_t>(0xbf80));
  const __m128i bits =
      _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(load_fp8(p)), 7), sign_and_magnitude);
  const __m128i carry =
      _mm_and_si128(_mm_add_epi16(bits, _mm_set1_epi16(0x80)), _mm_set1_epi16(0x4000));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(bits, carry)), _mm256_set1_ps(256.0f));
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }

inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// b where either is NaN.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), y);
}
// a where x < limit, else b.
inline Vec where_less(Vec x, Vec limit, Vec a, Vec b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
// 2^n, where n is an integer in [-126, 127] held in the low bits of x's mantissa.
inline Vec exponent_from_mantissa(Vec x) {
  const __m256i n = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
// Where rest, what is left of a division, is not zero and the quotient's last bit is clear: the
// quotient's neighbour in the direction of rest.
inline Vec odd_where_inexact(Vec quotient, Vec rest) {
  const __m256i bits = _mm256_castps_si256(quotient);
  const __m256i one = _mm256_set1_epi32(1);
  const __m256i differ = _mm256_castps_si256(_mm256_xor_ps(quotient, rest));
  const __m256i step = _mm256_or_si256(_mm256_srai_epi32(differ, 31), one);
  const __m256i inexact =
      _mm256_castps_si256(_mm256_cmp_ps(rest, _mm256_setzero_ps(), _CMP_NEQ_OQ));
  const __m256i is_odd = _mm256_cmpeq_epi32(_mm256_and_si256(bits, one), one);
  return _mm256_castsi256_ps(
      _mm256_add_epi32(bits, _mm256_and_si256(step, _mm256_andnot_si256(is_odd, inexact))));
}
inline Vec divide(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec division_rest(Vec a, Vec quotient, Vec b) { return _mm256_fnmadd_ps(quotient, b, a); }

inline __m128 add_halves(Vec x) {
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
inline void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  const Vec pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(p, add_halves(pairs));
}
inline float sum(Vec x) {
  __m128 y = add_halves(x);
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float largest(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// Eight elements at a time: the step of every head dim.
inline void widen8(const float* from, float* to) { store(to, load(from)); }
inline void widen8(const Half* from, float* to) { store(to, load(from)); }
inline void widen8(const BFloat16* from, float* to) { store(to, load(from)); }
inline void narrow8(const float* from, float* to) { store(to, load(from)); }
inline void narrow8(const float* from, Half* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(load(from), _MM_FROUND_TO_NEAREST_INT));
}
inline void narrow8(const float* from, BFloat16* to) {
  const Vec x = load(from);
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}

}  // namespace
}  // namespace paged_attn::cpu
