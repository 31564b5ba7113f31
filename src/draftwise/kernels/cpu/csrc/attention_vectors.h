// The table of kernels on vectors, for every kind of row and cache; the including file names it: DW_TABLE.
#pragma once

#include "attention_impl.h"

namespace dw {

#define DW_ENTRY(T, S) DW_ATTENTION(VectorSteps<T, S>)
extern const AttentionKernels DW_TABLE[2][KV_DTYPES] = {
    {DW_ENTRY(float, float), DW_ENTRY(float, bf16), DW_ENTRY(float, f16), DW_ENTRY(float, int8_t),
     DW_ENTRY(float, f8)},
    {DW_ENTRY(bf16, float), DW_ENTRY(bf16, bf16), DW_ENTRY(bf16, f16), DW_ENTRY(bf16, int8_t),
     DW_ENTRY(bf16, f8)},
};
#undef DW_ENTRY

}  // namespace dw
