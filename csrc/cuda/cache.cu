// reshape_and_cache and append_kv: from rows of key and value to slots of the caches, as bytes or
// converted, in vectors of up to 16 bytes.
#include <algorithm>
#include <type_traits>

#include "decode/divisor.h"
#include "dependent_launch.cuh"
#include "function_attribute.h"
#include "indices.cuh"
#include "kernels.h"
#include "vector.cuh"

namespace paged_attn::cuda {
namespace {

// A thread has a vector of key and the same one of value of so many tokens on their way at once.
constexpr int kRounds = 4;
// NOTE: small blocks of few registers, so that each has room beside one of the decode kernel, which
// may start meanwhile.
constexpr int kWriteThreads = 128;
constexpr int kBlocksAProcessor = 8;

// A row is a token's vectors of key, those of all heads, or as many of value. Thread i of the grid
// has vector i % row of tokens i / row, i / row + step, ...: always of the same head. 32 bits count
// a launch's threads and tokens, for multiplications of 64 would delay its first loads; a call of
// more, if there ever is one, takes several.
struct WriteTask : WriteKvParams {
  int64_t first_head, first_token;  // of this launch
  int32_t tokens, step;
  int32_t row, head_vectors;
  Divisor by_row, by_head_vectors;
  IndexDivisor by_block_size, by_query_len;
  int64_t k_gap, v_gap;  // elements from the end of a sequence's rows to the next one's first
};

struct Slot {
  int64_t block;  // -1: nowhere
  int64_t offset;
};

// Where a slot's rows begin in the caches.
struct Destination {
  int64_t k;  // -1: nowhere
  int64_t v;
};

// Every entry in [0, T] and none below the one before it. Called by all threads of a block.
__device__ __forceinline__ bool all_entries_are_good(const WriteTask& p) {
  bool is_bad = false;
  // NOTE: unrolled it has no registers left beside the key and value that are on their way.
#pragma unroll 1
  for (int64_t i = threadIdx.x; i <= p.batch_size; i += kWriteThreads) {
    const int32_t least = i > 0 ? p.cu_seqlens_q[i - 1] : 0;
    const int32_t entry = p.cu_seqlens_q[i];
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

// NOTE: all_entries_are_good has brought the entries into the L1, which makes the search quick.
__device__ __forceinline__ Owner find_owner(const WriteTask& p, int64_t row, bool good) {
  const auto entry = [&](int64_t i) { return p.cu_seqlens_q[i]; };
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

__device__ __forceinline__ Slot find_slot(const WriteTask& p, int64_t token, bool good) {
  if (p.slot_mapping != nullptr) {
    const int64_t slot = p.slots_are_int64
                             ? __ldcg(static_cast<const long long*>(p.slot_mapping) + token)
                             : __ldcg(static_cast<const int32_t*>(p.slot_mapping) + token);
    if (slot < 0 || slot >= p.num_blocks * p.block_size) return {-1, 0};
    const int64_t block = p.by_block_size.quotient(slot);
    return {block, slot - block * p.block_size};
  }
  int64_t batch, past_end;  // past_end: rows from this one to its sequence's end
  if (p.cu_seqlens_q != nullptr) {
    const Owner owner = find_owner(p, token, good);
    if (owner.batch < 0) return {-1, 0};
    batch = owner.batch;
    past_end = owner.end - token;
  } else {
    batch = p.by_query_len.quotient(token);
    past_end = (batch + 1) * p.query_len - token;
  }
  const int64_t position = __ldcg(p.context_lens + batch) - past_end;
  if (position < 0) return {-1, 0};
  const int64_t column = p.by_block_size.quotient(position);
  if (column >= p.max_blocks) return {-1, 0};
  const int64_t block = __ldcg(p.block_tables + batch * p.table_stride + column);
  if (block < 0 || block >= p.num_blocks) return {-1, 0};
  return {block, position - column * p.block_size};
}

__device__ __forceinline__ Destination find_destination(const WriteTask& p, int64_t token,
                                                        bool good) {
  const Slot slot = find_slot(p, token, good);
  if (slot.block < 0) return {-1, -1};
  return {slot.block * p.k_strides.block + slot.offset * p.k_strides.slot,
          slot.block * p.v_strides.block + slot.offset * p.v_strides.slot};
}

__device__ __forceinline__ float divisor_of(const CacheScale& scale, int64_t head) {
  return scale.data != nullptr ? __ldcg(scale.data + head * scale.stride) : 1.f;
}

// x / divisor as __fdiv_rn rounds it, for x of at most 11 significant bits: x times the reciprocal,
// less what the remainder, which is exact, says that it is off. (Tried: all significands of x over
// all of the divisor.) It is NaN instead where x or the product is infinite and for divisors that
// are not fit: negative ones would lose the sign of 0, others leave the range of floats. Quotients
// too small for an exact remainder are 0 in fp8, of the right sign.
struct Reciprocal {
  float divisor;
  float value;

  __device__ __forceinline__ explicit Reciprocal(float x) : divisor(x) {
    value = x >= 0x1p-64f && x <= 0x1p64f ? __frcp_rn(x) : NAN;
  }

  __device__ __forceinline__ float quotient(float x) const {
    const float near = x * value;
    return fmaf(fmaf(near, divisor, -x), -value, near);
  }
};

template <typename Fp8, int kElements>
__device__ __forceinline__ bool has_nan(const Vector<Fp8, kElements>& vector) {
  uint32_t words[(kElements + 3) / 4] = {};
  memcpy(words, &vector, sizeof(vector));
  // Of a NaN all bits below the sign are set, in e5m2 one of the last two: more carries into it.
  constexpr uint32_t kMore = std::is_same_v<Fp8, __nv_fp8_e5m2> ? 0x03030303 : 0x01010101;
  uint32_t carries = 0;
#pragma unroll
  for (const uint32_t word : words) carries |= (word & 0x7f7f7f7f) + kMore;
  return (carries & 0x80808080) != 0;
}

template <typename T, int kElements>
using Word = typename WordOf<sizeof(T) * kElements>::Type;

// NOTE: without this the compiler takes words apart as soon as they arrive, for which the thread
// would wait before it loads the next, and keeps each element in a register of its own.
template <typename W>
__device__ __forceinline__ W whole(W word) {
  if constexpr (sizeof(W) == 16) {
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
  }
  return word;
}

// What the cache stores for elements of `word`.
template <typename From, typename To, int kElements, typename Quotient>
__device__ __forceinline__ Vector<To, kElements> stored(const Word<From, kElements>& word,
                                                        const Quotient& quotient) {
  Vector<From, kElements> from;
  const auto copy = whole(word);
  memcpy(&from, &copy, sizeof(from));
  if constexpr (std::is_integral_v<From>) {
    return from;
  } else {
    float values[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) values[i] = quotient(to_float(from.elements[i]));
    Vector<To, kElements> to;
    store(values, to);
    return to;
  }
}

// Key and value are on their way while one thread for each token finds out where they go, which may
// take reads one after the other.
template <typename From, typename To, int kElements>
__global__ void __launch_bounds__(kWriteThreads, kBlocksAProcessor)
    write_kv_kernel(const __grid_constant__ WriteTask p) {
  constexpr bool kIsCopy = std::is_integral_v<From>, kIsFp8 = sizeof(To) == 1;
  extern __shared__ Destination destinations[];  // [kRounds, block_tokens]
  const auto begin = static_cast<int>(blockIdx.x * kWriteThreads);
  const int block_token = p.by_row.quotient(begin);
  const int block_tokens = p.by_row.quotient(begin + (kWriteThreads - 1)) - block_token + 1;
  const int index = begin + static_cast<int>(threadIdx.x);
  const int token = p.by_row.quotient(index), column = index - token * p.row;
  const int nth_head = p.by_head_vectors.quotient(column);
  const int64_t head = p.first_head + nth_head;
  const int d = (column - nth_head * p.head_vectors) * kElements;
  wait_for_kernel_before();
  let_next_kernel_start();
  const float k_divisor = kIsCopy ? 1.f : divisor_of(p.k_scale, head);
  const float v_divisor = kIsCopy ? 1.f : divisor_of(p.v_scale, head);
  const auto has = [&](int r) { return token < p.step && token + r * p.step < p.tokens; };

  struct Words {
    Word<From, kElements> key, value;
  };
  const auto load = [&](int r) -> Words {
    const int64_t row = p.first_token + (token + r * p.step);
    int64_t of_key = row * p.key_strides.token + head * p.key_strides.head + d;
    int64_t of_value = row * p.value_strides.token + head * p.value_strides.head + d;
    if ((p.k_gap | p.v_gap) != 0) {
      const int64_t batch = p.by_query_len.quotient(row);
      of_key += batch * p.k_gap;
      of_value += batch * p.v_gap;
    }
    const auto word_at = [](const void* data, int64_t offset) {
      return __ldcg(
          reinterpret_cast<const Word<From, kElements>*>(static_cast<const From*>(data) + offset));
    };
    return {word_at(p.key, of_key), word_at(p.value, of_value)};
  };
  Words words[kRounds];
#pragma unroll
  for (int r = 0; r < kRounds; ++r) {
    if (!has(r)) break;
    words[r] = load(r);
  }

  const bool good = p.cu_seqlens_q == nullptr || all_entries_are_good(p);
  constexpr int kRoundThreads = kWriteThreads / kRounds;
  const int round = static_cast<int>(threadIdx.x) / kRoundThreads;
  for (int i = static_cast<int>(threadIdx.x) % kRoundThreads; i < block_tokens;
       i += kRoundThreads) {
    const int nth_token = block_token + i + round * p.step;
    if (nth_token < p.tokens) {
      destinations[round * block_tokens + i] = find_destination(p, p.first_token + nth_token, good);
    }
  }
  __syncthreads();

  const Destination* own = destinations + (token - block_token);
  const auto store_at = [&](const Destination& to, const Vector<To, kElements>& key,
                            const Vector<To, kElements>& value) {
    store_vector(key, static_cast<To*>(p.k_cache) + to.k + head * p.k_strides.head + d);
    store_vector(value, static_cast<To*>(p.v_cache) + to.v + head * p.v_strides.head + d);
  };
  if constexpr (kIsCopy || kIsFp8) {
    const Reciprocal by_k(k_divisor), by_v(v_divisor);
    bool needs_division = false;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (!has(r)) break;
      const Destination to = own[r * block_tokens];
      if (to.k < 0) continue;
      const auto key =
          stored<From, To, kElements>(words[r].key, [&](float x) { return by_k.quotient(x); });
      const auto value =
          stored<From, To, kElements>(words[r].value, [&](float x) { return by_v.quotient(x); });
      if constexpr (kIsFp8) needs_division |= has_nan(key) | has_nan(value);
      store_at(to, key, value);
    }
    if (!needs_division) return;
  }
  const auto over_k = [&](float x) { return p.k_scale.data ? __fdiv_rn(x, k_divisor) : x; };
  const auto over_v = [&](float x) { return p.v_scale.data ? __fdiv_rn(x, v_divisor) : x; };
  // NOTE: divisions are long code: once, and not for each round. Words that were kept could not be
  // indexed so.
#pragma unroll 1
  for (int r = 0; r < kRounds && has(r); ++r) {
    const Destination to = own[r * block_tokens];
    if (to.k < 0) continue;
    const Words again = load(r);
    store_at(to, stored<From, To, kElements>(again.key, over_k),
             stored<From, To, kElements>(again.value, over_v));
  }
}

// Strides for a sequence's rows that follow on the one's before but for a gap, which is returned.
int64_t take_gap(const WriteKvParams& p, TokenStrides& strides) {
  if (p.query_len == 1) strides.token = strides.batch;
  return p.query_len > 1 && p.batch_size > 1 ? strides.batch - p.query_len * strides.token : 0;
}

template <typename From, typename To, int kElements>
cudaError_t launch(const WriteKvParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  constexpr auto kKernel = write_kv_kernel<From, To, kElements>;
  // The decode kernel that may come next wants its multiprocessor's memory as shared memory.
  cudaError_t error = set_attribute_once<kKernel, cudaFuncAttributePreferredSharedMemoryCarveout>(
      cudaSharedmemCarveoutMaxShared, limits);
  if (error != cudaSuccess) return error;

  WriteTask task{};
  static_cast<WriteKvParams&>(task) = p;
  task.k_gap = take_gap(p, task.key_strides);
  task.v_gap = take_gap(p, task.value_strides);
  task.by_block_size = IndexDivisor(p.block_size);
  task.by_query_len = IndexDivisor(std::max<int64_t>(p.query_len, 1));
  const int64_t vectors = p.head_dim / kElements;
  task.head_vectors = static_cast<int32_t>(vectors);
  task.by_head_vectors = Divisor(vectors);

  constexpr int64_t kMostThreads = (int64_t{1} << 31) - kWriteThreads,
                    kMostTokens = int64_t{1} << 30;
  const int64_t most_heads = kMostThreads / vectors;
  for (; task.first_head < p.num_kv_heads; task.first_head += most_heads) {
    const int64_t row = std::min(p.num_kv_heads - task.first_head, most_heads) * vectors;
    task.row = static_cast<int32_t>(row);
    task.by_row = Divisor(row);
    const int64_t most_tokens = std::min(kMostThreads / row, kMostTokens / kRounds) * kRounds;
    for (task.first_token = 0; task.first_token < p.num_tokens; task.first_token += most_tokens) {
      const int64_t tokens = std::min(p.num_tokens - task.first_token, most_tokens);
      // One round, which is quickest, where there are no more blocks than processors.
      const int64_t room = int64_t{limits.num_sms} * kWriteThreads;
      const int64_t rounds = std::clamp<int64_t>((tokens * row + room - 1) / room, 1, kRounds);
      task.tokens = static_cast<int32_t>(tokens);
      task.step = static_cast<int32_t>((tokens + rounds - 1) / rounds);
      const int64_t blocks = (task.step * row + kWriteThreads - 1) / kWriteThreads;
      // A block's vectors may belong to so many tokens.
      const int64_t block_tokens = (kWriteThreads - 1 + row - 1) / row + 1;
      const auto shared_bytes =
          static_cast<int>(kRounds * block_tokens * static_cast<int64_t>(sizeof(Destination)));
      error = launch_early(kKernel, static_cast<unsigned>(blocks), kWriteThreads, shared_bytes,
                           task, limits, stream);
      if (error != cudaSuccess) return error;
    }
  }
  return error;
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
