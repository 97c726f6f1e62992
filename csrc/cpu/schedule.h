// Who computes what: a batch cut into pieces. Which chunks and row tiles a sequence has depends on
// its own length and queries and the call's options only, and chunks are merged in their order
// wherever they were computed. What the batch and the threads do decide, which KV heads share a
// piece and whether chunks are pieces of their own, never shows in the result.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "piece.h"

namespace paged_attn::cpu {

// A sequence whose queries are to be computed. Its offsets are those of its first query token.
struct Sequence {
  const int32_t* blocks;  // its row of the block table
  int64_t context_len;
  int64_t query_len;
  int64_t first_key;  // that any of its queries sees
  int64_t q_offset;
  int64_t out_offset;
  int64_t lse_offset;
};

class Schedule {
 public:
  Schedule(const DecodeParams& params, std::vector<Sequence> sequences, int64_t num_threads);

  int64_t num_pieces() const { return num_pieces_; }
  // Threads that the pieces can keep busy.
  int64_t num_workers() const { return num_workers_; }
  // The most (KV head, row) pairs that a piece has.
  int64_t most_records() const { return most_records_; }
  // Floats of partial results.
  int64_t partials_size() const { return partials_size_; }
  // Sets of pieces whose partial results are to be merged, and how many pieces each has.
  int64_t num_merges() const { return num_merges_; }
  void count_chunks(std::atomic<int64_t>* chunks_left) const;

  // The pieces that compute chunks of the same rows and heads of a split sequence have one merge
  // among them, to be done, over all of the chunks, by whoever finishes last.
  struct Assignment {
    Piece piece;
    int64_t merge;       // -1: the piece writes the output itself
    int64_t num_chunks;  // of the merge
  };
  Assignment assignment(int64_t index, float* partials) const;

 private:
  // How a sequence is cut: into row tiles, groups of KV heads and, if it is long, chunks.
  struct Cut {
    int64_t tile_rows;
    int64_t num_row_tiles;
    int64_t piece_heads;
    int64_t num_head_groups;
    int64_t chunk_tokens;
    int64_t num_chunks;
    bool is_split;  // a piece for each chunk
    int64_t first_piece;
    int64_t first_merge;
    int64_t partials;  // offset in floats
  };

  void cut(int64_t num_threads, int64_t head_divisor);

  const DecodeParams& params_;
  RecordLayout record_;
  std::vector<Sequence> sequences_;
  std::vector<Cut> cuts_;
  int64_t num_workers_ = 0;
  int64_t num_pieces_ = 0;
  int64_t num_merges_ = 0;
  int64_t partials_size_ = 0;
  int64_t most_records_ = 0;
};

}  // namespace paged_attn::cpu
