// decode: the schedule's pieces, over the threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "isa.h"
#include "kernels.h"
#include "schedule.h"
#include "sequences.h"

namespace paged_attn::cpu {
namespace {

constexpr std::align_val_t kAlignment{64};

// Memory that is not cleared: it is written before it is read.
struct Free {
  void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
};
using Memory = std::unique_ptr<void, Free>;

Memory allocate(int64_t bytes) {
  return Memory(::operator new(static_cast<size_t>(bytes), kAlignment));
}

struct Job {
  const Schedule* schedule;
  void (*attend)(const Piece& piece, void* workspace);
  void (*merge)(const Piece& piece);
  char* workspaces;
  int64_t workspace_bytes;  // each
  float* partials;
  std::atomic<int64_t>* chunks_left;  // of each merge
  std::atomic<int64_t> next_piece;
};

// Takes pieces until none is left: which thread takes which is up to their speeds.
void work(void* context, int64_t worker) {
  Job& job = *static_cast<Job*>(context);
  void* workspace = job.workspaces + worker * job.workspace_bytes;
  const int64_t num_pieces = job.schedule->num_pieces();
  while (true) {
    const int64_t index = job.next_piece.fetch_add(1, std::memory_order_relaxed);
    if (index >= num_pieces) return;
    Schedule::Assignment assignment = job.schedule->assignment(index, job.partials);
    Piece& piece = assignment.piece;
    job.attend(piece, workspace);
    if (assignment.merge < 0) continue;
    // Acquire and release: whoever counts to zero sees the others' partial results.
    if (job.chunks_left[assignment.merge].fetch_sub(1, std::memory_order_acq_rel) == 1) {
      piece.first_chunk = 0;
      piece.num_chunks = assignment.num_chunks;
      job.merge(piece);
    }
  }
}

float widen(uint16_t bits, DType dtype) {
  if (dtype == DType::kBFloat16) {
    const uint32_t upper = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &upper, sizeof(value));
    return value;
  }
  const int exponent = bits >> 10 & 0x1f;
  const int mantissa = bits & 0x3ff;
  float value = std::ldexp(static_cast<float>(exponent > 0 ? mantissa | 0x400 : mantissa),
                           std::max(exponent, 1) - 25);
  if (exponent == 0x1f) {
    value = mantissa == 0 ? std::numeric_limits<float>::infinity()
                          : std::numeric_limits<float>::quiet_NaN();
  }
  return bits & 0x8000 ? -value : value;
}

// One a query head; empty if there are none.
std::vector<float> sinks_in_fp32(const DecodeParams& params) {
  if (params.sinks == nullptr) return {};
  std::vector<float> sinks(static_cast<size_t>(params.num_heads));
  for (size_t h = 0; h < sinks.size(); ++h) {
    sinks[h] = params.sinks_are_fp32
                   ? static_cast<const float*>(params.sinks)[h]
                   : widen(static_cast<const uint16_t*>(params.sinks)[h], params.dtype);
  }
  return sinks;
}

}  // namespace

void decode(const DecodeParams& arguments, const ThreadPool& threads) {
  const Kernels& chosen = kernels();
  DecodeParams params = arguments;
  const std::vector<float> sinks = sinks_in_fp32(params);
  params.sinks = sinks.empty() ? nullptr : sinks.data();
  params.sinks_are_fp32 = true;
  // batch_invariant asks for nothing more: with or without it, a sequence's chunks and row tiles
  // are its own affair (schedule.h), and a row's bits do not depend on what shares its registers
  // (tile_kernels.h).
  const Schedule schedule(params, find_sequences(params), threads.num_threads);
  if (schedule.num_pieces() == 0) return;

  const auto type = static_cast<size_t>(params.dtype);
  Job job{};
  job.schedule = &schedule;
  job.attend = chosen.attend[static_cast<size_t>(params.cache_dtype)][type];
  job.merge = chosen.merge[type];
  job.workspace_bytes = chosen.workspace_bytes(params.head_dim, schedule.most_records());
  const Memory workspaces = allocate(schedule.num_workers() * job.workspace_bytes);
  job.workspaces = static_cast<char*>(workspaces.get());
  const Memory partials = allocate(schedule.partials_size() * static_cast<int64_t>(sizeof(float)));
  job.partials = static_cast<float*>(partials.get());
  std::vector<std::atomic<int64_t>> chunks_left(static_cast<size_t>(schedule.num_merges()));
  schedule.count_chunks(chunks_left.data());
  job.chunks_left = chunks_left.data();

  if (schedule.num_workers() == 1) {
    work(&job, 0);
  } else {
    threads.run(schedule.num_workers(), work, &job);
  }
}

}  // namespace paged_attn::cpu
