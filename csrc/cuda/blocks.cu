// copy_blocks: whole blocks inside caches, as bytes. swap_blocks: whole blocks between tensors, by
// the copy engines.
#include <algorithm>
#include <cstring>
#include <limits>

#include "indices.cuh"
#include "kernels.h"

namespace paged_attn::cuda {
namespace {

// Loads that a thread has under way at once.
constexpr int kUnroll = 4;

// Launches for few caches, nearly all of them, carry small parameters. Even the larger ones stay
// below the 32 764 bytes that a kernel may have.
constexpr int kFewPools = 64, kManyPools = 512;

template <int kMostPools>
struct PoolsParams {
  BlockPool pools[kMostPools];
  const int64_t* block_mapping;
  int64_t num_pairs;
  int64_t num_blocks;
  int64_t chunks;  // of each block: what a thread block copies at a time
};

// The block's share of a run of contiguous pieces: those from `first` on, kUnroll a thread.
template <typename Piece>
__device__ __forceinline__ void copy_run(const Piece* from, Piece* to, int64_t first,
                                         int64_t pieces) {
  Piece values[kUnroll];
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    if (first + j * kThreads < pieces) values[j] = from[first + j * kThreads];
  }
#pragma unroll
  for (int j = 0; j < kUnroll; ++j) {
    if (first + j * kThreads < pieces) to[first + j * kThreads] = values[j];
  }
}

// The same of a block that lies in several runs.
template <typename Piece>
__device__ __forceinline__ void copy_runs(const BlockLayout& layout, const char* from, char* to,
                                          int64_t first, int64_t pieces) {
  const int64_t run_pieces = layout.run / static_cast<int64_t>(sizeof(Piece));
#pragma unroll 1
  for (int j = 0; j < kUnroll; ++j) {
    const int64_t piece = first + j * kThreads;
    if (piece >= pieces) return;
    const int64_t run = quotient(piece, run_pieces), outer = quotient(run, layout.inner);
    const int64_t offset = outer * layout.outer_stride +
                           (run - outer * layout.inner) * layout.inner_stride +
                           (piece - run * run_pieces) * static_cast<int64_t>(sizeof(Piece));
    *reinterpret_cast<Piece*>(to + offset) = *reinterpret_cast<const Piece*>(from + offset);
  }
}

// blockIdx.y is the cache.
template <typename Piece, int kMostPools>
__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(const __grid_constant__ PoolsParams<kMostPools> p) {
  const BlockPool& pool = p.pools[blockIdx.y];
  const BlockLayout& layout = pool.layout;
  const int64_t num_runs = layout.outer * layout.inner;
  const int64_t pieces = num_runs * layout.run / static_cast<int64_t>(sizeof(Piece));
  for (int64_t i = blockIdx.x; i < p.num_pairs * p.chunks; i += gridDim.x) {
    const int64_t pair = quotient(i, p.chunks), chunk = i - pair * p.chunks;
    const int64_t source = p.block_mapping[2 * pair];
    const int64_t destination = p.block_mapping[2 * pair + 1];
    if (source < 0 || source >= p.num_blocks || destination < 0 || destination >= p.num_blocks) {
      continue;
    }
    const char* from = pool.data + source * pool.block_stride;
    char* to = pool.data + destination * pool.block_stride;
    const int64_t first = chunk * (kThreads * kUnroll) + threadIdx.x;
    if (num_runs == 1) {
      copy_run(reinterpret_cast<const Piece*>(from), reinterpret_cast<Piece*>(to), first, pieces);
    } else {
      copy_runs<Piece>(layout, from, to, first, pieces);
    }
  }
}

template <typename Piece, int kMostPools>
cudaError_t launch_for(const CopyBlocksParams& params, cudaStream_t stream) {
  const BlockLayout& layout = params.pools[0].layout;
  const int64_t block_bytes = layout.outer * layout.inner * layout.run;
  constexpr int64_t kChunkBytes = sizeof(Piece) * kThreads * kUnroll;
  constexpr int64_t kMostBlocks = 1 << 30;
  PoolsParams<kMostPools> p;
  p.block_mapping = params.block_mapping;
  p.num_pairs = params.num_pairs;
  p.num_blocks = params.num_blocks;
  p.chunks = (block_bytes + kChunkBytes - 1) / kChunkBytes;
  for (int64_t first = 0; first < params.num_pools; first += kMostPools) {
    const int64_t count = std::min<int64_t>(kMostPools, params.num_pools - first);
    std::copy_n(params.pools + first, count, p.pools);
    const dim3 grid(static_cast<unsigned>(std::min(p.num_pairs * p.chunks, kMostBlocks)),
                    static_cast<unsigned>(count));
    copy_blocks_kernel<Piece, kMostPools><<<grid, kThreads, 0, stream>>>(p);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Piece>
cudaError_t launch(const CopyBlocksParams& params, cudaStream_t stream) {
  return params.num_pools <= kFewPools ? launch_for<Piece, kFewPools>(params, stream)
                                       : launch_for<Piece, kManyPools>(params, stream);
}

}  // namespace

cudaError_t copy_blocks(const CopyBlocksParams& params, cudaStream_t stream) {
  if (params.num_pools == 0 || params.num_pairs == 0) return cudaSuccess;
  switch (params.alignment) {
    case 16:
      return launch<uint4>(params, stream);
    case 8:
      return launch<uint2>(params, stream);
    case 4:
      return launch<uint32_t>(params, stream);
    case 2:
      return launch<uint16_t>(params, stream);
    default:
      return launch<uint8_t>(params, stream);
  }
}

cudaError_t swap_blocks(const SwapPair& pair, const std::vector<BlockRun>& runs,
                        cudaStream_t stream) {
  // The largest distance between rows that a copy in two dimensions may have.
  constexpr int64_t kMostPitch = std::numeric_limits<int32_t>::max();
  const int64_t bytes = pair.block_bytes;
  const bool is_dense = pair.source_stride == bytes && pair.destination_stride == bytes;
  const bool has_pitch = pair.source_stride >= bytes && pair.destination_stride >= bytes &&
                         std::max(pair.source_stride, pair.destination_stride) <= kMostPitch;
  for (const BlockRun& run : runs) {
    const int64_t blocks_at_once = is_dense || has_pitch ? run.count : 1;
    for (int64_t block = 0; block < run.count; block += blocks_at_once) {
      const char* from = pair.source + (run.source + block) * pair.source_stride;
      char* to = pair.destination + (run.destination + block) * pair.destination_stride;
      const cudaError_t error =
          is_dense || blocks_at_once == 1
              ? cudaMemcpyAsync(to, from, static_cast<size_t>(bytes * blocks_at_once),
                                cudaMemcpyDefault, stream)
              : cudaMemcpy2DAsync(to, static_cast<size_t>(pair.destination_stride), from,
                                  static_cast<size_t>(pair.source_stride),
                                  static_cast<size_t>(bytes), static_cast<size_t>(blocks_at_once),
                                  cudaMemcpyDefault, stream);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace paged_attn::cuda
