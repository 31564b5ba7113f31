// Features of draft heads: hidden states of several layers of the target side by side, through a linear layer and perhaps
// a norm. They are made of few rows right behind a pass, where each call from Python is dear.
#include <cstring>
#include <vector>

#include "boundary.h"
#include "join.h"
#include "linear.h"
#include "ops.h"

void dw::join_layers(Pool* pool, const Linear* layer, const void* const* parts, int64_t count, int64_t width, int64_t rows,
                     const float* norm, float eps, void* out) {
  const DType dtype = linear_input_dtype(layer);
  require(count > 0 && width > 0 && linear_inputs(layer) == count * width, "parts as wide as the layer");
  const size_t bytes = (size_t)width * (dtype == F32 ? 4 : 2), outputs = (size_t)linear_outputs(layer);
  std::vector<char> joined((size_t)(rows * count) * bytes);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i++)
      memcpy(joined.data() + (size_t)(r * count + i) * bytes, (const char*)parts[i] + (size_t)r * bytes, bytes);
  Pool* own = pool_for(pool, layer, rows);
  linear_forward(own, layer, joined.data(), count * width, out, (int64_t)outputs, dtype, rows);
  if (norm != nullptr) rms_norm(own, dtype, out, norm, eps, out, rows, (int64_t)outputs);
}

DW_EXPORT void dw_join(dw::Pool* pool, const dw::Linear* layer, const void* const* parts, int64_t count, int64_t width,
                       int64_t rows, const float* norm, float eps, void* out) {
  dw::guarded([&] { dw::join_layers(pool, layer, parts, count, width, rows, norm, eps, out); });
}
