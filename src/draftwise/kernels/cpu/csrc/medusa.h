// Medusa heads (Cai et al. 2024, arXiv:2401.10774): the logits of the next tokens but one, two, ... from one hidden state.
#pragma once
#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace dw {

// Layers of `heads` heads. Mirrored by medusa.py.
struct MedusaLayers {
  const Linear* first;           // the first residual layer of all heads: [heads * H, H]
  const Linear* const* later;    // [heads, layers - 1] those behind it, [H, H] each
  const Linear* const* outputs;  // [num_outputs] of each head, or one of all
  int64_t heads, layers, num_outputs;
};

int64_t medusa_vocab(const MedusaLayers&);

// hidden [rows, H] of the type of the layers' input -> logits [count, rows, vocab] of the first `count` heads. Throws
// std::invalid_argument for layers that do not fit each other.
void medusa_logits(Pool*, const MedusaLayers&, const void* hidden, int64_t rows, int64_t count, float* logits);

}  // namespace dw
