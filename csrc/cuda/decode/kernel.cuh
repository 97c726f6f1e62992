// The decode kernel, top down: find this block's share, stream its tiles, fold each into the online
// softmax of its unit, and write or merge what every segment gives.
#pragma once

#include "../dependent_launch.cuh"
#include "combine.cuh"
#include "empty_rows.cuh"
#include "scores.cuh"

namespace paged_attn::cuda {

// One block's share; the first kThreads sequences are left in `staged`. The params hold no other of
// decode's options than kVariant is for.
template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, int kStages,
          Variant kVariant>
__device__ __forceinline__ void decode_share(const DeviceParams& params,
                                             Sequence (&staged)[32 * kRings * kRowTiles]) {
  constexpr int kThreads = 32 * kRings * kRowTiles;
  constexpr int kRowsAPass = kTileRows * kRowTiles;
  constexpr bool kHasWindow = kVariant == Variant::kGeneral;
  constexpr bool kIsOne = kVariant == Variant::kOne;
  using Math = TileMath<T, C, kHeadDim>;
  using Stream = TileStream<T, C, kHeadDim, kRowTiles, kThreads, kVariant>;
  using Combine = Combiner<T, C, kHeadDim, kRings, kRowTiles, kVariant>;
  constexpr int kRingBytes = kStages * Stream::kSlotBytes;

  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int row_tile = warp % kRowTiles, ring = warp / kRowTiles;
  const int token_lane = ring & (params.token_lanes - 1);
  const int head_lane = ring >> params.token_lanes_shift;
  const auto ring_barrier = [&] {
    if constexpr (kRowTiles == 1) {
      __syncwarp();
    } else {
      named_barrier(1 + ring, 32 * kRowTiles);
    }
  };
  __shared__ uint64_t group_barriers[kRings];
  if (lane == 0 && row_tile == 0 && token_lane == 0) {
    GroupBarrier::init(&group_barriers[head_lane], params.token_lanes * kRowTiles * 32);
  }

  // Where this kernel overlaps the one before, all that is read until the waits below was there
  // before that began, but for new keys, for which the stream waits, and queries where it starts
  // early.
  if (!params.overlaps) wait_for_kernel_before();
  let_next_kernel_start();
  __shared__ Share kept_share;
  Share share;
  if constexpr (kIsOne) {
    share = find_share_of_one<kRowsAPass>(params, staged[0]);
  } else {
    share = find_share<kThreads, kRowsAPass>(params, staged, kept_share);
  }
  if (share.begin >= share.end) return;

  Stream stream(params, share, staged, shared + ring * kRingBytes, head_lane, token_lane, row_tile,
                lane);
  SegmentCursor<kRowsAPass, kThreads, kIsOne> cursor(params, share, staged, lane);
  auto& combine_shared = *reinterpret_cast<typename Combine::Shared*>(shared + kRings * kRingBytes);
  Combine combine(params, shared, kRingBytes, combine_shared, &group_barriers[head_lane], head_lane,
                  token_lane, row_tile, lane);

  typename Math::Query query;
  RowTile rows;
  typename Combine::State state;
  // Of the segment in work or, batch-invariant, its chunk:
  Target target;               // where its result goes
  bool is_new = false;         // its query is yet to be taken from the ring
  int lanes_used = 0;          // token lanes that have a part of it
  int tile = 0, end_tile = 0;  // this warp's next tile of it, and past the last
  int chunk_end = 0;           // batch-invariant: past the last tile of the chunk in work
  int limit[2] = {};           // this lane's rows see keys before these
  float factor = 0;            // of its scores
  bool poisoned = false;       // the sequence has a block id outside the pool
  // Of the ring:
  int slot = 0;              // the next tile's
  int free_slots = kStages;  // so many before it may be filled
  bool holds_slot = false;   // the one before it is kept for the merge of token lanes or chunks
  bool lacks_query = params.starts_early;  // the first tile's is still to come

  // NOTE: one loop, with one place for each thing that is done. Code is warm in the
  // multiprocessor's instruction cache from one call to the next only as long as it fits there, 128
  // KB.
#pragma unroll 1
  for (;;) {
#pragma unroll 1
    for (; free_slots > 0; --free_slots) {
      stream.issue(slot - free_slots + (slot < free_slots ? kStages : 0));
    }

    if (tile < end_tile) {
      wait_copies<kStages - 1>();
      ring_barrier();
      poisoned |= stream.is_bad(slot);
      const uint8_t* k_tile = shared + ring * kRingBytes + slot * Stream::kSlotBytes;
      if (is_new || !Math::kQueryInRegisters) {
        Math::load_query(query, k_tile + Stream::query_offset(row_tile), lane);
        is_new = false;
      }
      float4 s = Math::scores(k_tile, query, static_cast<int>(params.decode.head_dim), lane);
      s = make_float4(s.x * factor, s.y * factor, s.z * factor, s.w * factor);
      if (params.has_transforms) s = transform_scores(params, rows, limit, tile, s, lane);
      bool masked = tile >= min(limit[0], limit[1]) >> kTileShift;
      // A limit minus kAllKeys is not above any key, which the compiler cannot know.
      if (kHasWindow && tile << kTileShift < max(limit[0], limit[1]) - params.window) masked = true;
      if (masked) {
        const int token = tile * kTileTokens + (lane >> 2);
        const auto sees = [&](int key, int row) {
          return key < limit[row] && (!kHasWindow || key >= limit[row] - params.window);
        };
        if (!sees(token, 0)) s.x = -INFINITY;
        if (!sees(token, 1)) s.y = -INFINITY;
        if (!sees(token + 8, 0)) s.z = -INFINITY;
        if (!sees(token + 8, 1)) s.w = -INFINITY;
      }
      float4 weights = state.weights(s, params.scale_log2, params.slack);
      if (masked) {
        // Not left to the exponential: a scale of 0 would make it NaN.
        if (s.x == -INFINITY) weights.x = 0;
        if (s.y == -INFINITY) weights.y = 0;
        if (s.z == -INFINITY) weights.z = 0;
        if (s.w == -INFINITY) weights.w = 0;
      }
      state.add_exact(weights);
      state.add_rounded(Math::accumulate(state.out, k_tile + Stream::kTileBytes, weights, lane));
      ring_barrier();
      tile += params.max_chunks > 0 ? 1 : params.token_lanes;
      const bool is_last = tile >= end_tile;
      if (is_last) {
        state.reduce();
      } else if (can_keep_leaves(kHeadDim) && params.leaves_a_lane_shift > 0) {
        const Segment& segment = cursor.segment();
        const int leaf_shift = leaf_shift_of(params, segment.sequence);
        if (((tile - segment.first) & ((1 << leaf_shift) - 1)) == 0) {
          state.reduce();
          combine.keep_leaf(state, rows);
          state.clear();
        }
      }
      holds_slot = is_last && !params.has_state_buffers;
      free_slots = !holds_slot;
      slot = slot + 1 == kStages ? 0 : slot + 1;
      continue;
    }

    // The segment in work is complete or, batch-invariant, a chunk of it.
    if (poisoned) state.poison();
    if (lanes_used > 0) {
      combine.finish(state, rows, lanes_used, slot == 0 ? kStages - 1 : slot - 1, target);
    }
    free_slots = holds_slot;
    holds_slot = false;

    const Segment& segment = cursor.segment();
    const bool is_next_chunk = params.max_chunks > 0 && chunk_end < segment.end;
    if (!is_next_chunk) {
      if (!cursor.advance(params)) break;
      rows = RowTile(params, segment, head_lane, row_tile, kRowsAPass);
      is_new = true;
      poisoned = false;
      limit[0] = max(rows.limit(params, segment.sequence, 2 * (lane & 3)), 0);
      limit[1] = max(rows.limit(params, segment.sequence, 2 * (lane & 3) + 1), 0);
      factor = score_factor(params, rows.kv_head);
    }
    state.clear();
    const LaneTiles lane_tiles(params, segment, is_next_chunk ? chunk_end : segment.first,
                               token_lane);
    tile = lane_tiles.first;
    end_tile = lane_tiles.end;
    chunk_end = lane_tiles.chunk_end;
    lanes_used = lane_tiles.lanes_used;
    const bool is_spare_lane = rows.kv_head >= params.decode.num_kv_heads;
    if (is_spare_lane) lanes_used = end_tile = 0;
    if (is_plain(kVariant) && lacks_query) {
      // Before anything is written, too: the call before may use the same scratch.
      wait_for_kernel_before();
      if (tile < end_tile) {
        stream.store_query(shared + ring * kRingBytes + slot * Stream::kSlotBytes, rows);
        lacks_query = false;
      }
    }
    const bool is_last_chunk = chunk_end == segment.end;
    if (is_spare_lane || (!is_next_chunk && is_last_chunk && segment.is_whole(params))) {
      target = {};
    } else if (is_next_chunk) {
      target = target.next_chunk(combine.groups(), is_last_chunk);
    } else {
      target = combine.begin_part(kIsOne ? share : kept_share, segment, rows, is_last_chunk);
    }
  }

  wait_copies<0>();
  wait_for_kernel_before();
  combine.merge_cut_units();
}

template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, int kStages,
          Variant kVariant>
__device__ __forceinline__ void decode_block(const DeviceParams& params) {
  constexpr int kThreads = 32 * kRings * kRowTiles;
  __shared__ Sequence staged[kThreads];
  decode_share<T, C, kHeadDim, kRings, kRowTiles, kStages, kVariant>(params, staged);
  wait_for_kernel_before();
  fill_empty_sequences<T, kThreads>(params.decode, [&](int64_t b) {
    return b < kThreads ? staged[b] : load_sequence(params, b);
  });
}

template <typename T, typename C, int kHeadDim, int kRings, int kRowTiles, int kStages,
          Variant kVariant>
__global__ void __launch_bounds__(32 * kRings * kRowTiles, 1)
    decode_kernel(const __grid_constant__ DeviceParams params) {
  if constexpr (kVariant == Variant::kGeneral) {
    decode_block<T, C, kHeadDim, kRings, kRowTiles, kStages, kVariant>(params);
  } else {
    DeviceParams fewer = params;
    leave_out_options<kVariant>(fewer,
                                {kHeadDim, sizeof(T), sizeof(C), kRings, kRowTiles, kStages});
    if constexpr (kVariant == Variant::kOne) {
      fewer.head_lanes = 1;
      fewer.token_lanes = kRings;
      fewer.token_lanes_shift = log2_of(kRings);
    }
    decode_block<T, C, kHeadDim, kRings, kRowTiles, kStages, kVariant>(fewer);
  }
}

}  // namespace paged_attn::cuda
