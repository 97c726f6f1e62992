#include "block_pool.h"

#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string>

namespace paged_attn {

BlockPool::BlockPool(int32_t num_blocks)
    : free_(static_cast<size_t>(num_blocks)), reference_counts_(static_cast<size_t>(num_blocks)) {
  std::iota(free_.rbegin(), free_.rend(), 0);
}

int32_t BlockPool::take() noexcept {
  const int32_t block = free_.back();
  free_.pop_back();
  reference_counts_[block] = 1;
  return block;
}

void BlockPool::release(int32_t block) noexcept {
  if (--reference_counts_[block] == 0) free_.push_back(block);
}

void BlockPool::check(const std::vector<int32_t>& references) const {
  const auto fail = [](int32_t block, const std::string& what) {
    throw std::runtime_error("paged_attn.BlockManager.check: block " + std::to_string(block) + " " +
                             what);
  };
  std::vector<bool> is_free(reference_counts_.size());
  for (const int32_t block : free_) {
    if (block < 0 || block >= num_blocks()) fail(block, "is free but not in the pool");
    if (is_free[block]) fail(block, "is in the free list twice");
    is_free[block] = true;
  }
  for (int32_t block = 0; block < num_blocks(); ++block) {
    const int32_t count = reference_counts_[block];
    if (count != references[block]) {
      fail(block, "has reference count " + std::to_string(count) + " but " +
                      std::to_string(references[block]) + " table entries");
    }
    if (is_free[block] == (count > 0)) {
      fail(block, count > 0 ? "is both free and referenced" : "is neither free nor referenced");
    }
  }
}

}  // namespace paged_attn
