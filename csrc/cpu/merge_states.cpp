// merge_states: attention over disjoint sets of keys becomes attention over all of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "convert.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_attn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kStep = 8;

// A state's share of a row, not yet divided by the shares' sum.
struct Share {
  const void* row;
  float weight;
};

// The row's logarithm; `shares` gets the states that count.
float weigh(const MergeStatesParams& p, int64_t token, int64_t head, Share* shares,
            int64_t& num_shares, float& sum) {
  const auto lse_of = [&](int64_t i) {
    const AttentionState& state = p.states[i];
    return state.lse[token * state.lse_token_stride + head * state.lse_head_stride];
  };
  float largest = -kInfinity;
  for (int64_t i = 0; i < p.num_states; ++i) largest = std::max(largest, lse_of(i));
  num_shares = 0;
  sum = 0.0f;
  for (int64_t i = 0; i < p.num_states; ++i) {
    const AttentionState& state = p.states[i];
    const float lse = lse_of(i);
    if (lse == -kInfinity) continue;
    // Equal infinities have equal weights.
    const float weight = lse == largest ? 1.0f : std::exp(lse - largest);
    const int64_t offset = token * state.out_token_stride + head * state.out_head_stride;
    const int64_t bytes = offset * (p.dtype == DType::kFloat32 ? 4 : 2);
    shares[num_shares++] = {static_cast<const char*>(state.out) + bytes, weight};
    sum += weight;
  }
  return num_shares == 0 ? -kInfinity : largest + std::log(sum);
}

// kStep elements of a row, from d on. Rows need not be multiples of a step.
template <typename T>
void load_step(const T* row, int64_t d, int64_t head_dim, float* values) {
  if (head_dim - d >= kStep) {
    widen8(row + d, values);
    return;
  }
  T elements[kStep] = {};
  std::memcpy(elements, row + d, static_cast<size_t>(head_dim - d) * sizeof(T));
  widen8(elements, values);
}

template <typename T>
void store_step(const float* values, int64_t d, int64_t head_dim, T* row) {
  T elements[kStep];
  narrow8(values, elements);
  const int64_t count = std::min(kStep, head_dim - d);
  if (count == kStep) {
    std::memcpy(row + d, elements, sizeof(elements));
  } else {
    std::memcpy(row + d, elements, static_cast<size_t>(count) * sizeof(T));
  }
}

template <typename T>
void merge_row(const Share* shares, int64_t num_shares, float sum, T* out, int64_t head_dim) {
  const float factor = num_shares == 0 ? 0.0f : 1.0f / sum;
  for (int64_t d = 0; d < head_dim; d += kStep) {
    float total[kStep] = {};
    for (int64_t i = 0; i < num_shares; ++i) {
      float values[kStep];
      load_step(static_cast<const T*>(shares[i].row), d, head_dim, values);
      for (int64_t j = 0; j < kStep; ++j) total[j] += shares[i].weight * values[j];
    }
    for (float& x : total) x *= factor;
    store_step(total, d, head_dim, out);
  }
}

template <typename T>
void merge(const MergeStatesParams& p, const ThreadPool& threads) {
  const int64_t rows = p.num_tokens * p.num_heads;
  const int64_t bytes = rows * (p.num_states + 1) * p.head_dim * static_cast<int64_t>(sizeof(T));
  for_ranges(threads, rows, bytes, [&](int64_t begin, int64_t end) {
    Share shares[kMaxStates];
    for (int64_t row = begin; row < end; ++row) {
      int64_t num_shares;
      float sum;
      p.lse[row] = weigh(p, row / p.num_heads, row % p.num_heads, shares, num_shares, sum);
      merge_row(shares, num_shares, sum, static_cast<T*>(p.out) + row * p.head_dim, p.head_dim);
    }
  });
}

}  // namespace

void merge_states(const MergeStatesParams& params, const ThreadPool& threads) {
  switch (params.dtype) {
    case DType::kFloat16:
      return merge<Half>(params, threads);
    case DType::kBFloat16:
      return merge<BFloat16>(params, threads);
    default:
      return merge<float>(params, threads);
  }
}

}  // namespace paged_attn::cpu
