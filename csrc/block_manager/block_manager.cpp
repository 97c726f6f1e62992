#include "block_manager.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "errors.h"

namespace paged_attn {
namespace {

// Block ids, lengths and cumulative query lengths are int32 in every kernel argument.
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr const char* kPositive = "between 1 and 2147483647";
constexpr const char* kNonNegative = "between 0 and 2147483647";

int32_t checked_size(const char* argument, int64_t value) {
  if (value < 1 || value > kMaxInt32) {
    throw_invalid("paged_attn.BlockManager", argument, kPositive, value);
  }
  return static_cast<int32_t>(value);
}

void check_count(const char* where, const char* argument, const PerSequence& values, size_t count) {
  if (values.each && values.each->size() != count) {
    throw_invalid(where, argument,
                  "one int, or one a sequence (" + std::to_string(count) + " of them)",
                  std::to_string(values.each->size()) + " of them");
  }
}

}  // namespace

BlockManager::BlockManager(int64_t num_blocks, int64_t block_size)
    : block_size_(checked_size("block_size", block_size)),
      pool_(checked_size("num_blocks", num_blocks)) {}

int64_t BlockManager::blocks_for(int64_t num_tokens) const {
  return (num_tokens + block_size_ - 1) / block_size_;
}

const Sequence& BlockManager::find(const char* where, int64_t seq_id) const {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end()) throw UnknownSequence(where, seq_id);
  return found->second;
}

int64_t BlockManager::allocate(int64_t seq_id, int64_t num_tokens) {
  constexpr const char* kWhere = "paged_attn.BlockManager.allocate";
  if (num_tokens < 1 || num_tokens > kMaxInt32) {
    throw_invalid(kWhere, "num_tokens", kPositive, num_tokens);
  }
  if (sequences_.count(seq_id) != 0) {
    throw_invalid(kWhere, "seq_id", "the id of no present sequence", seq_id);
  }
  const int64_t needed = blocks_for(num_tokens);
  if (needed > pool_.num_free()) {
    throw OutOfBlocks(kWhere, needed, pool_.num_free(), pool_.num_blocks());
  }
  Sequence sequence;
  sequence.num_tokens = static_cast<int32_t>(num_tokens);
  sequence.blocks.reserve(static_cast<size_t>(needed));
  // Nothing can fail once the sequence is in the map.
  std::vector<int32_t>& blocks =
      sequences_.emplace(seq_id, std::move(sequence)).first->second.blocks;
  for (int64_t i = 0; i < needed; ++i) blocks.push_back(pool_.take());
  return 0;
}

std::vector<BlockCopy> BlockManager::append(const std::vector<int64_t>& seq_ids,
                                            const PerSequence& num_tokens) {
  constexpr const char* kWhere = "paged_attn.BlockManager.append";
  check_count(kWhere, "num_tokens", num_tokens, seq_ids.size());

  struct Growth {
    Sequence* sequence;
    int32_t num_tokens;
    size_t num_blocks;
  };
  std::vector<Growth> batch;
  batch.reserve(seq_ids.size());
  ++batch_;
  int64_t needed = 0;
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    const int64_t new_tokens = num_tokens[i];
    if (new_tokens < 1 || new_tokens > kMaxInt32) {
      throw_invalid(kWhere, "num_tokens", kPositive, new_tokens);
    }
    const auto found = sequences_.find(seq_ids[i]);
    if (found == sequences_.end()) throw UnknownSequence(kWhere, seq_ids[i]);
    Sequence& sequence = found->second;
    if (sequence.last_batch == batch_) {
      throw_invalid(kWhere, "seq_ids", "distinct",
                    "sequence " + std::to_string(seq_ids[i]) + " twice");
    }
    sequence.last_batch = batch_;
    const int64_t length = sequence.num_tokens + new_tokens;
    if (length > kMaxInt32) {
      throw_invalid(kWhere, "num_tokens",
                    "at most " + std::to_string(kMaxInt32 - sequence.num_tokens) +
                        " for sequence " + std::to_string(seq_ids[i]) + " of length " +
                        std::to_string(sequence.num_tokens),
                    new_tokens);
    }
    const int64_t new_blocks = blocks_for(length) - static_cast<int64_t>(sequence.blocks.size());
    needed += new_blocks;
    batch.push_back({&sequence, static_cast<int32_t>(length), sequence.blocks.size() + new_blocks});
  }
  if (needed > pool_.num_free()) {
    throw OutOfBlocks(kWhere, needed, pool_.num_free(), pool_.num_blocks());
  }
  // Memory for every table first: nothing can fail once the first of them grows.
  for (const Growth& growth : batch) {
    std::vector<int32_t>& blocks = growth.sequence->blocks;
    if (growth.num_blocks > blocks.capacity()) {
      blocks.reserve(std::max(growth.num_blocks, 2 * blocks.capacity()));
    }
  }
  for (const Growth& growth : batch) {
    std::vector<int32_t>& blocks = growth.sequence->blocks;
    while (blocks.size() < growth.num_blocks) blocks.push_back(pool_.take());
    growth.sequence->num_tokens = growth.num_tokens;
  }
  return {};
}

void BlockManager::free(int64_t seq_id) {
  const auto found = sequences_.find(seq_id);
  if (found == sequences_.end()) throw UnknownSequence("paged_attn.BlockManager.free", seq_id);
  const std::vector<int32_t>& blocks = found->second.blocks;
  std::for_each(blocks.rbegin(), blocks.rend(), [this](int32_t block) { pool_.release(block); });
  sequences_.erase(found);
}

const std::vector<int32_t>& BlockManager::block_table(int64_t seq_id) const {
  return find("paged_attn.BlockManager.block_table", seq_id).blocks;
}

int32_t BlockManager::num_tokens(int64_t seq_id) const {
  return find("paged_attn.BlockManager.num_tokens", seq_id).num_tokens;
}

Stats BlockManager::stats() const {
  Stats stats;
  stats.free = pool_.num_free();
  stats.used = pool_.num_blocks() - stats.free;
  int64_t tokens = 0;
  for (const auto& [seq_id, sequence] : sequences_) tokens += sequence.num_tokens;
  if (stats.used > 0) {
    stats.utilization =
        static_cast<double>(tokens) / (static_cast<double>(stats.used) * block_size_);
  }
  return stats;
}

StepPlan BlockManager::plan_step(const std::vector<int64_t>& seq_ids, const PerSequence& query_lens,
                                 std::optional<int64_t> pad_to) const {
  constexpr const char* kWhere = "paged_attn.BlockManager.step_inputs";
  const auto batch_size = static_cast<int64_t>(seq_ids.size());
  check_count(kWhere, "query_lens", query_lens, seq_ids.size());
  if (!query_lens.each && (query_lens.common < 0 || query_lens.common > kMaxInt32)) {
    throw_invalid(kWhere, "query_lens", kNonNegative, query_lens.common);
  }
  // NOTE: one less than int32 allows, because cu_seqlens_q has an entry more than there are rows.
  if (pad_to && (*pad_to < batch_size || *pad_to >= kMaxInt32)) {
    throw_invalid(kWhere, "pad_to",
                  "at least the number of sequences, " + std::to_string(batch_size) +
                      ", and below 2147483647",
                  *pad_to);
  }

  StepPlan plan;
  plan.num_rows = pad_to.value_or(batch_size);
  if (!query_lens.each) plan.padding_query_len = static_cast<int32_t>(query_lens.common);
  plan.num_query_tokens = (plan.num_rows - batch_size) * plan.padding_query_len;
  plan.sequences.reserve(seq_ids.size());
  plan.query_lens.reserve(seq_ids.size());
  for (size_t i = 0; i < seq_ids.size(); ++i) {
    const Sequence& sequence = find(kWhere, seq_ids[i]);
    const int64_t query_len = query_lens[i];
    if (query_len < 0 || query_len > sequence.num_tokens) {
      throw_invalid(kWhere, "query_lens",
                    "between 0 and the length of sequence " + std::to_string(seq_ids[i]) + ", " +
                        std::to_string(sequence.num_tokens),
                    query_len);
    }
    plan.sequences.push_back(&sequence);
    plan.query_lens.push_back(static_cast<int32_t>(query_len));
    plan.num_query_tokens += query_len;
    plan.min_width = std::max(plan.min_width, static_cast<int64_t>(sequence.blocks.size()));
  }
  if (plan.num_query_tokens > kMaxInt32) {
    throw_invalid(kWhere, "query_lens", "at most 2147483647 in all, padding included",
                  plan.num_query_tokens);
  }
  return plan;
}

void BlockManager::write_step(const StepPlan& plan, const StepBuffers& buffers) const noexcept {
  constexpr int32_t kNoBlock = -1;
  constexpr int64_t kNoSlot = -1;
  const auto batch_size = static_cast<int64_t>(plan.sequences.size());
  int32_t* table = buffers.block_tables;
  int64_t* slots = buffers.slot_mapping;
  int32_t query_start = 0;
  for (int64_t i = 0; i < batch_size; ++i) {
    const Sequence& sequence = *plan.sequences[i];
    int32_t* end = std::copy(sequence.blocks.begin(), sequence.blocks.end(), table);
    table += buffers.width;
    std::fill(end, table, kNoBlock);
    buffers.context_lens[i] = sequence.num_tokens;
    buffers.cu_seqlens_q[i] = query_start;
    query_start += plan.query_lens[i];
    slots = write_slots(sequence, plan.query_lens[i], slots);
  }
  std::fill(table, buffers.block_tables + plan.num_rows * buffers.width, kNoBlock);
  std::fill(slots, buffers.slot_mapping + buffers.num_slots, kNoSlot);
  for (int64_t i = batch_size; i < plan.num_rows; ++i) {
    buffers.context_lens[i] = 0;
    buffers.cu_seqlens_q[i] = query_start;
    query_start += plan.padding_query_len;
  }
  buffers.cu_seqlens_q[plan.num_rows] = query_start;
}

int64_t* BlockManager::write_slots(const Sequence& sequence, int32_t query_len,
                                   int64_t* slots) const noexcept {
  int64_t position = sequence.num_tokens - query_len;
  while (position < sequence.num_tokens) {
    // A block at a time: one division for all of its slots.
    const int64_t index = position / block_size_;
    const int64_t offset = position - index * block_size_;
    const int64_t count = std::min(block_size_ - offset, sequence.num_tokens - position);
    int64_t slot = static_cast<int64_t>(sequence.blocks[index]) * block_size_ + offset;
    for (int64_t i = 0; i < count; ++i) *slots++ = slot++;
    position += count;
  }
  return slots;
}

void BlockManager::check() const {
  std::vector<int32_t> references(static_cast<size_t>(pool_.num_blocks()));
  for (const auto& [seq_id, sequence] : sequences_) {
    const auto fail = [id = seq_id](const std::string& what) {
      throw std::runtime_error("paged_attn.BlockManager.check: sequence " + std::to_string(id) +
                               " " + what);
    };
    const auto table_size = static_cast<int64_t>(sequence.blocks.size());
    if (sequence.num_tokens < 1 || table_size != blocks_for(sequence.num_tokens)) {
      fail("has " + std::to_string(sequence.num_tokens) + " tokens in " +
           std::to_string(table_size) + " blocks");
    }
    for (const int32_t block : sequence.blocks) {
      if (block < 0 || block >= pool_.num_blocks()) {
        fail("holds block " + std::to_string(block) + ", which is not in the pool");
      }
      ++references[block];
    }
  }
  pool_.check(references);
}

}  // namespace paged_attn
