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

// Adds `count` and returns what was there. What this thread's block wrote before its last barrier
// is seen by whoever reads a later count.
__device__ __forceinline__ int32_t arrive(int32_t* counter, int32_t count) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(count)
               : "memory");
  return before;
}

}  // namespace paged_attn::cuda
