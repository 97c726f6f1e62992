// reshape_and_cache: a copy from rows to slots, in pieces of up to 16 bytes.
#include <algorithm>

#include "kernels.h"

namespace paged_attn::cuda {
namespace {

constexpr int kThreads = 256;

// Sizes and strides count pieces here; a row has row_pieces of them.
struct CopyParams {
  ReshapeAndCacheParams cache;
  int64_t row_pieces;
  int64_t total;  // tokens * KV heads * row_pieces
};

template <typename Piece, typename Slot>
__global__ void __launch_bounds__(kThreads)
    reshape_and_cache_kernel(const __grid_constant__ CopyParams params) {
  const ReshapeAndCacheParams& p = params.cache;
  const int64_t num_slots = p.num_blocks * p.block_size;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < params.total;
       i += step) {
    const int64_t row = i / params.row_pieces, piece = i - row * params.row_pieces;
    const int64_t token = row / p.num_kv_heads, head = row - token * p.num_kv_heads;
    const int64_t slot = static_cast<const Slot*>(p.slot_mapping)[token];
    if (slot < 0 || slot >= num_slots) continue;
    const int64_t block = slot / p.block_size, offset = slot - block * p.block_size;
    static_cast<Piece*>(p.k_cache)[block * p.k_strides.block + offset * p.k_strides.slot +
                                   head * p.k_strides.head + piece] =
        static_cast<const Piece*>(
            p.key)[token * p.key_token_stride + head * p.key_head_stride + piece];
    static_cast<Piece*>(p.v_cache)[block * p.v_strides.block + offset * p.v_strides.slot +
                                   head * p.v_strides.head + piece] =
        static_cast<const Piece*>(
            p.value)[token * p.value_token_stride + head * p.value_head_stride + piece];
  }
}

template <typename Piece>
cudaError_t launch(const ReshapeAndCacheParams& cache, int element_bytes,
                   const DeviceLimits& limits, cudaStream_t stream) {
  const int64_t elements = static_cast<int64_t>(sizeof(Piece)) / element_bytes;
  CopyParams params{cache, cache.head_dim / elements, 0};
  params.total = cache.num_tokens * cache.num_kv_heads * params.row_pieces;
  ReshapeAndCacheParams& p = params.cache;
  for (int64_t* stride :
       {&p.key_token_stride, &p.key_head_stride, &p.value_token_stride, &p.value_head_stride,
        &p.k_strides.block, &p.k_strides.slot, &p.k_strides.head, &p.v_strides.block,
        &p.v_strides.slot, &p.v_strides.head}) {
    *stride /= elements;
  }
  const int64_t blocks =
      std::min<int64_t>((params.total + kThreads - 1) / kThreads, 8 * limits.num_sms);
  const auto kernel = p.slots_are_int64 ? reshape_and_cache_kernel<Piece, int64_t>
                                        : reshape_and_cache_kernel<Piece, int32_t>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

cudaError_t reshape_and_cache(const ReshapeAndCacheParams& params, const DeviceLimits& limits,
                              cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  const int element_bytes = params.dtype == DType::kFloat32 ? 4 : 2;
  // The dimensions of size 1 count too: their strides may be anything, which only costs speed.
  const int64_t strides = params.key_token_stride | params.key_head_stride |
                          params.value_token_stride | params.value_head_stride |
                          params.k_strides.block | params.k_strides.slot | params.k_strides.head |
                          params.v_strides.block | params.v_strides.slot | params.v_strides.head;
  const auto addresses =
      reinterpret_cast<uintptr_t>(params.key) | reinterpret_cast<uintptr_t>(params.value) |
      reinterpret_cast<uintptr_t>(params.k_cache) | reinterpret_cast<uintptr_t>(params.v_cache);
  if ((addresses | static_cast<uintptr_t>(strides * element_bytes)) % 16 == 0) {
    return launch<uint4>(params, element_bytes, limits, stream);
  }
  return element_bytes == 4 ? launch<uint32_t>(params, element_bytes, limits, stream)
                            : launch<uint16_t>(params, element_bytes, limits, stream);
}

}  // namespace paged_attn::cuda
