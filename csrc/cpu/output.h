// From the records of chunks to rows of the output. Included by the isa files only, through
// decode_kernel.h.
#pragma once

#include "rows.h"
#include "tile_kernels.h"

namespace paged_attn::cpu {
namespace {

inline void start_records(float* records, int64_t num_records, const RecordLayout& layout) {
  for (int64_t i = 0; i < num_records; ++i, records += layout.size) {
    for (int64_t d = 0; d < layout.size; ++d) records[d] = 0.0f;
    records[layout.maximum] = -INFINITY;
  }
}

// total = total and part together.
__attribute__((noinline)) void merge_record(float* total, const float* part,
                                            const RecordLayout& layout) {
  const float a = total[layout.maximum];
  const float b = part[layout.maximum];
  const float top = a > b ? a : b;
  const float reference = top == -INFINITY ? 0.0f : top;
  const float scale_a = exp_nonpositive(a - reference);
  const float scale_b = exp_nonpositive(b - reference);
  for (int64_t d = 0; d < layout.maximum; d += kWidth) {
    const Vec scaled = mul(load(part + d), broadcast(scale_b));
    store(total + d, fma(load(total + d), broadcast(scale_a), scaled));
  }
  total[layout.maximum] = top;
  total[layout.denominator] =
      total[layout.denominator] * scale_a + part[layout.denominator] * scale_b;
}

// The row of a record that holds all of the keys that it sees. sink: null if there is none.
template <typename T>
void write_row(const float* record, const RecordLayout& layout, int64_t head_dim, bool sees_keys,
               float v_scale, const float* sink, T* out, float* lse) {
  constexpr int kStep = kWidth > 8 ? kWidth : 8;
  float maximum = record[layout.maximum];
  float denominator = record[layout.denominator];
  float factor = v_scale;
  if (sink != nullptr) {
    const float top = *sink > maximum ? *sink : maximum;
    const float reference = top == -INFINITY ? 0.0f : top;
    const float rescale = exp_nonpositive(maximum - reference);
    denominator = denominator * rescale + exp_nonpositive(*sink - reference);
    factor *= rescale;
    maximum = top;
  }
  const Vec factors = broadcast(factor);
  // Where all logits are -inf, weights are 0 and so is their sum.
  const Vec divisor = broadcast(denominator == 0.0f ? 1.0f : denominator);
  float quotients[kStep] = {};
  for (int64_t d = 0; d < head_dim; d += kStep) {
    for (int i = 0; sees_keys && i < kStep; i += kWidth) {
      const Vec x = mul(load(record + d + i), factors);
      Vec quotient = divide(x, divisor);
      // Rounding to fp32 and then to a shorter type would round twice; from an odd last bit, the
      // second rounding does what one alone would.
      if constexpr (sizeof(T) < sizeof(float)) {
        quotient = odd_where_inexact(quotient, division_rest(x, quotient, divisor));
      }
      store(quotients + i, quotient);
    }
    for (int i = 0; i < kStep && d + i < head_dim; i += 8) narrow8(quotients + i, out + d + i);
  }
  if (lse == nullptr) return;
  if (sees_keys) {
    *lse = maximum + __builtin_logf(denominator);
  } else {
    *lse = sink != nullptr ? *sink : -INFINITY;
  }
}

// records: [num_heads, num_rows] of the piece, heads head_stride apart.
template <typename T>
void write_output(const Piece& piece, const float* records, int64_t head_stride) {
  const DecodeParams& params = *piece.params;
  const float* sinks = static_cast<const float*>(params.sinks);
  T* out = static_cast<T*>(params.out) + piece.out_offset;
  for (int64_t g = 0; g < piece.num_heads; ++g) {
    const float v_scale = scale_of_head(params.v_scale, piece.first_head + g);
    for (int64_t r = 0; r < piece.num_rows; ++r) {
      const int64_t row = piece.first_row + r;
      const int64_t token = row / piece.group_size;
      const int64_t head = query_head(piece, g, row);
      float* lse = params.lse == nullptr
                       ? nullptr
                       : params.lse + piece.lse_offset + token * params.lse_strides.token +
                             head * params.lse_strides.head;
      write_row(records + g * head_stride + r * piece.record.size, piece.record, params.head_dim,
                visible_keys(piece, row).end > 0, v_scale,
                sinks == nullptr ? nullptr : sinks + head,
                out + token * params.out_strides.token + head * params.out_strides.head, lse);
    }
  }
}

// The first chunk's records take in the others', in order, and become the output.
template <typename T>
void merge(const Piece& piece) {
  for (int64_t c = 1; c < piece.num_chunks; ++c) {
    for (int64_t g = 0; g < piece.num_heads; ++g) {
      for (int64_t r = 0; r < piece.num_rows; ++r) {
        merge_record(partial_records(piece, 0, g) + r * piece.record.size,
                     partial_records(piece, c, g) + r * piece.record.size, piece.record);
      }
    }
  }
  const int64_t rows = piece.query_len * piece.group_size;
  write_output<T>(piece, partial_records(piece, 0, 0), rows * piece.record.size);
}

}  // namespace
}  // namespace paged_attn::cpu
