#include "heads.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "boundary.h"
#include "compiler.h"
#include "linear_weights.h"

namespace dw {

struct Heads {
  std::vector<const Linear*> layers;
};

Heads* heads_create(const Linear* const* layers, int64_t count) {
  require(count > 0, "heads");
  auto made = std::make_unique<Heads>();
  made->layers.assign(layers, layers + count);
  for (const Linear* layer : made->layers)
    require(layer->inputs == layers[0]->inputs && layer->outputs == layers[0]->outputs && layer->input == layers[0]->input,
            "heads of one size");
  return made.release();
}

void heads_free(Heads* heads) { delete heads; }

int64_t heads_bytes(const Heads* heads) { return (int64_t)heads->layers.size() * linear_bytes(heads->layers[0]); }

void heads_run(const Shares& shares, const Heads* heads, const void* x, int64_t ldx, void* out, int64_t ldo, int64_t rows) {
  if (rows <= 0) return;
  struct Work {
    const Heads* heads;
    const uint8_t* x;
    int64_t ldx;
    uint8_t* out;
    int64_t ldo, rows, per_task;
  } work{heads, (const uint8_t*)x, ldx, (uint8_t*)out, ldo, rows, 1};
  const int64_t count = (int64_t)heads->layers.size();
  // as many heads in a task as are worth a hand-over
  constexpr int64_t TASK_BYTES = 48 << 10;
  const int64_t one = linear_bytes(heads->layers[0]) * std::max<int64_t>(1, rows / 4);
  work.per_task = std::clamp<int64_t>(TASK_BYTES / std::max<int64_t>(one, 1), 1, count);
  shares.run(
      shares.context, (int)((count + work.per_task - 1) / work.per_task),
      [](void* arg, int task) {
        const Work& w = *(const Work*)arg;
        const int64_t last = std::min<int64_t>((task + 1) * w.per_task, (int64_t)w.heads->layers.size());
        for (int64_t h = task * w.per_task; h < last; h++) {
          const Linear& layer = *w.heads->layers[(size_t)h];
          const int64_t element = element_bytes(layer.input);
          LinearCall call{&layer, w.x + h * layer.inputs * element, w.ldx, w.out + h * layer.outputs * element, w.ldo,
                          layer.input, w.rows, EP_STORE};
          linear_run_part(&call, 0, 1);
        }
      },
      &work);
}

}  // namespace dw

DW_EXPORT dw::Heads* dw_heads_create(const dw::Linear* const* layers, int64_t count) {
  return dw::guarded([&] { return dw::heads_create(layers, count); });
}

DW_EXPORT void dw_heads_free(dw::Heads* heads) {
  dw::guarded([&] { dw::heads_free(heads); });
}

DW_EXPORT void dw_heads_run(dw::Pool* pool, const dw::Heads* heads, const void* x, int64_t ldx, void* out, int64_t ldo,
                            int64_t rows) {
  dw::guarded([&] { dw::heads_run(dw::shares_of(pool), heads, x, ldx, out, ldo, rows); });
}
