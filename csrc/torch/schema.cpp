// Every op's schema, once. Tensors are positional because DTensor cannot propagate keyword tensors;
// the rest is keyword-only.
#include <string>

#include "stable_abi.h"

namespace paged_attn {
namespace {

constexpr const char* kDecodeArguments =
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens, "
    "Tensor? cu_seqlens_q=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, *, float? scale=None, SymInt max_query_len=0, "
    "bool causal=True, SymInt window=-1, float softcap=0.0, bool batch_invariant=False";

constexpr const char* kAppendDecodeArguments =
    "Tensor q, Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor block_tables, Tensor context_lens, Tensor? cu_seqlens_q=None, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, "
    "*, float? scale=None, SymInt max_query_len=0, bool causal=True, SymInt window=-1, "
    "float softcap=0.0, bool batch_invariant=False";

std::string schema(const char* name, const char* arguments, const char* returns) {
  return std::string(name) + "(" + arguments + ") -> " + returns;
}

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY(paged_attn, m) {
  using paged_attn::kAppendDecodeArguments;
  using paged_attn::kDecodeArguments;
  using paged_attn::schema;
  const std::string decode_out = std::string(kDecodeArguments) + ", Tensor(a!) out";
  const std::string decode_lse_out = decode_out + ", Tensor(b!) lse";
  m.def(schema("decode", kDecodeArguments, "Tensor").c_str());
  m.def(schema("decode.out", decode_out.c_str(), "()").c_str());
  m.def(schema("decode_with_lse", kDecodeArguments, "(Tensor out, Tensor lse)").c_str());
  m.def(schema("decode_with_lse.out", decode_lse_out.c_str(), "()").c_str());
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor slot_mapping, Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(
      "append_kv(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor block_tables, Tensor context_lens, Tensor? cu_seqlens_q=None, "
      "Tensor? k_scale=None, Tensor? v_scale=None) -> ()");
  m.def(schema("append_decode", kAppendDecodeArguments, "Tensor").c_str());
  m.def("copy_blocks(Tensor(a!)[] k_caches, Tensor(b!)[] v_caches, Tensor block_mapping) -> ()");
  m.def("swap_blocks(Tensor[] srcs, Tensor(a!)[] dsts, Tensor block_mapping) -> ()");
  m.def("merge_states(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)");
  m.def("_set_checks(bool enabled) -> bool");
  m.def("_cpu_isa() -> str");
  m.def(
      "_decode_config(int element_bytes, int cache_bytes, bool batch_invariant, int batch_size, "
      "int query_len, int num_tokens, int max_query_len, int num_heads, int num_kv_heads, "
      "int head_dim, int table_tokens, bool has_options, int num_sms, int shared_memory, "
      "int[] tuning=[]) -> int[]");
  m.def("_tuning_names() -> str");
  m.def("_table_tuning(int compute_capability, int num_sms) -> int[]");
}
