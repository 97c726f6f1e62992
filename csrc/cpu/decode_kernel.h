// The kernels of one instruction set, over the Vec that the isa file has included before this.
// Everything is in an unnamed namespace and uses no inline function of other headers: what is
// compiled here must never be linked into code for lesser machines.
#pragma once

#include "output.h"
#include "row_kernels.h"
#include "rows.h"
#include "tile_kernels.h"

namespace paged_attn::cpu {
namespace {

// Rows of K or V that are read between two switches to another KV head: enough for the head's
// outputs to pay, few enough for memory to be read nearly in its order, which hardware prefetchers
// follow (measured with AVX-512: B8 32/8 1k bf16 1.77 ms from 1.90 with 32 rows; 4 rows cost head
// dim 64 8 %).
constexpr int64_t kStepTokens = 8;
constexpr int64_t kMostTokensAtOnce = 8;

// What attend works in. Arrays are over the piece's (KV head, row) pairs.
struct Workspace {
  void* queries;
  float* logits;   // [kTileTokens] each
  float* factors;  // what the outputs so far are multiplied by in this tile
  float* ones;     // as many: the same after the tile's first step
  float* state;    // one record each
  float* total;    // one record each
  // Where the tile's rows are, and some more that repeat the last.
  int64_t k_offsets[kTileTokens + kMostTokensAtOnce];
  int64_t v_offsets[kTileTokens + kMostTokensAtOnce];
};

inline int64_t query_stride(int64_t head_dim) { return round_up(head_dim, 32); }
inline int64_t record_size(int64_t head_dim) {
  return round_up(head_dim, kRecordAlignment) + kRecordAlignment;
}

int64_t workspace_bytes(int64_t head_dim, int64_t num_records) {
  const int64_t floats =
      num_records * (query_stride(head_dim) + kTileTokens + 2 * record_size(head_dim)) +
      2 * round_up(num_records, kRecordAlignment);
  return round_up(sizeof(Workspace), 64) + floats * static_cast<int64_t>(sizeof(float));
}

Workspace& lay_out(void* memory, int64_t head_dim, int64_t num_records) {
  Workspace& work = *static_cast<Workspace*>(memory);
  float* next =
      reinterpret_cast<float*>(static_cast<char*>(memory) + round_up(sizeof(Workspace), 64));
  work.queries = next;
  next += num_records * query_stride(head_dim);
  work.logits = next;
  next += num_records * kTileTokens;
  work.state = next;
  next += num_records * record_size(head_dim);
  work.total = next;
  next += num_records * record_size(head_dim);
  work.factors = next;
  next += round_up(num_records, kRecordAlignment);
  work.ones = next;
  for (int64_t i = 0; i < num_records; ++i) work.ones[i] = 1.0f;
  return work;
}

template <typename Element, typename Cache>
void load_queries(const Piece& piece, typename Dot<Cache>::Query* queries) {
  const DecodeParams& params = *piece.params;
  const int64_t stride = query_stride(params.head_dim);
  const Element* q = static_cast<const Element*>(params.q) + piece.q_offset;
  for (int64_t g = 0; g < piece.num_heads; ++g) {
    for (int64_t r = 0; r < piece.num_rows; ++r, queries += stride) {
      const int64_t row = piece.first_row + r;
      const Element* from = q + row / piece.group_size * params.q_strides.token +
                            query_head(piece, g, row) * params.q_strides.head;
      int64_t d = 0;
      for (; d < params.head_dim; d += 8) Dot<Cache>::store_query8(from + d, queries + d);
      for (; d < stride; ++d) queries[d] = typename Dot<Cache>::Query{};
    }
  }
}

// Block ids to offsets, for tokens [begin, end) of the sequence.
void find_rows(const Piece& piece, const CacheStrides& strides, int64_t begin, int64_t end,
               int64_t* offsets) {
  const int64_t block_size = piece.params->block_size;
  int64_t column = begin / block_size;
  int64_t slot = begin % block_size;
  int64_t count = 0;
  for (; begin + count < end; ++column, slot = 0) {
    const int64_t block = piece.blocks[column] * strides.block;
    for (; slot < block_size && begin + count < end; ++slot) {
      offsets[count++] = block + slot * strides.slot;
    }
  }
  for (int64_t i = 0; count > 0 && i < kMostTokensAtOnce; ++i) {
    offsets[count + i] = offsets[count - 1];
  }
}

template <typename T>
void logits_of_rows(int64_t rows, const typename Dot<T>::Query* q, int64_t q_stride,
                    const CacheRows<T>& keys, int64_t head_dim, float* logits, Prefetcher& ahead) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    compute_logits<4>(q + r * q_stride, q_stride, keys, head_dim, logits + r * kTileTokens, ahead);
  }
  q += r * q_stride;
  logits += r * kTileTokens;
  if (rows - r == 3) compute_logits<3>(q, q_stride, keys, head_dim, logits, ahead);
  if (rows - r == 2) compute_logits<2>(q, q_stride, keys, head_dim, logits, ahead);
  if (rows - r == 1) compute_logits<1>(q, q_stride, keys, head_dim, logits, ahead);
}

template <typename T>
void output_of_rows(int64_t rows, const float* weights, const CacheRows<T>& values,
                    int64_t head_dim, const float* factors, float* output, int64_t stride,
                    Prefetcher& ahead) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    accumulate_output<4>(weights + r * kTileTokens, values, head_dim, factors + r,
                         output + r * stride, stride, ahead);
  }
  weights += r * kTileTokens;
  factors += r;
  output += r * stride;
  if (rows - r == 3) {
    accumulate_output<3>(weights, values, head_dim, factors, output, stride, ahead);
  }
  if (rows - r == 2) {
    accumulate_output<2>(weights, values, head_dim, factors, output, stride, ahead);
  }
  if (rows - r == 1) {
    accumulate_output<1>(weights, values, head_dim, factors, output, stride, ahead);
  }
}

// K or V as a piece reads it: tokens of a tile, some at a time, for all of the piece's KV heads in
// turn. Together the heads read long runs of memory, and the keys of the next tokens can be on
// their way while these are worked on.
template <typename T>
struct TileReader {
  const T* base;  // of the piece's first head
  const CacheStrides& strides;
  int64_t num_heads;
  int64_t head_dim;
  const int64_t* offsets;  // of the tile's tokens
  int64_t num_tokens;

  TileReader(const Piece& piece, const void* cache, const CacheStrides& cache_strides,
             const int64_t* tile_offsets, int64_t tile_tokens)
      : base(static_cast<const T*>(cache) + piece.first_head * cache_strides.head),
        strides(cache_strides),
        num_heads(piece.num_heads),
        head_dim(piece.params->head_dim),
        offsets(tile_offsets),
        num_tokens(tile_tokens) {}

  CacheRows<T> rows(int64_t head, int64_t token) const {
    return {base + head * strides.head, offsets + token, smaller(kStepTokens, num_tokens - token)};
  }

  // A step's rows: whole tokens where the heads of one lie together.
  Prefetcher prefetcher(int64_t token) const {
    if (token >= num_tokens) return Prefetcher();
    const bool is_packed = strides.head == head_dim || num_heads == 1;
    return Prefetcher(reinterpret_cast<const char*>(base), offsets + token,
                      smaller(kStepTokens, num_tokens - token), sizeof(T),
                      head_dim * (is_packed ? num_heads : 1), is_packed ? 1 : num_heads,
                      strides.head);
  }
};

// Applies the call's options to a row's q . k of the tile that begins at key `begin`, of which the
// row sees `seen`. Returns the factor that is left for update_softmax: scale where there are none.
inline float finish_logits(const Piece& piece, int64_t g, int64_t row, int64_t begin,
                           const KeyRange& seen, float* logits) {
  const DecodeParams& params = *piece.params;
  const bool has_options =
      params.k_scale.data != nullptr || params.softcap > 0.0f || params.alibi_slopes != nullptr;
  if (!has_options && seen.begin == 0) return params.scale;
  LogitOptions options{};
  options.k_scale = scale_of_head(params.k_scale, piece.first_head + g);
  options.scale = params.scale;
  options.softcap = params.softcap;
  if (params.alibi_slopes != nullptr) {
    options.slope = params.alibi_slopes[query_head(piece, g, row)];
    options.distance = static_cast<float>(begin - query_position(piece, row));
  }
  apply_options(logits, seen.begin, seen.end, options);
  return 1.0f;
}

// Brings the piece's records up to date with tokens [begin, end) of its sequence, at most a tile,
// whose keys' offsets the workspace holds. Leaves those of the tile that ends at next_end there.
template <typename T>
void attend_tile(const Piece& piece, Workspace& work, int64_t begin, int64_t end, int64_t next_end,
                 float* records) {
  using Query = typename Dot<T>::Query;
  const DecodeParams& params = *piece.params;
  const int64_t count = end - begin;
  const int64_t rows = piece.num_rows;
  const int64_t q_stride = query_stride(params.head_dim);
  const int64_t record = piece.record.size;
  find_rows(piece, params.v_strides, begin, end, work.v_offsets);
  const TileReader<T> keys(piece, params.k_cache, params.k_strides, work.k_offsets, count);
  const TileReader<T> values(piece, params.v_cache, params.v_strides, work.v_offsets, count);

  for (int64_t t = 0; t < count; t += kStepTokens) {
    Prefetcher ahead =
        t + kStepTokens < count ? keys.prefetcher(t + kStepTokens) : values.prefetcher(0);
    ahead.spread_over(piece.num_heads * smaller(kStepTokens, count - t));
    for (int64_t g = 0; g < piece.num_heads; ++g) {
      logits_of_rows<T>(rows, static_cast<const Query*>(work.queries) + g * rows * q_stride,
                        q_stride, keys.rows(g, t), params.head_dim,
                        work.logits + g * rows * kTileTokens + t, ahead);
    }
  }

  for (int64_t i = 0; i < piece.num_heads * rows; ++i) {
    float* state = records + i * record;
    float* logits = work.logits + i * kTileTokens;
    const int64_t row = piece.first_row + i % rows;
    const KeyRange keys_seen = visible_keys(piece, row);
    const KeyRange seen = {larger(0, smaller(keys_seen.begin - begin, count)),
                           larger(0, smaller(keys_seen.end - begin, count))};
    const float scale = finish_logits(piece, i / rows, row, begin, seen, logits);
    work.factors[i] =
        update_softmax(logits, seen.end, round_up(count, kRecordAlignment), scale,
                       state + piece.record.maximum, state + piece.record.denominator);
  }

  find_rows(piece, params.k_strides, end, next_end, work.k_offsets);
  const TileReader<T> next_keys(piece, params.k_cache, params.k_strides, work.k_offsets,
                                next_end - end);
  for (int64_t t = 0; t < count; t += kStepTokens) {
    Prefetcher ahead =
        t + kStepTokens < count ? values.prefetcher(t + kStepTokens) : next_keys.prefetcher(0);
    ahead.spread_over(piece.num_heads * smaller(kStepTokens, count - t));
    for (int64_t g = 0; g < piece.num_heads; ++g) {
      output_of_rows<T>(rows, work.logits + g * rows * kTileTokens + t, values.rows(g, t),
                        params.head_dim, (t == 0 ? work.factors : work.ones) + g * rows,
                        records + g * rows * record, record, ahead);
    }
  }
}

// Element is the type of q and the output.
template <typename Element, typename Cache>
void attend(const Piece& piece, void* memory) {
  const int64_t num_records = piece.num_heads * piece.num_rows;
  const int64_t record = piece.record.size;
  Workspace& work = lay_out(memory, piece.params->head_dim, num_records);
  load_queries<Element, Cache>(piece, static_cast<typename Dot<Cache>::Query*>(work.queries));
  const KeyRange seen = visible_keys(piece);
  for (int64_t c = 0; c < piece.num_chunks; ++c) {
    const int64_t chunk = piece.first_chunk + c;
    const int64_t chunk_begin = piece.first_key + chunk * piece.chunk_tokens;
    const int64_t begin = larger(chunk_begin, seen.begin);
    const int64_t end = smaller(chunk_begin + piece.chunk_tokens, seen.end);
    const bool is_first = piece.partials == nullptr && c == 0;
    float* records = is_first ? work.total : work.state;
    start_records(records, num_records, piece.record);
    int64_t tile_end = smaller(begin + kTileTokens, end);
    find_rows(piece, piece.params->k_strides, begin, tile_end, work.k_offsets);
    for (int64_t tile = begin; tile < end; tile += kTileTokens) {
      const int64_t next_end = smaller(tile_end + kTileTokens, end);
      attend_tile<Cache>(piece, work, tile, tile_end, next_end, records);
      tile_end = next_end;
    }
    if (piece.partials != nullptr) {
      for (int64_t g = 0; g < piece.num_heads; ++g) {
        __builtin_memcpy(partial_records(piece, chunk, g), records + g * piece.num_rows * record,
                         piece.num_rows * record * sizeof(float));
      }
    } else if (!is_first) {
      for (int64_t i = 0; i < num_records; ++i) {
        merge_record(work.total + i * record, records + i * record, piece.record);
      }
    }
  }
  if (piece.partials == nullptr) write_output<Element>(piece, work.total, piece.num_rows * record);
}

constexpr Kernels make_kernels(const char* name) {
  return {name,
          workspace_bytes,
          {{attend<float, float>, nullptr, nullptr},
           {nullptr, attend<Half, Half>, nullptr},
           {nullptr, nullptr, attend<BFloat16, BFloat16>},
           {nullptr, attend<Half, Float8E4M3>, attend<BFloat16, Float8E4M3>},
           {nullptr, attend<Half, Float8E5M2>, attend<BFloat16, Float8E5M2>}},
          {merge<float>, merge<Half>, merge<BFloat16>},
          {{convert_row<float, float>, nullptr, nullptr},
           {nullptr, convert_row<Half, Half>, nullptr},
           {nullptr, nullptr, convert_row<BFloat16, BFloat16>},
           {nullptr, convert_row<Half, Float8E4M3>, convert_row<BFloat16, Float8E4M3>},
           {nullptr, convert_row<Half, Float8E5M2>, convert_row<BFloat16, Float8E5M2>}},
          {merge_row<float>, merge_row<Half>, merge_row<BFloat16>}};
}

}  // namespace
}  // namespace paged_attn::cpu
