// What lengths, block tables and ragged queries say, believed only after a look.
#pragma once

#include <vector>

#include "schedule.h"

namespace paged_attn::cpu {

// The sequences that have queries, keys and valid content. Everybody else's rows of the output are
// written here: 0 with lse -inf where there is nothing to see (context_len <= 0, rows outside every
// sequence), NaN where the content is bad.
std::vector<Sequence> find_sequences(const DecodeParams& params);

}  // namespace paged_attn::cpu
