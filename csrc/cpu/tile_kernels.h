// The arithmetic of one tile: logits, softmax, output. Every row's bits are the same whichever rows
// and tokens share its registers: each sum runs along its own chain, in the order of the keys.
// Included by the isa files only, through decode_kernel.h.
#pragma once

#include "dot.h"
#include "rows.h"

namespace paged_attn::cpu {
namespace {

// Rows of a cache, by their offsets in elements from a KV head's base.
template <typename T>
struct CacheRows {
  const T* base;
  const int64_t* offsets;
  int64_t count;
};

// Asks for rows that will be read later: those of one KV head lie apart, and hardware prefetchers
// lose them. The work of a step calls it as often as it was told to spread over, so that requests
// never queue up.
class Prefetcher {
 public:
  Prefetcher() = default;
  // Runs of run_size elements at every offset, for num_heads heads of them.
  Prefetcher(const char* base, const int64_t* offsets, int64_t count, int64_t element_size,
             int64_t run_size, int64_t num_heads, int64_t head_stride)
      : base_(base),
        offsets_(offsets),
        count_(count),
        element_size_(element_size),
        run_lines_((run_size * element_size + 63) / 64),
        head_bytes_(head_stride * element_size) {
    lines_left_ = run_lines_ * count * num_heads;
    start_run();
  }

  void spread_over(int64_t num_calls) { per_call_ = (lines_left_ + num_calls - 1) / num_calls; }

  void advance(int64_t calls) {
    int64_t lines = per_call_ * calls;
    lines = lines < lines_left_ ? lines : lines_left_;
    lines_left_ -= lines;
    for (; lines > 0; --lines) {
      if (line_ == run_end_) {
        if (++index_ == count_) {
          index_ = 0;
          base_ += head_bytes_;
        }
        start_run();
      }
      __builtin_prefetch(line_, 0, 2);
      line_ += 64;
    }
  }

 private:
  static constexpr int64_t kRowsAhead = 16;

  void start_run() {
    line_ = base_ + offsets_[index_] * element_size_;
    run_end_ = line_ + run_lines_ * 64;
    // The page of a row to come: its translation takes as long as its lines.
    const int64_t later = index_ + kRowsAhead < count_ ? index_ + kRowsAhead : count_ - 1;
    __builtin_prefetch(base_ + offsets_[later] * element_size_, 0, 2);
  }

  const char* base_ = nullptr;
  const int64_t* offsets_ = nullptr;
  int64_t count_ = 0;
  int64_t element_size_ = 0;
  int64_t run_lines_ = 0;
  int64_t head_bytes_ = 0;
  int64_t lines_left_ = 0;
  int64_t per_call_ = 0;
  int64_t index_ = 0;
  const char* line_ = nullptr;
  const char* run_end_ = nullptr;
};

// e^x = power * (1 + rest), for x in [-87, 88].
struct Exponential {
  Vec power;  // of two
  Vec rest;
};
inline Exponential exponential(Vec x) {
  const Vec round = broadcast(12582912.0f);  // 1.5 * 2^23: integers end up in the low bits
  const Vec shifted = fma(x, broadcast(1.44269504f), round);
  const Vec n = sub(shifted, round);
  // ln 2 in two parts, the first short enough for its multiples to be exact.
  Vec r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  // (e^r - 1 - r) / r^2, fitted for the least relative error of e^r on |r| <= ln(2) / 2.
  Vec p = fma(broadcast(1.381418173e-03f), r, broadcast(8.368922699e-03f));
  p = fma(p, r, broadcast(4.166840793e-02f));
  p = fma(p, r, broadcast(1.666651893e-01f));
  p = fma(p, r, broadcast(4.999999333e-01f));
  return {exponent_from_mantissa(shifted), fma(p, mul(r, r), r)};
}

// e^x within 2 ulp for x <= 0, exactly 1 at 0; 0 below -87, where fp32 runs out of normal numbers.
inline Vec exp_nonpositive(Vec x) {
  const Vec lowest = broadcast(-87.0f);
  const Exponential e = exponential(max(lowest, x));
  return zero_where_less(x, lowest, mul(add(e.rest, broadcast(1.0f)), e.power));
}
inline float exp_nonpositive(float x) {
  float result[kWidth];
  store(result, exp_nonpositive(broadcast(x)));
  return result[0];
}

// Within 3 ulp, also near 0; NaN for NaN.
inline Vec tanh(Vec x) {
  const Vec zero = broadcast(0.0f);
  const Vec one = broadcast(1.0f);
  const Vec magnitude = max(x, sub(zero, x));
  // tanh is 1 in fp32 from 9.1 on: nothing overflows above -40.
  const Exponential e = exponential(max(broadcast(-40.0f), mul(broadcast(-2.0f), magnitude)));
  const Vec power = fma(e.power, e.rest, e.power);
  const Vec one_minus_power = sub(sub(one, e.power), mul(e.power, e.rest));
  // (1 - e^y) / (1 + e^y) keeps the digits of small numbers, 1 - 2 e^y / (1 + e^y) those of large.
  const Vec limit = broadcast(0.625f);
  const Vec numerator = where_less(magnitude, limit, one_minus_power, mul(broadcast(2.0f), power));
  const Vec quotient = divide(numerator, add(one, power));
  const Vec result = where_less(magnitude, limit, quotient, sub(one, quotient));
  return where_less(x, zero, sub(zero, result), result);
}

// Compilers would rather load an operand once for each use: loads are what runs out first.
template <typename Register>
inline void keep_in_register([[maybe_unused]] Register& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#endif
}

// logits[r][t] = q[r] . k[t] for kRows rows. Tokens are taken kTokens at a time; the offsets past
// the count repeat the last row, and the logits past it are rubbish.
template <int kRows, typename T>
void compute_logits(const typename Dot<T>::Query* q, int64_t q_stride, const CacheRows<T>& keys,
                    int64_t head_dim, float* logits, Prefetcher& ahead) {
  constexpr int kTokens = tokens_at_once(kRows);
  constexpr int kStep = Dot<T>::kStep;
  static_assert(kTokens % 4 == 0 || (kTokens == 2 && kRows % 2 == 0), "sums are stored by fours");
  const int64_t whole = head_dim - head_dim % kStep;
  for (int64_t t = 0; t < keys.count; t += kTokens) {
    ahead.advance(kTokens);
    const T* k[kTokens];
    for (int j = 0; j < kTokens; ++j) k[j] = keys.base + keys.offsets[t + j];
    Vec sums[kRows * kTokens];
    for (Vec& sum : sums) sum = broadcast(0.0f);
    for (int64_t d = 0; d < whole; d += kStep) {
      // The operand of which there are fewer stays in registers, the other streams past it.
      if constexpr (kRows < kTokens) {
        typename Dot<T>::Register query[kRows];
        for (int r = 0; r < kRows; ++r) {
          query[r] = Dot<T>::load_query(q + r * q_stride + d);
          // Three would leave too few of sixteen for twelve sums.
          if (kRows < 3) keep_in_register(query[r]);
        }
        for (int j = 0; j < kTokens; ++j) {
          const auto key = Dot<T>::load_key(k[j] + d);
          for (int r = 0; r < kRows; ++r) {
            sums[r * kTokens + j] = Dot<T>::accumulate(query[r], key, sums[r * kTokens + j]);
          }
        }
      } else {
        typename Dot<T>::Register key[kTokens];
        for (int j = 0; j < kTokens; ++j) {
          key[j] = Dot<T>::load_key(k[j] + d);
          keep_in_register(key[j]);
        }
        for (int r = 0; r < kRows; ++r) {
          auto query = Dot<T>::load_query(q + r * q_stride + d);
          keep_in_register(query);
          for (int j = 0; j < kTokens; ++j) {
            sums[r * kTokens + j] = Dot<T>::accumulate(query, key[j], sums[r * kTokens + j]);
          }
        }
      }
    }
    if (kStep > 8 && whole < head_dim) {
      for (int j = 0; j < kTokens; ++j) {
        const auto key = Dot<T>::load_key_tail(k[j] + whole, head_dim - whole);
        for (int r = 0; r < kRows; ++r) {
          const auto query = Dot<T>::load_query(q + r * q_stride + whole);
          sums[r * kTokens + j] = Dot<T>::accumulate(query, key, sums[r * kTokens + j]);
        }
      }
    }
    for (int i = 0; i < kRows * kTokens; i += 4) {
      if constexpr (kTokens % 4 == 0) {
        store_sums(logits + i / kTokens * kTileTokens + t + i % kTokens, sums[i], sums[i + 1],
                   sums[i + 2], sums[i + 3]);
      } else {
        float two_rows[4];
        store_sums(two_rows, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        float* row = logits + i / kTokens * kTileTokens + t;
        __builtin_memcpy(row, two_rows, 2 * sizeof(float));
        __builtin_memcpy(row + kTileTokens, two_rows + 2, 2 * sizeof(float));
      }
    }
  }
}

// How q . k becomes a row's logit; see paged_attn/reference.py.
struct LogitOptions {
  float k_scale;
  float scale;
  float softcap;   // 0: none
  float slope;     // ALiBi's
  float distance;  // from the query to the row's first logit's key
};

// Applies them to a row's logits, up to end and on to a whole vector, and hides those before begin.
inline void apply_options(float* logits, int64_t begin, int64_t end, const LogitOptions& options) {
  static const float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec slope = broadcast(options.slope);
  const Vec softcap = broadcast(options.softcap);
  const Vec lanes = load(kLanes);
  for (int64_t t = 0; t < end; t += kWidth) {
    // Two factors: their product may overflow where the logit does not.
    Vec x = mul(mul(load(logits + t), broadcast(options.k_scale)), broadcast(options.scale));
    if (options.softcap > 0.0f) x = mul(softcap, tanh(divide(x, softcap)));
    const Vec distance = add(broadcast(options.distance + static_cast<float>(t)), lanes);
    store(logits + t, fma(slope, distance, x));
  }
  for (int64_t t = 0; t < smaller(begin, end); ++t) logits[t] = -INFINITY;
}

// Turns the first num_visible logits of a row into weights e^(scale * logit - maximum), the others
// up to num_padded into zeros, and brings maximum and denominator up to date. Returns the factor by
// which the output so far is to be multiplied.
inline float update_softmax(float* logits, int64_t num_visible, int64_t num_padded, float scale,
                            float* maximum, float* denominator) {
  const Vec scales = broadcast(scale);
  const Vec hidden = broadcast(-INFINITY);
  const int64_t whole = num_visible - num_visible % kWidth;
  Vec tops = hidden;
  for (int64_t t = 0; t < whole; t += kWidth) {
    const Vec x = mul(load(logits + t), scales);
    store(logits + t, x);
    tops = max(tops, x);
  }
  float top = largest(tops);
  for (int64_t t = whole; t < num_visible; ++t) {
    logits[t] *= scale;
    top = logits[t] > top ? logits[t] : top;
  }
  for (int64_t t = num_visible; t < num_padded; ++t) logits[t] = -INFINITY;

  top = top > *maximum ? top : *maximum;
  // A row that has seen no key: anything finite, so that -inf - top is not NaN.
  const float reference = top == -INFINITY ? 0.0f : top;
  const float factor = *maximum == top ? 1.0f : exp_nonpositive(*maximum - reference);
  const Vec references = broadcast(reference);
  Vec sums = broadcast(0.0f);
  for (int64_t t = 0; t < num_padded; t += kWidth) {
    const Vec weight = exp_nonpositive(sub(load(logits + t), references));
    store(logits + t, weight);
    sums = add(sums, weight);
  }
  *denominator = *denominator * factor + sum(sums);
  *maximum = top;
  return factor;
}

// output[r] = factors[r] * output[r] + sum over t of weights[r][t] * v[t], for kColumns vectors of
// the head dim from column d on (half a vector where kHalf). The tile's sum starts at zero: in
// blocks, rounding errors grow with the root of the block's length only.
template <int kRows, int kColumns, bool kHalf, typename T>
inline void accumulate_columns(const float* weights, const CacheRows<T>& values, int64_t d,
                               const float* factors, float* output, int64_t output_stride) {
  Vec sums[kRows * kColumns];
  for (Vec& sum : sums) sum = broadcast(0.0f);
  for (int64_t t = 0; t < values.count; ++t) {
    const T* v = values.base + values.offsets[t] + d;
    // The operand of which there are fewer stays in registers, the other streams past it.
    if constexpr (kRows < kColumns) {
      Vec weight[kRows];
      for (int r = 0; r < kRows; ++r) weight[r] = broadcast(weights[r * kTileTokens + t]);
      for (int c = 0; c < kColumns; ++c) {
        const Vec value = load(v + c * kWidth);
        for (int r = 0; r < kRows; ++r) {
          sums[r * kColumns + c] = fma(weight[r], value, sums[r * kColumns + c]);
        }
      }
    } else {
      Vec value[kColumns];
      for (int c = 0; c < kColumns; ++c) {
        if constexpr (kHalf) {
          value[c] = load_low8(v);
        } else {
          value[c] = load(v + c * kWidth);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = broadcast(weights[r * kTileTokens + t]);
        for (int c = 0; c < kColumns; ++c) {
          sums[r * kColumns + c] = fma(weight, value[c], sums[r * kColumns + c]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = broadcast(factors[r]);
    for (int c = 0; c < kColumns; ++c) {
      float* out = output + r * output_stride + d + c * kWidth;
      store(out, fma(load(out), factor, sums[r * kColumns + c]));
    }
  }
}

template <int kRows, typename T>
void accumulate_output(const float* weights, const CacheRows<T>& values, int64_t head_dim,
                       const float* factors, float* output, int64_t output_stride,
                       Prefetcher& ahead) {
  constexpr int kColumns = columns_at_once(kRows);
  int64_t d = 0;
  for (; d + kColumns * kWidth <= head_dim; d += kColumns * kWidth) {
    ahead.advance(values.count * kColumns * kWidth / head_dim);
    accumulate_columns<kRows, kColumns, false>(weights, values, d, factors, output, output_stride);
  }
  for (; d + kWidth <= head_dim; d += kWidth) {
    accumulate_columns<kRows, 1, false>(weights, values, d, factors, output, output_stride);
  }
  if constexpr (kWidth > 8) {
    if (d < head_dim) {
      accumulate_columns<kRows, 1, true>(weights, values, d, factors, output, output_stride);
    }
  }
}

}  // namespace
}  // namespace paged_attn::cpu
