// The ops on the CPU.
#include "../cpu/kernels.h"
#include "../cuda/decode/heuristics.h"
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

  static void write_kv(const char* op, const Tensor&, const WriteKvParams& params) {
    if (checks_enabled()) check_write_content(op, params);
    cpu::write_kv(params, threads());
  }

  static void append_decode(const DecodeArguments& arguments, const WriteKvParams& write,
                            const DecodeParams& params) {
    // Whatever the new tokens are written through, decode reads.
    if (checks_enabled()) check_decode_content(arguments.op, params);
    cpu::write_kv(write, threads());
    cpu::decode(params, threads());
  }

  static void copy_blocks(const CopyBlocksParams& params, const Tensor&) {
    if (checks_enabled()) {
      check_block_mapping_content("copy_blocks", params.block_mapping, params.num_pairs,
                                  params.num_blocks, params.num_blocks);
    }
    cpu::copy_blocks(params, threads());
  }

  static void swap_blocks(const SwapBlocksParams& params, const std::vector<BlockRun>& runs) {
    for (const SwapPair& pair : params.pairs) cpu::swap_blocks(pair, runs, threads());
  }

  static void merge_states(const MergeStatesParams& params, const Tensor&) {
    cpu::merge_states(params, threads());
  }
};

std::string cpu_isa() { return cpu::isa_name(); }

// What heuristics.h chooses for CUDA, for machines without a GPU too: DecodeConfig's fields in
// their order. A query_len of 0 stands for ragged queries, no tuning for that of cards without
// their own.
std::vector<int64_t> decode_config(int64_t element_bytes, int64_t cache_bytes, bool batch_invariant,
                                   int64_t batch_size, int64_t query_len, int64_t num_tokens,
                                   int64_t max_query_len, int64_t num_heads, int64_t num_kv_heads,
                                   int64_t head_dim, int64_t table_tokens, bool has_options,
                                   int64_t num_sms, int64_t shared_memory,
                                   const std::vector<int64_t>& tuning) {
  const int32_t any = 0;
  DecodeParams params{};
  params.dtype = element_bytes == 4 ? DType::kFloat32 : DType::kFloat16;
  params.cache_dtype = cache_bytes == 1 ? DType::kFloat8E4M3 : params.dtype;
  params.batch_invariant = batch_invariant;
  params.cu_seqlens_q = query_len == 0 ? &any : nullptr;
  params.batch_size = batch_size;
  params.query_len = query_len;
  params.num_tokens = num_tokens;
  params.max_query_len = max_query_len;
  params.num_heads = num_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim = head_dim;
  params.block_size = 1;
  params.max_blocks = table_tokens;
  params.causal = !has_options;
  cuda::DeviceLimits limits{};
  limits.num_sms = static_cast<int>(num_sms);
  limits.shared_memory_per_block = static_cast<int>(shared_memory);
  if (!tuning.empty()) limits.tuning = cuda::to_tuning(tuning);
  const cuda::DecodeConfig c = cuda::choose_decode_config(params, limits);
  return {static_cast<int>(c.variant),
          c.head_dim,
          c.rings,
          c.row_tiles,
          c.stages,
          c.head_lanes,
          c.token_lanes,
          c.grid,
          c.unit_blocks,
          c.min_tiles,
          c.unit_cost,
          c.line_shift,
          c.max_chunks,
          c.leaves,
          c.least_chunk_shift,
          c.has_state_buffers,
          c.has_unit_buffers,
          c.shared_bytes};
}

std::string tuning_names() { return cuda::tuning_names(); }

std::vector<int64_t> table_tuning(int64_t compute_capability, int64_t num_sms) {
  return cuda::to_list(
      cuda::tuning_of(static_cast<int>(compute_capability), static_cast<int>(num_sms)));
}

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  paged_attn::Ops<paged_attn::CpuBackend>::add_to(m);
}

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("_set_checks", TORCH_BOX(&paged_attn::set_checks));
  m.impl("_cpu_isa", TORCH_BOX(&paged_attn::cpu_isa));
  m.impl("_decode_config", TORCH_BOX(&paged_attn::decode_config));
  m.impl("_tuning_names", TORCH_BOX(&paged_attn::tuning_names));
  m.impl("_table_tuning", TORCH_BOX(&paged_attn::table_tuning));
}
