// The exceptions of the block manager. bindings.cpp maps them to Python's.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace paged_attn {

// More blocks are needed than are free. Waiting for a sequence to end, or a larger pool, helps.
class OutOfBlocks : public std::runtime_error {
 public:
  OutOfBlocks(const char* where, int64_t needed, int64_t free, int64_t num_blocks)
      : std::runtime_error(std::string(where) + ": out of blocks: needed " +
                           std::to_string(needed) + ", free " + std::to_string(free) + " of " +
                           std::to_string(num_blocks)),
        needed(needed),
        free(free) {}

  const int64_t needed;
  const int64_t free;
};

class UnknownSequence : public std::runtime_error {
 public:
  UnknownSequence(const char* where, int64_t seq_id)
      : std::runtime_error(std::string(where) + ": unknown sequence " + std::to_string(seq_id)) {}
};

[[noreturn]] inline void throw_invalid(const char* where, const std::string& argument,
                                       const std::string& expected, const std::string& got) {
  throw std::invalid_argument(std::string(where) + ": " + argument + " must be " + expected +
                              ", got " + got);
}

[[noreturn]] inline void throw_invalid(const char* where, const std::string& argument,
                                       const std::string& expected, int64_t got) {
  throw_invalid(where, argument, expected, std::to_string(got));
}

}  // namespace paged_attn
