// A tile's arithmetic for an fp8 cache: as mma.cuh's, on fp16 whatever the queries' type, for fp8
// converts to fp16 exactly and to bf16 only by way of it.
//
// ldmatrix moves pairs of bytes as if they were 16-bit elements. So head dims are taken in another
// order: a lane's 4 bytes of K are the 4 neighbours from 16 i + 4 (l % 4) on, which the queries
// match; those of V belong to two neighbouring head dims, and the i-th output fragment is of head
// dims 16 i + 2 (l / 4) and the next.
#pragma once

#include <cuda_fp8.h>

#include <type_traits>

#include "mma.cuh"
#include "softmax.cuh"

namespace paged_attn::cuda {

// Bytes 0, 1 and 2, 3 as two pairs of fp16.
__device__ __forceinline__ void convert_fp8(uint32_t bytes, uint32_t& low, uint32_t& high,
                                            __nv_fp8_e5m2) {
  // The upper byte of the same number in fp16.
  low = __byte_perm(bytes, 0, 0x1404);
  high = __byte_perm(bytes, 0, 0x3424);
}

__device__ __forceinline__ void convert_fp8(uint32_t bytes, uint32_t& low, uint32_t& high,
                                            __nv_fp8_e4m3) {
#if __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n}"
      : "=r"(low), "=r"(high)
      : "r"(bytes));
#else
  const auto convert = [](uint32_t in_upper_bytes) {
    // One bit of exponent less than fp16, of a bias that is less by 8. All ones is its only NaN:
    // one more would carry into the bit that fp16 has more.
    uint32_t bits = (in_upper_bytes & 0x7f007f00) >> 1;
    bits |= ((bits + 0x00800080) & 0x40004000) | (in_upper_bytes & 0x80008000);
    const __half2 result = __hmul2(reinterpret_cast<const __half2&>(bits),
                                   __half2half2(__ushort_as_half(0x5c00)));  // 256
    return reinterpret_cast<const uint32_t&>(result);
  };
  low = convert(__byte_perm(bytes, 0, 0x1404));
  high = convert(__byte_perm(bytes, 0, 0x3424));
#endif
}

template <typename T, typename C, int kHeadDim>
struct TileMath {
  static_assert(sizeof(C) == 1);
  static constexpr int kFragments = kHeadDim / 16;
  static constexpr int kRowBytes = kHeadDim;
  static constexpr int kQueryRowBytes = kHeadDim * static_cast<int>(sizeof(T));

  static constexpr bool kQueryInRegisters = true;

  // See TileMath of equal types.
  static constexpr int kSecondDim = 1;
  static __device__ __forceinline__ int first_dim(int lane) { return lane >> 2 << 1; }

  struct Query {
    uint32_t fragment[kFragments][2];
    uint32_t exponents;  // of the scores of rows 2 * (lane % 4) and the next, a byte each
  };

  static __device__ __forceinline__ void load_query(Query& query, const uint8_t* tile, int lane) {
    const int row = lane >> 2;
    const uint8_t* row_begin = tile + row * kQueryRowBytes;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const int chunk = 2 * i + ((lane & 3) >> 1);
      const uint2 four = *reinterpret_cast<const uint2*>(
          row_begin + swizzle<kQueryRowBytes>(row, chunk) * 16 + (lane & 1) * 8);
      query.fragment[i][0] = four.x;
      query.fragment[i][1] = four.y;
    }
    if constexpr (std::is_same_v<T, __nv_bfloat16>) to_fp16(query, lane);
  }

  static __device__ __forceinline__ float4 scores(const uint8_t* k_tile, const Query& query, int,
                                                  int lane) {
    const int row = lane & 15;
    const uint32_t address = shared_address(k_tile) + row * kRowBytes;
    constexpr int kChains = kHeadDim <= 128 ? 4 : 2;
    float4 sum[kChains] = {};
#pragma unroll
    for (int i = 0; i < kFragments; i += 2) {
      uint32_t r[4];
      ldmatrix(r, address + swizzle<kRowBytes>(row, i + (lane >> 4)) * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t a[4];
        convert_fp8(r[2 * j], a[0], a[2], C{});
        convert_fp8(r[2 * j + 1], a[1], a[3], C{});
        mma(sum[(i + j) % kChains], a, query.fragment[i + j][0], query.fragment[i + j][1],
            __half{});
      }
    }
#pragma unroll
    for (int i = 1; i < kChains; ++i) {
      sum[0] = make_float4(sum[0].x + sum[i].x, sum[0].y + sum[i].y, sum[0].z + sum[i].z,
                           sum[0].w + sum[i].w);
    }
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      scale_rows(sum[0], make_float2(__uint_as_float(query.exponents << 23 & 0x7f800000),
                                     __uint_as_float(query.exponents << 15 & 0x7f800000)));
    }
    return sum[0];
  }

  static __device__ __forceinline__ float4 accumulate(float4 (&out)[kFragments],
                                                      const uint8_t* v_tile, float4 p, int lane) {
    const uint32_t p_low = pack(p.x, p.y, __half{});
    const uint32_t p_high = pack(p.z, p.w, __half{});
    const uint32_t b0 = transpose8x8(p_low);
    const uint32_t b1 = transpose8x8(p_high);
    const int row = lane & 15;
    const uint32_t address = shared_address(v_tile) + row * kRowBytes;
#pragma unroll
    for (int i = 0; i < kFragments; i += 2) {
      uint32_t r[4];
      ldmatrix_transposed(r, address + swizzle<kRowBytes>(row, i + (lane >> 4)) * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // Bytes 0 and 2 are two tokens of one head dim, 1 and 3 of the next.
        uint32_t a[4];
        convert_fp8(__byte_perm(r[2 * j], 0, 0x3120), a[0], a[1], C{});
        convert_fp8(__byte_perm(r[2 * j + 1], 0, 0x3120), a[2], a[3], C{});
        mma(out[i + j], a, b0, b1, __half{});
      }
    }
    const float2 low = unpack(p_low, __half{});
    const float2 high = unpack(p_high, __half{});
    return make_float4(low.x, low.y, high.x, high.y);
  }

 private:
  // bf16 holds numbers that fp16 cannot: each row is multiplied by a power of 2 that brings its
  // largest element close to fp16's. What is 2^29 times smaller loses bits, which no sum of fp32
  // products would notice.
  static __device__ __forceinline__ void to_fp16(Query& query, int lane) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 x = unpack(query.fragment[i][j], __nv_bfloat16{});
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    // Exponents as float keeps them; 255 is infinity.
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    const int shift = exponent == 255 ? 0 : min(14 + 127 - exponent, 126);
    const float factor = __uint_as_float(static_cast<uint32_t>(127 + shift) << 23);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 x = unpack(query.fragment[i][j], __nv_bfloat16{});
        query.fragment[i][j] = pack(x.x * factor, x.y * factor, __half{});
      }
    }
    const int inverse = 127 - shift;
    const int row = 2 * (lane & 3);
    query.exponents = __shfl_sync(~0u, inverse, row * 4) | __shfl_sync(~0u, inverse, (row + 1) * 4)
                                                               << 8;
  }
};

}  // namespace paged_attn::cuda
