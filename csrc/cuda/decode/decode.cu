// decode() on the host: divides scratch, completes the params and picks the kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <utility>

#include "../kernels.h"
#include "launch.h"
#include "softmax.cuh"

namespace paged_attn::cuda {
namespace {

// How scratch is divided, in bytes from its start.
struct ScratchLayout {
  size_t partial_sums;
  size_t arrivals;
  size_t prefix_chunks;
  size_t row_starts;
  size_t bytes;

  ScratchLayout(const DecodeParams& params, const DecodeConfig& config) {
    const auto groups = static_cast<size_t>(config.grid) * config.head_lanes * config.row_tiles;
    const size_t parts = (2 + static_cast<size_t>(config.max_chunks)) * groups;
    partial_sums = parts * kTileRows * config.head_dim * sizeof(float);
    arrivals = partial_sums + parts * kTileRows * sizeof(RowSums);
    const auto units = static_cast<size_t>(config.grid) * config.head_lanes;
    prefix_chunks = arrivals + units * sizeof(uint64_t);
    row_starts = prefix_chunks + (config.max_chunks > 0 ? units * sizeof(int32_t) : 0);
    bytes = row_starts + (params.cu_seqlens_q ? (params.batch_size + 1) * sizeof(int32_t) : 0);
  }
};

template <typename T, typename C, size_t... kIndex>
cudaError_t launch_matching(const DeviceParams& params, const DecodeConfig& config,
                            const DeviceLimits& limits, cudaStream_t stream,
                            std::index_sequence<kIndex...>) {
  cudaError_t result = cudaErrorInvalidConfiguration;
  const auto try_shape = [&](auto index) {
    constexpr KernelShape kShape = kKernelShapes[decltype(index)::value];
    if constexpr (kShape.element_bytes == sizeof(T) && kShape.cache_bytes == sizeof(C)) {
      if (kShape.head_dim == config.head_dim && kShape.rings == config.rings &&
          kShape.row_tiles == config.row_tiles && kShape.stages == config.stages) {
        result =
            launch_decode<T, C, kShape.head_dim, kShape.rings, kShape.row_tiles, kShape.stages>(
                params, config, limits, stream);
      }
    }
  };
  (try_shape(std::integral_constant<size_t, kIndex>{}), ...);
  return result;
}

constexpr auto kShapeIndices = std::make_index_sequence<std::size(kKernelShapes)>{};

template <typename T>
cudaError_t launch_for_cache(const DeviceParams& params, const DecodeConfig& config,
                             const DeviceLimits& limits, cudaStream_t stream) {
  switch (params.decode.cache_dtype) {
    case DType::kFloat8E4M3:
      return launch_matching<T, __nv_fp8_e4m3>(params, config, limits, stream, kShapeIndices);
    case DType::kFloat8E5M2:
      return launch_matching<T, __nv_fp8_e5m2>(params, config, limits, stream, kShapeIndices);
    default:
      return launch_matching<T, T>(params, config, limits, stream, kShapeIndices);
  }
}

// Random for this process, and so far apart that what its earlier calls left in scratch is never
// taken for a later one's.
uint64_t next_call_number() {
  const auto random = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  };
  static std::atomic<uint64_t> next(random());
  return next.fetch_add(uint64_t{1} << 20, std::memory_order_relaxed);
}

}  // namespace

size_t decode_scratch_bytes(const DecodeParams& params, const DecodeConfig& config) {
  return ScratchLayout(params, config).bytes;
}

cudaError_t fill_counters(const DecodeParams& params, const DecodeConfig& config, void* scratch,
                          cudaStream_t stream) {
  const ScratchLayout layout(params, config);
  return cudaMemsetAsync(static_cast<uint8_t*>(scratch) + layout.arrivals, 0xff,
                         layout.prefix_chunks - layout.arrivals, stream);
}

cudaError_t decode(const DecodeParams& params, const WriteKvParams* new_tokens, bool starts_early,
                   const DecodeConfig& config, const DeviceLimits& limits, void* scratch,
                   cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  const ScratchLayout layout(params, config);
  auto* bytes = static_cast<uint8_t*>(scratch);
  DeviceParams device{};
  device.decode = params;
  device.partial_outputs = reinterpret_cast<float*>(bytes);
  device.partial_sums = reinterpret_cast<RowSums*>(bytes + layout.partial_sums);
  device.arrivals = reinterpret_cast<uint64_t*>(bytes + layout.arrivals);
  device.prefix_chunks = reinterpret_cast<int32_t*>(bytes + layout.prefix_chunks);
  device.row_starts = reinterpret_cast<int32_t*>(bytes + layout.row_starts);
  device.call_number = next_call_number();
  device.group = static_cast<int32_t>(params.num_heads / params.num_kv_heads);
  device.by_group = Divisor(device.group);
  device.by_block_size = Divisor(params.block_size);
  device.head_groups =
      static_cast<int32_t>((params.num_kv_heads + config.head_lanes - 1) / config.head_lanes);
  device.head_lanes = config.head_lanes;
  device.token_lanes = config.token_lanes;
  device.token_lanes_shift = log2_of(config.token_lanes);
  device.unit_blocks = config.unit_blocks;
  device.by_unit_blocks = Divisor(std::max(config.unit_blocks, 1));
  device.line_shift = config.line_shift;
  device.max_chunks = config.max_chunks;
  if (config.max_chunks > 0) {
    device.by_most_leaves = Divisor(config.max_chunks * config.leaves);
    device.least_chunk_shift = config.least_chunk_shift;
    device.leaves_a_lane_shift = static_cast<int8_t>(log2_of(config.leaves / config.token_lanes));
  }
  device.has_state_buffers = config.has_state_buffers;
  device.has_unit_buffers = config.has_unit_buffers;
  device.unit_cost = config.unit_cost >> config.line_shift;
  device.by_head_groups = Divisor(device.head_groups);
  device.by_grid = Divisor(config.grid);
  device.min_steps = std::max(config.min_tiles >> device.line_shift, 1);
  while (params.block_size % (2 << device.run_shift) == 0 &&
         (1 << device.run_shift) < kTileTokens) {
    ++device.run_shift;
  }
  device.window = params.window > 0 ? static_cast<int32_t>(params.window) : kAllKeys;
  constexpr float kMost = std::numeric_limits<float>::max();
  device.has_transforms = params.softcap > 0 || params.alibi_slopes != nullptr;
  if (device.has_transforms) {
    device.score_factor = params.scale;
    device.scale_log2 = static_cast<float>(M_LOG2E);
  } else {
    device.score_factor = params.scale < 0 ? -1.f : 1.f;
    device.scale_log2 =
        static_cast<float>(std::min<double>(std::abs(params.scale) * M_LOG2E, kMost));
  }
  // Weights are at most 2^8 then, far from overflow in fp16, and rescaling is rare.
  device.slack = device.scale_log2 > 8 / kMost ? 8 / device.scale_log2 : kMost;
  const TokenStrides& out = params.out_strides;
  const size_t four_elements = params.dtype == DType::kFloat32 ? 16 : 8;
  device.out_is_aligned = reinterpret_cast<uintptr_t>(params.out) % four_elements == 0 &&
                          (out.batch | out.token | out.head) % 4 == 0;

  // Ragged rows are found by prepare_kernel, for which every block waits before all else. The
  // kernel that writes new tokens lets decode start when all before it is done.
  const bool is_ragged = params.cu_seqlens_q != nullptr;
  const bool writes = new_tokens != nullptr && new_tokens->num_blocks > 0;
  device.starts_early =
      starts_early && new_tokens == nullptr && is_plain(config.variant) && !is_ragged;
  device.overlaps = device.starts_early || (writes && !is_ragged);
  if (device.overlaps) {
    // Halves of 16 bytes pass through the L1, by lines that neighbouring slots may share.
    const bool share_lines = params.cache_dtype != params.dtype && params.head_dim % 16 != 0;
    device.num_new_keys = share_lines ? kAllKeys : static_cast<int32_t>(params.query_len);
  }

  cudaError_t error = cudaSuccess;
  if (writes) error = write_kv(*new_tokens, limits, stream);
  if (error == cudaSuccess && is_ragged) error = launch_prepare(device, limits, stream);
  if (error != cudaSuccess) return error;
  switch (params.dtype) {
    case DType::kFloat16:
      return launch_for_cache<__half>(device, config, limits, stream);
    case DType::kBFloat16:
      return launch_for_cache<__nv_bfloat16>(device, config, limits, stream);
    default:
      return launch_matching<float, float>(device, config, limits, stream, kShapeIndices);
  }
}

}  // namespace paged_attn::cuda
