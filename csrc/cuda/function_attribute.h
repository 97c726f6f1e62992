// Attributes of kernels, which stay set.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "device_limits.h"

namespace paged_attn::cuda {

// Sets an attribute of kKernel on the current device before its first launch there. Not before
// every launch: that would take as long as half of one. A kernel has one value of an attribute for
// good.
template <auto kKernel, cudaFuncAttribute kAttribute>
cudaError_t set_attribute_once(int value, const DeviceLimits& limits) {
  static std::atomic<uint64_t> devices{0};
  const uint64_t device = limits.device < 64 ? uint64_t{1} << limits.device : 0;
  if ((devices.load(std::memory_order_relaxed) & device) != 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kKernel, kAttribute, value);
  if (error == cudaSuccess) devices.fetch_or(device, std::memory_order_relaxed);
  return error;
}

}  // namespace paged_attn::cuda
