// reshape_and_cache and append_kv: from rows of key and value to slots of the caches, as bytes or
// converted, in vectors of up to 16 bytes.
#include <algorithm>
#include <type_traits>

#include "dependent_launch.cuh"
#include "function_attribute.h"
#include "indices.cuh"
#include "kernels.h"
#include "vector.cuh"

namespace paged_attn::cuda {
namespace {

struct Place {
  int64_t block;  // -1: nowhere
  int64_t offset;
  int64_t batch;  // the token's row of key and value is batch * strides.batch + row * strides.token
  int64_t row;
};

// Every entry in [0, T] and none below the one before it. Called by all threads of a block.
__device__ __forceinline__ bool all_entries_are_good(const WriteKvParams& p) {
  bool is_bad = false;
  for (int64_t i = threadIdx.x; i <= p.batch_size; i += kThreads) {
    const int32_t least = i > 0 ? __ldcg(p.cu_seqlens_q + i - 1) : 0;
    const int32_t entry = __ldcg(p.cu_seqlens_q + i);
    is_bad |= entry < least || entry > p.num_tokens;
  }
  return !__syncthreads_or(is_bad);
}

// The sequence that owns a row: rows of sequence b lie between the greatest of
// cu_seqlens_q[0 ... b] and of [0 ... b + 1], each entry clamped to [0, T].
struct Owner {
  int64_t batch;  // -1: none, or one whose entries are bad
  int64_t end;    // past its last row
};

__device__ __forceinline__ Owner find_owner(const WriteKvParams& p, int64_t row, bool good) {
  const auto entry = [&](int64_t i) { return __ldcg(p.cu_seqlens_q + i); };
  // The first entry past the row ends its sequence.
  int64_t last = 0;
  if (good) {
    int64_t beyond = p.batch_size + 1;
    while (last < beyond) {
      const int64_t middle = last + (beyond - last) / 2;
      if (entry(middle) > row) {
        beyond = middle;
      } else {
        last = middle + 1;
      }
    }
  } else {
    int32_t begin = 0;
    while (last <= p.batch_size && entry(last) <= row) begin = max(begin, entry(last++));
    good =
        last > 0 && entry(last - 1) == begin && last <= p.batch_size && entry(last) <= p.num_tokens;
  }
  if (!good || last == 0 || last > p.batch_size) return {-1, 0};
  return {last - 1, entry(last)};
}

__device__ __forceinline__ Place find_place(const WriteKvParams& p, int64_t token, bool good) {
  if (p.slot_mapping != nullptr) {
    const int64_t slot = p.slots_are_int64
                             ? __ldcg(static_cast<const long long*>(p.slot_mapping) + token)
                             : __ldcg(static_cast<const int32_t*>(p.slot_mapping) + token);
    if (slot < 0 || slot >= p.num_blocks * p.block_size) return {-1, 0, 0, 0};
    const int64_t block = quotient(slot, p.block_size);
    return {block, slot - block * p.block_size, 0, token};
  }
  int64_t batch, row, past_end;  // past_end: rows from this one to its sequence's end
  const bool is_ragged = p.cu_seqlens_q != nullptr;
  if (is_ragged) {
    const Owner owner = find_owner(p, token, good);
    if (owner.batch < 0) return {-1, 0, 0, 0};
    batch = owner.batch;
    row = token;
    past_end = owner.end - token;
  } else {
    batch = quotient(token, p.query_len);
    row = token - batch * p.query_len;
    past_end = p.query_len - row;
  }
  const int64_t position = __ldcg(p.context_lens + batch) - past_end;
  if (position < 0) return {-1, 0, 0, 0};
  const int64_t column = quotient(position, p.block_size);
  if (column >= p.max_blocks) return {-1, 0, 0, 0};
  const int64_t block = __ldcg(p.block_tables + batch * p.table_stride + column);
  if (block < 0 || block >= p.num_blocks) return {-1, 0, 0, 0};
  return {block, position - column * p.block_size, is_ragged ? 0 : batch, row};
}

// What the cache stores for `from`; null: as it is.
template <typename To, typename From, int kElements>
__device__ __forceinline__ Vector<To, kElements> stored(const Vector<From, kElements>& from,
                                                        const float* scale) {
  if constexpr (std::is_integral_v<From>) {
    return from;
  } else {
    float values[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = to_float(from.elements[i]);
    if (scale != nullptr) {
      const float divisor = __ldcg(scale);
#pragma unroll
      for (int i = 0; i < kElements; ++i) values[i] = __fdiv_rn(values[i], divisor);
    }
    Vector<To, kElements> to;
    store(values, to);
    return to;
  }
}

__device__ __forceinline__ const float* scale_of(const CacheScale& scale, int64_t head) {
  return scale.data != nullptr ? scale.data + head * scale.stride : nullptr;
}

template <typename T>
__device__ __forceinline__ const T* row_of(const void* data, const TokenStrides& strides,
                                           const Place& place, int64_t head) {
  return static_cast<const T*>(data) + place.batch * strides.batch + place.row * strides.token +
         head * strides.head;
}

template <typename T>
__device__ __forceinline__ T* slot_of(void* cache, const CacheStrides& strides, const Place& place,
                                      int64_t head) {
  return static_cast<T*>(cache) + place.block * strides.block + place.offset * strides.slot +
         head * strides.head;
}

// A thread takes a vector of key and the same one of value. NOTE: asked for 5 blocks a
// multiprocessor, the compiler has the registers that it else spills to make room for 6.
template <typename From, typename To, int kElements>
__global__ void __launch_bounds__(kThreads, 5)
    write_kv_kernel(const __grid_constant__ WriteKvParams p) {
  let_next_kernel_start();
  const bool good = p.cu_seqlens_q == nullptr || all_entries_are_good(p);
  const int64_t vectors = p.head_dim / kElements;
  const int64_t total = p.num_tokens * p.num_kv_heads * vectors;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += step) {
    const int64_t row = quotient(i, vectors), d = (i - row * vectors) * kElements;
    const int64_t token = quotient(row, p.num_kv_heads), head = row - token * p.num_kv_heads;
    const Place place = find_place(p, token, good);
    if (place.block < 0) continue;
    const auto key = load_vector<kElements>(row_of<From>(p.key, p.key_strides, place, head) + d);
    const auto value =
        load_vector<kElements>(row_of<From>(p.value, p.value_strides, place, head) + d);
    store_vector(stored<To>(key, scale_of(p.k_scale, head)),
                 slot_of<To>(p.k_cache, p.k_strides, place, head) + d);
    store_vector(stored<To>(value, scale_of(p.v_scale, head)),
                 slot_of<To>(p.v_cache, p.v_strides, place, head) + d);
  }
}

template <typename From, typename To, int kElements>
cudaError_t launch(const WriteKvParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr auto kKernel = write_kv_kernel<From, To, kElements>;
  const unsigned blocks =
      blocks_for(p.num_tokens * p.num_kv_heads * (p.head_dim / kElements), limits);
  // The decode kernel that comes next wants its multiprocessor's memory as shared memory.
  const cudaError_t error =
      set_attribute_once<kKernel, cudaFuncAttributePreferredSharedMemoryCarveout>(
          cudaSharedmemCarveoutMaxShared, limits);
  if (error != cudaSuccess) return error;
  kKernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

// Whether vectors of so many elements start at multiples of their size everywhere.
bool are_aligned(const WriteKvParams& p, int elements, int64_t from_bytes, int64_t to_bytes) {
  const auto address = [](const void* pointer) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer));
  };
  const auto strides = [](const auto& a, const auto& b) { return a.head | b.head; };
  const int64_t rows = strides(p.key_strides, p.value_strides) | p.key_strides.batch |
                       p.key_strides.token | p.value_strides.batch | p.value_strides.token;
  const int64_t slots = strides(p.k_strides, p.v_strides) | p.k_strides.block | p.k_strides.slot |
                        p.v_strides.block | p.v_strides.slot;
  return (rows | slots | p.head_dim) % elements == 0 &&
         (address(p.key) | address(p.value)) % (elements * from_bytes) == 0 &&
         (address(p.k_cache) | address(p.v_cache)) % (elements * to_bytes) == 0;
}

template <typename From, typename To>
cudaError_t launch_widest(const WriteKvParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(From));
  return are_aligned(p, kElements, sizeof(From), sizeof(To))
             ? launch<From, To, kElements>(p, limits, stream)
             : launch<From, To, 1>(p, limits, stream);
}

template <typename From>
cudaError_t launch_conversion(const WriteKvParams& p, const DeviceLimits& limits,
                              cudaStream_t stream) {
  if constexpr (sizeof(From) == 2) {
    if (p.cache_dtype == DType::kFloat8E4M3) {
      return launch_widest<From, __nv_fp8_e4m3>(p, limits, stream);
    }
    if (p.cache_dtype == DType::kFloat8E5M2) {
      return launch_widest<From, __nv_fp8_e5m2>(p, limits, stream);
    }
  }
  return launch_widest<From, From>(p, limits, stream);
}

}  // namespace

cudaError_t write_kv(const WriteKvParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  if (p.num_tokens == 0 || p.num_blocks == 0) return cudaSuccess;
  if (p.cache_dtype == p.dtype && p.k_scale.data == nullptr && p.v_scale.data == nullptr) {
    return p.dtype == DType::kFloat32 ? launch_widest<uint32_t, uint32_t>(p, limits, stream)
                                      : launch_widest<uint16_t, uint16_t>(p, limits, stream);
  }
  switch (p.dtype) {
    case DType::kFloat16:
      return launch_conversion<__half>(p, limits, stream);
    case DType::kBFloat16:
      return launch_conversion<__nv_bfloat16>(p, limits, stream);
    default:
      return launch_conversion<float>(p, limits, stream);
  }
}

}  // namespace paged_attn::cuda
