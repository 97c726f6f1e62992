// merge_states: attention over disjoint sets of keys becomes attention over all of them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "isa.h"
#include "kernels.h"
#include "parallel.h"

namespace paged_attn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The row's logarithm; `shares` gets the states that count.
float weigh(const MergeStatesParams& p, int64_t token, int64_t head, StateShare* shares,
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
    shares[num_shares++] = {static_cast<const char*>(state.out) + offset * element_bytes(p.dtype),
                            weight};
    sum += weight;
  }
  return num_shares == 0 ? -kInfinity : largest + std::log(sum);
}

}  // namespace

void merge_states(const MergeStatesParams& p, const ThreadPool& threads) {
  const auto merge_row = kernels().merge_row[static_cast<size_t>(p.dtype)];
  const int64_t rows = p.num_tokens * p.num_heads;
  const int64_t row_bytes = p.head_dim * element_bytes(p.dtype);
  for_ranges(threads, rows, rows * (p.num_states + 1) * row_bytes, [&](int64_t begin, int64_t end) {
    StateShare shares[kMaxStates];
    for (int64_t row = begin; row < end; ++row) {
      int64_t num_shares;
      float sum;
      p.lse[row] = weigh(p, row / p.num_heads, row % p.num_heads, shares, num_shares, sum);
      const float factor = num_shares == 0 ? 0.0f : 1.0f / sum;
      merge_row(shares, num_shares, factor, p.head_dim,
                static_cast<char*>(p.out) + row * row_bytes);
    }
  });
}

}  // namespace paged_attn::cpu
