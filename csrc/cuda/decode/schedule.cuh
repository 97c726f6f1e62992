// Who reads which tokens. All tiles of all sequences form one line: sequence by sequence, within it
// unit by unit (a unit is a group of head_lanes KV heads by a pass over rows_a_pass query rows),
// within that token by token. A unit begins with steps that stand for what it costs besides its
// tiles. Every block gets an equal contiguous share of the line; what a share holds of one unit is
// a segment. A unit cut by a boundary of shares is merged by combine.cuh.
//
// Positions in the line count steps of 2^line_shift tiles, which is one tile unless the line would
// be too long for 32 bits.
//
// NOTE: what runs before the first load of K is on the critical path of every call. A jump to code
// that the nearest instruction cache does not hold takes some 70 cycles and a division as long: few
// branches and no divisions matter here more than few operations.
#pragma once

#include "sequence.cuh"

namespace paged_attn::cuda {

struct Share {
  int begin;  // first step and past the last, in the line
  int end;
  // How the line is cut: the first `longer` blocks have steps_a_block + 1 steps.
  int steps_a_block;
  int longer;
  // Where begin falls: the sequence, the unit of it, and the unit's first step in the line.
  int batch;
  Sequence sequence;
  int pass;
  int head_group;
  int unit_begin;

  __device__ __forceinline__ int block_of(int step) const {
    const int in_longer = longer * (steps_a_block + 1);
    const bool is_in = step < in_longer;
    return (is_in ? step : step - in_longer) / (steps_a_block + is_in) + (is_in ? 0 : longer);
  }
};

// Steps of each unit of a sequence.
__device__ __forceinline__ int steps_of(const DeviceParams& params, const Sequence& sequence) {
  const int tiles = tiles_of(params, sequence);
  return tiles == 0
             ? 0
             : params.unit_cost + ((tiles + (1 << params.line_shift) - 1) >> params.line_shift);
}

// Batch-invariant: what is added up one by one are leaves. Each token lane adds up a stretch of
// them, and what these give together is a chunk, between which alone units are cut. How many tiles
// a leaf has depends on nothing but the sequence itself; it is a power of 2, as the rest are. These
// are logarithms.
__device__ __forceinline__ int leaf_shift_of(const DeviceParams& params, const Sequence& sequence) {
  const int tiles = max(tiles_of(params, sequence), 1);
  const int more = params.by_most_leaves.quotient(tiles - 1);
  // The longer a sequence, the more chunks it has, and the longer ones, up to 64 tiles unless there
  // would be too many: the end of each costs as much as some tiles.
  const int chunk_shift = min(params.least_chunk_shift + max(29 - __clz(tiles), 0) / 2, 6);
  return max(32 - __clz(more), chunk_shift - params.token_lanes_shift - params.leaves_a_lane_shift);
}

// Not batch-invariant, a lane's stretches are single tiles.
__device__ __forceinline__ int stretch_shift_of(const DeviceParams& params,
                                                const Sequence& sequence) {
  return params.max_chunks > 0 ? leaf_shift_of(params, sequence) + params.leaves_a_lane_shift : 0;
}

__device__ __forceinline__ int chunk_shift_of(const DeviceParams& params,
                                              const Sequence& sequence) {
  return stretch_shift_of(params, sequence) + params.token_lanes_shift;
}

template <int kRowsAPass>
__device__ __forceinline__ int passes_of(const DeviceParams& params, const Sequence& sequence) {
  const uint32_t rows = static_cast<uint32_t>(sequence.query_len) * params.group;
  return static_cast<int>((rows + kRowsAPass - 1) / kRowsAPass);
}

// Every block sums up the lengths itself, which is cheaper than a kernel or a host that plans. The
// first kThreads sequences stay in `staged`, the share in `found`, both in shared memory: should
// lengths change meanwhile, against the rules, the block's warps still agree. A share without steps
// has begin >= end and is not kept.
template <int kThreads, int kRowsAPass>
__device__ __forceinline__ Share find_share(const DeviceParams& params,
                                            Sequence (&staged)[kThreads], Share& found) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int warp_sums[kWarps];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int batch_size = static_cast<int>(params.decode.batch_size);
  const int each = (batch_size + kThreads - 1) / kThreads;
  const int first = threadIdx.x * each;
  if (threadIdx.x == 0) found.begin = found.end = 0;

  // Twice over this thread's sequences: once for the sum, then for the one that holds the share's
  // begin, which one thread has.
  int own = 0, before = 0;
  Share share{};
#pragma unroll 1
  for (bool searching = false;; searching = true) {
#pragma unroll 1
    for (int b = first; b < min(first + each, batch_size); ++b) {
      const Sequence sequence = searching && b < kThreads ? staged[b] : load_sequence(params, b);
      const int steps = steps_of(params, sequence);
      const int all_steps = steps * passes_of<kRowsAPass>(params, sequence) * params.head_groups;
      if (!searching) {
        if (b < kThreads) staged[b] = sequence;
        own += all_steps;
      } else if (before + all_steps > share.begin) {
        const int unit = (share.begin - before) / steps;
        share.batch = b;
        share.sequence = sequence;
        share.pass = params.by_head_groups.quotient(unit);
        share.head_group = unit - share.pass * params.head_groups;
        share.unit_begin = before + unit * steps;
        found = share;
        break;
      }
      before += all_steps;
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
    share.steps_a_block = params.by_grid.quotient(total);
    share.longer = total - share.steps_a_block * gridDim.x;
    if (share.steps_a_block < params.min_steps) {
      share.steps_a_block = params.min_steps;
      share.longer = 0;
    }
    const int block = blockIdx.x;
    share.begin = block * share.steps_a_block + min(block, share.longer);
    share.end = min(share.begin + share.steps_a_block + (block < share.longer), total);
    if (share.begin >= total) return share;
    if (share.begin < before || share.begin >= before + own) break;
  }
  __syncthreads();
  return found;
}

// Variant::kOne, for one sequence: the same number of blocks for each of its units, which shorter
// search the line does not need. The last blocks of a unit may have nothing, and of a short one all
// but the first.
template <int kRowsAPass>
__device__ __forceinline__ Share find_share_of_one(const DeviceParams& params, Sequence& staged) {
  if (threadIdx.x == 0) staged = load_sequence(params, 0);
  __syncthreads();
  Share share{};
  share.sequence = staged;
  const int block = static_cast<int>(blockIdx.x);
  const int unit = params.by_unit_blocks.quotient(block);
  share.pass = params.by_head_groups.quotient(unit);
  share.head_group = unit - share.pass * params.head_groups;
  const int tiles = tiles_of(params, share.sequence);
  share.steps_a_block = max(params.by_unit_blocks.quotient(tiles + params.unit_blocks - 1),
                            tiles <= params.min_steps ? tiles : 0);
  // In the line every block has a full share, and what a unit has no tiles for is never reached.
  share.unit_begin = unit * params.unit_blocks * share.steps_a_block;
  share.begin = block * share.steps_a_block;
  share.end = min(share.begin + share.steps_a_block, share.unit_begin + tiles);
  return share;
}

// What a share holds of one unit: batch-invariant, whole chunks.
struct Segment {
  int batch;
  Sequence sequence;
  int pass;  // the unit: rows of the pass-th pass, KV heads of the head_group-th group
  int head_group;
  int first;  // tiles [first, end) of the sequence
  int end;
  int unit_begin;  // the unit's first step in the line that is a tile
  int unit_last;   // and its last

  __device__ __forceinline__ bool is_whole(const DeviceParams& params) const {
    return first == first_tile_of(params, sequence) && end == end_tile_of(sequence);
  }
};

// A token lane's tiles of a segment: every token_lanes-th or, batch-invariant, of the chunk that
// begins at tile `begin` a stretch.
struct LaneTiles {
  int first;
  int end;
  int chunk_end;
  int lanes_used;  // so many token lanes have tiles

  __device__ __forceinline__ LaneTiles(const DeviceParams& params, const Segment& segment,
                                       int begin, int token_lane) {
    const int shift = stretch_shift_of(params, segment.sequence);
    chunk_end = segment.end;
    first = begin + (token_lane << shift);
    if (params.max_chunks == 0) {
      end = segment.end;
      lanes_used = min(params.token_lanes, segment.end - begin);
    } else {
      chunk_end = min(begin + (params.token_lanes << shift), segment.end);
      end = min(first + (1 << shift), chunk_end);
      lanes_used = (chunk_end - begin + (1 << shift) - 1) >> shift;
    }
  }

  // Of a segment's chunks together.
  __device__ __forceinline__ static int count(const DeviceParams& params, const Segment& segment,
                                              int token_lane) {
    const int shift = stretch_shift_of(params, segment.sequence);
    const int chunk_shift = shift + params.token_lanes_shift;
    const int tiles = segment.end - segment.first;
    const int rest = (tiles & ((1 << chunk_shift) - 1)) - (token_lane << shift);
    return (tiles >> chunk_shift << shift) + min(max(rest, 0), 1 << shift);
  }
};

// Walks a share's segments; every warp for itself. It holds a window of 32 sequences, one a lane,
// so that rows of padding are stepped over at once. kIsOne: the share is one segment.
template <int kRowsAPass, int kStaged, bool kIsOne>
class SegmentCursor {
 public:
  // Starts before the first segment.
  __device__ __forceinline__ SegmentCursor(const DeviceParams& params, const Share& share,
                                           const Sequence (&staged)[kStaged], int lane)
      : staged_(staged),
        lane_(lane),
        segment_{},
        position_(share.begin),
        end_(share.end),
        unit_begin_(share.unit_begin),
        pass_(share.pass),
        head_group_(share.head_group),
        window_begin_(share.batch - 31),
        window_(0) {
    set_sequence(params, share.batch, share.sequence);
  }

  __device__ __forceinline__ const Segment& segment() const { return segment_; }

  // To the next segment; false past the last.
  __device__ __forceinline__ bool advance(const DeviceParams& params) {
    do {
      if (!kIsOne && position_ != end_ &&
          pass_ == passes_of<kRowsAPass>(params, segment_.sequence)) {
        enter_sequence(params);
      }
      if (position_ == end_) return false;
      segment_.pass = pass_;
      segment_.head_group = head_group_;
      segment_.unit_begin = unit_begin_ + params.unit_cost;
      segment_.unit_last = unit_begin_ + unit_steps_ - 1;
      const int first = max(position_ - segment_.unit_begin, 0);
      position_ = min(segment_.unit_last + 1, end_);
      unit_begin_ = position_;
      const int first_tile = first_tile_of(params, segment_.sequence);
      segment_.first = first_tile + (first << params.line_shift);
      segment_.end =
          min(first_tile + (max(position_ - segment_.unit_begin, 0) << params.line_shift),
              end_tile_of(segment_.sequence));
      if (params.max_chunks > 0) keep_whole_chunks(params);
      if (++head_group_ == params.head_groups) {
        head_group_ = 0;
        ++pass_;
      }
      // A share may end before the unit's first tile.
    } while (segment_.first >= segment_.end);
    return true;
  }

 private:
  // A chunk that a boundary of shares cuts is of the share behind it.
  __device__ __forceinline__ void keep_whole_chunks(const DeviceParams& params) {
    const int first_tile = first_tile_of(params, segment_.sequence);
    const int mask = -(1 << chunk_shift_of(params, segment_.sequence));
    segment_.first = first_tile + ((segment_.first - first_tile) & mask);
    if (segment_.end < end_tile_of(segment_.sequence)) {
      segment_.end = first_tile + ((segment_.end - first_tile) & mask);
    }
  }

  // Finds the next sequence that has tiles. There is one, for steps are left; if not, lengths were
  // changed meanwhile, and the share ends here.
  __device__ __forceinline__ void enter_sequence(const DeviceParams& params) {
#pragma unroll 1
    while (window_ == 0 && window_begin_ < params.decode.batch_size) {
      window_begin_ += 32;
      const int b = window_begin_ + lane_;
      own_ = b < kStaged && b < params.decode.batch_size ? staged_[b] : load_sequence(params, b);
      window_ = __ballot_sync(~0u, own_.context_len > 0);
    }
    if (window_ == 0) position_ = end_;
    const int first = __ffs(static_cast<int>(window_)) - 1;
    window_ &= window_ - 1;
    Sequence sequence;
    sequence.context_len = __shfl_sync(~0u, own_.context_len, first);
    sequence.first_row = __shfl_sync(~0u, own_.first_row, first);
    sequence.query_len = __shfl_sync(~0u, own_.query_len, first);
    set_sequence(params, window_begin_ + first, sequence);
    pass_ = 0;
  }

  __device__ __forceinline__ void set_sequence(const DeviceParams& params, int batch,
                                               const Sequence& sequence) {
    segment_.batch = batch;
    segment_.sequence = sequence;
    unit_steps_ = steps_of(params, sequence);
  }

  const Sequence (&staged_)[kStaged];
  int lane_;
  Segment segment_;
  int position_;  // the next segment's first step
  int end_;
  int unit_begin_, unit_steps_, pass_, head_group_;  // the next segment's unit
  int window_begin_;
  unsigned window_;  // bit i: sequence window_begin_ + i has tiles and was not entered yet
  Sequence own_;     // sequence window_begin_ + lane
};

}  // namespace paged_attn::cuda
