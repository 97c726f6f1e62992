// From tensors to params: every argument is checked here, before anything is written. Bad arguments
// throw std::invalid_argument (ValueError in Python), bad content std::out_of_range (IndexError).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../params.h"
#include "stable_abi.h"

namespace paged_attn {

// decode's arguments as the schema orders them, for the four overloads.
struct DecodeArguments {
  const char* op;  // the name that error messages give
  const Tensor& q;
  const Tensor& k_cache;
  const Tensor& v_cache;
  const Tensor& block_tables;
  const Tensor& context_lens;
  const OptionalTensor& cu_seqlens_q;
  const OptionalTensor& alibi_slopes;
  const OptionalTensor& sinks;
  const OptionalTensor& k_scale;
  const OptionalTensor& v_scale;
  std::optional<double> scale;
  int64_t max_query_len;
  bool causal;
  int64_t window;
  double softcap;
  bool batch_invariant;
};

// Everything but out and lse, which check_decode_outputs adds.
DecodeParams check_decode(const DecodeArguments& arguments);
void check_decode_outputs(const DecodeArguments& arguments, const Tensor& out, const Tensor* lse,
                          DecodeParams& params);

WriteKvParams check_reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& k_cache,
                                      const Tensor& v_cache, const Tensor& slot_mapping,
                                      const OptionalTensor& k_scale, const OptionalTensor& v_scale);

// append_kv's arguments, and append_decode's first half.
struct AppendArguments {
  const char* op;
  const Tensor& key;
  const Tensor& value;
  const Tensor& k_cache;
  const Tensor& v_cache;
  const Tensor& block_tables;
  const Tensor& context_lens;
  const OptionalTensor& cu_seqlens_q;
  const OptionalTensor& k_scale;
  const OptionalTensor& v_scale;
};

WriteKvParams check_append_kv(const AppendArguments& arguments);
// That both halves speak of the same tokens.
void check_append_decode(const AppendArguments& append, const WriteKvParams& write, const Tensor& q,
                         const DecodeParams& decode);

// `pools` is what the params point to.
CopyBlocksParams check_copy_blocks(const std::vector<Tensor>& k_caches,
                                   const std::vector<Tensor>& v_caches, const Tensor& block_mapping,
                                   std::vector<BlockPool>& pools);

struct SwapDevices {
  DeviceId source;
  DeviceId destination;
};

struct SwapBlocksParams {
  std::vector<SwapPair> pairs;
  std::vector<SwapDevices> devices;  // of each pair
  const int64_t* block_mapping;      // [num_pairs, 2] of (source, destination), in host memory
  int64_t num_pairs;
  int64_t source_blocks;
  int64_t destination_blocks;
};

SwapBlocksParams check_swap_blocks(const std::vector<Tensor>& srcs, const std::vector<Tensor>& dsts,
                                   const Tensor& block_mapping);
// The mapping's pairs, neighbours joined, without those whose ids are bad.
std::vector<BlockRun> find_block_runs(const SwapBlocksParams& params);

// All but the results; `states` is what the params point to.
MergeStatesParams check_merge_states(const std::vector<Tensor>& outs,
                                     const std::vector<Tensor>& lses,
                                     std::vector<AttentionState>& states);

// Checks mode. On: before anything is written, tables, lengths and slots are looked through for
// entries that would otherwise give NaN rows or be skipped.
bool set_checks(bool enabled);  // returns the previous setting
bool checks_enabled();

// Throw std::out_of_range naming the first bad entry. The pointers in params are host pointers.
void check_decode_content(const char* op, const DecodeParams& params);
void check_write_content(const char* op, const WriteKvParams& params);
void check_block_mapping_content(const char* op, const int64_t* block_mapping, int64_t num_pairs,
                                 int64_t source_blocks, int64_t destination_blocks);

}  // namespace paged_attn
