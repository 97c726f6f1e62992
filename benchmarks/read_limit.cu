// The denominator of every ratio: kernels that only read K and V, built by read_limit.py.
//
// Three ways of going through the same bytes, each with several unrolls and two priorities in the
// L2, for the caller to time with several grids and keep the fastest. Every 32-bit word is added
// into one checksum when the caller asks for it, which proves that all of them were read; a timed
// run passes no checksum.

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

__device__ __forceinline__ void copy_async(uint4* shared, const uint4* p, bool exists,
                                           uint64_t l2_policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(shared))),
               "l"(p), "r"(exists ? 16 : 0), "l"(l2_policy)
               : "memory");
}

// Both buffers, a contiguous share a block, into shared memory. A warp has kStages pieces of
// kUnroll vectors a lane under way; neighbouring warps take neighbouring pieces.
constexpr int kStages = 2;
constexpr int ring_bytes(int unroll) { return kStages * unroll * 2 * kThreads * 16; }

template <int kUnroll>
__global__ void __launch_bounds__(kThreads, 1)
    read_ring(const uint4* k, const uint4* v, int64_t vectors, bool evict_first,
              unsigned* checksum) {
  constexpr int kWarps = kThreads / kWarp, kPiece = kUnroll * kWarp;
  extern __shared__ uint4 ring[];
  const uint64_t l2 = policy(evict_first);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  uint4* own = ring + warp * kStages * 2 * kPiece + lane;
  const int64_t pieces = (vectors + kPiece - 1) / kPiece;
  const int64_t each = (pieces + gridDim.x - 1) / gridDim.x;
  const int64_t end = min(each * (blockIdx.x + 1), pieces);
  const auto issue = [&](int64_t piece, int stage) {
    if (piece < end) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = piece * kPiece + u * kWarp + lane;
        uint4* to = own + (stage * kUnroll + u) * 2 * kWarp;
        copy_async(to, k + i, i < vectors, l2);
        copy_async(to + kWarp, v + i, i < vectors, l2);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const int64_t first = each * blockIdx.x + warp;
  for (int s = 0; s < kStages; ++s) issue(first + s * kWarps, s);
  unsigned total = 0;
  int stage = 0;
  for (int64_t piece = first; piece < end; piece += kWarps) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    if (checksum != nullptr) {
      for (int u = 0; u < 2 * kUnroll; ++u) {
        total += sum(own[(stage * 2 * kUnroll + u) * kWarp]);
      }
    }
    issue(piece + kStages * kWarps, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  if (checksum != nullptr) atomicAdd(checksum, total);
}

enum Order { kFlat, kPages, kRing };

template <int kUnroll>
cudaError_t launch(const uint4* k, const uint4* v, const int* pages, const int* valid,
                   int num_pages, int64_t page_stride, int page_vectors, int64_t vectors, int order,
                   int blocks, bool evict_first, unsigned* checksum, cudaStream_t stream) {
  if (order == kFlat) {
    read_flat<kUnroll><<<blocks, kThreads, 0, stream>>>(k, v, vectors, evict_first, checksum);
  } else if (order == kPages) {
    const int unit = kUnroll * kWarp;
    const int parts = (page_vectors + unit - 1) / unit;
    read_pages<kUnroll><<<blocks, kThreads, 0, stream>>>(k, v, pages, valid, num_pages, page_stride,
                                                         parts, evict_first, checksum);
  } else {
    constexpr int kBytes = ring_bytes(kUnroll);
    const cudaError_t error = cudaFuncSetAttribute(
        read_ring<kUnroll>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
    if (error != cudaSuccess) return error;
    read_ring<kUnroll><<<blocks, kThreads, kBytes, stream>>>(k, v, vectors, evict_first, checksum);
  }
  return cudaGetLastError();
}

}  // namespace

// Launches one read of K and V: in flat and ring order `vectors` of each buffer from its start,
// else the pages named. Returns a cudaError_t.
extern "C" int read_limit_launch(const void* k, const void* v, const int* pages, const int* valid,
                                 int num_pages, int64_t page_stride, int page_vectors,
                                 int64_t vectors, int order, int unroll, int blocks,
                                 int evict_first, unsigned* checksum, void* stream) {
  const auto run = [&](auto function) {
    return static_cast<int>(function(static_cast<const uint4*>(k), static_cast<const uint4*>(v),
                                     pages, valid, num_pages, page_stride, page_vectors, vectors,
                                     order, blocks, evict_first != 0, checksum,
                                     static_cast<cudaStream_t>(stream)));
  };
  switch (unroll) {
    case 1:
      return run(launch<1>);
    case 2:
      return run(launch<2>);
    case 4:
      return run(launch<4>);
    case 8:
      return run(launch<8>);
    default:
      return static_cast<int>(cudaErrorInvalidValue);
  }
}
