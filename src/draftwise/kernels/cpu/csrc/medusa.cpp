#include "medusa.h"

#include <algorithm>
#include <vector>

#include "boundary.h"
#include "ops.h"

namespace dw {
int64_t medusa_vocab(const MedusaLayers& of) { return linear_outputs(of.outputs[0]); }

void medusa_logits(Pool* pool, const MedusaLayers& of, const void* hidden, int64_t rows, int64_t count, float* logits) {
  const DType dtype = linear_input_dtype(of.first);
  const int64_t width = linear_inputs(of.first), vocab = medusa_vocab(of), later = of.layers - 1;
  const size_t bytes = (size_t)width * (dtype == F32 ? 4 : 2);
  require(0 < count && count <= of.heads && linear_outputs(of.first) == of.heads * width, "as many heads as there are");
  require(of.num_outputs == 1 || of.num_outputs == of.heads, "an output layer of each head, or one of all");
  for (int64_t i = 0; i < of.num_outputs; i++)
    require(linear_inputs(of.outputs[i]) == width && linear_outputs(of.outputs[i]) == vocab && linear_input_dtype(of.outputs[i]) == dtype,
            "output layers of one size");
  static thread_local std::vector<char> memory;
  memory.resize(bytes * (size_t)(rows * (of.heads + count)));
  char *products = memory.data(), *states = products + bytes * (size_t)(rows * of.heads);
  linear_forward(pool_for(pool, of.first, rows), of.first, hidden, width, products, of.heads * width, dtype, rows);
  // Example: two heads, three rows: the state of head 1 in row 2 is row 1 * 3 + 2, made of row 2 * 2 + 1 of the products.
  for (int64_t i = 0; i < count; i++)
    for (int64_t r = 0; r < rows; r++)
      silu_add(dtype, products + (size_t)(r * of.heads + i) * bytes, (const char*)hidden + (size_t)r * bytes,
               states + (size_t)(i * rows + r) * bytes, width);
  for (int64_t i = 0; i < count; i++) {
    char* own = states + (size_t)(i * rows) * bytes;
    for (int64_t j = 0; j < later; j++) {
      const Linear* layer = of.later[i * later + j];
      require(linear_inputs(layer) == width && linear_outputs(layer) == width && linear_input_dtype(layer) == dtype, "residual layers");
      linear_forward(pool_for(pool, layer, rows), layer, own, width, products, width, dtype, rows);
      silu_add(dtype, products, own, own, rows * width);
    }
    if (of.num_outputs > 1)
      linear_forward(pool_for(pool, of.outputs[i], rows), of.outputs[i], own, width, logits + i * rows * vocab, vocab, F32, rows);
  }
  if (of.num_outputs == 1)
    linear_forward(pool_for(pool, of.outputs[0], count * rows), of.outputs[0], states, width, logits, vocab, F32, count * rows);
}

}  // namespace dw

DW_EXPORT void dw_medusa_logits(dw::Pool* pool, const dw::MedusaLayers* of, const void* hidden, int64_t rows, int64_t count,
                                float* logits) {
  dw::guarded([&] { dw::medusa_logits(pool, *of, hidden, rows, count, logits); });
}
