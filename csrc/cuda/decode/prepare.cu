// What runs before the decode kernel where queries are ragged: finds which rows of q each sequence
// owns, and fills those of none.
#include <algorithm>

#include "../dependent_launch.cuh"
#include "../function_attribute.h"
#include "../kernels.h"
#include "empty_rows.cuh"
#include "launch.h"

namespace paged_attn::cuda {
namespace {

constexpr int kPrepareThreads = 256;

// row_starts[b]: the greatest of cu_seqlens_q[0 ... b], each clamped to [0, T]: for valid entries
// the entry itself, and whatever they hold the rows of two sequences never overlap.
__device__ __forceinline__ void find_row_starts(const DeviceParams& params, int32_t* row_starts) {
  __shared__ int32_t warp_max[kPrepareThreads / 32];
  const DecodeParams& p = params.decode;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int64_t entries = p.batch_size + 1;
  const int64_t each = (entries + kPrepareThreads - 1) / kPrepareThreads;
  const int64_t first = threadIdx.x * each, last = min(first + each, entries);
  const auto clamped = [&](int64_t b) {
    return static_cast<int32_t>(
        max(int64_t{0}, min(static_cast<int64_t>(p.cu_seqlens_q[b]), p.num_tokens)));
  };
  int32_t own = 0;
  for (int64_t b = first; b < last; ++b) own = max(own, clamped(b));
  int32_t inclusive = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t below = __shfl_up_sync(~0u, inclusive, distance);
    if (lane >= distance) inclusive = max(inclusive, below);
  }
  if (lane == 31) warp_max[warp] = inclusive;
  __syncthreads();
  int32_t before = __shfl_up_sync(~0u, inclusive, 1);
  if (lane == 0) before = 0;
  for (int w = 0; w < warp; ++w) before = max(before, warp_max[w]);
  for (int64_t b = first; b < last; ++b) {
    before = max(before, clamped(b));
    row_starts[b] = before;
  }
}

template <typename T>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ DeviceParams params) {
  wait_for_kernel_before();
  let_next_kernel_start();
  const DecodeParams& p = params.decode;
  // Every block finds them all for itself: they write the same values.
  find_row_starts(params, params.row_starts);
  __syncthreads();
  // The rows of no sequence, a part of them a block. A bad first entry may hide where sequences
  // begin: all rows before it are as bad.
  const auto fill_part = [&](int64_t begin, int64_t end, bool bad) {
    const int64_t each = (end - begin + gridDim.x - 1) / gridDim.x;
    const int64_t first = min(begin + blockIdx.x * each, end);
    fill_rows<T, kPrepareThreads>(p, 0, first, min(first + each, end), bad, false);
  };
  fill_part(0, params.row_starts[0], p.cu_seqlens_q[0] != params.row_starts[0]);
  fill_part(params.row_starts[p.batch_size], p.num_tokens, false);
}

template <typename T>
cudaError_t launch(const DeviceParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  // Few blocks where there is little to fill: the decode kernel starts on the other multiprocessors
  // at once.
  constexpr int64_t kBytesABlock = 1 << 18;
  const DecodeParams& p = params.decode;
  const int64_t bytes = p.num_tokens * p.num_heads * p.head_dim * static_cast<int64_t>(sizeof(T));
  const int64_t blocks = std::clamp<int64_t>(bytes / kBytesABlock, 1, limits.num_sms);
  // The decode kernel wants its multiprocessor's memory as shared memory. Wanting the same here
  // spares a reconfiguration between the two, for which the multiprocessor would have to drain.
  const cudaError_t error =
      set_attribute_once<prepare_kernel<T>, cudaFuncAttributePreferredSharedMemoryCarveout>(
          cudaSharedmemCarveoutMaxShared, limits);
  if (error != cudaSuccess) return error;
  return launch_early(prepare_kernel<T>, static_cast<unsigned>(blocks), kPrepareThreads, 0, params,
                      limits, stream);
}

}  // namespace

cudaError_t has_dependent_launch(bool& answer) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, prepare_kernel<float>);
  answer = error == cudaSuccess && attributes.ptxVersion >= 90;
  return error;
}

cudaError_t launch_prepare(const DeviceParams& params, const DeviceLimits& limits,
                           cudaStream_t stream) {
  switch (params.decode.dtype) {
    case DType::kFloat16:
      return launch<__half>(params, limits, stream);
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(params, limits, stream);
    default:
      return launch<float>(params, limits, stream);
  }
}

}  // namespace paged_attn::cuda
