// What a launch hands to the device.
#pragma once

#include "../../params.h"
#include "divisor.h"
#include "heuristics.h"

namespace paged_attn::cuda {

struct RowSums;

// The window of a call without one.
constexpr int32_t kAllKeys = 0x7fffffff;

// NOTE: params come to a multiprocessor by lines of 64 bytes, at the cost of some 300 cycles for
// the first that a kernel reads of each. What is read before the first load of K comes first, here
// and in DecodeParams.
struct DeviceParams {
  int32_t group;  // query heads a KV head
  Divisor by_group;
  Divisor by_block_size;
  Divisor by_head_groups;
  Divisor by_grid;
  Divisor by_unit_blocks;
  int32_t unit_blocks;  // Variant::kOne: so many blocks share each unit
  int32_t head_groups;  // KV heads by head_lanes at a time
  int32_t head_lanes;
  int32_t token_lanes;
  int32_t token_lanes_shift;  // log2: warps are split in powers of two
  int32_t min_steps;          // see min_tiles in heuristics.h
  int32_t line_shift;         // see schedule.cuh
  int32_t unit_cost;          // steps that a unit counts for besides its tiles
  // Aligned runs of 2^run_shift tokens lie in one block: the greatest such, up to a tile.
  int32_t run_shift;
  int32_t num_new_keys;  // the kernel before may still be writing a sequence's last so many
  int32_t window;        // keys that a query sees, itself included; or kAllKeys
  // Batch-invariant: a unit is cut into at most so many chunks (else 0), which hold a power of 2 of
  // leaves for each token lane. A leaf has a power of 2 of tiles.
  int32_t max_chunks;
  int8_t leaves_a_lane_shift;
  bool has_state_buffers;  // shared memory for a state of each warp beside the rings
  bool has_unit_buffers;   // and for one of each KV head behind that
  bool overlaps;           // the kernel before may still run while old keys and values are read
  bool starts_early;       // and queries are written: see kernels.h; without options
  bool has_transforms;     // softcap or ALiBi
  bool out_is_aligned;     // every row of out starts at a multiple of 4 elements

  // A score is score_factor * (q . k), times the KV head's k_scale, changed by softcap and ALiBi if
  // there is one of them; its weight is 2^(score * scale_log2). The larger has more weight.
  float score_factor;
  float scale_log2;
  float slack;  // a score may exceed the row's reference by so much

  DecodeParams decode;

  // Scratch, in this order in one allocation. Groups: head_lanes by row tiles, a warp tile of rows.
  float* partial_outputs;  // [parts, kTileRows, head_dim]; parts: [grid, 2, groups], and then
                           // [grid, max_chunks, groups]
  RowSums* partial_sums;   // [parts, kTileRows]
  uint64_t* arrivals;      // [grid, head_lanes]: at the unit that ends a block's share
  int32_t* prefix_chunks;  // [grid, head_lanes]: of that unit, those that the block has
  int32_t* row_starts;     // ragged: [B + 1]; sequence b owns rows row_starts[b] ... [b + 1] of q
  uint64_t call_number;    // random, this call's own

  Divisor by_most_leaves;  // batch-invariant: of all chunks
  int32_t least_chunk_shift;
};

// Tells the compiler what choose_variant() has found to be so.
template <Variant kVariant>
__device__ __forceinline__ void leave_out_options(DeviceParams& params, const KernelShape& shape) {
  DecodeParams& p = params.decode;
  p.causal = true;
  params.window = kAllKeys;
  params.has_transforms = false;
  p.sinks = nullptr;
  if (shape.cache_bytes != 1) p.k_scale.data = p.v_scale.data = nullptr;
  if (kVariant == Variant::kInvariant) return;
  params.max_chunks = 0;
  params.leaves_a_lane_shift = 0;
  params.has_state_buffers = has_plain_state_buffers(shape);
}

}  // namespace paged_attn::cuda
