// The denominator of every ratio: kernels that only read K and V, built by read_limit.py.
//
// Two ways of going through the same bytes, each with several unrolls and two priorities in the L2,
// for the caller to time with several grids and keep the fastest. Every 32-bit word is added into
// one checksum when the caller asks for it, which proves that all of them were read; a timed run
// passes no checksum.

#include <cuda_runtime.h>

#include <cstdint>

namespace {

// NOTE: a minimum of one block an SM below leaves ptxas the registers to keep all loads of an
// unroll in flight; without it, it serialises them to reach full occupancy.
constexpr int kThreads = 256;
constexpr int kWarp = 32;

// What the L2 does with lines of K and V, none of which is read twice.
__device__ __forceinline__ uint64_t policy(bool evict_first) {
  uint64_t first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return evict_first ? first : normal;
}

__device__ __forceinline__ uint4 load_once(const uint4* p, uint64_t l2_policy) {
  uint4 v;
  asm volatile(
      "ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p), "l"(l2_policy));
  return v;
}

__device__ __forceinline__ unsigned sum(uint4 v) { return v.x + v.y + v.z + v.w; }

// Both buffers from end to end: `vectors` 16-byte vectors of each.
template <int kUnroll>
__global__ void __launch_bounds__(kThreads, 1)
    read_flat(const uint4* k, const uint4* v, int64_t vectors, bool evict_first,
              unsigned* checksum) {
  const uint64_t l2 = policy(evict_first);
  const int64_t stride = int64_t(gridDim.x) * kThreads;
  unsigned total = 0;
  int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + (kUnroll - 1) * stride < vectors; i += kUnroll * stride) {
    uint4 a[kUnroll], b[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      a[u] = load_once(k + i + u * stride, l2);
      b[u] = load_once(v + i + u * stride, l2);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) total += sum(a[u]) + sum(b[u]);
  }
#pragma unroll 1
  for (; i < vectors; i += stride) total += sum(load_once(k + i, l2)) + sum(load_once(v + i, l2));
  if (checksum != nullptr) atomicAdd(checksum, total);
}

// The pages of K and V in the order of the tables. A warp takes kUnroll vectors a lane of a page
// at a time; neighbouring warps take neighbouring parts.
// pages: [num_pages] ids, valid: [num_pages] vectors of each that hold tokens.
template <int kUnroll>
__global__ void __launch_bounds__(kThreads, 1)
    read_pages(const uint4* k, const uint4* v, const int* pages, const int* valid, int num_pages,
               int64_t page_stride, int parts, bool evict_first, unsigned* checksum) {
  const uint64_t l2 = policy(evict_first);
  const int lane = threadIdx.x % kWarp;
  const unsigned warps = gridDim.x * (kThreads / kWarp);
  const unsigned units = 2u * num_pages * parts;
  unsigned total = 0;
  for (unsigned unit = (blockIdx.x * kThreads + threadIdx.x) / kWarp; unit < units; unit += warps) {
    const int part = unit % parts;
    const unsigned entry = unit / parts;
    const uint4* base = (entry % 2 == 0 ? k : v) + pages[entry / 2] * page_stride;
    const int limit = valid[entry / 2];
    const int first = part * kUnroll * kWarp + lane;
    if (first + (kUnroll - 1) * kWarp < limit) {
      uint4 a[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) a[u] = load_once(base + first + u * kWarp, l2);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) total += sum(a[u]);
    } else {
      const int end = min(limit, (part + 1) * kUnroll * kWarp);
#pragma unroll 1
      for (int i = first; i < end; i += kWarp) total += sum(load_once(base + i, l2));
    }
  }
  if (checksum != nullptr) atomicAdd(checksum, total);
}

template <int kUnroll>
void launch(const uint4* k, const uint4* v, const int* pages, const int* valid, int num_pages,
            int64_t page_stride, int page_vectors, int64_t vectors, int blocks, bool evict_first,
            unsigned* checksum, cudaStream_t stream) {
  if (pages == nullptr) {
    read_flat<kUnroll><<<blocks, kThreads, 0, stream>>>(k, v, vectors, evict_first, checksum);
    return;
  }
  const int unit = kUnroll * kWarp;
  const int parts = (page_vectors + unit - 1) / unit;
  read_pages<kUnroll><<<blocks, kThreads, 0, stream>>>(k, v, pages, valid, num_pages, page_stride,
                                                       parts, evict_first, checksum);
}

}  // namespace

// Launches one read of K and V. pages == nullptr: `vectors` of each buffer from its start;
// else the pages named. Returns a cudaError_t.
extern "C" int read_limit_launch(const void* k, const void* v, const int* pages, const int* valid,
                                 int num_pages, int64_t page_stride, int page_vectors,
                                 int64_t vectors, int unroll, int blocks, int evict_first,
                                 unsigned* checksum, void* stream) {
  const auto run = [&](auto function) {
    function(static_cast<const uint4*>(k), static_cast<const uint4*>(v), pages, valid, num_pages,
             page_stride, page_vectors, vectors, blocks, evict_first != 0, checksum,
             static_cast<cudaStream_t>(stream));
  };
  switch (unroll) {
    case 1:
      run(launch<1>);
      break;
    case 2:
      run(launch<2>);
      break;
    case 4:
      run(launch<4>);
      break;
    case 8:
      run(launch<8>);
      break;
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
  return static_cast<int>(cudaGetLastError());
}
