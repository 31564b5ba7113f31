// Look-ups of many requests side by side: as `dw_ngram_step` and `dw_suffix_steps`, which have no pool.
#pragma once
#include <cstdint>

#include "pool.h"
#include "suffix.h"

namespace dw {

void ngram_step(int64_t requests, const int64_t* columns, int64_t width, int32_t* found);
void suffix_steps(Pool*, int64_t requests, void* global, const SuffixLimits*, const int64_t* columns, int64_t width, int32_t* found);

}  // namespace dw
