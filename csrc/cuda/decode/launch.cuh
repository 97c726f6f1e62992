// Host side of one kernel shape.
#pragma once

#include "kernel.cuh"
#include "launch.h"

namespace paged_attn::cuda {

// Programmatic dependent launch is what lets the decode kernel read tables, lengths and cache
// before prepare_kernel has finished: prepare_kernel itself began after everything before it was
// done, so this rests on no promise of the caller's.
template <typename T, int kHeadDim, int kRings, int kRowTiles, int kStages>
cudaError_t launch_decode(const DeviceParams& params, const DecodeConfig& config,
                          const DeviceLimits& limits, cudaStream_t stream) {
  constexpr KernelShape kShape = {kHeadDim, sizeof(T), kRings, kRowTiles, kStages};
  static_assert(sizeof(typename Combiner<T, kHeadDim, kRings, kRowTiles>::Shared) +
                    kRings * kStages * slot_bytes(kHeadDim, sizeof(T), kRowTiles) <=
                shared_bytes(kShape));
  const auto kernel = decode_kernel<T, kHeadDim, kRings, kRowTiles, kStages>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(config.grid));
  launch.blockDim = dim3(static_cast<unsigned>(config.threads()));
  launch.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = limits.has_dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace paged_attn::cuda
