// The kernels of each instruction set, and the choice between them.
#pragma once

#include <cstdint>

#include "piece.h"

namespace paged_attn::cpu {

struct Kernels {
  const char* name;
  // Bytes of workspace, 64-byte aligned, that attend needs for pieces of num_records
  // (KV head, row) pairs.
  int64_t (*workspace_bytes)(int64_t head_dim, int64_t num_records);
  // Indexed by q's DType, attend by the cache's before that. Null where the two do not go together.
  void (*attend[5][3])(const Piece& piece, void* workspace);
  void (*merge[3])(const Piece& piece);
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
