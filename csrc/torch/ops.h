// The ops, once for both devices: arguments in, checked params to the backend, outputs back.
// A Backend is a struct with
//   static void decode(const DecodeArguments&, const DecodeParams&);
//   static void reshape_and_cache(const ReshapeAndCacheParams&, const Tensor& slot_mapping);
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "argument.h"
#include "checks.h"
#include "stable_abi.h"

namespace paged_attn {

template <typename Backend>
struct Ops {
  static Tensor decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& block_tables, const Tensor& context_lens,
                       const OptionalTensor& cu_seqlens_q, const OptionalTensor& alibi_slopes,
                       const OptionalTensor& sinks, const OptionalTensor& k_scale,
                       const OptionalTensor& v_scale, std::optional<double> scale,
                       int64_t max_query_len, bool causal, int64_t window, double softcap,
                       bool batch_invariant) {
    return allocate_and_run({"decode", q, k_cache, v_cache, block_tables, context_lens,
                             cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale, scale,
                             max_query_len, causal, window, softcap, batch_invariant});
  }

  static void decode_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                         const Tensor& block_tables, const Tensor& context_lens,
                         const OptionalTensor& cu_seqlens_q, const OptionalTensor& alibi_slopes,
                         const OptionalTensor& sinks, const OptionalTensor& k_scale,
                         const OptionalTensor& v_scale, std::optional<double> scale,
                         int64_t max_query_len, bool causal, int64_t window, double softcap,
                         bool batch_invariant, const Tensor& out) {
    run({"decode", q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q, alibi_slopes,
         sinks, k_scale, v_scale, scale, max_query_len, causal, window, softcap, batch_invariant},
        out, nullptr);
  }

  static std::tuple<Tensor, Tensor> decode_with_lse(
      const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_tables,
      const Tensor& context_lens, const OptionalTensor& cu_seqlens_q,
      const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
      const OptionalTensor& k_scale, const OptionalTensor& v_scale, std::optional<double> scale,
      int64_t max_query_len, bool causal, int64_t window, double softcap, bool batch_invariant) {
    std::optional<Tensor> lse;
    Tensor out =
        allocate_and_run({"decode_with_lse", q, k_cache, v_cache, block_tables, context_lens,
                          cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale, scale, max_query_len,
                          causal, window, softcap, batch_invariant},
                         &lse);
    return {out, *lse};
  }

  static void decode_with_lse_out(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                  const Tensor& block_tables, const Tensor& context_lens,
                                  const OptionalTensor& cu_seqlens_q,
                                  const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                  const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                                  std::optional<double> scale, int64_t max_query_len, bool causal,
                                  int64_t window, double softcap, bool batch_invariant,
                                  const Tensor& out, const Tensor& lse) {
    run({"decode_with_lse", q, k_cache, v_cache, block_tables, context_lens, cu_seqlens_q,
         alibi_slopes, sinks, k_scale, v_scale, scale, max_query_len, causal, window, softcap,
         batch_invariant},
        out, &lse);
  }

  static void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& k_cache,
                                const Tensor& v_cache, const Tensor& slot_mapping,
                                const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
    const ReshapeAndCacheParams params =
        check_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale);
    Backend::reshape_and_cache(params, slot_mapping);
  }

  static void append_kv(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                        const Tensor&, const OptionalTensor&, const OptionalTensor&,
                        const OptionalTensor&) {
    throw_not_supported("append_kv", "the op");
  }

  static Tensor append_decode(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, std::optional<double>, int64_t, bool, int64_t,
                              double, bool) {
    throw_not_supported("append_decode", "the op");
  }

  static void copy_blocks(const std::vector<Tensor>&, const std::vector<Tensor>&, const Tensor&) {
    throw_not_supported("copy_blocks", "the op");
  }

  static void swap_blocks(const std::vector<Tensor>&, const std::vector<Tensor>&, const Tensor&) {
    throw_not_supported("swap_blocks", "the op");
  }

  static std::tuple<Tensor, Tensor> merge_states(const std::vector<Tensor>&,
                                                 const std::vector<Tensor>&) {
    throw_not_supported("merge_states", "the op");
  }

  static void add_to(torch::stable::detail::StableLibrary& library) {
    library.impl("decode", TORCH_BOX(&decode));
    library.impl("decode.out", TORCH_BOX(&decode_out));
    library.impl("decode_with_lse", TORCH_BOX(&decode_with_lse));
    library.impl("decode_with_lse.out", TORCH_BOX(&decode_with_lse_out));
    library.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
    library.impl("append_kv", TORCH_BOX(&append_kv));
    library.impl("append_decode", TORCH_BOX(&append_decode));
    library.impl("copy_blocks", TORCH_BOX(&copy_blocks));
    library.impl("swap_blocks", TORCH_BOX(&swap_blocks));
    library.impl("merge_states", TORCH_BOX(&merge_states));
  }

 private:
  static void run(const DecodeArguments& arguments, const Tensor& out, const Tensor* lse) {
    DecodeParams params = check_decode(arguments);
    check_decode_outputs(arguments, out, lse, params);
    Backend::decode(arguments, params);
  }

  // lse is made too where the caller has a place for it.
  static Tensor allocate_and_run(const DecodeArguments& arguments,
                                 std::optional<Tensor>* lse = nullptr) {
    DecodeParams params = check_decode(arguments);
    const auto q_sizes = arguments.q.sizes();
    std::vector<int64_t> sizes(q_sizes.begin(), q_sizes.end());
    Tensor out = empty_on_device(arguments.q, sizes, dtype_code(arguments.q));
    if (lse != nullptr) {
      sizes.pop_back();
      *lse = empty_on_device(arguments.q, sizes, aoti_torch_dtype_float32());
    }
    check_decode_outputs(arguments, out, lse ? &**lse : nullptr, params);
    Backend::decode(arguments, params);
    return out;
  }
};

}  // namespace paged_attn
