// The ops, once for both devices: arguments in, checked params to the backend, outputs back.
// A Backend is a struct with
//   static void decode(const DecodeArguments&, const DecodeParams&);
//   static void write_kv(const char* op, const Tensor& key, const WriteKvParams&);
//   static void append_decode(const DecodeArguments&, const WriteKvParams&, const DecodeParams&);
//   static void copy_blocks(const CopyBlocksParams&, const Tensor& block_mapping);
//   static void swap_blocks(const SwapBlocksParams&, const std::vector<BlockRun>&);
//   static void merge_states(const MergeStatesParams&, const Tensor& out);
// which look for bad content where checks are on, except swap_blocks, whose content is on the host.
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
    Backend::write_kv(
        "reshape_and_cache", key,
        check_reshape_and_cache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale));
  }

  static void append_kv(const Tensor& key, const Tensor& value, const Tensor& k_cache,
                        const Tensor& v_cache, const Tensor& block_tables,
                        const Tensor& context_lens, const OptionalTensor& cu_seqlens_q,
                        const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
    Backend::write_kv("append_kv", key,
                      check_append_kv({"append_kv", key, value, k_cache, v_cache, block_tables,
                                       context_lens, cu_seqlens_q, k_scale, v_scale}));
  }

  static Tensor append_decode(const Tensor& q, const Tensor& key, const Tensor& value,
                              const Tensor& k_cache, const Tensor& v_cache,
                              const Tensor& block_tables, const Tensor& context_lens,
                              const OptionalTensor& cu_seqlens_q,
                              const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                              const OptionalTensor& k_scale, const OptionalTensor& v_scale,
                              std::optional<double> scale, int64_t max_query_len, bool causal,
                              int64_t window, double softcap, bool batch_invariant) {
    constexpr const char* kOp = "append_decode";
    const DecodeArguments arguments{
        kOp,          q,       k_cache,        v_cache, block_tables, context_lens,  cu_seqlens_q,
        alibi_slopes, sinks,   k_scale,        v_scale, scale,        max_query_len, causal,
        window,       softcap, batch_invariant};
    const AppendArguments append{kOp,          key,          value,        k_cache, v_cache,
                                 block_tables, context_lens, cu_seqlens_q, k_scale, v_scale};
    DecodeParams params = check_decode(arguments);
    const WriteKvParams write = check_append_kv(append);
    check_append_decode(append, write, q, params);
    const Tensor out = empty_like(q);
    check_decode_outputs(arguments, out, nullptr, params);
    Backend::append_decode(arguments, write, params);
    return out;
  }

  static void copy_blocks(const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                          const Tensor& block_mapping) {
    std::vector<BlockPool> pools;
    const CopyBlocksParams params = check_copy_blocks(k_caches, v_caches, block_mapping, pools);
    if (!k_caches.empty()) Backend::copy_blocks(params, block_mapping);
  }

  static void swap_blocks(const std::vector<Tensor>& srcs, const std::vector<Tensor>& dsts,
                          const Tensor& block_mapping) {
    const SwapBlocksParams params = check_swap_blocks(srcs, dsts, block_mapping);
    if (checks_enabled() && !srcs.empty()) {
      check_block_mapping_content("swap_blocks", params.block_mapping, params.num_pairs,
                                  params.source_blocks, params.destination_blocks);
    }
    Backend::swap_blocks(params, find_block_runs(params));
  }

  static std::tuple<Tensor, Tensor> merge_states(const std::vector<Tensor>& outs,
                                                 const std::vector<Tensor>& lses) {
    std::vector<AttentionState> states;
    MergeStatesParams params = check_merge_states(outs, lses, states);
    Tensor out = empty_like(outs[0]);
    Tensor lse = empty_lse_like(outs[0]);
    params.out = out.data_ptr();
    params.lse = static_cast<float*>(lse.data_ptr());
    Backend::merge_states(params, out);
    return {out, lse};
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
    Tensor out = empty_like(arguments.q);
    if (lse != nullptr) *lse = empty_lse_like(arguments.q);
    check_decode_outputs(arguments, out, lse ? &**lse : nullptr, params);
    Backend::decode(arguments, params);
    return out;
  }

  static Tensor empty_like(const Tensor& q) {
    const auto sizes = q.sizes();
    return empty_on_device(q, {sizes.begin(), sizes.end()}, dtype_code(q));
  }

  static Tensor empty_lse_like(const Tensor& q) {
    const auto sizes = q.sizes();
    return empty_on_device(q, {sizes.begin(), sizes.end() - 1}, aoti_torch_dtype_float32());
  }
};

}  // namespace paged_attn
