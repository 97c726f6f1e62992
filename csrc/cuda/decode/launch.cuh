// Host side of one kernel shape.
#pragma once

#include "../dependent_launch.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace paged_attn::cuda {

// The decode kernel reads tables, lengths and cache before prepare_kernel, or write_kv_kernel
// behind that, has ended: prepare_kernel lets it start only once everything before was done, so
// this rests on no promise of the caller's.
template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, int kStages>
cudaError_t launch_decode(const DeviceParams& params, const DecodeConfig& config,
                          const DeviceLimits& limits, cudaStream_t stream) {
  constexpr KernelShape kShape = {kHeadDim, sizeof(T), sizeof(C), kRings, kRowTiles, kStages};
  static_assert(sizeof(typename Combiner<T, C, kHeadDim, kRings, kRowTiles>::Shared) +
                    kRings * kStages * slot_bytes(kHeadDim, sizeof(T), sizeof(C), kRowTiles) <=
                shared_bytes(kShape));
  auto kernel = decode_kernel<T, C, kHeadDim, kRings, kRowTiles, kStages, false>;
  if constexpr (sizeof(C) == 2) {
    if (is_plain(params)) kernel = decode_kernel<T, C, kHeadDim, kRings, kRowTiles, kStages, true>;
  }
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes);
  if (error != cudaSuccess) return error;

  return launch_early(kernel, static_cast<unsigned>(config.grid), config.threads(),
                      config.shared_bytes, params, limits, stream);
}

}  // namespace paged_attn::cuda
