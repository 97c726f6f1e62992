// The ops on the CPU.
#include "../cpu/kernels.h"
#include "ops.h"

namespace paged_attn {
namespace {

struct CpuBackend {
  static cpu::ThreadPool threads() {
    return {static_cast<int64_t>(torch::stable::get_num_threads()), run_on_torch_threads};
  }

  static void decode(const DecodeArguments& arguments, const DecodeParams& params) {
    if (checks_enabled()) check_decode_content(arguments.op, params);
    cpu::decode(params, threads());
  }

  static void reshape_and_cache(const ReshapeAndCacheParams& params, const Tensor&) {
    if (checks_enabled()) check_slots("reshape_and_cache", params);
    cpu::reshape_and_cache(params, threads());
  }
};

std::string cpu_isa() { return cpu::isa_name(); }

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  paged_attn::Ops<paged_attn::CpuBackend>::add_to(m);
}

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("_set_checks", TORCH_BOX(&paged_attn::set_checks));
  m.impl("_cpu_isa", TORCH_BOX(&paged_attn::cpu_isa));
}
