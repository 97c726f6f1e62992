// Host side of one kernel shape.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../dependent_launch.cuh"
#include "../function_attribute.h"
#include "kernel.cuh"
#include "launch.h"

namespace paged_attn::cuda {

// The decode kernel may start before the one ahead of it has ended, and waits for that first of all
// unless it overlaps: write_kv_kernel, which has waited for everything before, or whatever the
// caller has promised about. Behind write_kv_kernel that rests on no promise but append_decode's,
// that a written slot has one sequence.
template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, int kStages>
cudaError_t launch_decode(const DeviceParams& params, const DecodeConfig& config,
                          const DeviceLimits& limits, cudaStream_t stream) {
  static constexpr KernelShape kShape = {kHeadDim, sizeof(T), sizeof(C),
                                         kRings,   kRowTiles, kStages};
  using Merge = Combiner<T, C, kHeadDim, kRings, kRowTiles, Variant::kGeneral>;
  constexpr int kRingBytes = kStages * slot_bytes(kHeadDim, sizeof(T), sizeof(C), kRowTiles);
  static_assert(sizeof(typename Merge::Shared) + kRings * kRingBytes <= shared_bytes(kShape));
  static_assert(Merge::places_in(ring_part_bytes(kRingBytes, kRowTiles) / 2) >= 2);
  cudaError_t result = cudaErrorInvalidConfiguration;
  const auto launch_if = [&](auto variant) {
    constexpr Variant kVariant = decltype(variant)::value;
    if constexpr (exists(kShape, kVariant)) {
      if (config.variant != kVariant) return;
      constexpr auto kKernel = decode_kernel<T, C, kHeadDim, kRings, kRowTiles, kStages, kVariant>;
      constexpr int kMostBytes =
          shared_bytes(kShape) + state_buffer_bytes(kShape) + unit_buffer_bytes(kShape, true);
      result = set_attribute_once<kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize>(
          std::min(kMostBytes, limits.shared_memory_per_block - own_shared_bytes(kShape)), limits);
      if (result != cudaSuccess) return;
      result = launch_early(kKernel, static_cast<unsigned>(config.grid), config.threads(),
                            config.shared_bytes, params, limits, stream);
    }
  };
  launch_if(std::integral_constant<Variant, Variant::kGeneral>{});
  launch_if(std::integral_constant<Variant, Variant::kInvariant>{});
  launch_if(std::integral_constant<Variant, Variant::kPlain>{});
  launch_if(std::integral_constant<Variant, Variant::kOne>{});
  return result;
}

}  // namespace paged_attn::cuda
