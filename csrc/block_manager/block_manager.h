// Which sequence owns which block of a paged KV cache. Knows nothing of tensors.
//
// Every call succeeds, or throws and changes nothing. Thread-compatible: const calls may run at
// once, others need a lock (from Python, the GIL, which the bindings never release).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "block_pool.h"

namespace paged_attn {

using BlockCopy = std::pair<int32_t, int32_t>;  // (source, destination)

// An argument that is one value for all sequences, or one for each.
struct PerSequence {
  int64_t common = 0;
  std::optional<std::vector<int64_t>> each;

  int64_t operator[](size_t i) const { return each ? (*each)[i] : common; }
};

struct Sequence {
  int32_t num_tokens = 0;
  std::vector<int32_t> blocks;  // [ceil(num_tokens / block_size)], the block table
  uint64_t last_batch = 0;      // the append that named this sequence last, to find duplicates
};

struct Stats {
  int64_t used = 0;    // blocks referenced by some sequence
  int64_t shared = 0;  // of those, by more than one
  int64_t cached = 0;  // blocks kept for their content alone
  int64_t free = 0;
  int64_t evicted = 0;      // cached blocks given up for new content, ever
  int64_t hit_tokens = 0;   // tokens that allocate found cached, ever
  double utilization = 0.;  // share of the used blocks' slots that hold tokens; 0 when none is used
};

// A validated step: what write_step needs. Good until the manager changes.
struct StepPlan {
  std::vector<const Sequence*> sequences;
  std::vector<int32_t> query_lens;  // one a sequence
  int64_t num_rows = 0;             // the sequences, then the padding rows
  int32_t padding_query_len = 0;    // slots that each padding row takes
  int64_t num_query_tokens = 0;     // of all rows
  int64_t min_width = 0;            // blocks of the longest sequence
};

struct StepBuffers {
  int32_t* block_tables;  // [num_rows, width], contiguous
  int64_t width;          // at least min_width
  int32_t* context_lens;  // [num_rows]
  int64_t* slot_mapping;  // [num_slots]
  int64_t num_slots;      // at least num_query_tokens
  int32_t* cu_seqlens_q;  // [num_rows + 1]
};

class BlockManager {
 public:
  BlockManager(int64_t num_blocks, int64_t block_size);

  int32_t num_blocks() const { return pool_.num_blocks(); }
  int32_t block_size() const { return block_size_; }
  int32_t num_free_blocks() const { return pool_.num_free(); }

  // Registers a sequence of num_tokens tokens; returns how many of them are cached already.
  int64_t allocate(int64_t seq_id, int64_t num_tokens);

  // Grows all the sequences, or none; returns the block copies to make before the new tokens are
  // written. An id named twice is refused.
  std::vector<BlockCopy> append(const std::vector<int64_t>& seq_ids, const PerSequence& num_tokens);

  // Forgets the sequence. Its blocks are released last to first, so that the next sequence gets
  // them first to last.
  void free(int64_t seq_id);

  const std::vector<int32_t>& block_table(int64_t seq_id) const;
  int32_t num_tokens(int64_t seq_id) const;
  Stats stats() const;

  // The queries of a step are the last query_lens tokens of their sequences, appended before.
  StepPlan plan_step(const std::vector<int64_t>& seq_ids, const PerSequence& query_lens,
                     std::optional<int64_t> pad_to) const;
  void write_step(const StepPlan& plan, const StepBuffers& buffers) const noexcept;

  // Throws std::runtime_error unless tables, lengths, reference counts and free list agree.
  void check() const;

 private:
  int64_t blocks_for(int64_t num_tokens) const;
  const Sequence& find(const char* where, int64_t seq_id) const;
  int64_t* write_slots(const Sequence& sequence, int32_t query_len, int64_t* slots) const noexcept;

  int32_t block_size_;
  BlockPool pool_;
  std::unordered_map<int64_t, Sequence> sequences_;
  uint64_t batch_ = 0;  // counts calls of append
};

}  // namespace paged_attn
