// The checks of the ops that move cache data.
#include <algorithm>
#include <string>

#include "checks.h"
#include "shared_checks.h"

namespace paged_attn {
namespace {

// key, value and both caches, for whoever then says which token goes where.
WriteKvParams check_write_kv(const Argument& key, const Argument& value, const Argument& k_cache,
                             const Argument& v_cache, TokenDims dims, bool has_batch,
                             const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  WriteKvParams p{};
  p.dtype = check_float_dtype(key);
  p.head_dim = key.size(dims.heads + 1);
  check_head_dim(key, p.head_dim);
  value.expect_device_of(key);
  value.expect_dtype(key.dtype());
  value.expect_shape_of(key, key.rank());
  key.expect_last_dim_contiguous();
  value.expect_last_dim_contiguous();

  p.cache_dtype = check_caches(k_cache, v_cache, key, p.head_dim);
  k_cache.expect_no_overlap();
  v_cache.expect_no_overlap();
  p.num_blocks = k_cache.size(0);
  p.block_size = k_cache.size(1);
  p.num_kv_heads = k_cache.size(2);
  if (key.size(dims.heads) != p.num_kv_heads) {
    key.fail("of k_cache's " + std::to_string(p.num_kv_heads) + " KV heads", key.shape());
  }
  p.k_scale = check_scale(key.op(), "k_scale", k_scale, key, p.num_kv_heads);
  p.v_scale = check_scale(key.op(), "v_scale", v_scale, key, p.num_kv_heads);

  p.key = key.data();
  p.value = value.data();
  p.k_cache = k_cache.data();
  p.v_cache = v_cache.data();
  p.key_strides = token_strides(key, dims, !has_batch);
  p.value_strides = token_strides(value, dims, !has_batch);
  p.k_strides = cache_strides(k_cache);
  p.v_strides = cache_strides(v_cache);
  return p;
}

void check_list_length(const char* op, const char* name, const std::vector<Tensor>& list,
                       const char* other_name, const std::vector<Tensor>& other) {
  if (list.size() != other.size()) {
    throw_bad_argument(
        op, name,
        "as many tensors as " + std::string(other_name) + ", " + std::to_string(other.size()),
        std::to_string(list.size()));
  }
}

// [n, 2] pairs of block ids.
void check_block_mapping(const Argument& block_mapping) {
  block_mapping.expect_dtype(aoti_torch_dtype_int64());
  if (block_mapping.rank() != 2 || block_mapping.size(1) != 2) {
    block_mapping.fail("[num_pairs, 2]", block_mapping.shape());
  }
  block_mapping.expect_contiguous();
}

// A dimension, or several that are as one.
struct Extent {
  int64_t size;
  int64_t stride;
};

// How the elements of one block, [0, ...], lie in memory, from the widest extent to the narrowest,
// which is a run of contiguous elements.
std::vector<Extent> block_extents(const Argument& blocks) {
  std::vector<Extent> dims;
  for (int64_t i = 1; i < blocks.rank(); ++i) {
    if (blocks.size(i) != 1) dims.push_back({blocks.size(i), blocks.stride(i)});
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [](const Extent& a, const Extent& b) { return a.stride > b.stride; });
  dims.push_back({1, 1});
  std::vector<Extent> extents;
  for (const Extent& dim : dims) {
    if (!extents.empty() && extents.back().stride == dim.size * dim.stride) {
      extents.back() = {extents.back().size * dim.size, dim.stride};
    } else {
      extents.push_back(dim);
    }
  }
  return extents;
}

BlockPool block_pool(const Argument& cache) {
  const int64_t element = cache.element_bytes();
  std::vector<Extent> extents = block_extents(cache);
  // A cache has three dimensions beside the blocks: at most three extents.
  const Extent run = extents.back();
  extents.pop_back();
  BlockPool pool{cache.data_as<char>(), cache.step(0) * element, {1, 0, 1, 0, run.size * element}};
  if (!extents.empty()) {
    pool.layout.inner = extents.back().size;
    pool.layout.inner_stride = extents.back().stride * element;
    extents.pop_back();
  }
  if (!extents.empty()) {
    pool.layout.outer = extents.back().size;
    pool.layout.outer_stride = extents.back().stride * element;
  }
  return pool;
}

int64_t alignment_of(const BlockPool& pool) {
  const int64_t bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pool.data)) |
                       pool.block_stride | pool.layout.outer_stride | pool.layout.inner_stride |
                       pool.layout.run | 16;
  return bits & -bits;
}

// Dimensions [0, dims) as one: its stride, 0 if it has but one index.
int64_t leading_stride(const Argument& argument, int64_t dims) {
  int64_t stride = 0, size = 1;
  for (int64_t i = dims; i-- > 0;) {
    if (argument.size(i) == 1) continue;
    if (size > 1 && argument.stride(i) != size * stride) {
      argument.fail("a tensor whose dimensions before the heads are as one (view them so)",
                    argument.strides());
    }
    if (size == 1) stride = argument.stride(i);
    size *= argument.size(i);
  }
  return stride;
}

}  // namespace

WriteKvParams check_reshape_and_cache(const Tensor& key_tensor, const Tensor& value_tensor,
                                      const Tensor& k_cache_tensor, const Tensor& v_cache_tensor,
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
  WriteKvParams p =
      check_write_kv(key, value, k_cache, v_cache, {false, 1}, false, k_scale, v_scale);

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
  p.slot_mapping = slot_mapping.data();
  return p;
}

WriteKvParams check_append_kv(const AppendArguments& a) {
  const Argument key(a.op, "key", a.key);
  const Argument value(a.op, "value", a.value);
  const Argument k_cache(a.op, "k_cache", a.k_cache);
  const Argument v_cache(a.op, "v_cache", a.v_cache);
  const bool is_ragged = a.cu_seqlens_q.has_value();
  const TokenDims dims = check_token_dims(key, "num_kv_heads", is_ragged);
  WriteKvParams p =
      check_write_kv(key, value, k_cache, v_cache, dims, !is_ragged, a.k_scale, a.v_scale);
  static_cast<Sequences&>(p) =
      check_sequences(key, dims, a.block_tables, a.context_lens, a.cu_seqlens_q);
  return p;
}

void check_append_decode(const AppendArguments& append, const WriteKvParams& write,
                         const Tensor& q_tensor, const DecodeParams& decode) {
  const Argument q(append.op, "q", q_tensor);
  const Argument key(append.op, "key", append.key);
  key.expect_device_of(q);
  key.expect_dtype(q.dtype());
  if (write.num_tokens != decode.num_tokens || write.query_len != decode.query_len) {
    key.fail("of q's tokens, q being of shape " + q.shape(), key.shape());
  }
}

CopyBlocksParams check_copy_blocks(const std::vector<Tensor>& k_caches,
                                   const std::vector<Tensor>& v_caches,
                                   const Tensor& block_mapping_tensor,
                                   std::vector<BlockPool>& pools) {
  constexpr const char* kOp = "copy_blocks";
  check_list_length(kOp, "v_caches", v_caches, "k_caches", k_caches);
  const Argument block_mapping(kOp, "block_mapping", block_mapping_tensor);
  check_block_mapping(block_mapping);
  CopyBlocksParams p{};
  if (k_caches.empty()) return p;
  const Argument first(kOp, "k_caches", 0, k_caches[0]);
  block_mapping.expect_device_of(first);
  p.alignment = 16;
  pools.reserve(2 * k_caches.size());
  for (const auto* list : {&k_caches, &v_caches}) {
    const char* name = list == &k_caches ? "k_caches" : "v_caches";
    for (size_t i = 0; i < list->size(); ++i) {
      const Argument cache(kOp, name, static_cast<int64_t>(i), (*list)[i]);
      if (cache.rank() != 4) {
        cache.fail("[num_blocks, block_size, num_kv_heads, head_dim]", cache.shape());
      }
      cache.expect_device_of(first);
      cache.expect_dtype(first.dtype());
      cache.expect_shape_of(first, 4);
      cache.expect_last_dim_contiguous();
      cache.expect_no_overlap();
      p.num_blocks = cache.size(0);
      if (cache.num_elements() == 0) continue;
      pools.push_back(block_pool(cache));
      p.alignment = std::min(p.alignment, alignment_of(pools.back()));
    }
  }
  p.pools = pools.data();
  p.num_pools = static_cast<int64_t>(pools.size());
  p.block_mapping = block_mapping.data_as<int64_t>();
  p.num_pairs = block_mapping.size(0);
  return p;
}

SwapBlocksParams check_swap_blocks(const std::vector<Tensor>& srcs, const std::vector<Tensor>& dsts,
                                   const Tensor& block_mapping_tensor) {
  constexpr const char* kOp = "swap_blocks";
  check_list_length(kOp, "dsts", dsts, "srcs", srcs);
  const Argument block_mapping(kOp, "block_mapping", block_mapping_tensor);
  check_block_mapping(block_mapping);
  if (block_mapping.device().type != aoti_torch_device_type_cpu()) {
    block_mapping.fail("on the CPU", device_name(block_mapping.device()));
  }
  SwapBlocksParams p{};
  if (srcs.empty()) return p;
  const Argument first_src(kOp, "srcs", 0, srcs[0]), first_dst(kOp, "dsts", 0, dsts[0]);
  p.block_mapping = block_mapping.data_as<int64_t>();
  p.num_pairs = block_mapping.size(0);
  for (size_t i = 0; i < srcs.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const Argument src(kOp, "srcs", index, srcs[i]), dst(kOp, "dsts", index, dsts[i]);
    if (src.rank() < 1) src.fail("of blocks, its first dimension", "a scalar");
    src.expect_dtype(first_src.dtype());
    src.expect_shape_of(first_src, first_src.rank());
    dst.expect_dtype(src.dtype());
    if (dst.rank() < 1) dst.fail("of blocks, its first dimension", "a scalar");
    dst.expect_shape_of(first_dst, first_dst.rank());
    for (const Argument* argument : {&src, &dst}) {
      const int32_t type = argument->device().type;
      if (type != aoti_torch_device_type_cpu() && type != aoti_torch_device_type_cuda()) {
        argument->fail("on the CPU or a CUDA device", device_name(argument->device()));
      }
      if (argument->num_elements() > 0 && block_extents(*argument).size() != 1) {
        argument->fail("dense in memory within a block",
                       "strides " + argument->strides() + " for shape " + argument->shape());
      }
    }
    bool is_same = dst.rank() == src.rank();
    for (int64_t d = 1; is_same && d < src.rank(); ++d) is_same = dst.size(d) == src.size(d);
    if (!is_same) {
      dst.fail("of blocks like those of " + src.name() + ", " + src.shape(), dst.shape());
    }
    for (int64_t d = 1; is_same && d < src.rank(); ++d) is_same = dst.step(d) == src.step(d);
    if (!is_same) {
      dst.fail("of blocks with the strides of " + src.name() + "'s, " + src.strides(),
               dst.strides());
    }
    dst.expect_no_overlap();
    p.source_blocks = src.size(0);
    p.destination_blocks = dst.size(0);
    if (src.num_elements() == 0 || dst.num_elements() == 0) continue;
    const int64_t element = src.element_bytes();
    p.pairs.push_back({src.data_as<char>(), dst.data_as<char>(), src.step(0) * element,
                       dst.step(0) * element, src.num_elements() / src.size(0) * element});
    p.devices.push_back({src.device(), dst.device()});
  }
  return p;
}

std::vector<BlockRun> find_block_runs(const SwapBlocksParams& params) {
  std::vector<BlockRun> runs;
  for (int64_t i = 0; i < params.num_pairs; ++i) {
    const int64_t source = params.block_mapping[2 * i];
    const int64_t destination = params.block_mapping[2 * i + 1];
    if (source < 0 || source >= params.source_blocks || destination < 0 ||
        destination >= params.destination_blocks) {
      continue;
    }
    if (!runs.empty() && source == runs.back().source + runs.back().count &&
        destination == runs.back().destination + runs.back().count) {
      ++runs.back().count;
    } else {
      runs.push_back({source, destination, 1});
    }
  }
  return runs;
}

MergeStatesParams check_merge_states(const std::vector<Tensor>& outs,
                                     const std::vector<Tensor>& lses,
                                     std::vector<AttentionState>& states) {
  constexpr const char* kOp = "merge_states";
  check_list_length(kOp, "lses", lses, "outs", outs);
  if (outs.empty() || static_cast<int64_t>(outs.size()) > kMaxStates) {
    throw_bad_argument(kOp, "outs", "from 1 to " + std::to_string(kMaxStates) + " tensors",
                       std::to_string(outs.size()));
  }
  const Argument first(kOp, "outs", 0, outs[0]);
  MergeStatesParams p{};
  p.num_states = static_cast<int64_t>(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const Argument out(kOp, "outs", index, outs[i]), lse(kOp, "lses", index, lses[i]);
    const int64_t rank = out.rank();
    if (rank < 2) out.fail("[..., num_heads, head_dim]", out.shape());
    out.expect_device_of(first);
    lse.expect_device_of(first);
    p.dtype = check_float_dtype(out);
    out.expect_dtype(first.dtype());
    lse.expect_dtype(aoti_torch_dtype_float32());
    out.expect_shape_of(first, first.rank());
    lse.expect_shape_of(out, rank - 1);
    p.num_heads = out.size(rank - 2);
    p.head_dim = out.size(rank - 1);
    if (p.head_dim < 1) out.fail("of a head dim of at least 1", out.shape());
    p.num_tokens = 1;
    for (int64_t d = 0; d + 2 < rank; ++d) p.num_tokens *= out.size(d);
    out.expect_last_dim_contiguous();
    states.push_back(
        {out.data(), lse.data_as<float>(), 0, out.step(rank - 2), 0, lse.step(rank - 2)});
    if (out.num_elements() == 0) continue;
    states.back().out_token_stride = leading_stride(out, rank - 2);
    states.back().lse_token_stride = leading_stride(lse, rank - 2);
  }
  p.states = states.data();
  return p;
}

}  // namespace paged_attn
