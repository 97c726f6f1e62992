#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace paged_attn::cpu {
namespace {

// Best first.
std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> available;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) available.push_back(&kAvx512Bf16Kernels);
  if (avx512) available.push_back(&kAvx512Kernels);
  if (avx2) available.push_back(&kAvx2Kernels);
#endif
  available.push_back(&kGenericKernels);
  return available;
}

const Kernels* choose() {
  const std::vector<const Kernels*> available = available_kernels();
  const char* wanted = std::getenv("PAGED_ATTN_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return available.front();
  std::string names;
  for (const Kernels* candidate : available) {
    if (std::strcmp(candidate->name, wanted) == 0) return candidate;
    names += names.empty() ? candidate->name : std::string(", ") + candidate->name;
  }
  throw std::runtime_error("PAGED_ATTN_CPU_ISA must be one of " + names +
                           " (what this processor and build have), got " + wanted);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* const chosen = choose();
  return *chosen;
}

const char* isa_name() { return kernels().name; }

}  // namespace paged_attn::cpu
