// Who reads which tokens. All tiles of all sequences form one line: sequence by sequence, within it
// unit by unit (a unit is a group of head_lanes KV heads by a pass over rows_a_pass query rows),
// within that token by token. Every block gets an equal contiguous share of the line; what a share
// holds of one unit is a segment. A unit cut by a boundary of shares is merged by combine.cuh.
//
// Positions in the line count steps of 2^line_shift tiles, which is one tile unless the line would
// be too long for 32 bits.
//
// NOTE: what runs before the first load of K is on the critical path of every call, and most of its
// time goes into fetching instructions: short code matters more here than few operations.
#pragma once

#include "sequence.cuh"

namespace paged_attn::cuda {

struct Share {
  int begin;  // first step and past the last, in the line
  int end;
  int sequence;        // the sequence that begin falls into
  int sequence_begin;  // that sequence's first step in the line
  // How the line is cut: the first `longer` blocks have steps_a_block + 1 steps.
  int steps_a_block;
  int longer;

  __device__ __forceinline__ int block_of(int step) const {
    const int in_longer = longer * (steps_a_block + 1);
    return step < in_longer ? step / (steps_a_block + 1)
                            : longer + (step - in_longer) / steps_a_block;
  }
};

__device__ __forceinline__ int steps_of(const DeviceParams& params, const Sequence& sequence) {
  const int tiles = tiles_of(sequence);
  return (tiles >> params.line_shift) + ((tiles & ((1 << params.line_shift) - 1)) != 0);
}

template <int kRowsAPass>
__device__ __forceinline__ int units_of(const DeviceParams& params, const Sequence& sequence) {
  const uint32_t rows = static_cast<uint32_t>(sequence.query_len) * params.group;
  return params.head_groups * static_cast<int>((rows + kRowsAPass - 1) / kRowsAPass);
}

// Every block sums up the lengths itself, which is cheaper than a kernel or a host that plans. The
// first kThreads sequences stay in `staged`.
template <int kThreads, int kRowsAPass>
__device__ __forceinline__ Share find_share(const DeviceParams& params,
                                            Sequence (&staged)[kThreads]) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int warp_sums[kWarps];
  __shared__ int found[2];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int batch_size = static_cast<int>(params.decode.batch_size);
  const int each = (batch_size + kThreads - 1) / kThreads;
  const int first = threadIdx.x * each;

  // Twice over this thread's sequences: once for the sum, then for the one that holds the share's
  // begin.
  int own = 0, before = 0;
  Share share{};
#pragma unroll 1
  for (bool searching = false;; searching = true) {
#pragma unroll 1
    for (int b = first; b < min(first + each, batch_size); ++b) {
      const Sequence sequence = searching && b < kThreads ? staged[b] : load_sequence(params, b);
      const int steps = steps_of(params, sequence) * units_of<kRowsAPass>(params, sequence);
      if (!searching) {
        if (b < kThreads) staged[b] = sequence;
        own += steps;
      } else if (before <= share.begin && share.begin < before + steps) {
        found[0] = b;
        found[1] = before;
      }
      before += steps;
    }
    if (searching) break;
    int inclusive = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int below = __shfl_up_sync(~0u, inclusive, distance);
      if (lane >= distance) inclusive += below;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    before = inclusive - own;
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_sums[w];
      total += warp_sums[w];
    }
    const int blocks = max(1, min(static_cast<int>(gridDim.x), total / params.min_steps));
    share.steps_a_block = total / blocks;
    share.longer = total - share.steps_a_block * blocks;
    const int block = blockIdx.x;
    if (block >= blocks || total == 0) return share;
    share.begin = block * share.steps_a_block + min(block, share.longer);
    share.end = share.begin + share.steps_a_block + (block < share.longer);
  }
  __syncthreads();
  share.sequence = found[0];
  share.sequence_begin = found[1];
  return share;
}

// What a share holds of one unit.
struct Segment {
  int batch;
  Sequence sequence;
  int unit;   // of the sequence's
  int first;  // tiles [first, end) of the unit's `tiles`
  int end;
  int tiles;
  int unit_begin;  // the unit's first step in the line, ...
  int unit_last;   // ... and its last

  __device__ __forceinline__ bool is_whole() const { return first == 0 && end == tiles; }
};

// Walks a share's segments; every warp for itself. It knows of a window of 32 sequences which of
// them have tiles, so that rows of padding are stepped over at once.
template <int kRowsAPass, int kStaged>
class SegmentCursor {
 public:
  // Starts before the first segment.
  __device__ __forceinline__ SegmentCursor(const Share& share, const Sequence (&staged)[kStaged],
                                           int lane)
      : staged_(staged),
        lane_(lane),
        segment_{},
        position_(share.begin),
        end_(share.end),
        sequence_begin_(share.sequence_begin),
        next_begin_(share.sequence_begin),
        window_begin_(share.sequence - 32),
        window_(0) {}

  __device__ __forceinline__ const Segment& segment() const { return segment_; }

  // To the next segment; false, and no change, past the last.
  __device__ __forceinline__ bool advance(const DeviceParams& params) {
    if (position_ == end_) return false;
    if (position_ >= next_begin_) enter_sequence(params);
    segment_.unit = (position_ - sequence_begin_) / steps_;
    segment_.unit_begin = sequence_begin_ + segment_.unit * steps_;
    segment_.unit_last = segment_.unit_begin + steps_ - 1;
    const int unit_end = min(segment_.unit_begin + steps_, end_);
    segment_.first = (position_ - segment_.unit_begin) << params.line_shift;
    segment_.end = min((unit_end - segment_.unit_begin) << params.line_shift, segment_.tiles);
    position_ = unit_end;
    return true;
  }

 private:
  __device__ __forceinline__ Sequence sequence(const DeviceParams& params, int b) const {
    return b < kStaged && b < params.decode.batch_size ? staged_[b] : load_sequence(params, b);
  }

  // Finds the next sequence that has tiles. There is one, for steps are left.
  __device__ __forceinline__ void enter_sequence(const DeviceParams& params) {
#pragma unroll 1
    while (window_ == 0) {
      window_begin_ += 32;
      window_ = __ballot_sync(~0u, sequence(params, window_begin_ + lane_).context_len > 0);
    }
    const int first = __ffs(static_cast<int>(window_)) - 1;
    window_ &= window_ - 1;
    segment_.batch = window_begin_ + first;
    segment_.sequence = sequence(params, segment_.batch);
    segment_.tiles = tiles_of(segment_.sequence);
    steps_ = steps_of(params, segment_.sequence);
    sequence_begin_ = next_begin_;
    next_begin_ += steps_ * units_of<kRowsAPass>(params, segment_.sequence);
  }

  const Sequence (&staged_)[kStaged];
  int lane_;
  Segment segment_;
  int position_;  // the next segment's first step
  int end_;
  int sequence_begin_, next_begin_;  // steps of the sequence, and of the one behind it
  int steps_;                        // of each of its units
  int window_begin_;
  unsigned window_;  // bit i: sequence window_begin_ + i has tiles and was not entered yet
};

}  // namespace paged_attn::cuda
