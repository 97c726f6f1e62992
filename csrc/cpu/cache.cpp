// reshape_and_cache and append_kv: new keys and values to their slots.
#include <algorithm>
#include <cstring>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_attn::cpu {
namespace {

// Where position `position` of sequence b is, or -1.
int64_t slot_of_position(const WriteKvParams& p, int64_t b, int64_t position) {
  if (position < 0 || position / p.block_size >= p.max_blocks) return -1;
  const int64_t block = p.block_tables[b * p.table_stride + position / p.block_size];
  if (block < 0 || block >= p.num_blocks) return -1;
  return block * p.block_size + position % p.block_size;
}

// The slot of every token; -1 where none is to be written.
std::vector<int64_t> find_slots(const WriteKvParams& p) {
  std::vector<int64_t> slots(static_cast<size_t>(p.num_tokens), -1);
  if (p.slot_mapping != nullptr) {
    const auto copy = [&](const auto* mapping) {
      std::copy(mapping, mapping + p.num_tokens, slots.begin());
    };
    if (p.slots_are_int64) {
      copy(static_cast<const int64_t*>(p.slot_mapping));
    } else {
      copy(static_cast<const int32_t*>(p.slot_mapping));
    }
    for (int64_t& slot : slots) slot = slot / p.block_size < p.num_blocks ? slot : -1;
    return slots;
  }
  const auto fill = [&](int64_t b, int64_t first_token, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      slots[first_token + t] = slot_of_position(p, b, p.context_lens[b] - count + t);
    }
  };
  if (p.cu_seqlens_q == nullptr) {
    for (int64_t b = 0; b < p.batch_size; ++b) fill(b, b * p.query_len, p.query_len);
    return slots;
  }
  // Rows belong to sequences as in decode: between the running maxima of the clamped entries; an
  // entry that differs from its maximum is bad.
  const auto clamped = [&](int64_t b) {
    return std::clamp<int64_t>(p.cu_seqlens_q[b], 0, p.num_tokens);
  };
  int64_t begin = clamped(0);
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const int64_t end = std::max(begin, clamped(b + 1));
    if (p.cu_seqlens_q[b] == begin && p.cu_seqlens_q[b + 1] == end) fill(b, begin, end - begin);
    begin = end;
  }
  return slots;
}

// One of key and value, and the cache that it goes to.
struct Side {
  const char* data;
  char* cache;
  TokenStrides strides;
  CacheStrides cache_strides;
  CacheScale scale;
};

void copy_token(const WriteKvParams& p, const Side& side, const char* from, char* to) {
  const int64_t size = element_bytes(p.dtype);
  const int64_t head_bytes = p.head_dim * size;
  const int64_t from_head = side.strides.head * size, to_head = side.cache_strides.head * size;
  const bool packed = p.num_kv_heads == 1 || (from_head == head_bytes && to_head == head_bytes);
  const int64_t copies = packed ? 1 : p.num_kv_heads;
  const auto bytes = static_cast<size_t>(packed ? head_bytes * p.num_kv_heads : head_bytes);
  for (int64_t head = 0; head < copies; ++head) {
    std::memcpy(to + head * to_head, from + head * from_head, bytes);
  }
}

void convert_token(const WriteKvParams& p, const Side& side, const char* from, char* to) {
  const auto convert_row =
      kernels().convert_row[static_cast<size_t>(p.cache_dtype)][static_cast<size_t>(p.dtype)];
  const int64_t from_head = side.strides.head * element_bytes(p.dtype);
  const int64_t to_head = side.cache_strides.head * element_bytes(p.cache_dtype);
  for (int64_t head = 0; head < p.num_kv_heads; ++head) {
    const float scale =
        side.scale.data == nullptr ? 1.0f : side.scale.data[head * side.scale.stride];
    convert_row(from + head * from_head, scale, p.head_dim, to + head * to_head);
  }
}

using WriteToken = void (*)(const WriteKvParams&, const Side&, const char* from, char* to);

WriteToken choose(const WriteKvParams& p, const Side& side) {
  const bool is_copy = p.cache_dtype == p.dtype && side.scale.data == nullptr;
  return is_copy ? copy_token : convert_token;
}

}  // namespace

void write_kv(const WriteKvParams& p, const ThreadPool& threads) {
  if (p.num_tokens == 0 || p.num_blocks == 0) return;
  const std::vector<int64_t> slots = find_slots(p);
  const Side sides[] = {{static_cast<const char*>(p.key), static_cast<char*>(p.k_cache),
                         p.key_strides, p.k_strides, p.k_scale},
                        {static_cast<const char*>(p.value), static_cast<char*>(p.v_cache),
                         p.value_strides, p.v_strides, p.v_scale}};
  const WriteToken writes[] = {choose(p, sides[0]), choose(p, sides[1])};
  const int64_t from_bytes = element_bytes(p.dtype), to_bytes = element_bytes(p.cache_dtype);
  const int64_t bytes = 2 * p.num_tokens * p.num_kv_heads * p.head_dim * from_bytes;
  // Row t of sequence b, or row t where only rows count.
  const int64_t rows_a_sequence = p.query_len > 0 ? p.query_len : p.num_tokens;
  for_ranges(threads, p.num_tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = slots[static_cast<size_t>(token)];
      if (slot < 0) continue;
      const int64_t b = token / rows_a_sequence, t = token % rows_a_sequence;
      const int64_t block = slot / p.block_size, offset = slot % p.block_size;
      for (int i = 0; i < 2; ++i) {
        const Side& side = sides[i];
        const int64_t row = b * side.strides.batch + t * side.strides.token;
        const int64_t stored = block * side.cache_strides.block + offset * side.cache_strides.slot;
        writes[i](p, side, side.data + row * from_bytes, side.cache + stored * to_bytes);
      }
    }
  });
}

}  // namespace paged_attn::cpu
