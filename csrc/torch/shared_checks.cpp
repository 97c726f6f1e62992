#include "shared_checks.h"

#include <limits>
#include <string>

namespace paged_attn {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

}  // namespace

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
  return {cache.step(0), cache.step(1), cache.step(2)};
}

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
  const bool is_fp8 = is_e4m3 || k_cache.dtype() == aoti_torch_dtype_float8_e5m2();
  if (is_fp8 && data.dtype() == aoti_torch_dtype_float32()) {
    data.fail("float16 or bfloat16 with an fp8 cache", "float32");
  }
  if (!is_fp8 && k_cache.dtype() != data.dtype()) {
    const bool has_fp8 = data.dtype() != aoti_torch_dtype_float32();
    k_cache.fail(dtype_name(data.dtype()) + " as " + data.name() +
                     (has_fp8 ? ", or fp8 (float8_e4m3fn, float8_e5m2)" : ""),
                 dtype_name(k_cache.dtype()));
  }
  v_cache.expect_dtype(k_cache.dtype());
  if (is_fp8) return is_e4m3 ? DType::kFloat8E4M3 : DType::kFloat8E5M2;
  return check_float_dtype(k_cache);
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

TokenDims check_token_dims(const Argument& rows, const char* heads, bool is_ragged) {
  const std::string row = std::string(heads) + ", head_dim]";
  if (is_ragged && rows.rank() != 3) {
    rows.fail("[num_tokens, " + row + " with cu_seqlens_q", rows.shape());
  }
  if (rows.rank() != 3 && rows.rank() != 4) {
    rows.fail("[batch, " + row + " or [batch, query_len, " + row, rows.shape());
  }
  return {rows.rank() == 4, rows.rank() - 2};
}

TokenStrides token_strides(const Argument& rows, TokenDims dims, bool is_ragged) {
  return {is_ragged ? 0 : rows.step(0), rows.step(dims.has_query_dim ? 1 : 0),
          rows.step(dims.heads)};
}

Sequences check_sequences(const Argument& rows, TokenDims dims, const Tensor& block_tables_tensor,
                          const Tensor& context_lens_tensor,
                          const OptionalTensor& cu_seqlens_q_tensor) {
  const char* op = rows.op();
  const Argument block_tables(op, "block_tables", block_tables_tensor);
  const Argument context_lens(op, "context_lens", context_lens_tensor);
  if (block_tables.rank() != 2) block_tables.fail("[batch, max_blocks]", block_tables.shape());
  block_tables.expect_device_of(rows);
  block_tables.expect_dtype(aoti_torch_dtype_int32());
  block_tables.expect_last_dim_contiguous();
  if (block_tables.size(0) > kInt32Max) {
    block_tables.fail("of at most 2^31 - 1 sequences", block_tables.shape());
  }
  if (block_tables.size(1) > kInt32Max) {
    block_tables.fail("of at most 2^31 - 1 columns", block_tables.shape());
  }
  Sequences s{};
  s.batch_size = block_tables.size(0);
  s.max_blocks = block_tables.size(1);
  context_lens.expect_device_of(rows);
  context_lens.expect_dtype(aoti_torch_dtype_int32());
  context_lens.expect_shape("[batch of block_tables]", {s.batch_size});
  context_lens.expect_contiguous();
  if (cu_seqlens_q_tensor) {
    const Argument cu_seqlens_q(op, "cu_seqlens_q", *cu_seqlens_q_tensor);
    cu_seqlens_q.expect_device_of(rows);
    cu_seqlens_q.expect_dtype(aoti_torch_dtype_int32());
    cu_seqlens_q.expect_shape("[batch of block_tables + 1]", {s.batch_size + 1});
    cu_seqlens_q.expect_contiguous();
    s.cu_seqlens_q = cu_seqlens_q.data_as<int32_t>();
    s.num_tokens = rows.size(0);
  } else {
    if (rows.size(0) != s.batch_size) {
      rows.fail("of block_tables' batch size " + std::to_string(s.batch_size), rows.shape());
    }
    s.query_len = dims.has_query_dim ? rows.size(1) : 1;
    s.num_tokens = s.batch_size * s.query_len;
  }
  s.block_tables = block_tables.data_as<int32_t>();
  s.context_lens = context_lens.data_as<int32_t>();
  s.table_stride = block_tables.step(0);
  return s;
}

}  // namespace paged_attn
