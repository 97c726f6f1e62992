#if defined(__x86_64__)

// GCC 12 finds its own _mm512_undefined_ps() uninitialised.
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cmath>
#include <cstdint>

#include "../isa.h"

// From here to the end of the file, after every header that other files include too.
#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif

// In this order: the kernels are written over Vec.
// clang-format off
#include "../vec_avx512.h"
#include "../decode_kernel.h"
// clang-format on

namespace paged_attn::cpu {
const Kernels kAvx512Kernels = make_kernels("avx512");
}  // namespace paged_attn::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
