// A linear layer of its own for each head: what latent attention does with its queries before, and with its results behind attention.
#pragma once

#include "experts.h"
#include "linear.h"

namespace dw {

struct Heads;

// `count` layers of the same size, [N, K] each. They are not kept alive. Throws std::invalid_argument if they differ.
Heads* heads_create(const Linear* const* layers, int64_t count);
void heads_free(Heads*);
int64_t heads_bytes(const Heads*);

// x [rows, count * K] of the layers' input, row stride ldx -> out [rows, count * N] of the same dtype, row stride ldo.
void heads_run(const Shares&, const Heads*, const void* x, int64_t ldx, void* out, int64_t ldo, int64_t rows);

}  // namespace dw
