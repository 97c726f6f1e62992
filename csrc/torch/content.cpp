// Checks mode: what tables, lengths and slots hold, looked through before anything is written.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "checks.h"

namespace paged_attn {
namespace {

std::atomic<bool>& checks_flag() {
  static std::atomic<bool> flag([] {
    const char* value = std::getenv("PAGED_ATTN_CHECK");
    return value != nullptr && *value != '\0' && std::string(value) != "0";
  }());
  return flag;
}

[[noreturn]] void throw_bad_content(const char* op, const std::string& what) {
  throw std::out_of_range("paged_attn." + std::string(op) + ": " + what);
}

std::string entry(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

void check_cu_seqlens_q(const char* op, const int32_t* cu_seqlens_q, int64_t batch_size,
                        int64_t num_tokens) {
  for (int64_t i = 0; cu_seqlens_q != nullptr && i <= batch_size; ++i) {
    const int64_t least = i > 0 ? cu_seqlens_q[i - 1] : 0;
    if (cu_seqlens_q[i] < least || cu_seqlens_q[i] > num_tokens) {
      throw_bad_content(op, entry("cu_seqlens_q", i) + " must be in [" + std::to_string(least) +
                                ", " + std::to_string(num_tokens) + "], got " +
                                std::to_string(cu_seqlens_q[i]));
    }
  }
}

// The length of sequence b and the blocks of its positions [first_position, length). Params:
// DecodeParams or WriteKvParams.
template <typename Params>
void check_positions(const char* op, const Params& p, int64_t b, int64_t first_position) {
  const int64_t length = p.context_lens[b];
  const int64_t capacity = p.max_blocks * p.block_size;
  if (length > capacity) {
    throw_bad_content(op, entry("context_lens", b) + " must be at most " +
                              std::to_string(capacity) + " (" + std::to_string(p.max_blocks) +
                              " columns of block_tables x " + std::to_string(p.block_size) +
                              " slots), got " + std::to_string(length));
  }
  const int64_t live_blocks = (length + p.block_size - 1) / p.block_size;
  for (int64_t column = first_position / p.block_size; column < live_blocks; ++column) {
    const int32_t id = p.block_tables[b * p.table_stride + column];
    if (id < 0 || id >= p.num_blocks) {
      throw_bad_content(op, "block_tables[" + std::to_string(b) + ", " + std::to_string(column) +
                                "] must be in [0, " + std::to_string(p.num_blocks) + "), got " +
                                std::to_string(id));
    }
  }
}

void check_slots(const char* op, const WriteKvParams& p) {
  const int64_t num_slots = p.num_blocks * p.block_size;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[t]
                                           : static_cast<const int32_t*>(p.slot_mapping)[t];
    if (slot >= num_slots) {
      throw_bad_content(op, entry("slot_mapping", t) + " must be below " +
                                std::to_string(num_slots) + " (" + std::to_string(p.num_blocks) +
                                " blocks x " + std::to_string(p.block_size) + " slots), got " +
                                std::to_string(slot));
    }
  }
}

}  // namespace

bool set_checks(bool enabled) { return checks_flag().exchange(enabled); }

bool checks_enabled() { return checks_flag().load(std::memory_order_relaxed); }

void check_decode_content(const char* op, const DecodeParams& p) {
  check_cu_seqlens_q(op, p.cu_seqlens_q, p.batch_size, p.num_tokens);
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const int64_t queries =
        p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.query_len;
    if (p.cu_seqlens_q && p.max_query_len > 0 && queries > p.max_query_len) {
      throw_bad_content(op, "sequence [" + std::to_string(b) + "] of cu_seqlens_q must have at " +
                                "most max_query_len = " + std::to_string(p.max_query_len) +
                                " queries, got " + std::to_string(queries));
    }
    // Nothing is read for a sequence without queries.
    if (queries == 0) continue;
    check_positions(op, p, b, p.first_visible_key(p.context_lens[b], queries));
  }
}

void check_write_content(const char* op, const WriteKvParams& p) {
  if (p.slot_mapping != nullptr) {
    check_slots(op, p);
    return;
  }
  check_cu_seqlens_q(op, p.cu_seqlens_q, p.batch_size, p.num_tokens);
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const int64_t tokens = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.query_len;
    if (tokens == 0) continue;
    check_positions(op, p, b, std::max<int64_t>(0, p.context_lens[b] - tokens));
  }
}

void check_block_mapping_content(const char* op, const int64_t* block_mapping, int64_t num_pairs,
                                 int64_t source_blocks, int64_t destination_blocks) {
  for (int64_t i = 0; i < 2 * num_pairs; ++i) {
    const int64_t limit = i % 2 == 0 ? source_blocks : destination_blocks;
    if (block_mapping[i] < 0 || block_mapping[i] >= limit) {
      throw_bad_content(op, "block_mapping[" + std::to_string(i / 2) + ", " +
                                std::to_string(i % 2) + "] must be in [0, " +
                                std::to_string(limit) + "), got " +
                                std::to_string(block_mapping[i]));
    }
  }
}

}  // namespace paged_attn
