// Sixteen floats in an AVX-512 register. Included by isa/avx512*.cpp only.
#pragma once

namespace paged_attn::cpu {
namespace {

using Vec = __m512;
constexpr int kWidth = 16;

// Rows times tokens of logits, and rows times vectors of output, that are accumulated at once:
// at least 8 chains hide the latency of two FMAs a cycle, and 32 registers hold no more than 24.
constexpr int tokens_at_once(int rows) { return rows <= 2 ? 8 : 4; }
constexpr int columns_at_once(int rows) { return rows == 1 ? 8 : 4; }

inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
// fp8 takes the way over half, of which float8_e5m2 is the upper byte.
inline Vec widen_e5m2(__m128i bytes) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
}
inline Vec widen_e4m3(__m128i bytes) {
  // One bit of exponent less than half, of a bias that is less by 8. All ones is its only NaN: one
  // more would carry into the bit that half has more.
  const __m256i sign_and_magnitude = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  const __m256i bits =
      _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), sign_and_magnitude);
  const __m256i carry =
      _mm256_and_si256(_mm256_add_epi16(bits, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(bits, carry)), _mm512_set1_ps(256.0f));
}
inline Vec load(const Float8E5M2* p) {
  return widen_e5m2(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const Float8E4M3* p) {
  return widen_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }

// The last eight elements of a head dim that is an odd multiple of eight; zeros above.
inline Vec load_low8(const float* p) { return _mm512_maskz_loadu_ps(0xff, p); }
inline Vec load_low8(const Half* p) {
  return _mm512_cvtph_ps(
      _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_low8(const BFloat16* p) {
  const __m256i bits = _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec load_low8(const Float8E5M2* p) {
  return widen_e5m2(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_low8(const Float8E4M3* p) {
  return widen_e4m3(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// b where either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec zero_where_less(Vec x, Vec limit, Vec y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), y);
}
// a where x < limit, else b.
inline Vec where_less(Vec x, Vec limit, Vec a, Vec b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), a);
}
// 2^n, where n is an integer in [-126, 127] held in the low bits of x's mantissa.
inline Vec exponent_from_mantissa(Vec x) {
  const __m512i n = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
}
// Where rest, what is left of a division, is not zero and the quotient's last bit is clear: the
// quotient's neighbour in the direction of rest.
inline Vec odd_where_inexact(Vec quotient, Vec rest) {
  const __m512i bits = _mm512_castps_si512(quotient);
  const __m512i one = _mm512_set1_epi32(1);
  const __m512i differ = _mm512_castps_si512(_mm512_xor_ps(quotient, rest));
  const __m512i step = _mm512_or_si512(_mm512_srai_epi32(differ, 31), one);
  const __mmask16 inexact = _mm512_cmp_ps_mask(rest, _mm512_setzero_ps(), _CMP_NEQ_OQ);
  const __mmask16 is_even = _mm512_testn_epi32_mask(bits, one);
  return _mm512_castsi512_ps(_mm512_mask_add_epi32(bits, inexact & is_even, bits, step));
}
inline Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec division_rest(Vec a, Vec quotient, Vec b) { return _mm512_fnmadd_ps(quotient, b, a); }

inline __m256 add_halves(Vec x) {
  return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
}
inline void store_sums(float* p, Vec a, Vec b, Vec c, Vec d) {
  const __m256 ab = _mm256_hadd_ps(add_halves(a), add_halves(b));
  const __m256 cd = _mm256_hadd_ps(add_halves(c), add_halves(d));
  const __m256 pairs = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }

// Eight elements at a time: the step of every head dim.
inline void widen8(const float* from, float* to) { _mm256_storeu_ps(to, _mm256_loadu_ps(from)); }
inline void widen8(const Half* from, float* to) {
  _mm256_storeu_ps(to, _mm512_castps512_ps256(load_low8(from)));
}
inline void widen8(const BFloat16* from, float* to) {
  _mm256_storeu_ps(to, _mm512_castps512_ps256(load_low8(from)));
}
inline void narrow8(const float* from, float* to) { _mm256_storeu_ps(to, _mm256_loadu_ps(from)); }
inline void narrow8(const float* from, Half* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}
inline void narrow8(const float* from, BFloat16* to) {
  const __m256 x = _mm256_loadu_ps(from);
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __mmask8 is_nan = _mm256_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m256i result = _mm256_mask_mov_epi32(rounded, is_nan, _mm256_set1_epi32(0x7fc0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtepi32_epi16(result));
}

}  // namespace
}  // namespace paged_attn::cpu
