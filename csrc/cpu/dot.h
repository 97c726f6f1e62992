// How q and K meet: in fp32, unless the instruction set has something better for K's type.
// Included by the isa files only, through decode_kernel.h.
#pragma once

namespace paged_attn::cpu {
namespace {

template <typename T>
struct Dot {
  using Query = float;
  using Register = Vec;
  static constexpr int kStep = kWidth;

  template <typename Element>
  static void store_query8(const Element* from, Query* to) {
    widen8(from, to);
  }
  static Register load_query(const Query* p) { return load(p); }
  static Register load_key(const T* p) { return load(p); }
  // The last elements, fewer than kStep, of a key whose head dim is not a multiple of it.
  static Register load_key_tail(const T* p, [[maybe_unused]] int64_t n) {
    if constexpr (kWidth > 8) {
      return load_low8(p);
    } else {
      return load(p);
    }
  }
  static Vec accumulate(Register query, Register key, Vec sum) { return fma(query, key, sum); }
};

}  // namespace
}  // namespace paged_attn::cpu
