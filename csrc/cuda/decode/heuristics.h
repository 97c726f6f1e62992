// From shapes to a launch configuration, by the numbers of tuning.h. No device code: tested on
// machines without a GPU. Lengths may not enter, for a captured graph is replayed with others; nor
// the table's width, for engines pass tables as wide as the longest context they allow, except
// where positions would overflow.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../../params.h"
#include "../device_limits.h"

namespace paged_attn::cuda {

// What a kernel is compiled for. Without the code of options that most calls do not take, it stays
// in the instruction cache.
enum class Variant {
  kGeneral,    // every option
  kInvariant,  // batch_invariant and no other
  kPlain,      // no option
  kOne,        // nor any, and one sequence: see find_share_of_one
};

constexpr bool is_plain(Variant variant) {
  return variant == Variant::kPlain || variant == Variant::kOne;
}

constexpr int kMostLineShift = 30;  // more: too many sequences and heads for any line
constexpr int kTileShift = 4;
constexpr int kTileTokens = 1 << kTileShift;  // a tile: the M of the tensor cores' instruction
constexpr int kTileRows = 8;                  // query rows a warp: its N

// How one block of the decode kernel is laid out. Tiles of K and V stream through `rings` ring
// buffers of `stages` slots; `row_tiles` warps of kTileRows query rows share each ring. The rings
// are head_lanes KV heads side by side times token_lanes tiles of one head.
struct DecodeConfig {
  Variant variant;
  int head_dim;  // of the kernel: 64, 128 or 256, at least the tensors'
  int rings;
  int row_tiles;
  int stages;
  int head_lanes;
  int token_lanes;
  int grid;
  int unit_blocks;         // of Variant::kOne: so many blocks share each unit
  int min_tiles;           // not worth a merge: of a block; kOne: of a whole unit
  int unit_cost;           // tiles whose time a unit takes besides its own
  int line_shift;          // see schedule.cuh
  int max_chunks;          // batch-invariant: a unit is cut into at most so many; else 0
  int leaves;              // of a chunk
  int least_chunk_shift;   // log2 of a short sequence's tiles a chunk
  bool has_state_buffers;  // see state_buffer_bytes and unit_buffer_bytes
  bool has_unit_buffers;
  int shared_bytes;  // of ring buffers and what surrounds them

  int threads() const { return 32 * rings * row_tiles; }
};

// The kernels that exist: see instantiations/.
struct KernelShape {
  int head_dim;
  int element_bytes;  // of queries
  int cache_bytes;    // of an element of the cache
  int rings;
  int row_tiles;
  int stages;
};

constexpr KernelShape kKernelShapes[] = {
    // At most 128 KB of tiles in the ring buffers, ...
    {64, 2, 2, 8, 1, 4},
    {64, 2, 2, 4, 2, 4},
    {128, 2, 2, 8, 1, 2},
    {128, 2, 2, 4, 2, 4},
    {256, 2, 2, 4, 1, 2},
    {256, 2, 2, 4, 2, 2},
    {64, 2, 1, 8, 1, 8},
    {64, 2, 1, 4, 2, 8},
    {128, 2, 1, 8, 1, 4},
    {128, 2, 1, 4, 2, 6},
    {256, 2, 1, 4, 1, 4},
    {256, 2, 1, 4, 2, 3},
    {64, 4, 4, 8, 1, 2},
    {128, 4, 4, 4, 1, 2},
    {256, 4, 4, 2, 1, 2},
    // ... and fewer, for devices whose blocks may have no more than 99 KB in all.
    {64, 2, 2, 8, 1, 2},
    {64, 2, 2, 4, 2, 3},
    {128, 2, 2, 4, 1, 2},
    {128, 2, 2, 2, 2, 3},
    {256, 2, 2, 2, 1, 2},
    {256, 2, 2, 2, 2, 2},
    {64, 2, 1, 8, 1, 3},
    {64, 2, 1, 4, 2, 5},
    {128, 2, 1, 4, 1, 3},
    {128, 2, 1, 4, 2, 2},
    {256, 2, 1, 2, 1, 4},
    {256, 2, 1, 2, 2, 2},
    {64, 4, 4, 4, 1, 2},
    {128, 4, 4, 2, 1, 2},
    {256, 4, 4, 1, 1, 2},
};

// K and V of one tile, and the query rows that the first tile of a segment brings along.
constexpr int slot_bytes(int head_dim, int element_bytes, int cache_bytes, int row_tiles) {
  return (2 * kTileTokens * cache_bytes + row_tiles * kTileRows * element_bytes) * head_dim;
}

// What the merges keep (see merge_places.cuh): sums of each warp's state and unit; of each ring a
// slot and two cut units; marks.
constexpr int merge_bytes(int rings, int row_tiles) { return rings * (row_tiles * 256 + 80) + 32; }

// Each of the warps that share a ring has a part of it when it is empty.
constexpr int ring_part_bytes(int ring_bytes, int row_tiles) { return ring_bytes / row_tiles; }

// Rings, and behind them what the merges keep. This is the least that a launch asks for; the kernel
// has a little of its own besides.
constexpr int shared_bytes(const KernelShape& shape) {
  return shape.rings * shape.stages *
             slot_bytes(shape.head_dim, shape.element_bytes, shape.cache_bytes, shape.row_tiles) +
         merge_bytes(shape.rings, shape.row_tiles);
}

// If there is room: behind all that sums of each warp ...
constexpr int state_buffer_bytes(const KernelShape& shape) {
  return shape.rings * shape.row_tiles * shape.head_dim * kTileRows * 4;
}

// ... and, batch-invariant, of each KV head that a block has at once: one, or as many as pairs of
// rings.
constexpr int unit_buffer_bytes(const KernelShape& shape, bool pairs) {
  return (pairs && shape.rings > 1 ? shape.rings / 2 : 1) * shape.row_tiles * shape.head_dim *
         kTileRows * 4;
}

// A sequence a thread, and what blocks find out about their share.
constexpr int own_shared_bytes(const KernelShape& shape) {
  return 32 * shape.rings * shape.row_tiles * 12 + 256;
}

// How many KV heads the rings take side by side: as many as leave segments for most processors,
// because neighbouring heads' rows are neighbours in memory and a ring has whole segments to
// itself. The rest of the rings share a head's tokens: two at most where sequences are many, for
// then they are ragged, and the last tiles of each leave rings idle. Rows that are no whole memory
// lines share some with their neighbours, which are better read at once, up to some cost in merges.
inline int choose_head_lanes(int rings, int64_t batch_size, int64_t num_kv_heads, int64_t row_bytes,
                             const DeviceLimits& limits) {
  const Tuning& tuning = limits.tuning;
  const int64_t enough_segments =
      share_of(limits.num_sms, row_bytes % 128 == 0 ? tuning.head_lanes_least_segments
                                                    : tuning.head_lanes_least_segments_unaligned);
  for (int lanes = rings; lanes > 1; lanes /= 2) {
    const int64_t groups = (num_kv_heads + lanes - 1) / lanes;
    const bool few_idle = is_share(num_kv_heads, groups * lanes, tuning.head_lanes_least_used);
    const bool many_sequences =
        lanes * 2 <= rings && is_share(batch_size, limits.num_sms, tuning.many_sequences);
    if (few_idle && (many_sequences || batch_size * groups >= enough_segments)) return lanes;
  }
  return 1;
}

// Batch-invariant: whether a warp has the registers to add up several leaves.
constexpr bool can_keep_leaves(int head_dim) { return head_dim <= 128; }

// The least that blocks have on devices that a shape fits: as 8.9 and 12.0, as 8.0, or as 9.0.
constexpr int room(const KernelShape& shape) {
  const int bytes = shared_bytes(shape) + own_shared_bytes(shape);
  return (bytes <= 99 * 1024 ? 99 : bytes <= 163 * 1024 ? 163 : 227) * 1024;
}

// Plain variants know when they are compiled whether there is room.
constexpr bool has_plain_state_buffers(const KernelShape& shape) {
  return shared_bytes(shape) + own_shared_bytes(shape) + state_buffer_bytes(shape) <= room(shape);
}

constexpr bool is_large(const KernelShape& shape) { return room(shape) > 99 * 1024; }

// Whether a shape is compiled for a variant. Kernels are many: for small shapes there are few.
constexpr bool exists(const KernelShape& shape, Variant variant) {
  switch (variant) {
    case Variant::kGeneral:
      return true;
    case Variant::kInvariant:
      return shape.cache_bytes == 2 && is_large(shape) && can_keep_leaves(shape.head_dim);
    case Variant::kPlain:
      return shape.cache_bytes == 2 || (shape.cache_bytes == 1 && is_large(shape));
    case Variant::kOne:
      return shape.cache_bytes == 2 && is_large(shape);
  }
  return false;
}

inline Variant choose_variant(const KernelShape& shape, const DecodeParams& p) {
  // Scales are no option of fp8 caches, which nearly always have them.
  const bool has_scales = p.k_scale.data != nullptr || p.v_scale.data != nullptr;
  const bool has_options = !p.causal || p.window > 0 || p.softcap > 0 ||
                           p.alibi_slopes != nullptr || p.sinks != nullptr ||
                           (has_scales && shape.cache_bytes != 1);
  const Variant wanted = has_options         ? Variant::kGeneral
                         : p.batch_invariant ? Variant::kInvariant
                                             : Variant::kPlain;
  return exists(shape, wanted) ? wanted : Variant::kGeneral;
}

// One sequence's units have all as many tiles: equally many blocks share each of them, unless that
// would leave too many processors idle. 0: it would.
inline int choose_unit_blocks(int64_t units, const DeviceLimits& limits) {
  const int64_t blocks = units > 0 ? limits.num_sms / units : 0;
  const int64_t idle = limits.num_sms - units * blocks;
  const bool few_idle = idle <= share_of(limits.num_sms, limits.tuning.one_sequence_most_idle);
  return static_cast<int>(few_idle ? blocks : 0);
}

// Batch-invariant: how sums are divided, from what the batch does not change. Of the batch's size
// depends only whether all rings share a head's tokens or pairs of them do, which gives the same
// bits: a chunk has a leaf for each ring, and a warp of a pair adds up half of them.
inline void choose_chunks(DecodeConfig& config, const DecodeParams& p, int cache_bytes,
                          const DeviceLimits& limits) {
  const Tuning& tuning = limits.tuning;
  const int pairs = config.rings / 2;
  const bool can_pair = can_keep_leaves(config.head_dim) && config.has_state_buffers && pairs > 1 &&
                        is_share(p.num_kv_heads, (p.num_kv_heads + pairs - 1) / pairs * pairs,
                                 tuning.head_lanes_least_used);
  config.head_lanes = can_pair && config.head_lanes >= pairs ? pairs : 1;
  config.leaves = config.rings;
  config.least_chunk_shift = p.head_dim * cache_bytes <= tuning.invariant_short_row_bytes
                                 ? tuning.invariant_chunk_shift_of_short_rows
                                 : tuning.invariant_chunk_shift;
  // A long sequence alone fills the card although chunks, being powers of 2 of tiles, may be little
  // more than half as many; as far as scratch has room, of which two parts a block are for others.
  constexpr int64_t kMostBytes = 60 << 20, kFewest = 8;
  const int64_t part_bytes = (can_pair ? pairs : 1) * config.row_tiles *
                             (config.head_dim * kTileRows * 4 + kTileRows * 16);
  const int64_t room = kMostBytes / (limits.num_sms * part_bytes) - 2;
  config.max_chunks = static_cast<int>(
      std::max(kFewest, std::min<int64_t>(2 * limits.num_sms / p.num_kv_heads, room)));
}

// No rings: the device's blocks have too little shared memory for any kernel.
inline DecodeConfig choose_decode_config(const DecodeParams& p, const DeviceLimits& limits) {
  DecodeConfig config{};
  const int element_bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  const int cache_bytes = is_fp8(p.cache_dtype) ? 1 : element_bytes;
  const int64_t group = p.num_heads / p.num_kv_heads;
  int64_t queries = p.query_len;
  if (p.cu_seqlens_q != nullptr) {
    queries = p.max_query_len > 0
                  ? std::min(p.max_query_len, p.num_tokens)
                  : (p.num_tokens + p.batch_size - 1) / std::max<int64_t>(p.batch_size, 1);
  }
  const int64_t rows = std::max<int64_t>(queries, 1) * group;
  // Batch-invariant: nothing that changes a sequence's sums may depend on the others.
  const int row_tiles =
      (p.batch_invariant ? group : rows) > kTileRows && element_bytes == 2 ? 2 : 1;
  bool has_one = false;
  for (const KernelShape& shape : kKernelShapes) {
    const bool fits = shape.head_dim >= p.head_dim && shape.element_bytes == element_bytes &&
                      shape.cache_bytes == cache_bytes && shape.row_tiles == row_tiles;
    // The first shape that is wide enough says how wide; of these the first that the device can
    // hold.
    if (!fits || config.rings > 0) continue;
    if (config.head_dim == 0) config.head_dim = shape.head_dim;
    if (shape.head_dim != config.head_dim) continue;
    const Variant variant = choose_variant(shape, p);
    const bool has_state_buffers = is_plain(variant) && has_plain_state_buffers(shape);
    const int bytes = shared_bytes(shape) + (has_state_buffers ? state_buffer_bytes(shape) : 0);
    if (bytes + own_shared_bytes(shape) > limits.shared_memory_per_block) continue;
    config.rings = shape.rings;
    config.row_tiles = shape.row_tiles;
    config.stages = shape.stages;
    config.shared_bytes = bytes;
    config.variant = variant;
    config.has_state_buffers = has_state_buffers;
    has_one = exists(shape, Variant::kOne);
    if (p.batch_invariant) {
      const int room =
          limits.shared_memory_per_block - shared_bytes(shape) - own_shared_bytes(shape);
      const int both = state_buffer_bytes(shape) + unit_buffer_bytes(shape, true);
      config.has_state_buffers = both <= room;
      config.has_unit_buffers = unit_buffer_bytes(shape, false) <= room;
      if (config.has_unit_buffers) {
        config.shared_bytes += config.has_state_buffers ? both : unit_buffer_bytes(shape, false);
      }
    }
  }
  if (config.rings == 0) return config;
  const int64_t rows_a_pass = kTileRows * config.row_tiles;
  const int64_t passes = (rows + rows_a_pass - 1) / rows_a_pass;
  const double most_tokens =
      std::min(static_cast<double>(p.max_blocks) * static_cast<double>(p.block_size), 0x1p31);
  const double tiles = most_tokens / kTileTokens + 1;  // of a unit
  constexpr double kLongestLine = 1 << 30;
  if (config.variant == Variant::kPlain && has_one && p.batch_size == 1 &&
      p.cu_seqlens_q == nullptr &&
      static_cast<double>(p.num_kv_heads * passes) * (tiles + limits.num_sms) <= kLongestLine) {
    config.unit_blocks = choose_unit_blocks(p.num_kv_heads * passes, limits);
    if (config.unit_blocks > 0) {
      config.variant = Variant::kOne;
      config.head_lanes = 1;
      config.token_lanes = config.rings;
      config.grid = static_cast<int>(p.num_kv_heads * passes) * config.unit_blocks;
      config.min_tiles = limits.tuning.one_sequence_whole_tiles;
      return config;
    }
  }
  config.head_lanes = choose_head_lanes(config.rings, p.batch_size, p.num_kv_heads,
                                        p.head_dim * cache_bytes, limits);
  if (p.batch_invariant) choose_chunks(config, p, cache_bytes, limits);
  config.token_lanes = config.rings / config.head_lanes;

  // Where segments are fewer than blocks, equal ones are cut into equal whole parts.
  const Tuning& tuning = limits.tuning;
  const int64_t head_groups = (p.num_kv_heads + config.head_lanes - 1) / config.head_lanes;
  const int64_t segments = std::max<int64_t>(p.batch_size * head_groups * passes, 1);
  const int64_t idle = limits.num_sms % segments;
  const bool equal_parts =
      segments < limits.num_sms && idle <= share_of(limits.num_sms, tuning.equal_parts_most_idle);
  config.grid = static_cast<int>(limits.num_sms - (equal_parts ? idle : 0));
  config.min_tiles = tuning.least_tiles_of_token_lane * config.token_lanes;
  // A unit costs its queries, its end, where token lanes meet, and if it is cut a merge. Where
  // every unit is cut into several parts, what matters is that these are equal.
  const int unit_cost = tuning.unit_cost + tuning.unit_cost_of_token_lane * config.token_lanes;
  config.unit_cost = is_share(segments, config.grid, tuning.unit_cost_least_segments)
                         ? std::min(unit_cost, tuning.most_unit_cost)
                         : 0;

  if (p.batch_invariant) {
    config.grid = limits.num_sms;
    // Blocks that have many units are those of pairs: see unit_cost above.
    config.unit_cost = config.token_lanes < config.rings ? tuning.invariant_unit_cost : 0;
  }

  // The longest that the line can be: every unit as long as the table is wide.
  const double units =
      static_cast<double>(head_groups) *
      (static_cast<double>(p.num_tokens) * static_cast<double>(group) / rows_a_pass + p.batch_size);
  while (config.line_shift <= kMostLineShift &&
         units * (std::ldexp(tiles + config.unit_cost, -config.line_shift) + 1) > kLongestLine) {
    ++config.line_shift;
  }
  return config;
}

}  // namespace paged_attn::cuda
