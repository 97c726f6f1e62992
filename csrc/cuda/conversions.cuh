// Between the storage types and fp32: exactly, and back to the nearest, ties to even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace paged_attn::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ void store(float x, float& to) { to = x; }
__device__ __forceinline__ void store(float x, __half& to) { to = __float2half_rn(x); }
__device__ __forceinline__ void store(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

}  // namespace paged_attn::cuda
