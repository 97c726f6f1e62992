#include "sequences.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace paged_attn::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Query tokens of one sequence; offsets are those of the first.
struct Tokens {
  int64_t count;
  int64_t q_offset;
  int64_t out_offset;
  int64_t lse_offset;
};

Tokens uniform_tokens(const DecodeParams& p, int64_t index) {
  return {p.query_len, index * p.q_strides.batch, index * p.out_strides.batch,
          index * p.lse_strides.batch};
}

// Rows [begin, end) of ragged queries.
Tokens ragged_tokens(const DecodeParams& p, int64_t begin, int64_t end) {
  return {end - begin, begin * p.q_strides.token, begin * p.out_strides.token,
          begin * p.lse_strides.token};
}

template <typename Bits>
void fill_elements(void* data, int64_t offset, int64_t count, Bits bits) {
  Bits* begin = static_cast<Bits*>(data) + offset;
  std::fill(begin, begin + count, bits);
}

// Writes value to the tokens' rows of the output and, to those of the lse, lses[h] for head h or
// lse where that is null.
void fill(const DecodeParams& p, const Tokens& tokens, float value, float lse,
          const float* lses = nullptr) {
  const bool is_nan = value != value;
  for (int64_t t = 0; t < tokens.count; ++t) {
    for (int64_t h = 0; h < p.num_heads; ++h) {
      const int64_t offset = tokens.out_offset + t * p.out_strides.token + h * p.out_strides.head;
      if (p.dtype == DType::kFloat32) {
        fill_elements<float>(p.out, offset, p.head_dim, value);
      } else {
        const uint16_t nan = p.dtype == DType::kFloat16 ? 0x7e00 : 0x7fc0;
        fill_elements<uint16_t>(p.out, offset, p.head_dim, is_nan ? nan : 0);
      }
      if (p.lse != nullptr) {
        p.lse[tokens.lse_offset + t * p.lse_strides.token + h * p.lse_strides.head] =
            lses != nullptr ? lses[h] : lse;
      }
    }
  }
}

// Whether the table reaches to the context's end and all blocks from first_key on are in the pool.
bool is_readable(const DecodeParams& p, const int32_t* blocks, int64_t first_key,
                 int64_t context_len) {
  const int64_t live = (context_len - 1) / p.block_size + 1;
  if (live > p.max_blocks) return false;
  // As unsigned numbers negative ids are beyond any pool.
  const auto limit = static_cast<uint32_t>(
      std::min<int64_t>(p.num_blocks, std::numeric_limits<int32_t>::max() + int64_t{1}));
  bool is_bad = false;
  for (int64_t i = first_key / p.block_size; i < live; ++i)
    is_bad |= static_cast<uint32_t>(blocks[i]) >= limit;
  return !is_bad;
}

void add_sequence(const DecodeParams& p, int64_t index, const Tokens& tokens,
                  std::vector<Sequence>& sequences) {
  if (tokens.count == 0) return;
  const int64_t context_len = p.context_lens[index];
  if (context_len <= 0) {
    fill(p, tokens, 0.0f, -kInfinity, static_cast<const float*>(p.sinks));
    return;
  }
  const int32_t* blocks = p.block_tables + index * p.table_stride;
  const int64_t first_key = p.first_visible_key(context_len, tokens.count);
  if (!is_readable(p, blocks, first_key, context_len)) {
    fill(p, tokens, kNaN, kNaN);
    return;
  }
  sequences.push_back({blocks, context_len, tokens.count, first_key, tokens.q_offset,
                       tokens.out_offset, tokens.lse_offset});
}

// Sequence b owns the rows between the greatest of cu_seqlens_q[0 ... b] and of [0 ... b + 1], each
// entry clamped to [0, T]. For valid entries these are the entries themselves; whatever they hold,
// no row has two owners.
void add_ragged_sequences(const DecodeParams& p, std::vector<Sequence>& sequences) {
  const auto clamped = [&](int64_t b) {
    return std::clamp<int64_t>(p.cu_seqlens_q[b], 0, p.num_tokens);
  };
  int64_t begin = clamped(0);
  // A bad first entry may hide where sequences begin: all rows before it are as bad.
  const bool is_first_good = p.cu_seqlens_q[0] == begin;
  fill(p, ragged_tokens(p, 0, begin), is_first_good ? 0.0f : kNaN,
       is_first_good ? -kInfinity : kNaN);
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const int64_t end = std::max(begin, clamped(b + 1));
    const Tokens tokens = ragged_tokens(p, begin, end);
    const bool is_too_long = p.max_query_len > 0 && tokens.count > p.max_query_len;
    // An entry that differs lies outside [0, T] or below one before it.
    if (p.cu_seqlens_q[b] == begin && p.cu_seqlens_q[b + 1] == end && !is_too_long) {
      add_sequence(p, b, tokens, sequences);
    } else {
      fill(p, tokens, kNaN, kNaN);
    }
    begin = end;
  }
  fill(p, ragged_tokens(p, begin, p.num_tokens), 0.0f, -kInfinity);
}

}  // namespace

std::vector<Sequence> find_sequences(const DecodeParams& params) {
  std::vector<Sequence> sequences;
  sequences.reserve(static_cast<size_t>(params.batch_size));
  if (params.cu_seqlens_q != nullptr) {
    add_ragged_sequences(params, sequences);
  } else {
    for (int64_t b = 0; b < params.batch_size; ++b) {
      add_sequence(params, b, uniform_tokens(params, b), sequences);
    }
  }
  return sequences;
}

}  // namespace paged_attn::cpu
