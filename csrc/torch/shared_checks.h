// What the checks of several ops have in common.
#pragma once

#include "../params.h"
#include "argument.h"

namespace paged_attn {

DType check_float_dtype(const Argument& argument);
void check_head_dim(const Argument& argument, int64_t head_dim);

// The caches' dtype, after their shapes, dtypes and strides have been checked against those of
// `data`, q or key.
DType check_caches(const Argument& k_cache, const Argument& v_cache, const Argument& data,
                   int64_t head_dim);
CacheStrides cache_strides(const Argument& cache);
CacheScale check_scale(const char* op, const char* name, const OptionalTensor& tensor,
                       const Argument& data, int64_t num_kv_heads);

// Rows of tokens, [B, heads, D], [B, Q, heads, D] or ragged [T, heads, D]; `heads` names them.
struct TokenDims {
  bool has_query_dim;
  int64_t heads;  // index of the dimension of heads; D's is the next
};
TokenDims check_token_dims(const Argument& rows, const char* heads, bool is_ragged);
TokenStrides token_strides(const Argument& rows, TokenDims dims, bool is_ragged);

Sequences check_sequences(const Argument& rows, TokenDims dims, const Tensor& block_tables,
                          const Tensor& context_lens, const OptionalTensor& cu_seqlens_q);

}  // namespace paged_attn
