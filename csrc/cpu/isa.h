// The kernels of each instruction set, and the choice between them.
#pragma once

#include <cstdint>

#include "piece.h"

namespace paged_attn::cpu {

// A row of a state that merge_states merges, and its weight, not yet divided by the weights' sum.
struct StateShare {
  const void* row;
  float weight;
};

struct Kernels {
  const char* name;
  // Bytes of workspace, 64-byte aligned, that attend needs for pieces of num_records
  // (KV head, row) pairs.
  int64_t (*workspace_bytes)(int64_t head_dim, int64_t num_records);
  // Indexed by q's DType, attend by the cache's before that. Null where the two do not go together.
  void (*attend[5][3])(const Piece& piece, void* workspace);
  void (*merge[3])(const Piece& piece);
  // Indexed like attend: a row of the cache from one of key or value over the scale.
  void (*convert_row[5][3])(const void* from, float scale, int64_t head_dim, void* to);
  // Indexed by the states' DType: a row of the output, the sum of the shares times the factor.
  void (*merge_row[3])(const StateShare* shares, int64_t num_shares, float factor, int64_t head_dim,
                       void* out);
};

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Bf16Kernels;
#endif

// Chosen on the first call, see isa_name().
const Kernels& kernels();

}  // namespace paged_attn::cpu
