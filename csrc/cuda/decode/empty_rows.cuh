// The rows of out and lse that no key reaches: of sequences without keys or with bad lengths, and
// of no sequence at all.
#pragma once

#include <cstring>

#include "rows.cuh"

namespace paged_attn::cuda {

// Rows [begin, end) of sequence b, or of q if ragged: a warp of the block for each token and head.
// The sinks are all that rows see which a sequence owns.
template <typename T, int kThreads>
__device__ __forceinline__ void fill_rows(const DecodeParams& p, int64_t b, int64_t begin,
                                          int64_t end, bool bad, bool owned) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(T));
  T value;
  store(bad ? NAN : 0.f, value);
  uint32_t word = 0;
  memcpy(&word, &value, sizeof(T));
  if (sizeof(T) == 2) word |= word << 16;
  const int lane = threadIdx.x & 31;
  int64_t token = begin, head = threadIdx.x >> 5;
#pragma unroll 1
  for (;; head += kThreads / 32) {
    for (; head >= p.num_heads && token < end; head -= p.num_heads) ++token;
    if (token >= end) return;
    T* row = static_cast<T*>(p.out) + b * p.out_strides.batch + token * p.out_strides.token +
             head * p.out_strides.head;
    if (reinterpret_cast<uintptr_t>(row) % 16 == 0) {
#pragma unroll 1
      for (int64_t d = lane * kVector; d < p.head_dim; d += 32 * kVector) {
        *reinterpret_cast<uint4*>(row + d) = make_uint4(word, word, word, word);
      }
    } else {
#pragma unroll 1
      for (int64_t d = lane; d < p.head_dim; d += 32) row[d] = value;
    }
    if (p.lse != nullptr && lane == 0) {
      p.lse[b * p.lse_strides.batch + token * p.lse_strides.token + head * p.lse_strides.head] =
          bad     ? NAN
          : owned ? sink_of<T>(p, head)
                  : -INFINITY;
    }
  }
}

// Those of every gridDim.x-th sequence. `sequence_of(b)`: what is known of it already, the same for
// all of the block.
template <typename T, int kThreads, typename SequenceOf>
__device__ __forceinline__ void fill_empty_sequences(const DecodeParams& p,
                                                     const SequenceOf& sequence_of) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int64_t first = blockIdx.x; first < p.batch_size; first += 32 * int64_t{gridDim.x}) {
    const auto batch_of = [&](int i) { return first + i * int64_t{gridDim.x}; };
    Sequence own{};
    if (batch_of(lane) < p.batch_size) own = sequence_of(batch_of(lane));
    const bool is_empty = batch_of(lane) < p.batch_size && own.context_len <= 0;
#pragma unroll 1
    for (unsigned left = __ballot_sync(~0u, is_empty); left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int context_len = __shfl_sync(~0u, own.context_len, i);
      const int first_row = __shfl_sync(~0u, own.first_row, i);
      const int query_len = __shfl_sync(~0u, own.query_len, i);
      fill_rows<T, kThreads>(p, batch_of(i), first_row, first_row + query_len, context_len < 0,
                             true);
    }
  }
}

}  // namespace paged_attn::cuda
