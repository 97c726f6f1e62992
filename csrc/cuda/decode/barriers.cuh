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
// own on, which what lies there is not within reach of but by a chance of 1 in 2^54 a word. The
// last to arrive takes the word out of reach again, for a graph's next replay has the same number.
class ArrivalCounter {
 public:
  __device__ __forceinline__ ArrivalCounter(uint64_t* word, uint64_t start)
      : word_(word), start_(start) {}

  // Sets the word to where the count starts, unless that has been done. Arrivals do so where they
  // must; one thread that does it early spares them the time.
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

  // Adds `count` arrivals. What this thread's block wrote before its last barrier is seen by
  // whoever completes the count.
  __device__ __forceinline__ uint64_t add(int count) const {
    uint64_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(word_), "l"(static_cast<uint64_t>(count))
                 : "memory");
    return before;
  }

  // Whether `count` arrivals, for which add() has returned `before`, complete `all`. What was added
  // before the count had begun is lost. NOTE: it is begun for certain before they are added again,
  // for each add keeps others from beginning it: two blocks could do so to each other for ever.
  __device__ __forceinline__ bool completes(uint64_t before, int count, int all) const {
    if (!is_count(before)) {
      begin();
      before = add(count);
    }
    const bool is_last = static_cast<int>(before - start_) + count == all;
    if (is_last) *word_ = start_ + kOutOfReach;
    return is_last;
  }

 private:
  static constexpr uint64_t kOutOfReach = uint64_t{1} << 63;
  static constexpr uint64_t kMost = 1 << 10;  // more than there are blocks or chunks

  __device__ __forceinline__ bool is_count(uint64_t found) const { return found - start_ < kMost; }

  uint64_t* word_;
  uint64_t start_;
};

}  // namespace paged_attn::cuda
