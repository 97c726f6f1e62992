// The measured numbers behind heuristics.h, a set for each card. benchmarks/tune.py measures them
// anew and prints the entry that another card needs in kTunings. No device code.
#pragma once

#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace paged_attn::cuda {

// Shares are in 1/10000: 1/16, 1/6 and 7/8 come out as they are meant on any card.
constexpr int64_t kWhole = 10000;

constexpr int64_t share_of(int64_t total, int share) { return total * share / kWhole; }

constexpr bool is_share(int64_t part, int64_t total, int least_share) {
  return part * kWhole >= total * least_share;
}

// Defaults are the H200's, for cards that nobody has measured. Where no measurement is told, the
// number was measured only together with others: see docs/performance.md. Segments are sequences
// times passes over their rows times groups of KV heads that lie side by side in the rings.
struct Tuning {
  // KV heads lie side by side while segments are at least this share of the processors: a ring with
  // whole segments to itself needs no merges, but idle processors cost more than these.
  int head_lanes_least_segments = 8750;
  // The same for rows that are no whole memory lines, which are better read beside their
  // neighbours. Measured: head dim 120 took 1.33 times head dim 128 without.
  int head_lanes_least_segments_unaligned = 625;
  // ... and while KV heads are at least this share of the places side by side; the rest are idle.
  int head_lanes_least_used = 7500;
  // Sequences are many from this share of the processors on; then at most two rings share a head's
  // tokens. Measured, 100 to 1000 tokens: B32 32/8 27.6 us from 30.0; with eight rings to a head
  // now 33.7 from 27.3, B32 32/32 105.6 from 75.2.
  int many_sequences = 2000;
  // Tiles whose time a unit takes besides its own, for its queries and its end, ...
  int unit_cost = 2;
  // ... for each of the token lanes that meet there, ...
  int unit_cost_of_token_lane = 2;
  // ... and at most. Measured, B8 32/8, 100 to 1000 tokens: 15.0 us from 16.3 with at most 8; B16
  // 21.4 from 21.5.
  int most_unit_cost = 16;
  // Units cost nothing where segments are fewer than this share of the grid: then each is cut into
  // several parts, and what matters is that these are equal.
  int unit_cost_least_segments = 5000;
  // A block with fewer tiles than this for each of its token lanes is not worth its merge.
  int least_tiles_of_token_lane = 1;
  // One sequence: equally many blocks share each unit, in a kernel of its own, while at most this
  // share of the processors is idle. Measured with 4 of 132 idle, together with merges by rows: B1
  // 32/8, 512 tokens, 7.6 us from 9.2; with 36 idle, B1 48/48, 8192 tokens, 60.4 from 62.0.
  int one_sequence_most_idle = 3000;
  // ... and up to so many tiles one block has a unit for itself. Measured, B1 32/8, 512 tokens: 7.2
  // us from 7.6.
  int one_sequence_whole_tiles = 32;
  // Fewer segments than processors are cut into equally many whole parts each while at most this
  // share of the processors is idle. Measured, 8192 tokens: B6 32/8 (36 of 132 idle) 57.1 us from
  // 62.1, B12 100.4 from 109.8, B48 364 from 386; but B4 (4 idle) 42.1 from 38.7.
  int equal_parts_most_idle = 500;
  // Batch-invariant: tiles that a unit takes besides its own where rings are paired.
  int invariant_unit_cost = 8;
  // Batch-invariant: log2 of the tiles in a short sequence's chunk. Measured: the end of a chunk
  // costs as much as some KB more of K and V. These three decide bits: other numbers, other sums.
  int invariant_chunk_shift = 3;
  // The same where a row of K has at most so many bytes.
  int invariant_chunk_shift_of_short_rows = 4;
  int invariant_short_row_bytes = 128;
};

using TuningMember = int Tuning::*;

// Names and what values may be, in Tuning's order.
struct TuningNumber {
  const char* name;
  TuningMember member;
  int least;
  int most;
};

constexpr TuningNumber kTuningNumbers[] = {
    {"head_lanes_least_segments", &Tuning::head_lanes_least_segments, 0, 100000},
    {"head_lanes_least_segments_unaligned", &Tuning::head_lanes_least_segments_unaligned, 0,
     100000},
    {"head_lanes_least_used", &Tuning::head_lanes_least_used, 0, 10000},
    {"many_sequences", &Tuning::many_sequences, 0, 100000},
    {"unit_cost", &Tuning::unit_cost, 0, 64},
    {"unit_cost_of_token_lane", &Tuning::unit_cost_of_token_lane, 0, 64},
    {"most_unit_cost", &Tuning::most_unit_cost, 0, 64},
    {"unit_cost_least_segments", &Tuning::unit_cost_least_segments, 0, 100000},
    {"least_tiles_of_token_lane", &Tuning::least_tiles_of_token_lane, 1, 64},
    {"one_sequence_most_idle", &Tuning::one_sequence_most_idle, 0, 10000},
    {"one_sequence_whole_tiles", &Tuning::one_sequence_whole_tiles, 1, 1024},
    {"equal_parts_most_idle", &Tuning::equal_parts_most_idle, 0, 10000},
    {"invariant_unit_cost", &Tuning::invariant_unit_cost, 0, 64},
    {"invariant_chunk_shift", &Tuning::invariant_chunk_shift, 0, 6},
    {"invariant_chunk_shift_of_short_rows", &Tuning::invariant_chunk_shift_of_short_rows, 0, 6},
    {"invariant_short_row_bytes", &Tuning::invariant_short_row_bytes, 0, 4096},
};
static_assert(sizeof(Tuning) == std::size(kTuningNumbers) * sizeof(int), "a number has no name");

struct CardTuning {
  int compute_capability;  // major * 10 + minor
  int num_sms;             // 0: any
  Tuning tuning;
};

// The first that fits counts: new entries come first, the one for all others stays the last.
constexpr CardTuning kTunings[] = {
    // NVIDIA H200: docs/performance.md, and the comments of Tuning.
    {90,
     0,
     {
         /*head_lanes_least_segments=*/8750,
         /*head_lanes_least_segments_unaligned=*/625,
         /*head_lanes_least_used=*/7500,
         /*many_sequences=*/2000,
         /*unit_cost=*/2,
         /*unit_cost_of_token_lane=*/2,
         /*most_unit_cost=*/16,
         /*unit_cost_least_segments=*/5000,
         /*least_tiles_of_token_lane=*/1,
         /*one_sequence_most_idle=*/3000,
         /*one_sequence_whole_tiles=*/32,
         /*equal_parts_most_idle=*/500,
         /*invariant_unit_cost=*/8,
         /*invariant_chunk_shift=*/3,
         /*invariant_chunk_shift_of_short_rows=*/4,
         /*invariant_short_row_bytes=*/128,
     }},
    {0, 0, {}},
};

constexpr const Tuning& tuning_of(int compute_capability, int num_sms) {
  for (const CardTuning& card : kTunings) {
    if (card.compute_capability == compute_capability &&
        (card.num_sms == 0 || card.num_sms == num_sms)) {
      return card.tuning;
    }
  }
  return std::end(kTunings)[-1].tuning;
}

// Separated by spaces, in the order of lists.
inline std::string tuning_names() {
  std::string names;
  for (const TuningNumber& number : kTuningNumbers) {
    names += (names.empty() ? "" : " ") + std::string(number.name);
  }
  return names;
}

inline std::vector<int64_t> to_list(const Tuning& tuning) {
  std::vector<int64_t> values;
  for (const TuningNumber& number : kTuningNumbers) values.push_back(tuning.*number.member);
  return values;
}

// Throws std::invalid_argument: too few or too many values, or one that makes no sense.
inline Tuning to_tuning(const std::vector<int64_t>& values) {
  const std::string tuning_must = "paged_attn: tuning must be ";
  if (values.size() != std::size(kTuningNumbers)) {
    throw std::invalid_argument(tuning_must + std::to_string(std::size(kTuningNumbers)) +
                                " numbers (" + tuning_names() + "), got " +
                                std::to_string(values.size()));
  }
  Tuning tuning{};
  auto value = values.begin();
  for (const TuningNumber& number : kTuningNumbers) {
    if (*value < number.least || *value > number.most) {
      throw std::invalid_argument(tuning_must + "of a " + number.name + " from " +
                                  std::to_string(number.least) + " to " +
                                  std::to_string(number.most) + ", got " + std::to_string(*value));
    }
    tuning.*number.member = static_cast<int>(*value++);
  }
  return tuning;
}

}  // namespace paged_attn::cuda
