// Checks mode: what tables, lengths and slots hold, looked through before anything is written.
#include <atomic>
#include <cstdlib>
#include <stdexcept>

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

}  // namespace

bool set_checks(bool enabled) { return checks_flag().exchange(enabled); }

bool checks_enabled() { return checks_flag().load(std::memory_order_relaxed); }

void check_decode_content(const char* op, const DecodeParams& p) {
  for (int64_t i = 0; p.cu_seqlens_q != nullptr && i <= p.batch_size; ++i) {
    const int64_t least = i > 0 ? p.cu_seqlens_q[i - 1] : 0;
    if (p.cu_seqlens_q[i] < least || p.cu_seqlens_q[i] > p.num_tokens) {
      throw_bad_content(op, "cu_seqlens_q[" + std::to_string(i) + "] must be in [" +
                                std::to_string(least) + ", " + std::to_string(p.num_tokens) +
                                "], got " + std::to_string(p.cu_seqlens_q[i]));
    }
  }
  for (int64_t b = 0; b < p.batch_size; ++b) {
    const std::string sequence = "[" + std::to_string(b) + "]";
    const int64_t queries =
        p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b] : p.query_len;
    if (p.cu_seqlens_q && p.max_query_len > 0 && queries > p.max_query_len) {
      throw_bad_content(op, "sequence " + sequence + " of cu_seqlens_q must have at most " +
                                "max_query_len = " + std::to_string(p.max_query_len) +
                                " queries, got " + std::to_string(queries));
    }
    // Nothing is read for a sequence without queries.
    if (queries == 0) continue;
    const int64_t length = p.context_lens[b];
    const int64_t capacity = p.max_blocks * p.block_size;
    if (length > capacity) {
      throw_bad_content(op, "context_lens" + sequence + " must be at most " +
                                std::to_string(capacity) + " (" + std::to_string(p.max_blocks) +
                                " columns of block_tables x " + std::to_string(p.block_size) +
                                " slots), got " + std::to_string(length));
    }
    const int64_t live_blocks = (length + p.block_size - 1) / p.block_size;
    const int64_t first_column = p.first_visible_key(length, queries) / p.block_size;
    for (int64_t column = first_column; column < live_blocks; ++column) {
      const int32_t id = p.block_tables[b * p.table_stride + column];
      if (id < 0 || id >= p.num_blocks) {
        throw_bad_content(op, "block_tables[" + std::to_string(b) + ", " + std::to_string(column) +
                                  "] must be in [0, " + std::to_string(p.num_blocks) + "), got " +
                                  std::to_string(id));
      }
    }
  }
}

void check_slots(const char* op, const ReshapeAndCacheParams& p) {
  const int64_t num_slots = p.num_blocks * p.block_size;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int64_t slot = p.slots_are_int64 ? static_cast<const int64_t*>(p.slot_mapping)[t]
                                           : static_cast<const int32_t*>(p.slot_mapping)[t];
    if (slot >= num_slots) {
      throw_bad_content(op, "slot_mapping[" + std::to_string(t) + "] must be below " +
                                std::to_string(num_slots) + " (" + std::to_string(p.num_blocks) +
                                " blocks x " + std::to_string(p.block_size) + " slots), got " +
                                std::to_string(slot));
    }
  }
}

}  // namespace paged_attn
