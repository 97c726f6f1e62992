// Kernels of a stream that overlap (programmatic dependent launch). One that is launched early may
// start as soon as each block of the kernel before has let it or has ended, and waits before it
// uses what that kernel writes. A kernel that waits first and lets the next start after that
// vouches for everything before itself.
#pragma once

#include <cuda_runtime.h>

#include "device_limits.h"

namespace paged_attn::cuda {

// Until the kernel before has ended and its writes are visible. Nothing to wait for in a kernel
// that was not launched early.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches a kernel that may start before the one ahead of it has ended. One that waits first may
// follow anything.
template <typename Params>
cudaError_t launch_early(void (*kernel)(Params), unsigned grid, int threads, int shared_bytes,
                         const Params& params, const DeviceLimits& limits, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(grid);
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  launch.stream = stream;
  launch.attrs = &attribute;
  launch.numAttrs = limits.has_dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&launch, kernel, params);
}

}  // namespace paged_attn::cuda
