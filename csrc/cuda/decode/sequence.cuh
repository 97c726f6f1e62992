// One sequence as its lengths describe it, checked: every read of a length goes through here, so
// that no later code meets a context past the table's end.
#pragma once

#include "device_params.cuh"

namespace paged_attn::cuda {

struct Sequence {
  int32_t context_len;  // 0 if no query sees a key; -1 if the sequence is bad: its rows are NaN
  int32_t first_row;    // ragged: its first row of q
  int32_t query_len;
};

__device__ __forceinline__ Sequence load_sequence(const DeviceParams& params, int64_t b) {
  const DecodeParams& p = params.decode;
  Sequence sequence{};
  if (b >= p.batch_size) return sequence;
  const int32_t length = __ldcg(p.context_lens + b);
  sequence.query_len = static_cast<int32_t>(p.query_len);
  bool bad = length > p.max_blocks * p.block_size;
  if (p.cu_seqlens_q != nullptr) {
    const int32_t begin = __ldcg(params.row_starts + b), end = __ldcg(params.row_starts + b + 1);
    sequence.first_row = begin;
    sequence.query_len = end - begin;
    // row_starts is the running maximum of the clamped entries: an entry that differs is outside
    // [0, T] or below one before it.
    bad = bad || __ldcg(p.cu_seqlens_q + b) != begin || __ldcg(p.cu_seqlens_q + b + 1) != end ||
          (p.max_query_len > 0 && sequence.query_len > p.max_query_len);
  }
  if (bad) {
    sequence.context_len = -1;
  } else if (sequence.query_len > 0) {
    sequence.context_len = max(length, 0);
  }
  return sequence;
}

// The first key that any of a sequence's queries sees.
__device__ __forceinline__ int first_key_of(const DeviceParams& params, const Sequence& sequence) {
  if (params.window == kAllKeys) return 0;
  return max(max(sequence.context_len - sequence.query_len + 1, 0) - params.window, 0);
}

// The tiles of a sequence that are read: [first_tile, end_tile).
__device__ __forceinline__ int first_tile_of(const DeviceParams& params, const Sequence& sequence) {
  return first_key_of(params, sequence) >> kTileShift;
}
__device__ __forceinline__ int end_tile_of(const Sequence& sequence) {
  return static_cast<int>((static_cast<uint32_t>(sequence.context_len) + kTileTokens - 1) >>
                          kTileShift);
}
__device__ __forceinline__ int tiles_of(const DeviceParams& params, const Sequence& sequence) {
  return end_tile_of(sequence) - first_tile_of(params, sequence);
}

}  // namespace paged_attn::cuda
