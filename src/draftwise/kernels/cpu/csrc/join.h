#pragma once
#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace dw {

// Rows of hidden states side by side, through a layer and perhaps a norm. parts [count]: where rows [rows, width] of each lie; norm
// [outputs] or null; out [rows, outputs], of the layer's type.
void join_layers(Pool*, const Linear*, const void* const* parts, int64_t count, int64_t width, int64_t rows, const float* norm,
                 float eps, void* out);

}  // namespace dw
