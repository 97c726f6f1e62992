#include "checks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "argument.h"

namespace paged_attn {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

DType check_float_dtype(const Argument& argument) {
  if (argument.dtype() == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (argument.dtype() == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (argument.dtype() == aoti_torch_dtype_float32()) return DType::kFloat32;
  argument.fail("float16, bfloat16 or float32", dtype_name(argument.dtype()));
}

void check_head_dim(const Argument& argument, int64_t head_dim) {
  if (head_dim < 8 || head_dim > kMaxHeadDim || head_dim % 8 != 0) {
    argument.fail("of a head dim that is a multiple of 8 and at most 256", argument.shape());
  }
}

CacheStrides cache_strides(const Argument& cache) {
  return {cache.stride(0), cache.stride(1), cache.stride(2)};
}

// The caches' dtype, after their shapes, dtypes and strides have been checked against those of
// `data`, q or key.
DType check_caches(const Argument& k_cache, const Argument& v_cache, const Argument& data,
                   int64_t head_dim) {
  for (const Argument* cache : {&k_cache, &v_cache}) {
    if (cache->rank() != 4) {
      cache->fail("[num_blocks, block_size, num_kv_heads, head_dim]", cache->shape());
    }
    cache->expect_device_of(data);
  }
  if (k_cache.size(3) != head_dim) {
    k_cache.fail("of head dim " + std::to_string(head_dim), k_cache.shape());
  }
  if (k_cache.size(1) < 1 || k_cache.size(1) > kInt32Max) {
    k_cache.fail("of a block size from 1 to 2^31 - 1", k_cache.shape());
  }
  if (k_cache.size(2) < 1) k_cache.fail("of at least one KV head", k_cache.shape());
  v_cache.expect_shape_of(k_cache, 4);
  for (const Argument* cache : {&k_cache, &v_cache}) {
    cache->expect_last_dim_contiguous();
    cache->expect_aligned_rows();
  }
  const bool is_e4m3 = k_cache.dtype() == aoti_torch_dtype_float8_e4m3fn();
  const bool is_e5m2 = k_cache.dtype() == aoti_torch_dtype_float8_e5m2();
  if (!is_e4m3 && !is_e5m2) k_cache.expect_dtype(data.dtype());
  v_cache.expect_dtype(k_cache.dtype());
  if (!is_e4m3 && !is_e5m2) return check_float_dtype(k_cache);
  if (data.dtype() == aoti_torch_dtype_float32()) {
    data.fail("float16 or bfloat16 with an fp8 cache", "float32");
  }
  return is_e4m3 ? DType::kFloat8E4M3 : DType::kFloat8E5M2;
}

CacheScale check_scale(const char* op, const char* name, const OptionalTensor& tensor,
                       const Argument& data, int64_t num_kv_heads) {
  if (!tensor) return {nullptr, 0};
  const Argument scale(op, name, *tensor);
  scale.expect_device_of(data);
  scale.expect_dtype(aoti_torch_dtype_float32());
  const bool one_a_head = scale.rank() == 1 && scale.size(0) == num_kv_heads;
  if (!one_a_head && scale.rank() != 0 && !(scale.rank() == 1 && scale.size(0) == 1)) {
    scale.fail("[], [1] or [num_kv_heads] = [" + std::to_string(num_kv_heads) + "]", scale.shape());
  }
  scale.expect_contiguous();
  return {scale.data_as<float>(), one_a_head && num_kv_heads > 1 ? 1 : 0};
}

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
  const Argument block_tables(a.op, "block_tables", a.block_tables);
  const Argument context_lens(a.op, "context_lens", a.context_lens);
  const bool ragged = a.cu_seqlens_q.has_value();

  if (ragged && q.rank() != 3)
    q.fail("[num_tokens, num_heads, head_dim] with cu_seqlens_q", q.shape());
  if (q.rank() != 3 && q.rank() != 4) {
    q.fail("[batch, num_heads, head_dim] or [batch, query_len, num_heads, head_dim]", q.shape());
  }
  const bool has_query_dim = q.rank() == 4;
  const int64_t heads_dim = has_query_dim ? 2 : 1;

  DecodeParams p{};
  p.dtype = check_float_dtype(q);
  p.head_dim = q.size(heads_dim + 1);
  check_head_dim(q, p.head_dim);
  q.expect_last_dim_contiguous();
  q.expect_aligned_rows();

  p.cache_dtype = check_caches(k_cache, v_cache, q, p.head_dim);
  p.num_blocks = k_cache.size(0);
  p.block_size = k_cache.size(1);
  p.num_kv_heads = k_cache.size(2);
  p.num_heads = q.size(heads_dim);
  if (p.num_heads < 1 || p.num_heads % p.num_kv_heads != 0) {
    q.fail("of a number of heads that is a multiple of k_cache's " +
               std::to_string(p.num_kv_heads) + " KV heads",
           q.shape());
  }

  if (block_tables.rank() != 2) block_tables.fail("[batch, max_blocks]", block_tables.shape());
  block_tables.expect_device_of(q);
  block_tables.expect_dtype(aoti_torch_dtype_int32());
  block_tables.expect_last_dim_contiguous();
  if (block_tables.size(0) > kInt32Max) {
    block_tables.fail("of at most 2^31 - 1 sequences", block_tables.shape());
  }
  if (block_tables.size(1) > kInt32Max) {
    block_tables.fail("of at most 2^31 - 1 columns", block_tables.shape());
  }
  p.batch_size = block_tables.size(0);
  p.max_blocks = block_tables.size(1);
  context_lens.expect_device_of(q);
  context_lens.expect_dtype(aoti_torch_dtype_int32());
  context_lens.expect_shape("[batch]", {p.batch_size});
  context_lens.expect_contiguous();

  if (ragged) {
    const Argument cu_seqlens_q(a.op, "cu_seqlens_q", *a.cu_seqlens_q);
    cu_seqlens_q.expect_device_of(q);
    cu_seqlens_q.expect_dtype(aoti_torch_dtype_int32());
    cu_seqlens_q.expect_shape("[batch + 1]", {p.batch_size + 1});
    cu_seqlens_q.expect_contiguous();
    p.cu_seqlens_q = cu_seqlens_q.data_as<int32_t>();
    p.num_tokens = q.size(0);
  } else {
    if (q.size(0) != p.batch_size) {
      q.fail("of block_tables' batch size " + std::to_string(p.batch_size), q.shape());
    }
    p.query_len = has_query_dim ? q.size(1) : 1;
    p.num_tokens = p.batch_size * p.query_len;
  }

  const int64_t most_queries = ragged ? p.num_tokens : p.query_len;
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
  p.block_tables = block_tables.data_as<int32_t>();
  p.context_lens = context_lens.data_as<int32_t>();
  const int64_t q_token_dim = has_query_dim ? 1 : 0;
  p.q_strides = {ragged ? 0 : q.stride(0), q.stride(q_token_dim), q.stride(heads_dim)};
  p.k_strides = cache_strides(k_cache);
  p.v_strides = cache_strides(v_cache);
  p.table_stride = block_tables.stride(0);
  p.max_query_len = a.max_query_len;
  p.scale =
      static_cast<float>(a.scale ? *a.scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  return p;
}

void check_decode_outputs(const DecodeArguments& a, const Tensor& out_tensor,
                          const Tensor* lse_tensor, DecodeParams& p) {
  const Argument q(a.op, "q", a.q);
  const Argument out(a.op, "out", out_tensor);
  const bool has_query_dim = q.rank() == 4;
  out.expect_device_of(q);
  out.expect_dtype(q.dtype());
  out.expect_shape_of(q, q.rank());
  out.expect_last_dim_contiguous();
  out.expect_no_overlap();
  const int64_t batch_stride = p.cu_seqlens_q ? 0 : out.stride(0);
  p.out = out.data();
  p.out_strides = {batch_stride, out.stride(has_query_dim ? 1 : 0),
                   out.stride(has_query_dim ? 2 : 1)};

  if (lse_tensor == nullptr) return;
  const Argument lse(a.op, "lse", *lse_tensor);
  lse.expect_device_of(q);
  lse.expect_dtype(aoti_torch_dtype_float32());
  lse.expect_shape_of(q, q.rank() - 1);
  lse.expect_contiguous();
  p.lse = lse.data_as<float>();
  p.lse_strides = {p.query_len * p.num_heads, p.num_heads, 1};
}

ReshapeAndCacheParams check_reshape_and_cache(const Tensor& key_tensor, const Tensor& value_tensor,
                                              const Tensor& k_cache_tensor,
                                              const Tensor& v_cache_tensor,
                                              const Tensor& slot_mapping_tensor,
                                              const OptionalTensor& k_scale,
                                              const OptionalTensor& v_scale) {
  constexpr const char* kOp = "reshape_and_cache";
  const Argument key(kOp, "key", key_tensor);
  const Argument value(kOp, "value", value_tensor);
  const Argument k_cache(kOp, "k_cache", k_cache_tensor);
  const Argument v_cache(kOp, "v_cache", v_cache_tensor);
  const Argument slot_mapping(kOp, "slot_mapping", slot_mapping_tensor);

  if (key.rank() != 3) key.fail("[num_tokens, num_kv_heads, head_dim]", key.shape());
  ReshapeAndCacheParams p{};
  p.dtype = check_float_dtype(key);
  p.head_dim = key.size(2);
  check_head_dim(key, p.head_dim);
  value.expect_device_of(key);
  value.expect_dtype(key.dtype());
  value.expect_shape_of(key, 3);
  key.expect_last_dim_contiguous();
  value.expect_last_dim_contiguous();

  p.cache_dtype = check_caches(k_cache, v_cache, key, p.head_dim);
  k_cache.expect_no_overlap();
  v_cache.expect_no_overlap();
  p.num_blocks = k_cache.size(0);
  p.block_size = k_cache.size(1);
  p.num_kv_heads = k_cache.size(2);
  if (key.size(1) != p.num_kv_heads) {
    key.fail("of k_cache's " + std::to_string(p.num_kv_heads) + " KV heads", key.shape());
  }

  slot_mapping.expect_device_of(key);
  p.slots_are_int64 = slot_mapping.dtype() == aoti_torch_dtype_int64();
  if (!p.slots_are_int64 && slot_mapping.dtype() != aoti_torch_dtype_int32()) {
    slot_mapping.fail("int64 or int32", dtype_name(slot_mapping.dtype()));
  }
  if (slot_mapping.rank() != 1) slot_mapping.fail("[num_tokens]", slot_mapping.shape());
  slot_mapping.expect_contiguous();
  p.num_tokens = slot_mapping.size(0);
  if (p.num_tokens > key.size(0)) {
    slot_mapping.fail("no longer than key's " + std::to_string(key.size(0)) + " tokens",
                      slot_mapping.shape());
  }
  p.k_scale = check_scale(kOp, "k_scale", k_scale, key, p.num_kv_heads);
  p.v_scale = check_scale(kOp, "v_scale", v_scale, key, p.num_kv_heads);

  p.key = key.data();
  p.value = value.data();
  p.k_cache = k_cache.data();
  p.v_cache = v_cache.data();
  p.slot_mapping = slot_mapping.data();
  p.key_token_stride = key.stride(0);
  p.key_head_stride = key.stride(1);
  p.value_token_stride = value.stride(0);
  p.value_head_stride = value.stride(1);
  p.k_strides = cache_strides(k_cache);
  p.v_strides = cache_strides(v_cache);
  return p;
}

}  // namespace paged_attn
