// For any machine: what the compiler makes of vector extensions on its baseline.
#include <cmath>
#include <cstdint>

#include "../isa.h"

// In this order: the kernels are written over Vec.
// clang-format off
#include "../vec_generic.h"
#include "../decode_kernel.h"
// clang-format on

namespace paged_attn::cpu {
const Kernels kGenericKernels = make_kernels("generic");
}  // namespace paged_attn::cpu
