// What of a device matters to launches. No device code.
#pragma once

#include "decode/tuning.h"

namespace paged_attn::cuda {

struct DeviceLimits {
  int num_sms;
  int shared_memory_per_block;  // bytes that one block may opt in to
  bool has_dependent_launch;    // programmatic dependent launch: compute capability 9.0 on
  int device;                   // CUDA's number of it
  Tuning tuning;                // what decode's heuristics rest on
};

}  // namespace paged_attn::cuda
