// The blocks of one KV cache: which are free, and how often each of the others is referenced.
#pragma once

#include <cstdint>
#include <vector>

namespace paged_attn {

// The free list is a stack: a new pool hands out 0, 1, 2 …, and later the block that was given back
// last comes first, since its memory is the likeliest to be in a cache still.
class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(reference_counts_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }

  // A free block, now referenced once. The caller has made sure that there is one.
  int32_t take() noexcept;

  // Drops one reference; with the last one the block is free again.
  void release(int32_t block) noexcept;

  // Throws std::runtime_error unless every block is either free or referenced, and referenced as
  // often as `references` [num_blocks] says.
  void check(const std::vector<int32_t>& references) const;

 private:
  std::vector<int32_t> free_;  // its capacity is num_blocks from the start: release cannot fail
  std::vector<int32_t> reference_counts_;  // [num_blocks], 0 for a free block
};

}  // namespace paged_attn
