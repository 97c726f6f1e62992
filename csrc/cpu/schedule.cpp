#include "schedule.h"

#include <algorithm>
#include <utility>

namespace paged_attn::cpu {
namespace {

// A chunk is at least this long, and a sequence has at most this many.
constexpr int64_t kLeastChunkTokens = 512;
constexpr int64_t kMostChunks = 128;

// Rows of one KV head that share a reading of its keys, and (KV head, row) pairs of one piece: what
// they need stays in the second level cache.
constexpr int64_t kMostTileRows = 32;
constexpr int64_t kMostRecords = 64;
// Bytes of one token's keys that a piece reads: enough for memory to stream, few enough for the
// steps of a tile (decode_kernel.h) and those on their way to stay in that cache too.
constexpr int64_t kMostKeyBytes = 4096;

// Pieces a thread that even out its speed and theirs.
constexpr int64_t kPiecesPerThread = 4;
// A sequence is split where a piece of it would be more than a thread's share of all work over
// this.
constexpr int64_t kPartsOfShare = 16;

// Partial results together, beside twice the output.
constexpr int64_t kMostPartialBytes = 16 << 20;

// Multiply-adds that are worth waking another thread: some 10 us.
constexpr int64_t kWorkPerThread = 1 << 18;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

int64_t element_size(DType dtype) {
  if (is_fp8(dtype)) return 1;
  return dtype == DType::kFloat32 ? 4 : 2;
}

int64_t num_keys(const Sequence& sequence) { return sequence.context_len - sequence.first_key; }

}  // namespace

Schedule::Schedule(const DecodeParams& params, std::vector<Sequence> sequences, int64_t num_threads)
    : params_(params), sequences_(std::move(sequences)) {
  const int64_t padded = round_up(params.head_dim, kRecordAlignment);
  record_ = {padded, padded + 1, padded + kRecordAlignment};
  int64_t work = 0;
  for (const Sequence& sequence : sequences_) {
    work += 2 * num_keys(sequence) * sequence.query_len * params.num_heads * params.head_dim;
  }
  const int64_t useful_threads =
      std::clamp<int64_t>(work / kWorkPerThread, 1, std::max<int64_t>(1, num_threads));
  // KV heads of a token are read together as long as that leaves work for all threads.
  int64_t head_divisor = 1;
  cut(useful_threads, head_divisor);
  while (useful_threads > 1 && num_pieces_ < kPiecesPerThread * useful_threads &&
         head_divisor < params.num_kv_heads) {
    head_divisor *= 2;
    cut(useful_threads, head_divisor);
  }
  num_workers_ = std::min(useful_threads, num_pieces_);
}

void Schedule::cut(int64_t num_threads, int64_t head_divisor) {
  cuts_.clear();
  num_pieces_ = num_merges_ = partials_size_ = most_records_ = 0;
  const int64_t group = params_.num_heads / params_.num_kv_heads;
  const int64_t output_size = params_.num_tokens * params_.num_heads * params_.head_dim;
  const int64_t output_bytes = output_size * element_size(params_.dtype);
  const int64_t most_partials =
      (kMostPartialBytes + 2 * output_bytes) / static_cast<int64_t>(sizeof(float));
  const int64_t key_bytes = params_.head_dim * element_size(params_.cache_dtype);

  for (const Sequence& sequence : sequences_) {
    const int64_t rows = sequence.query_len * group;
    Cut cut{};
    cut.num_row_tiles = ceil_div(rows, kMostTileRows);
    cut.tile_rows = ceil_div(rows, cut.num_row_tiles);
    const int64_t most_heads = std::clamp<int64_t>(
        std::min(kMostRecords / cut.tile_rows, kMostKeyBytes / key_bytes), 1, params_.num_kv_heads);
    cut.num_head_groups = ceil_div(params_.num_kv_heads, ceil_div(most_heads, head_divisor));
    cut.piece_heads = ceil_div(params_.num_kv_heads, cut.num_head_groups);
    cut.num_head_groups = ceil_div(params_.num_kv_heads, cut.piece_heads);
    cut.chunk_tokens = round_up(
        std::max(kLeastChunkTokens, ceil_div(num_keys(sequence), kMostChunks)), kTileTokens);
    cut.num_chunks = ceil_div(num_keys(sequence), cut.chunk_tokens);
    most_records_ = std::max(most_records_, cut.tile_rows * cut.piece_heads);
    cuts_.push_back(cut);
  }

  const auto work = [&](size_t i) { return num_keys(sequences_[i]) * cuts_[i].num_row_tiles; };
  int64_t total_work = 0;
  for (size_t i = 0; i < cuts_.size(); ++i) total_work += work(i);

  for (size_t i = 0; i < cuts_.size(); ++i) {
    Cut& cut = cuts_[i];
    const int64_t unsplit = cut.num_row_tiles * cut.num_head_groups;
    const int64_t partials =
        cut.num_chunks * sequences_[i].query_len * params_.num_heads * record_.size;
    cut.is_split = num_threads > 1 && cut.num_chunks > 1 &&
                   work(i) / unsplit > total_work / (num_threads * kPartsOfShare) &&
                   partials_size_ + partials <= most_partials;
    cut.first_piece = num_pieces_;
    cut.first_merge = num_merges_;
    cut.partials = partials_size_;
    num_pieces_ += cut.is_split ? unsplit * cut.num_chunks : unsplit;
    if (cut.is_split) {
      num_merges_ += unsplit;
      partials_size_ += partials;
    }
  }
}

void Schedule::count_chunks(std::atomic<int64_t>* chunks_left) const {
  for (const Cut& cut : cuts_) {
    if (!cut.is_split) continue;
    const int64_t merges = cut.num_row_tiles * cut.num_head_groups;
    for (int64_t i = 0; i < merges; ++i) {
      chunks_left[cut.first_merge + i].store(cut.num_chunks, std::memory_order_relaxed);
    }
  }
}

Schedule::Assignment Schedule::assignment(int64_t index, float* partials) const {
  const auto after = std::upper_bound(
      cuts_.begin(), cuts_.end(), index,
      [](int64_t piece, const Cut& candidate) { return piece < candidate.first_piece; });
  const Cut& cut = *(after - 1);
  const Sequence& sequence = sequences_[static_cast<size_t>(after - 1 - cuts_.begin())];

  const int64_t local = index - cut.first_piece;
  const int64_t chunk_pieces = cut.is_split ? cut.num_chunks : 1;
  const int64_t rows_and_heads = local / chunk_pieces;
  const int64_t group = params_.num_heads / params_.num_kv_heads;
  const int64_t rows = sequence.query_len * group;

  Assignment result{};
  Piece& piece = result.piece;
  piece.params = &params_;
  piece.record = record_;
  piece.blocks = sequence.blocks;
  piece.context_len = sequence.context_len;
  piece.query_len = sequence.query_len;
  piece.first_key = sequence.first_key;
  piece.q_offset = sequence.q_offset;
  piece.out_offset = sequence.out_offset;
  piece.lse_offset = sequence.lse_offset;
  piece.group_size = group;
  piece.first_row = rows_and_heads / cut.num_head_groups * cut.tile_rows;
  piece.num_rows = std::min(cut.tile_rows, rows - piece.first_row);
  piece.first_head = rows_and_heads % cut.num_head_groups * cut.piece_heads;
  piece.num_heads = std::min(cut.piece_heads, params_.num_kv_heads - piece.first_head);
  piece.chunk_tokens = cut.chunk_tokens;
  piece.first_chunk = cut.is_split ? local % chunk_pieces : 0;
  piece.num_chunks = cut.is_split ? 1 : cut.num_chunks;
  if (cut.is_split) {
    piece.partials = partials + cut.partials;
    piece.partial_stride = rows * params_.num_kv_heads * record_.size;
  }
  result.merge = cut.is_split ? cut.first_merge + rows_and_heads : -1;
  result.num_chunks = cut.num_chunks;
  return result;
}

}  // namespace paged_attn::cpu
