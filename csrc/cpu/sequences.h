// What lengths, block tables and ragged queries say, believed only after a look.
#pragma once

#include <vector>

#include "schedule.h"

namespace paged_attn::cpu {

// The sequences that have queries, keys and valid content. Everybody else's rows of the output are
// written here: 0 where there is nothing to see, with lse -inf for rows outside every sequence and,
// where context_len <= 0, the head's sink if there are any; NaN where the content is bad. Sinks are
// in fp32.
std::vector<Sequence> find_sequences(const DecodeParams& params);

}  // namespace paged_attn::cpu
