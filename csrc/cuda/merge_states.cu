// merge_states: attention over disjoint sets of keys becomes attention over all of them.
#include <algorithm>

#include "indices.cuh"
#include "kernels.h"
#include "vector.cuh"

namespace paged_attn::cuda {
namespace {

template <int kMostStates>
struct StatesParams {
  AttentionState states[kMostStates];
  MergeStatesParams merge;
};

// A thread merges one vector of a row; it looks at all of the row's logarithms, which the threads
// next to it have in the cache too.
template <typename T, int kElements, int kMostStates>
__global__ void __launch_bounds__(kThreads)
    merge_states_kernel(const __grid_constant__ StatesParams<kMostStates> params) {
  const MergeStatesParams& p = params.merge;
  const int64_t vectors = p.head_dim / kElements;
  const int64_t total = p.num_tokens * p.num_heads * vectors;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const auto num_states = static_cast<int>(p.num_states);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = quotient(i, vectors), d = (i - row * vectors) * kElements;
    const int64_t token = quotient(row, p.num_heads), head = row - token * p.num_heads;
    const auto lse_of = [&](int s) {
      const AttentionState& state = params.states[s];
      return state.lse[token * state.lse_token_stride + head * state.lse_head_stride];
    };
    float largest = -INFINITY;
#pragma unroll 4
    for (int s = 0; s < num_states; ++s) largest = fmaxf(largest, lse_of(s));

    float sum = 0.f;
    float merged[kElements];
    // -0 changes no number that is added to it, 0 one: -0.
#pragma unroll
    for (int e = 0; e < kElements; ++e) merged[e] = -0.f;
#pragma unroll 2
    for (int s = 0; s < num_states; ++s) {
      const float lse = lse_of(s);
      // Such a state's row may hold anything.
      if (lse == -INFINITY) continue;
      const AttentionState& state = params.states[s];
      const auto vector =
          load_vector<kElements>(static_cast<const T*>(state.out) + token * state.out_token_stride +
                                 head * state.out_head_stride + d);
      // Equal infinities have equal weights.
      const float weight = lse == largest ? 1.f : expf(lse - largest);
      sum += weight;
#pragma unroll
      for (int e = 0; e < kElements; ++e) merged[e] += weight * to_float(vector.elements[e]);
    }
    const bool is_empty = largest == -INFINITY && sum == 0.f;
    const float factor = 1.f / sum;
    Vector<T, kElements> out;
#pragma unroll
    for (int e = 0; e < kElements; ++e) merged[e] = is_empty ? 0.f : merged[e] * factor;
    store(merged, out);
    store_vector(out, static_cast<T*>(p.out) + row * p.head_dim + d);
    if (d == 0) p.lse[row] = is_empty ? -INFINITY : largest + logf(sum);
  }
}

template <typename T, int kElements, int kMostStates>
cudaError_t launch_for(const MergeStatesParams& merge, const DeviceLimits& limits,
                       cudaStream_t stream) {
  StatesParams<kMostStates> params;
  std::copy_n(merge.states, merge.num_states, params.states);
  params.merge = merge;
  const int64_t total = merge.num_tokens * merge.num_heads * (merge.head_dim / kElements);
  merge_states_kernel<T, kElements, kMostStates>
      <<<blocks_for(total, limits), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

template <typename T, int kElements>
cudaError_t launch(const MergeStatesParams& merge, const DeviceLimits& limits,
                   cudaStream_t stream) {
  // Few states, as nearly always, are few bytes of parameters.
  constexpr int kFewStates = 16;
  return merge.num_states <= kFewStates
             ? launch_for<T, kElements, kFewStates>(merge, limits, stream)
             : launch_for<T, kElements, kMaxStates>(merge, limits, stream);
}

template <typename T>
cudaError_t launch_widest(const MergeStatesParams& merge, const DeviceLimits& limits,
                          cudaStream_t stream) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  bool is_aligned = merge.head_dim % kElements == 0;
  for (int64_t s = 0; s < merge.num_states; ++s) {
    const AttentionState& state = merge.states[s];
    is_aligned &= (state.out_token_stride | state.out_head_stride) % kElements == 0 &&
                  reinterpret_cast<uintptr_t>(state.out) % 16 == 0;
  }
  return is_aligned ? launch<T, kElements>(merge, limits, stream)
                    : launch<T, 1>(merge, limits, stream);
}

}  // namespace

cudaError_t merge_states(const MergeStatesParams& merge, const DeviceLimits& limits,
                         cudaStream_t stream) {
  if (merge.num_tokens * merge.num_heads == 0) return cudaSuccess;
  switch (merge.dtype) {
    case DType::kFloat16:
      return launch_widest<__half>(merge, limits, stream);
    case DType::kBFloat16:
      return launch_widest<__nv_bfloat16>(merge, limits, stream);
    default:
      return launch_widest<float>(merge, limits, stream);
  }
}

}  // namespace paged_attn::cuda
