// reshape_and_cache: new keys and values to their slots.
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace paged_attn::cpu {
namespace {

// Fewer bytes a thread than this are not worth waking it.
constexpr int64_t kBytesPerRange = 1 << 16;

struct Job {
  const ReshapeAndCacheParams* params;
  int64_t element_size;
  int64_t num_ranges;
};

int64_t slot_of(const ReshapeAndCacheParams& params, int64_t token) {
  if (params.slots_are_int64) return static_cast<const int64_t*>(params.slot_mapping)[token];
  return static_cast<const int32_t*>(params.slot_mapping)[token];
}

// One token's heads; strides in elements.
void copy_token(const char* from, int64_t from_head, char* to, int64_t to_head, int64_t num_heads,
                int64_t head_dim, int64_t element_size) {
  const bool packed = num_heads == 1 || (from_head == head_dim && to_head == head_dim);
  const int64_t copies = packed ? 1 : num_heads;
  const auto bytes = static_cast<size_t>(head_dim * element_size * (packed ? num_heads : 1));
  for (int64_t head = 0; head < copies; ++head) {
    std::memcpy(to + head * to_head * element_size, from + head * from_head * element_size, bytes);
  }
}

void copy_range(void* context, int64_t range) {
  const Job& job = *static_cast<const Job*>(context);
  const ReshapeAndCacheParams& p = *job.params;
  const int64_t size = job.element_size;
  const int64_t begin = p.num_tokens * range / job.num_ranges;
  const int64_t end = p.num_tokens * (range + 1) / job.num_ranges;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = slot_of(p, token);
    if (slot < 0 || slot / p.block_size >= p.num_blocks) continue;
    const int64_t block = slot / p.block_size;
    const int64_t offset = slot % p.block_size;
    const int64_t k_slot = (block * p.k_strides.block + offset * p.k_strides.slot) * size;
    const int64_t v_slot = (block * p.v_strides.block + offset * p.v_strides.slot) * size;
    copy_token(static_cast<const char*>(p.key) + token * p.key_token_stride * size,
               p.key_head_stride, static_cast<char*>(p.k_cache) + k_slot, p.k_strides.head,
               p.num_kv_heads, p.head_dim, size);
    copy_token(static_cast<const char*>(p.value) + token * p.value_token_stride * size,
               p.value_head_stride, static_cast<char*>(p.v_cache) + v_slot, p.v_strides.head,
               p.num_kv_heads, p.head_dim, size);
  }
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& params, const ThreadPool& threads) {
  if (params.num_tokens == 0 || params.num_blocks == 0) return;
  const int64_t element_size = params.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t bytes =
      2 * params.num_tokens * params.num_kv_heads * params.head_dim * element_size;
  const int64_t num_ranges = std::max<int64_t>(
      1, std::min({params.num_tokens, threads.num_threads, bytes / kBytesPerRange}));
  Job job{&params, element_size, num_ranges};
  if (num_ranges == 1) {
    copy_range(&job, 0);
  } else {
    threads.run(num_ranges, copy_range, &job);
  }
}

}  // namespace paged_attn::cpu
