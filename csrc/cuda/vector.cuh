// Elements side by side, and their conversions: to fp32 exactly, from it to the nearest, ties to
// even; to fp8 saturating, NaN staying NaN.
#pragma once

#include <cuda_fp8.h>

#include <cstring>

#include "conversions.cuh"

namespace paged_attn::cuda {

template <typename T, int kElements>
struct alignas(sizeof(T) * kElements) Vector {
  T elements[kElements];
};

// NOTE: an array of elements is stored in one instruction only as a word, and by name.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using Type = uint4;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<4> {
  using Type = unsigned int;
};
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<1> {
  using Type = unsigned char;
};

template <int kElements, typename T>
__device__ __forceinline__ Vector<T, kElements> load_vector(const T* from) {
  Vector<T, kElements> vector;
  const auto word = __ldcg(reinterpret_cast<const typename WordOf<sizeof(vector)>::Type*>(from));
  memcpy(&vector, &word, sizeof(vector));
  return vector;
}

template <int kElements, typename T>
__device__ __forceinline__ void store_vector(const Vector<T, kElements>& vector, T* to) {
  typename WordOf<sizeof(vector)>::Type word;
  memcpy(&word, &vector, sizeof(vector));
  __stwb(reinterpret_cast<decltype(word)*>(to), word);
}

template <__nv_fp8_interpretation_t kKind, typename Fp8, int kElements>
__device__ __forceinline__ void store_fp8(const float* x, Vector<Fp8, kElements>& to) {
  if constexpr (kElements == 1) {
    to.elements[0].__x = __nv_cvt_float_to_fp8(x[0], __NV_SATFINITE, kKind);
  } else {
    // The instruction converts two.
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const auto pair =
          __nv_cvt_float2_to_fp8x2(make_float2(x[i], x[i + 1]), __NV_SATFINITE, kKind);
      memcpy(to.elements + i, &pair, sizeof(pair));
    }
  }
}

template <int kElements>
__device__ __forceinline__ void store(const float* x, Vector<__nv_fp8_e4m3, kElements>& to) {
  store_fp8<__NV_E4M3>(x, to);
}
template <int kElements>
__device__ __forceinline__ void store(const float* x, Vector<__nv_fp8_e5m2, kElements>& to) {
  store_fp8<__NV_E5M2>(x, to);
}
template <typename T, int kElements>
__device__ __forceinline__ void store(const float* x, Vector<T, kElements>& to) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) store(x[i], to.elements[i]);
}

}  // namespace paged_attn::cuda
