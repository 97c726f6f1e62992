// decode: the schedule's pieces, over the threads.
#include <algorithm>
#include <atomic>
#include <cstddef>
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

}  // namespace

void decode(const DecodeParams& params, const ThreadPool& threads) {
  const Kernels& chosen = kernels();
  const Schedule schedule(params, find_sequences(params), threads.num_threads);
  if (schedule.num_pieces() == 0) return;

  const auto type = static_cast<size_t>(params.dtype);
  Job job{};
  job.schedule = &schedule;
  job.attend = chosen.attend[type];
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
