// The CUDA kernels' interface: params.h and a stream, no torch.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "../params.h"
#include "decode/heuristics.h"

namespace paged_attn::cuda {

// What decode needs beside its arguments. It may hold anything when the call starts and belongs to
// the call.
size_t decode_scratch_bytes(const DecodeParams& params, const DecodeConfig& config);

// The part of it that is read before it was written, whatever it holds: counters of arrivals.
// Filled before the call, they keep compute-sanitizer's initcheck from taking that for a mistake.
cudaError_t fill_counters(const DecodeParams& params, const DecodeConfig& config, void* scratch,
                          cudaStream_t stream);

// Whether the kernels that this device runs were compiled for programmatic dependent launch: code
// for an older architecture, compiled at load time for a newer device, was not.
cudaError_t has_dependent_launch(bool& answer);

// All of them launch on `stream`, do not wait, and return CUDA's verdict on the launch.
// new_tokens: written to the cache first, or null. Old keys and values are read meanwhile.
// starts_early: the caller promises that what is still under way in the stream writes no table, no
// length, no scale, and no keys and values but those of the query tokens.
cudaError_t decode(const DecodeParams& params, const WriteKvParams* new_tokens, bool starts_early,
                   const DecodeConfig& config, const DeviceLimits& limits, void* scratch,
                   cudaStream_t stream);
// Lets a kernel behind it start early: when all that was before is done, but before it has ended.
cudaError_t write_kv(const WriteKvParams& params, const DeviceLimits& limits, cudaStream_t stream);
cudaError_t copy_blocks(const CopyBlocksParams& params, cudaStream_t stream);
// `runs` lie inside both tensors, which may be anywhere: on the host, pinned or not, or a device.
cudaError_t swap_blocks(const SwapPair& pair, const std::vector<BlockRun>& runs,
                        cudaStream_t stream);
cudaError_t merge_states(const MergeStatesParams& params, const DeviceLimits& limits,
                         cudaStream_t stream);

}  // namespace paged_attn::cuda
