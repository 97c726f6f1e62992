// Host side of one kernel shape.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../dependent_launch.cuh"
#include "../function_attribute.h"
#include "kernel.cuh"
#include "launch.h"

namespace paged_attn::cuda {

// The decode kernel reads tables, lengths and cache before prepare_kernel, or write_kv_kernel
// behind that, has ended: prepare_kernel lets it start only once everything before was done. That
// rests on no promise of the caller's but append_decode's, that a written slot has one sequence.
template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, int kStages>
cudaError_t launch_decode(const DeviceParams& params, const DecodeConfig& config,
                          const DeviceLimits& limits, cudaStream_t stream) {
  constexpr KernelShape kShape = {kHeadDim, sizeof(T), sizeof(C), kRings, kRowTiles, kStages};
  static_assert(sizeof(typename Combiner<T, C, kHeadDim, kRings, kRowTiles, true>::Shared) +
                    kRings * kStages * slot_bytes(kHeadDim, sizeof(T), sizeof(C), kRowTiles) <=
                shared_bytes(kShape));
  const auto launch = [&](auto plain) {
    constexpr auto kKernel =
        decode_kernel<T, C, kHeadDim, kRings, kRowTiles, kStages, decltype(plain)::value>;
    const cudaError_t error =
        set_attribute_once<kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize>(
            std::min(
                shared_bytes(kShape) + leaf_buffer_bytes(kShape) + unit_buffer_bytes(kShape, true),
                limits.shared_memory_per_block - own_shared_bytes(kShape)),
            limits);
    if (error != cudaSuccess) return error;
    return launch_early(kKernel, static_cast<unsigned>(config.grid), config.threads(),
                        config.shared_bytes, params, limits, stream);
  };
  if constexpr (sizeof(C) == 2) {
    if (is_plain(params)) return launch(std::true_type{});
  }
  return launch(std::false_type{});
}

}  // namespace paged_attn::cuda
