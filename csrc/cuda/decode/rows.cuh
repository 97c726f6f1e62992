// Where the query rows of a unit live. Row r of a KV head is query token r / group and query head
// r % group of the head's group.
#pragma once

#include "../conversions.cuh"
#include "schedule.cuh"

namespace paged_attn::cuda {

// The kTileRows rows of one warp in one unit.
struct RowTile {
  int32_t batch;
  int32_t ragged_row;  // the sequence's first row of q if ragged, else 0
  int32_t num_rows;    // the unit's KV head has so many rows in all
  int32_t first;       // this tile's first
  int32_t kv_head;

  RowTile() = default;
  __device__ __forceinline__ RowTile(const DeviceParams& params, const Segment& segment,
                                     int head_lane, int row_tile, int rows_a_pass) {
    batch = segment.batch;
    ragged_row = segment.sequence.first_row;
    num_rows = segment.sequence.query_len * params.group;
    first = segment.pass * rows_a_pass + row_tile * kTileRows;
    kv_head = segment.head_group * params.head_lanes + head_lane;
  }

  __device__ __forceinline__ bool exists(int row) const { return first + row < num_rows; }
  __device__ __forceinline__ int count() const { return max(min(num_rows - first, kTileRows), 0); }

  // The query token of row `row`.
  __device__ __forceinline__ int token(const DeviceParams& params, int row) const {
    return params.by_group.quotient(first + row);
  }

  // Keys that row `row` of the tile sees; all of them for one that does not exist.
  __device__ __forceinline__ int limit(const DeviceParams& params, const Sequence& sequence,
                                       int row) const {
    const int position = sequence.context_len - sequence.query_len + token(params, row);
    return params.decode.causal && exists(row) ? position + 1 : sequence.context_len;
  }

  // Its query head.
  __device__ __forceinline__ int head(const DeviceParams& params, int row) const {
    return kv_head * params.group + first + row - token(params, row) * params.group;
  }

  // Offset of a row in q, out or lse.
  __device__ __forceinline__ int64_t offset(const DeviceParams& params, const TokenStrides& strides,
                                            int row) const {
    return static_cast<int64_t>(batch) * strides.batch +
           static_cast<int64_t>(ragged_row + token(params, row)) * strides.token +
           head(params, row) * strides.head;
  }
};

// The logit that query head `head` attends to besides its keys; -inf if there is none.
template <typename T>
__device__ __forceinline__ float sink_of(const DecodeParams& p, int64_t head) {
  if (p.sinks == nullptr) return -INFINITY;
  if (p.sinks_are_fp32) return __ldcg(static_cast<const float*>(p.sinks) + head);
  return to_float(__ldcg(static_cast<const T*>(p.sinks) + head));
}

}  // namespace paged_attn::cuda
