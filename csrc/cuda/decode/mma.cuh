// A tile's arithmetic on the tensor cores, and on the CUDA cores for fp32. Tokens lie on M and
// query rows on N, so that groups of 1 to 8 query heads cost the same: S^T = K Q^T, then O^T = V^T
// P^T.
//
// Fragments, for lane l: scores and probabilities are a float4 of tokens l / 4 and l / 4 + 8 (x, y
// and z, w) by rows 2 * (l % 4) and the next; outputs are head_dim / 16 float4s, the i-th of head
// dims 16 i + l / 4 and 8 more by the same rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "barriers.cuh"

namespace paged_attn::cuda {

__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Transposes an 8x8 matrix of 16-bit elements spread over the warp.
__device__ __forceinline__ uint32_t transpose8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void mma(float4& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float4& c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c.x), "+f"(c.y), "+f"(c.z), "+f"(c.w)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float x, float y, __half) {
  const __half2 h = __floats2half2_rn(x, y);
  return reinterpret_cast<const uint32_t&>(h);
}

__device__ __forceinline__ uint32_t pack(float x, float y, __nv_bfloat16) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  return reinterpret_cast<const uint32_t&>(h);
}

__device__ __forceinline__ float2 unpack(uint32_t x, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(x));
}

__device__ __forceinline__ float2 unpack(uint32_t x, __nv_bfloat16) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(x));
}

// 16-byte chunks of a row are permuted within groups of 8 (or within the row's 4), so that the 8
// rows that one ldmatrix phase reads lie in different banks.
template <int kRowBytes>
__device__ __forceinline__ int swizzle(int row, int chunk) {
  return kRowBytes > 64 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
}

// Arithmetic with queries of type T and a cache of type C.
template <typename T, typename C, int kHeadDim>
struct TileMath;

template <typename T, int kHeadDim>
struct TileMath<T, T, kHeadDim> {
  static constexpr int kFragments = kHeadDim / 16;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));

  static constexpr bool kQueryInRegisters = true;

  // Where in a row fragment i has its elements: x and y at first_dim(lane) + 16 i, z and w
  // kSecondDim behind. Of rows 2 * (lane % 4), which x and z are of, and the next.
  static constexpr int kSecondDim = 8;
  static __device__ __forceinline__ int first_dim(int lane) { return lane >> 2; }

  // Row lane / 4 of the query tile, as the B operand.
  struct Query {
    uint32_t fragment[kFragments][2];
  };

  // `tile`: 8 rows in shared memory, chunks permuted as those of K.
  static __device__ __forceinline__ void load_query(Query& query, const uint8_t* tile, int lane) {
    const int row = lane & 7;
    const uint32_t address = shared_address(tile) + row * kRowBytes;
#pragma unroll
    for (int i = 0; i < kFragments; i += 2) {
      uint32_t r[4];
      ldmatrix(r, address + swizzle<kRowBytes>(row, 2 * i + (lane >> 3)) * 16);
      query.fragment[i][0] = r[0];
      query.fragment[i][1] = r[1];
      query.fragment[i + 1][0] = r[2];
      query.fragment[i + 1][1] = r[3];
    }
  }

  static __device__ __forceinline__ float4 scores(const uint8_t* k_tile, const Query& query, int,
                                                  int lane) {
    const int row = lane & 15;
    const uint32_t address = shared_address(k_tile) + row * kRowBytes;
    // Several accumulators make shorter chains of dependent instructions.
    constexpr int kChains = kHeadDim <= 128 ? 4 : 2;
    float4 sum[kChains] = {};
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      uint32_t a[4];
      ldmatrix(a, address + swizzle<kRowBytes>(row, 2 * i + (lane >> 4)) * 16);
      mma(sum[i % kChains], a, query.fragment[i][0], query.fragment[i][1], T{});
    }
#pragma unroll
    for (int i = 1; i < kChains; ++i) {
      sum[0] = make_float4(sum[0].x + sum[i].x, sum[0].y + sum[i].y, sum[0].z + sum[i].z,
                           sum[0].w + sum[i].w);
    }
    return sum[0];
  }

  // Adds P V to `out`. Returns P as it was used, so that the softmax denominator is the sum of the
  // very weights that V was multiplied by.
  static __device__ __forceinline__ float4 accumulate(float4 (&out)[kFragments],
                                                      const uint8_t* v_tile, float4 p, int lane) {
    const uint32_t p_low = pack(p.x, p.y, T{});
    const uint32_t p_high = pack(p.z, p.w, T{});
    const uint32_t b0 = transpose8x8(p_low);
    const uint32_t b1 = transpose8x8(p_high);
    const int row = (lane & 7) + (lane >> 4) * 8;
    const uint32_t address = shared_address(v_tile) + row * kRowBytes;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      uint32_t a[4];
      ldmatrix_transposed(a, address + swizzle<kRowBytes>(row, 2 * i + ((lane >> 3) & 1)) * 16);
      mma(out[i], a, b0, b1, T{});
    }
    const float2 low = unpack(p_low, T{});
    const float2 high = unpack(p_high, T{});
    return make_float4(low.x, low.y, high.x, high.y);
  }
};

// fp32: the same fragments, computed one product at a time.
template <int kHeadDim>
struct TileMath<float, float, kHeadDim> {
  static constexpr int kFragments = kHeadDim / 16;
  static constexpr int kRowBytes = kHeadDim * 4;

  static constexpr bool kQueryInRegisters = false;

  static constexpr int kSecondDim = 8;
  static __device__ __forceinline__ int first_dim(int lane) { return lane >> 2; }

  struct Query {
    const uint8_t* tile;
  };

  static __device__ __forceinline__ void load_query(Query& query, const uint8_t* tile, int) {
    query.tile = tile;
  }

  static __device__ __forceinline__ float4 load(const uint8_t* tile, int row, int chunk) {
    return *reinterpret_cast<const float4*>(tile + row * kRowBytes +
                                            swizzle<kRowBytes>(row, chunk) * 16);
  }

  // Sums for each place of a chunk over 8 chunks at a time: they round less than a single one over
  // all, which would cost scores near 0 the digits that lse is asked for.
  static __device__ __forceinline__ void add_products(float4& sums, float4 a, float4 b) {
    sums = make_float4(fmaf(a.x, b.x, sums.x), fmaf(a.y, b.y, sums.y), fmaf(a.z, b.z, sums.z),
                       fmaf(a.w, b.w, sums.w));
  }

  static __device__ __forceinline__ float total(float4 sums) {
    return (sums.x + sums.y) + (sums.z + sums.w);
  }

  static __device__ __forceinline__ float4 scores(const uint8_t* k_tile, const Query& query,
                                                  int head_dim, int lane) {
    float4 s = make_float4(0, 0, 0, 0);
    const int row = 2 * (lane & 3), chunks = head_dim / 4;
#pragma unroll 1
    for (int first = 0; first < chunks; first += 8) {
      float4 sums[4] = {};
#pragma unroll 2
      for (int chunk = first; chunk < min(first + 8, chunks); ++chunk) {
        const float4 k0 = load(k_tile, lane >> 2, chunk);
        const float4 k1 = load(k_tile, (lane >> 2) + 8, chunk);
        const float4 q0 = load(query.tile, row, chunk), q1 = load(query.tile, row + 1, chunk);
        add_products(sums[0], k0, q0);
        add_products(sums[1], k0, q1);
        add_products(sums[2], k1, q0);
        add_products(sums[3], k1, q1);
      }
      s = make_float4(s.x + total(sums[0]), s.y + total(sums[1]), s.z + total(sums[2]),
                      s.w + total(sums[3]));
    }
    return s;
  }

  static __device__ __forceinline__ float4 accumulate(float4 (&out)[kFragments],
                                                      const uint8_t* v_tile, float4 p, int lane) {
#pragma unroll 1
    for (int token = 0; token < 8; ++token) {
      const int source = token * 4 + (lane & 3);
      const float4 weight =
          make_float4(__shfl_sync(~0u, p.x, source), __shfl_sync(~0u, p.y, source),
                      __shfl_sync(~0u, p.z, source), __shfl_sync(~0u, p.w, source));
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        const int d = i * 16 + (lane >> 2);
        const float v00 = element(v_tile, token, d), v01 = element(v_tile, token, d + 8);
        const float v10 = element(v_tile, token + 8, d), v11 = element(v_tile, token + 8, d + 8);
        out[i].x = fmaf(weight.z, v10, fmaf(weight.x, v00, out[i].x));
        out[i].y = fmaf(weight.w, v10, fmaf(weight.y, v00, out[i].y));
        out[i].z = fmaf(weight.z, v11, fmaf(weight.x, v01, out[i].z));
        out[i].w = fmaf(weight.w, v11, fmaf(weight.y, v01, out[i].w));
      }
    }
    return p;
  }

 private:
  static __device__ __forceinline__ float element(const uint8_t* tile, int row, int d) {
    return *reinterpret_cast<const float*>(tile + row * kRowBytes +
                                           swizzle<kRowBytes>(row, d >> 2) * 16 + (d & 3) * 4);
  }
};

}  // namespace paged_attn::cuda
