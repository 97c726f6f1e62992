// How warps of a block meet, and blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace paged_attn::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Where the warps of a head lane meet. An mbarrier at which every thread arrives, because
// compute-sanitizer's racecheck understands it: where warps have passed other named barriers
// unequally often, as warps that share a ring do, it takes a named barrier for a missing one.
class GroupBarrier {
 public:
  // One thread sets it up and lets the others know by a barrier of the block.
  __device__ __forceinline__ static void init(uint64_t* barrier, int threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(threads)
                 : "memory");
  }

  __device__ __forceinline__ explicit GroupBarrier(uint64_t* barrier)
      : barrier_(shared_address(barrier)) {}

  __device__ __forceinline__ void wait() {
    asm volatile(
        "{\n.reg .b64 state;\n"
        "mbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier_)
        : "memory");
    uint32_t done;
    do {
      asm volatile(
          "{\n.reg .pred done;\n"
          "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
          "selp.u32 %0, 1, 0, done;\n}"
          : "=r"(done)
          : "r"(barrier_), "r"(phase_)
          : "memory");
    } while (done == 0);
    phase_ ^= 1;
  }

 private:
  uint32_t barrier_;
  uint32_t phase_ = 0;
};

// Counts arrivals at a word that may hold anything before the first: from a number of the call's
// own on, which what lies there is not within reach of but by a chance of some in 2^64. The last to
// arrive takes the word out of reach again, for a graph's next replay has the same number.
class ArrivalCounter {
 public:
  __device__ __forceinline__ ArrivalCounter(uint64_t* word, uint64_t start, int all)
      : word_(word), start_(start), all_(static_cast<uint32_t>(all)) {}

  // Sets the word to where the count starts, unless that has been done. Arrivals do so where they
  // must; one that is early spares them the time.
  __device__ __forceinline__ void begin() const {
    uint64_t found;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(word_) : "memory");
    while (!is_count(found)) {
      const uint64_t other = found;
      asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                   : "=l"(found)
                   : "l"(word_), "l"(other), "l"(start_)
                   : "memory");
      if (found == other) break;
    }
  }

  // Whether these `count` complete it. What this thread's block wrote before its last barrier is
  // seen by whoever completes it.
  __device__ __forceinline__ bool arrive(int count) const {
    for (;;) {
      uint64_t before;
      asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                   : "=l"(before)
                   : "l"(word_), "l"(static_cast<uint64_t>(count))
                   : "memory");
      if (is_count(before)) {
        const bool is_last = before - start_ + static_cast<uint32_t>(count) == all_;
        if (is_last) *word_ = start_ + kOutOfReach;
        return is_last;
      }
      begin();
    }
  }

 private:
  static constexpr uint64_t kOutOfReach = uint64_t{1} << 63;

  __device__ __forceinline__ bool is_count(uint64_t found) const { return found - start_ < all_; }

  uint64_t* word_;
  uint64_t start_;
  uint32_t all_;
};

}  // namespace paged_attn::cuda
