// What the host tells a kernel: plain structs, the only thing that the torch-facing code and the
// kernels share. Strides and sizes count elements, not bytes, and 64 bits hold every offset: a pool
// passes 2^31 elements long before it fills a GPU. The stride of a dimension of size 1 may be
// anything, so it is only ever multiplied by 0.
#pragma once

#include <cstdint>

namespace paged_attn {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 };

constexpr bool is_fp8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}

constexpr int64_t element_bytes(DType dtype) {
  return is_fp8(dtype) ? 1 : dtype == DType::kFloat32 ? 4 : 2;
}

// Factors of what a cache holds: the real value is stored * scale.
struct CacheScale {
  const float* data;  // [1] or [G], in the device's memory; null: 1
  int64_t stride;     // from one KV head's to the next's: 0 or 1
};

// A tensor addressed by (token, head); the head dim is contiguous. Token t of sequence b is
// data + b * batch_stride + t * token_stride when queries are uniform, and
// data + (cu_seqlens_q[b] + t) * token_stride when they are ragged.
struct TokenStrides {
  int64_t batch;
  int64_t token;
  int64_t head;
};

// A cache tensor, logically [num_blocks, block_size, num_kv_heads, head_dim].
struct CacheStrides {
  int64_t block;
  int64_t slot;
  int64_t head;
};

// Which sequences there are, where their blocks are, and which rows of q or key they own.
struct Sequences {
  const int32_t* block_tables;  // [B, M], row stride table_stride
  const int32_t* context_lens;  // [B]; tokens in the cache, the query or new tokens included
  const int32_t* cu_seqlens_q;  // [B + 1], or null: every sequence has query_len rows

  int64_t table_stride;
  int64_t batch_size;  // B
  int64_t max_blocks;  // M, the table's columns
  int64_t query_len;   // Q when uniform, 0 when ragged
  int64_t num_tokens;  // T: rows in all, B * Q when uniform
};

// decode: out[b, t, h] = softmax(scale * q[b, t, h] . K[b, keys]) V[b, keys], where K[b], V[b] are
// the rows that block_tables[b] names, times their scales. The query's position is i =
// context_lens[b] - query_len + t; its keys are all of context_lens[b] if not causal, else those at
// j <= i, and with a window those at i - window < j <= i. Query head h reads KV head
// h / (num_heads / num_kv_heads). paged_attn/reference.py defines the options.
struct DecodeParams : Sequences {
  const void* k_cache;  // [N, S, G, D]
  const void* v_cache;  // [N, S, G, D]
  CacheStrides k_strides;
  CacheStrides v_strides;
  const void* q;  // [B, Q, H, D] or, ragged, [T, H, D]
  TokenStrides q_strides;
  int64_t num_kv_heads;  // G
  int64_t head_dim;      // D: a multiple of 8, at most 256
  int64_t num_blocks;    // N, the pool's blocks
  int64_t block_size;    // S, slots a block

  void* out;                  // like q
  float* lse;                 // out's shape without D, contiguous; null: not wanted
  const float* alibi_slopes;  // [H], or null
  const void* sinks;          // [H], fp32 or of dtype; null: none
  TokenStrides out_strides;
  TokenStrides lse_strides;
  CacheScale k_scale;
  CacheScale v_scale;
  int64_t max_query_len;  // ragged: the most queries a sequence may have; 0: unknown
  int64_t num_heads;      // H
  int64_t window;         // keys that a query sees, itself included; 0: all

  float scale;
  float softcap;  // 0: off
  bool causal;
  bool batch_invariant;
  bool sinks_are_fp32;
  DType dtype;        // of q and out
  DType cache_dtype;  // of k_cache and v_cache: dtype or fp8

  // The first key that any of a sequence's queries sees.
  constexpr int64_t first_visible_key(int64_t context_len, int64_t queries) const {
    const int64_t first = context_len - queries - window + 1;
    return window > 0 && first > 0 ? first : 0;
  }
};

// reshape_and_cache and append_kv: every token of key and value goes to one slot of the caches.
// With slot_mapping, row t goes to slot slot_mapping[t] = block * block_size + offset; there are no
// sequences, only num_tokens rows. Without, token t of the query_len tokens of sequence b goes to
// position context_lens[b] - query_len + t, found in row b of block_tables. Slots and positions
// that do not exist, ids outside the pool and sequences with a bad cu_seqlens_q are skipped. The
// caches store the value over its scale, in fp8 saturated at the largest finite value.
struct WriteKvParams : Sequences {
  const void* key;           // [B, Q, G, D] or, ragged or with slot_mapping, [>= T, G, D]
  const void* value;         // like key
  void* k_cache;             // [N, S, G, D]
  void* v_cache;             // [N, S, G, D]
  const void* slot_mapping;  // [T], int64 or int32; null: the sequences' tables say where

  TokenStrides key_strides;
  TokenStrides value_strides;
  CacheStrides k_strides;
  CacheStrides v_strides;
  CacheScale k_scale;
  CacheScale v_scale;

  int64_t num_kv_heads;  // G
  int64_t head_dim;      // D
  int64_t num_blocks;    // N
  int64_t block_size;    // S

  bool slots_are_int64;
  DType dtype;        // of key and value
  DType cache_dtype;  // of the caches: dtype or fp8
};

// Tensors whose first dimension counts blocks, for whole blocks on their way. Here sizes and
// strides are bytes: what the elements mean does not matter.

// Where the bytes of one block are: `outer` times `inner` runs of contiguous bytes.
struct BlockLayout {
  int64_t outer;
  int64_t outer_stride;
  int64_t inner;
  int64_t inner_stride;
  int64_t run;
};

struct BlockPool {
  char* data;
  int64_t block_stride;
  BlockLayout layout;
};

// copy_blocks: in every pool the block block_mapping[i, 0] is copied to block_mapping[i, 1]; a pair
// with an id outside [0, num_blocks) is skipped.
struct CopyBlocksParams {
  const BlockPool* pools;  // [num_pools], in host memory
  int64_t num_pools;
  const int64_t* block_mapping;  // [num_pairs, 2]
  int64_t num_pairs;
  int64_t num_blocks;
  int64_t alignment;  // all runs, their addresses and strides are multiples of it: 1 ... 16
};

// swap_blocks: `count` neighbouring blocks from `source` on go to `destination` and the blocks
// behind it.
struct BlockRun {
  int64_t source;
  int64_t destination;
  int64_t count;
};

// A tensor of blocks and the one that they go to. Each block is block_bytes contiguous bytes.
struct SwapPair {
  const char* source;
  char* destination;
  int64_t source_stride;
  int64_t destination_stride;
  int64_t block_bytes;
};

// merge_states: attention over disjoint sets of keys, from each set's normalised output and the
// natural logarithm of its softmax denominator. At most kMaxStates at once: kernels take them as
// parameters.
constexpr int64_t kMaxStates = 512;

struct AttentionState {
  const void* out;   // [T, H, D]
  const float* lse;  // [T, H]
  int64_t out_token_stride;
  int64_t out_head_stride;
  int64_t lse_token_stride;
  int64_t lse_head_stride;
};

struct MergeStatesParams {
  const AttentionState* states;  // [num_states], in host memory
  int64_t num_states;            // P, from 1 to kMaxStates
  void* out;                     // [T, H, D], contiguous
  float* lse;                    // [T, H], contiguous

  int64_t num_tokens;  // T, the product of all dimensions before H
  int64_t num_heads;   // H
  int64_t head_dim;    // D, any
  DType dtype;         // of all outs
};

}  // namespace paged_attn
