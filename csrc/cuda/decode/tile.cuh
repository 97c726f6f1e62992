// Tiles on their way from the paged pool to shared memory. Each ring of a block streams the tiles
// of one KV head lane and one token lane, segment after segment: when a segment ends, the loads of
// the next are already under way. A segment's first tile brings its query rows along.
#pragma once

#include "../dependent_launch.cuh"
#include "mma_fp8.cuh"
#include "rows.cuh"

namespace paged_attn::cuda {

// Copies 16 bytes without passing through registers; zeros instead if `read` is false, and then
// `source` is not touched. Cache lines are marked to go first: each is needed once.
__device__ __forceinline__ void copy_async(uint32_t shared, const void* source, bool read) {
  // What createpolicy.fractional.L2::evict_first gives for all of the accesses.
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared),
      "l"(source), "r"(read ? 16 : 0), "l"(kEvictFirst)
      : "memory");
}

// 8 bytes, for what may not start at a multiple of 16.
__device__ __forceinline__ void copy_half_async(uint32_t shared, const void* source, bool read) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(source),
               "r"(read ? 8 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <typename T, typename C, int kHeadDim, int kRowTiles, int kStaged, Variant kVariant>
class TileStream {
 public:
  using Cursor = SegmentCursor<kTileRows * kRowTiles, kStaged, kVariant == Variant::kOne>;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(C));
  static constexpr int kTileBytes = kTileTokens * kRowBytes;
  static constexpr int kQueryRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kQueryBytes = kTileRows * kQueryRowBytes;
  // K, V and the query rows of each row tile.
  static constexpr int kSlotBytes = slot_bytes(kHeadDim, sizeof(T), sizeof(C), kRowTiles);
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kCopies = kTileTokens * kChunks / 32 / kRowTiles;  // of K, a lane

  // NOTE: each of these copies has registers of its own for its address, for a register that a copy
  // under way still has to read cannot be written: the copies would go out one by one.
  static constexpr bool kHasRegisters =
      kHeadDim <= 128 || (is_plain(kVariant) && sizeof(C) == sizeof(T));
  static constexpr int kCopiesAtATime = !kHasRegisters       ? 4
                                        : kCopies < 16       ? kCopies
                                        : is_plain(kVariant) ? 8
                                                             : 4;

  // Whether some live block id of the sequence whose tile is in the slot lies outside the pool. Not
  // every one of its tiles tells, but one of its tiles does.
  __device__ __forceinline__ bool is_bad(int slot) const { return bad_slots_ >> slot & 1; }

  __device__ __forceinline__ TileStream(const DeviceParams& params, const Share& share,
                                        const Sequence (&staged)[kStaged], uint8_t* ring,
                                        int head_lane, int token_lane, int row_tile, int lane)
      : params_(params),
        ahead_(params, share, staged, lane),
        ring_(shared_address(ring)),
        head_lane_(head_lane),
        token_lane_(token_lane),
        row_tile_(row_tile),
        lane_(lane),
        leaves_out_query_(params.starts_early) {}

  // This row tile's query rows.
  __host__ __device__ static constexpr int query_offset(int row_tile) {
    return 2 * kTileBytes + row_tile * kQueryBytes;
  }

  // Starts the copies of the stream's next tile into `slot`. One group of copies a call, empty when
  // the stream has ended.
  __device__ __forceinline__ void issue(int slot) {
    // The only place where batches are loaded, the first two included.
#pragma unroll 1
    while (current_.tiles == 0 && !(ended_ && next_.tiles == 0)) {
      current_ = next_;
      taken_ = 0;
      first_new_tile_ = params_.num_new_keys > 0
                            ? (current_.context_len - params_.num_new_keys) >> kTileShift
                            : 0x7fffffff;
      load_batch(next_);
      check_batch();
    }
    if (current_.tiles > 0) {
      const int tile = tile_at(current_, taken_);
      if (tile >= first_new_tile_) wait_for_kernel_before();
      const uint32_t shared = ring_ + slot * kSlotBytes;
      if (current_.has_query && (taken_ == 0 || !kQueryInRegisters)) {
        if (kMayStartEarly && leaves_out_query_) {
          leaves_out_query_ = false;
        } else {
          if (kMayStartEarly && params_.starts_early) wait_for_kernel_before();
          copy_query(shared + query_offset(row_tile_));
        }
      }
      if (params_.run_shift != kTileShift) {
        copy_tile_of_runs(shared, tile);
      } else {
        copy_tile_of_one_block(shared, tile);
      }
      bad_slots_ = (bad_slots_ & ~(1u << slot)) | (static_cast<unsigned>(current_bad_) << slot);
      ++taken_;
      --current_.tiles;
    }
    commit_copies();
  }

  // The first query, which a stream that starts early leaves out: it is there once the kernel
  // before has ended.
  __device__ __forceinline__ void store_query(uint8_t* slot, const RowTile& rows) const {
    const int row = lane_ >> 2;
    const T* from = static_cast<const T*>(params_.decode.q);
    if (rows.exists(row)) from += rows.offset(params_, params_.decode.q_strides, row);
    uint8_t* to = slot + query_offset(row_tile_) + row * kQueryRowBytes;
#pragma unroll 1
    for (int chunk = lane_ & 3; chunk < kQueryRowBytes / 16; chunk += 4) {
      const int d = chunk * (16 / static_cast<int>(sizeof(T)));
      uint4 elements = make_uint4(0, 0, 0, 0);
      if (rows.exists(row) && d < params_.decode.head_dim) {
        elements = __ldcg(reinterpret_cast<const uint4*>(from + d));
      }
      *reinterpret_cast<uint4*>(to + swizzle<kQueryRowBytes>(row, chunk) * 16) = elements;
    }
  }

 private:
  static constexpr bool kMayStartEarly = is_plain(kVariant);
  static constexpr bool kQueryInRegisters = TileMath<T, C, kHeadDim>::kQueryInRegisters;
  static constexpr int kChunkElements = 16 / static_cast<int>(sizeof(C));

  // Some of one segment's tiles and the block ids that they need: lane i holds that of the i-th run
  // of tokens. Ids are fetched two batches ahead of the copies, all at once.
  struct Batch {
    int tiles = 0;  // how many are left
    int tile;       // the first
    int context_len;
    int kv_head;
    int block_id;        // -1: outside the pool
    int block_slot;      // the run's first slot
    int shape;           // in one register: hidden_rows() and stretch_shift()
    bool has_query;      // its first tile, or every one, brings the query rows:
    const T* query_row;  // row lane / 4 of the row tile; null: there is none

    // Of its first tile so many rows are seen by no query.
    __device__ __forceinline__ int hidden_rows() const { return shape & 0xff; }
    __device__ __forceinline__ int stretch_shift() const { return shape >> 8; }  // see tile_at
  };

  // A batch's i-th tile. It has whole stretches, or a part of one.
  __device__ __forceinline__ int tile_at(const Batch& batch, int i) const {
    if (params_.max_chunks == 0) return batch.tile + (i << params_.token_lanes_shift);
    const int shift = batch.stretch_shift();
    return batch.tile + (i >> shift << shift << params_.token_lanes_shift) +
           (i & ((1 << shift) - 1));
  }

  // This lane's i-th copy: its row of the tile and its 16-byte chunk of the row.
  __device__ __forceinline__ int copy_row(int i) const {
    return (row_tile_ * kCopies + i) * 32 / kChunks + lane_ / kChunks;
  }
  __device__ __forceinline__ int copy_chunk(int i) const {
    return kChunks > 32 ? i * 32 % kChunks + lane_ : lane_ % kChunks;
  }

  __device__ __forceinline__ uint32_t place(uint32_t tile, int i) const {
    const int row = copy_row(i);
    return tile + row * kRowBytes + swizzle<kRowBytes>(row, copy_chunk(i)) * 16;
  }

  __device__ __forceinline__ const C* address(const void* cache, const CacheStrides& strides,
                                              int id, int block_slot) const {
    return static_cast<const C*>(cache) + static_cast<uint32_t>(id) * strides.block +
           static_cast<uint32_t>(block_slot) * strides.slot + current_.kv_head * strides.head;
  }

  // 16 bytes of a row from head dim d on.
  __device__ __forceinline__ void copy_chunk_of(uint32_t to, const C* row, int d, bool read) const {
    const int head_dim = static_cast<int>(params_.decode.head_dim);
    if constexpr (sizeof(C) == 1) {
      // Rows that are an odd number of 8-byte halves may begin in the middle of 16 bytes.
      if (head_dim % 16 != 0) {
        copy_half_async(to, row + d, read && d < head_dim);
        copy_half_async(to + 8, row + d + 8, read && d + 8 < head_dim);
        return;
      }
    }
    copy_async(to, row + d, read && d < head_dim);
  }

  // The usual case: rows a constant step apart.
  __device__ __forceinline__ void copy_tile_of_one_block(uint32_t shared, int tile) const {
    const DecodeParams& p = params_.decode;
    const int id = __shfl_sync(~0u, current_.block_id, taken_);
    const int block_slot = __shfl_sync(~0u, current_.block_slot, taken_);
    const int hidden_rows = taken_ == 0 ? current_.hidden_rows() : 0;
    const int live_rows = id < 0 ? 0 : current_.context_len - (tile << kTileShift) - hidden_rows;
    const auto is_live = [&](int row) {
      return static_cast<unsigned>(row - hidden_rows) < static_cast<unsigned>(live_rows);
    };
    const auto copy = [&](uint32_t to, const void* cache, const CacheStrides& strides) {
      const C* from = address(cache, strides, id, block_slot + copy_row(0));
#pragma unroll kCopiesAtATime
      for (int i = 0; i < kCopies; ++i) {
        const int d = copy_chunk(i) * kChunkElements;
        copy_chunk_of(place(to, i), from + (copy_row(i) - copy_row(0)) * strides.slot, d,
                      is_live(copy_row(i)));
      }
    };
    copy(shared, p.k_cache, p.k_strides);
    copy(shared + kTileBytes, p.v_cache, p.v_strides);
  }

  __device__ __forceinline__ void copy_query(uint32_t tile) const {
    const int row = lane_ >> 2;
#pragma unroll
    for (int i = 0; i < kQueryRowBytes / 16; i += 4) {
      const int chunk = i + (lane_ & 3);
      const int d = chunk * (16 / static_cast<int>(sizeof(T)));
      copy_async(tile + row * kQueryRowBytes + swizzle<kQueryRowBytes>(row, chunk) * 16,
                 current_.query_row + d,
                 current_.query_row != nullptr && d < params_.decode.head_dim);
    }
  }

  // Blocks of fewer than kTileTokens tokens, or of a number that kTileTokens does not divide.
  __device__ __forceinline__ void copy_tile_of_runs(uint32_t shared, int tile) const {
    const DecodeParams& p = params_.decode;
    const int hidden_rows = taken_ == 0 ? current_.hidden_rows() : 0;
    const int live_rows = current_.context_len - (tile << kTileShift);
    const int first_run = taken_ << (kTileShift - params_.run_shift);
#pragma unroll kCopiesAtATime
    for (int i = 0; i < kCopies; ++i) {
      const int row = copy_row(i);
      const int run = first_run + (row >> params_.run_shift);
      const int id = __shfl_sync(~0u, current_.block_id, run);
      const int block_slot =
          __shfl_sync(~0u, current_.block_slot, run) + (row & ((1 << params_.run_shift) - 1));
      const int d = copy_chunk(i) * kChunkElements;
      const bool read = row >= hidden_rows && row < live_rows && id >= 0;
      copy_chunk_of(place(shared, i), address(p.k_cache, p.k_strides, id, block_slot), d, read);
      copy_chunk_of(place(shared + kTileBytes, i), address(p.v_cache, p.v_strides, id, block_slot),
                    d, read);
    }
  }

  __device__ __forceinline__ void load_batch(Batch& batch) {
    batch.tiles = 0;
    if (kVariant == Variant::kOne && ended_) return;
    batch.has_query = !kQueryInRegisters;
    const Segment& segment = ahead_.segment();
#pragma unroll 1
    while (tiles_left_ == 0) {
      if (!ahead_.advance(params_)) {
        ended_ = true;
        return;
      }
      kv_head_ = segment.head_group * params_.head_lanes + head_lane_;
      tile_ = segment.first + (token_lane_ << stretch_shift_of(params_, segment.sequence));
      // A head lane too many has nothing to load.
      if (kv_head_ < params_.decode.num_kv_heads) {
        tiles_left_ = LaneTiles::count(params_, segment, token_lane_);
      }
      batch.has_query = true;
    }
    const DecodeParams& p = params_.decode;
    const int runs_shift = kTileShift - params_.run_shift;  // log2 of the runs a tile
    batch.tile = tile_;
    batch.tiles = min(32 >> runs_shift, tiles_left_);
    batch.context_len = segment.sequence.context_len;
    batch.kv_head = kv_head_;
    const int first_key = first_key_of(params_, segment.sequence);
    const int hidden_rows = first_key == 0 ? 0 : max(first_key - (batch.tile << kTileShift), 0);
    const int stretch_shift = stretch_shift_of(params_, segment.sequence);
    batch.shape = hidden_rows | stretch_shift << 8;
    tiles_left_ -= batch.tiles;
    // A share that is one segment: at its end there is no other to look for.
    if (kVariant == Variant::kOne && tiles_left_ == 0) ended_ = true;
    tile_ = tile_at(batch, batch.tiles);
    // A batch that is a part of a stretch may end where the next lane's begins.
    if (params_.max_chunks > 0 && batch.tiles < 1 << stretch_shift &&
        ((tile_ - segment.first) & ((1 << stretch_shift) - 1)) == 0) {
      tile_ += (params_.token_lanes - 1) << stretch_shift;
    }
    // The ids first: all else happens while they are on their way.
    const int tile_of_lane = lane_ >> runs_shift;
    const int run_of_lane = lane_ & ((1 << runs_shift) - 1);
    const int token =
        (tile_at(batch, tile_of_lane) << kTileShift) + (run_of_lane << params_.run_shift);
    batch.block_id = 0;
    batch.block_slot = 0;
    if (tile_of_lane < batch.tiles && token < batch.context_len &&
        (first_key == 0 || token > first_key - (1 << params_.run_shift))) {
      const int column = params_.by_block_size.quotient(token);
      batch.block_slot = token - column * static_cast<int>(p.block_size);
      batch.block_id =
          __ldcg(p.block_tables + static_cast<int64_t>(segment.batch) * p.table_stride + column);
    }
    if (batch.has_query) {
      const RowTile rows(params_, segment, head_lane_, row_tile_, kTileRows * kRowTiles);
      const int row = lane_ >> 2;
      batch.query_row = nullptr;
      if (rows.exists(row)) {
        batch.query_row = static_cast<const T*>(p.q) + rows.offset(params_, p.q_strides, row);
      }
    }
  }

  // Lanes without a live run hold block 0, which an empty pool does not have either; but then the
  // live lanes, which every batch has, are bad too.
  __device__ __forceinline__ void check_batch() {
    if (current_.tiles == 0) return;
    const bool bad = current_.block_id < 0 || current_.block_id >= params_.decode.num_blocks;
    if (bad) current_.block_id = -1;
    current_bad_ = __any_sync(~0u, bad);
  }

  const DeviceParams& params_;
  Cursor ahead_;  // where the next batch comes from: tiles_left_ of its segment's from tile_ on
  int tile_ = 0, tiles_left_ = 0, kv_head_ = 0;
  uint32_t ring_;
  int head_lane_, token_lane_, row_tile_, lane_;
  Batch current_, next_;
  int taken_ = 0;       // tiles of current_ that were issued
  int first_new_tile_;  // of current_'s sequence: tiles from it on may still be written
  bool ended_ = false;  // no batch is left to load
  bool current_bad_ = false;
  unsigned bad_slots_ = 0;
  bool leaves_out_query_;
};

}  // namespace paged_attn::cuda
