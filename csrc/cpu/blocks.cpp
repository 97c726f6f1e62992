// copy_blocks and swap_blocks: whole blocks, as bytes.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace paged_attn::cpu {
namespace {

// Chained pairs may have source and destination overlap, in swap_blocks: what is there then is
// undefined, but memmove may.
void copy(char* to, const char* from, int64_t bytes) {
  std::memmove(to, from, static_cast<size_t>(bytes));
}

void copy_block(const BlockPool& pool, int64_t source, int64_t destination) {
  const BlockLayout& layout = pool.layout;
  const char* from = pool.data + source * pool.block_stride;
  char* to = pool.data + destination * pool.block_stride;
  for (int64_t i = 0; i < layout.outer; ++i) {
    for (int64_t j = 0; j < layout.inner; ++j) {
      const int64_t offset = i * layout.outer_stride + j * layout.inner_stride;
      copy(to + offset, from + offset, layout.run);
    }
  }
}

}  // namespace

void copy_blocks(const CopyBlocksParams& p, const ThreadPool& threads) {
  if (p.num_pools == 0) return;
  const BlockLayout& layout = p.pools[0].layout;
  const int64_t block_bytes = layout.outer * layout.inner * layout.run;
  // A range of pools each: chained pairs are undefined, but two threads at one block are a race.
  for_ranges(threads, p.num_pools, p.num_pools * p.num_pairs * block_bytes,
             [&](int64_t begin, int64_t end) {
               for (int64_t pool = begin; pool < end; ++pool) {
                 for (int64_t i = 0; i < p.num_pairs; ++i) {
                   const int64_t source = p.block_mapping[2 * i];
                   const int64_t destination = p.block_mapping[2 * i + 1];
                   if (std::min(source, destination) < 0) continue;
                   if (std::max(source, destination) >= p.num_blocks) continue;
                   copy_block(p.pools[pool], source, destination);
                 }
               }
             });
}

void swap_blocks(const SwapPair& pair, const std::vector<BlockRun>& runs,
                 const ThreadPool& threads) {
  const bool is_dense =
      pair.source_stride == pair.block_bytes && pair.destination_stride == pair.block_bytes;
  int64_t num_blocks = 0;
  for (const BlockRun& run : runs) num_blocks += run.count;
  for_ranges(threads, static_cast<int64_t>(runs.size()), num_blocks * pair.block_bytes,
             [&](int64_t begin, int64_t end) {
               for (int64_t i = begin; i < end; ++i) {
                 const BlockRun& run = runs[static_cast<size_t>(i)];
                 const int64_t copies = is_dense ? 1 : run.count;
                 const int64_t bytes = pair.block_bytes * (is_dense ? run.count : 1);
                 for (int64_t block = 0; block < copies; ++block) {
                   copy(pair.destination + (run.destination + block) * pair.destination_stride,
                        pair.source + (run.source + block) * pair.source_stride, bytes);
                 }
               }
             });
}

}  // namespace paged_attn::cpu
