#include "checks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "shared_checks.h"

namespace paged_attn {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

// A vector of one value a query head.
const void* check_head_vector(const Argument& argument, const Argument& q, int64_t num_heads) {
  argument.expect_device_of(q);
  argument.expect_shape("[num_heads]", {num_heads});
  argument.expect_contiguous();
  return argument.data();
}

}  // namespace

DecodeParams check_decode(const DecodeArguments& a) {
  const Argument q(a.op, "q", a.q);
  const Argument k_cache(a.op, "k_cache", a.k_cache);
  const Argument v_cache(a.op, "v_cache", a.v_cache);
  const bool is_ragged = a.cu_seqlens_q.has_value();
  const TokenDims dims = check_token_dims(q, "num_heads", is_ragged);

  DecodeParams p{};
  p.dtype = check_float_dtype(q);
  p.head_dim = q.size(dims.heads + 1);
  check_head_dim(q, p.head_dim);
  q.expect_last_dim_contiguous();
  q.expect_aligned_rows();

  p.cache_dtype = check_caches(k_cache, v_cache, q, p.head_dim);
  p.num_blocks = k_cache.size(0);
  p.block_size = k_cache.size(1);
  p.num_kv_heads = k_cache.size(2);
  p.num_heads = q.size(dims.heads);
  if (p.num_heads < 1 || p.num_heads % p.num_kv_heads != 0) {
    q.fail("of a number of heads that is a multiple of k_cache's " +
               std::to_string(p.num_kv_heads) + " KV heads",
           q.shape());
  }

  static_cast<Sequences&>(p) =
      check_sequences(q, dims, a.block_tables, a.context_lens, a.cu_seqlens_q);

  const int64_t most_queries = is_ragged ? p.num_tokens : p.query_len;
  if (most_queries > kInt32Max / (p.num_heads / p.num_kv_heads)) {
    q.fail("of at most 2^31 - 1 query rows (query tokens x heads a KV head) a sequence", q.shape());
  }

  if (a.max_query_len < 0) {
    throw_bad_argument(a.op, "max_query_len", "0 (unknown) or more",
                       std::to_string(a.max_query_len));
  }
  if (a.window == 0) throw_bad_argument(a.op, "window", "negative (all keys) or at least 1", "0");
  p.softcap = static_cast<float>(a.softcap);
  if (!(a.softcap >= 0) || std::isinf(p.softcap) || (a.softcap > 0 && p.softcap == 0)) {
    throw_bad_argument(a.op, "softcap", "0 (off) or positive and finite in float32",
                       std::to_string(a.softcap));
  }
  if (a.scale && !std::isfinite(static_cast<float>(*a.scale))) {
    throw_bad_argument(a.op, "scale", "finite in float32", std::to_string(*a.scale));
  }
  if (!a.causal && a.window > 0) {
    throw_bad_argument(a.op, "window", "negative with causal=False", std::to_string(a.window));
  }
  p.causal = a.causal;
  p.window = a.window < 0 ? 0 : std::min(a.window, kInt32Max);
  p.batch_invariant = a.batch_invariant;
  if (a.alibi_slopes) {
    const Argument alibi_slopes(a.op, "alibi_slopes", *a.alibi_slopes);
    if (!a.causal) alibi_slopes.fail("None with causal=False", alibi_slopes.shape());
    alibi_slopes.expect_dtype(aoti_torch_dtype_float32());
    p.alibi_slopes = static_cast<const float*>(check_head_vector(alibi_slopes, q, p.num_heads));
  }
  if (a.sinks) {
    const Argument sinks(a.op, "sinks", *a.sinks);
    p.sinks_are_fp32 = sinks.dtype() == aoti_torch_dtype_float32();
    if (!p.sinks_are_fp32) sinks.expect_dtype(q.dtype());
    p.sinks = check_head_vector(sinks, q, p.num_heads);
  }
  p.k_scale = check_scale(a.op, "k_scale", a.k_scale, q, p.num_kv_heads);
  p.v_scale = check_scale(a.op, "v_scale", a.v_scale, q, p.num_kv_heads);

  p.q = q.data();
  p.k_cache = k_cache.data();
  p.v_cache = v_cache.data();
  p.q_strides = token_strides(q, dims, is_ragged);
  p.k_strides = cache_strides(k_cache);
  p.v_strides = cache_strides(v_cache);
  p.max_query_len = a.max_query_len;
  p.scale =
      static_cast<float>(a.scale ? *a.scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  return p;
}

void check_decode_outputs(const DecodeArguments& a, const Tensor& out_tensor,
                          const Tensor* lse_tensor, DecodeParams& p) {
  const Argument q(a.op, "q", a.q);
  const Argument out(a.op, "out", out_tensor);
  out.expect_device_of(q);
  out.expect_dtype(q.dtype());
  out.expect_shape_of(q, q.rank());
  out.expect_last_dim_contiguous();
  out.expect_no_overlap();
  p.out = out.data();
  p.out_strides = token_strides(out, {q.rank() == 4, q.rank() - 2}, p.cu_seqlens_q != nullptr);

  if (lse_tensor == nullptr) return;
  const Argument lse(a.op, "lse", *lse_tensor);
  lse.expect_device_of(q);
  lse.expect_dtype(aoti_torch_dtype_float32());
  lse.expect_shape_of(q, q.rank() - 1);
  lse.expect_contiguous();
  p.lse = lse.data_as<float>();
  p.lse_strides = {p.query_len * p.num_heads, p.num_heads, 1};
}

}  // namespace paged_attn
