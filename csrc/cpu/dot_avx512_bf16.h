// bf16 dot products: 32 exact products, added to 16 fp32 sums, an instruction. Included by
// isa/avx512_bf16.cpp only.
#pragma once

#include "dot.h"

namespace paged_attn::cpu {
namespace {

template <>
struct Dot<BFloat16> {
  using Query = BFloat16;
  using Register = __m512bh;
  static constexpr int kStep = 32;

  static void store_query8(const BFloat16* from, Query* to) {
    __builtin_memcpy(to, from, 8 * sizeof(Query));
  }
  static Register load_query(const Query* p) { return load_key(p); }
  static Register load_key(const BFloat16* p) {
    return reinterpret_cast<Register>(_mm512_loadu_si512(p));
  }
  static Register load_key_tail(const BFloat16* p, int64_t n) {
    const __mmask32 mask = (static_cast<__mmask32>(1) << n) - 1;
    return reinterpret_cast<Register>(_mm512_maskz_loadu_epi16(mask, p));
  }
  static Vec accumulate(Register query, Register key, Vec sum) {
    return _mm512_dpbf16_ps(sum, query, key);
  }
};

}  // namespace
}  // namespace paged_attn::cpu
