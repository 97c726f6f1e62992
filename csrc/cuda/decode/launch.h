// The host functions behind decode(): one a kernel shape, defined in launch.cuh and compiled in
// instantiations/, and the kernel that runs before any of them where queries are ragged.
#pragma once

#include <cuda_runtime.h>

#include "device_params.cuh"

namespace paged_attn::cuda {

template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, int kStages>
cudaError_t launch_decode(const DeviceParams& params, const DecodeConfig& config,
                          const DeviceLimits& limits, cudaStream_t stream);

cudaError_t launch_prepare(const DeviceParams& params, const DeviceLimits& limits,
                           cudaStream_t stream);

}  // namespace paged_attn::cuda
