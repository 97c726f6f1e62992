// From tensors to params: every argument is checked here, before anything is written. Bad arguments
// throw std::invalid_argument (ValueError in Python), bad content std::out_of_range (IndexError).
#pragma once

#include <optional>
#include <string>

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

ReshapeAndCacheParams check_reshape_and_cache(const Tensor& key, const Tensor& value,
                                              const Tensor& k_cache, const Tensor& v_cache,
                                              const Tensor& slot_mapping,
                                              const OptionalTensor& k_scale,
                                              const OptionalTensor& v_scale);

// Checks mode. On: before anything is written, tables, lengths and slots are looked through for
// entries that would otherwise give NaN rows or be skipped.
bool set_checks(bool enabled);  // returns the previous setting
bool checks_enabled();

// Throw std::out_of_range naming the first bad entry. The pointers in params are host pointers.
void check_decode_content(const char* op, const DecodeParams& params);
void check_slots(const char* op, const ReshapeAndCacheParams& params);

}  // namespace paged_attn
