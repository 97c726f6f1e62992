// The rows of a piece: which query they are, which keys they see, where their state is kept.
// Included by the isa files only, through decode_kernel.h.
#pragma once

#include "piece.h"

namespace paged_attn::cpu {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// The query head of row r of the sequence and the piece's KV head g.
inline int64_t query_head(const Piece& piece, int64_t g, int64_t row) {
  return (piece.first_head + g) * piece.group_size + row % piece.group_size;
}
// The position in the sequence of row r's query token; negative if it lies before the first key.
inline int64_t query_position(const Piece& piece, int64_t row) {
  return piece.context_len - piece.query_len + row / piece.group_size;
}

// Keys [begin, end) of a sequence.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// What row r of the sequence sees. Neither end falls from one row to the next.
inline KeyRange visible_keys(const Piece& piece, int64_t row) {
  const DecodeParams& params = *piece.params;
  if (!params.causal) return {0, piece.context_len};
  const int64_t end = larger(0, query_position(piece, row) + 1);
  return {params.window > 0 ? larger(0, end - params.window) : 0, end};
}
// What any row of the piece sees: each of these keys is seen by some row.
inline KeyRange visible_keys(const Piece& piece) {
  return {visible_keys(piece, piece.first_row).begin,
          visible_keys(piece, piece.first_row + piece.num_rows - 1).end};
}

// A head's factor of what its cache holds.
inline float scale_of_head(const CacheScale& scale, int64_t kv_head) {
  return scale.data == nullptr ? 1.0f : scale.data[kv_head * scale.stride];
}

// Where the piece's records of a chunk are in the partial results.
inline float* partial_records(const Piece& piece, int64_t chunk, int64_t head) {
  const int64_t rows = piece.query_len * piece.group_size;
  return piece.partials + chunk * piece.partial_stride +
         ((piece.first_head + head) * rows + piece.first_row) * piece.record.size;
}

}  // namespace
}  // namespace paged_attn::cpu
