// What the schedule (decode.cpp) hands to an instruction set's kernels (decode_kernel.h): one piece
// of the attention at a time. Plain data only: the kernels are compiled for instructions that the
// machine may lack, so no inline function may be shared with them (the linker keeps one copy).
#pragma once

#include <cstdint>

#include "../params.h"

namespace paged_attn::cpu {

// Storage types that C++17 does not have.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

// Tokens whose logits are held at once; chunks are multiples of it.
constexpr int64_t kTileTokens = 256;

// The state of one row (one query head of one query token) over some keys: the unnormalised output
// (head_dim floats, padded), then the maximum logit, then the softmax denominator relative to it.
constexpr int64_t kRecordAlignment = 16;  // floats

struct RecordLayout {
  int64_t maximum;      // index of the maximum logit
  int64_t denominator;  // index of the softmax denominator
  int64_t size;         // floats a record
};

// A run of chunks of one sequence's keys, for some of its rows and KV heads. Rows of a sequence are
// its (query token, query head of the KV head's group) pairs, the token varying slowest.
struct Piece {
  const DecodeParams* params;  // sinks in fp32
  RecordLayout record;

  const int32_t* blocks;  // the sequence's row of the block table
  int64_t context_len;
  int64_t query_len;
  int64_t first_key;  // that any of the sequence's queries sees: where the first chunk begins
  int64_t q_offset;   // of the sequence's first query token, in elements
  int64_t out_offset;
  int64_t lse_offset;

  int64_t group_size;  // query heads of a KV head
  int64_t first_row;
  int64_t num_rows;
  int64_t first_head;  // KV heads
  int64_t num_heads;

  int64_t chunk_tokens;
  int64_t first_chunk;
  int64_t num_chunks;

  // Null: attend computes all of the rows' chunks and writes the output. Else chunk c's records go
  // to partials + c * partial_stride, [num_kv_heads, rows of the sequence] of them, and whoever
  // completes a piece's chunks merges them.
  float* partials;
  int64_t partial_stride;
};

}  // namespace paged_attn::cpu
