// The CPU kernels' interface: plain C++ over params.h, no torch.
#pragma once

#include <cstdint>
#include <vector>

#include "../params.h"

namespace paged_attn::cpu {

// Runs body(context, i) for every i in [0, n), on the caller's threads. Bodies must not throw.
struct ThreadPool {
  int64_t num_threads;
  void (*run)(int64_t n, void (*body)(void* context, int64_t i), void* context);
};

// Arguments have been checked; what tables, lengths, slots and mappings hold has not.
void decode(const DecodeParams& params, const ThreadPool& threads);
void write_kv(const WriteKvParams& params, const ThreadPool& threads);
void copy_blocks(const CopyBlocksParams& params, const ThreadPool& threads);
// `runs` lie inside both tensors.
void swap_blocks(const SwapPair& pair, const std::vector<BlockRun>& runs,
                 const ThreadPool& threads);
void merge_states(const MergeStatesParams& params, const ThreadPool& threads);

// The instruction set that the kernels use: "avx512_bf16", "avx512", "avx2" or "generic". Chosen
// once: the best that the processor has, or what PAGED_ATTN_CPU_ISA names. Throws
// std::runtime_error if that is unknown or not available here, naming those that are.
const char* isa_name();

}  // namespace paged_attn::cpu
