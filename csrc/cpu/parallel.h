// Loops over the caller's threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace paged_attn::cpu {

// Fewer bytes a thread than this are not worth waking it.
constexpr int64_t kBytesPerRange = 1 << 16;

// body(begin, end) for disjoint ranges that cover [0, n); in all they move so many bytes.
template <typename Body>
void for_ranges(const ThreadPool& threads, int64_t n, int64_t bytes, const Body& body) {
  struct Job {
    const Body* body;
    int64_t n;
    int64_t num_ranges;
  };
  const int64_t num_ranges = std::min({n, threads.num_threads, bytes / kBytesPerRange});
  if (num_ranges <= 1) {
    body(int64_t{0}, n);
    return;
  }
  Job job{&body, n, num_ranges};
  threads.run(
      num_ranges,
      [](void* context, int64_t range) {
        const Job& j = *static_cast<const Job*>(context);
        (*j.body)(j.n* range / j.num_ranges, j.n * (range + 1) / j.num_ranges);
      },
      &job);
}

}  // namespace paged_attn::cpu
