// The host functions behind decode(): one a kernel shape, defined in launch.cuh and compiled in
// instantiations/, and the kernel that runs before any of them.
#pragma once

#include <cuda_runtime.h>

#include "device_params.cuh"

namespace paged_attn::cuda {

// Launches a kernel that may start before the one ahead of it in the stream has finished
// (programmatic dependent launch). What it does before its griddepcontrol.wait must not depend on
// that kernel; one that waits first may follow anything.
template <typename Kernel>
cudaError_t launch_early(Kernel kernel, int grid, int threads, int shared_bytes,
                         const DeviceParams& params, const DeviceLimits& limits,
                         cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(grid));
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = limits.has_dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, int kStages>
cudaError_t launch_decode(const DeviceParams& params, const DecodeConfig& config,
                          const DeviceLimits& limits, cudaStream_t stream);

cudaError_t launch_prepare(const DeviceParams& params, const DeviceLimits& limits,
                           cudaStream_t stream);

}  // namespace paged_attn::cuda
