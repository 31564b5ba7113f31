#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "boundary.h"
#include "isa.h"
#include "linear_part.h"
#include "linear_weights.h"
#include "memory.h"
#include "ops.h"

namespace dw {

struct Experts {
  ExpertsSetting setting;
  std::vector<const Linear*> gate_up, down;
  std::vector<float> correction;  // empty: none
  int64_t hidden = 0;
  int64_t widest = 0;  // I of the widest expert
  DType input = F32;
  int64_t step_bytes = 0;

  int64_t chosen() const { return setting.top_k + (setting.shared != SHARED_NONE); }
};

namespace {

const MixKernels& kernels(DType dtype) {
  int i = dtype == BF16 ? 1 : 0;
  switch (isa_of_vectors()) {
#if DW_HAVE_AVX512
    case ISA_AVX512: return mix_kernels_avx512[i];
#endif
#if DW_HAVE_AVX512VNNI
    case ISA_AVX512VNNI: return mix_kernels_avx512vnni[i];
#endif
#if DW_HAVE_AVX2
    case ISA_AVX2: return mix_kernels_avx2[i];
#endif
    default: return mix_kernels_portable[i];
  }
}

// ------------------------------------------------------------------------------------------------- routing

// The `count` largest of values[size], best first, the lower index first of equal ones; they become -inf. NaN is never the larger one:
// whatever the values are, the results are indices, each of them once.
void take_best(float* values, uint8_t* taken, int64_t size, int64_t count, int32_t* best) {
  for (int64_t k = 0; k < count; k++) {
    int64_t found = -1;
    for (int64_t i = 0; i < size; i++)
      if (!taken[i] && (found < 0 || values[i] > values[found])) found = i;
    taken[found] = 1;
    best[k] = (int32_t)found;
  }
}

struct RouteScratch {
  std::vector<float> shares, judged, of_groups;
  std::vector<uint8_t> taken;
  std::vector<int32_t> groups;
};

// Leaves the experts of the best groups as they are, and lets nobody choose the others.
void keep_best_groups(const ExpertsSetting& s, RouteScratch& scratch) {
  const int64_t size = s.experts / s.groups;
  scratch.of_groups.assign((size_t)s.groups, 0.0f);
  scratch.groups.resize((size_t)std::max(s.groups, s.group_rank));
  for (int64_t g = 0; g < s.groups; g++) {
    scratch.taken.assign((size_t)size, 0);
    take_best(scratch.judged.data() + g * size, scratch.taken.data(), size, s.group_rank, scratch.groups.data());
    for (int32_t i = 0; i < s.group_rank; i++)
      scratch.of_groups[(size_t)g] += scratch.judged[(size_t)(g * size + scratch.groups[(size_t)i])];
  }
  scratch.taken.assign((size_t)s.groups, 0);
  take_best(scratch.of_groups.data(), scratch.taken.data(), s.groups, s.top_groups, scratch.groups.data());
  for (int64_t g = 0; g < s.groups; g++)
    if (!scratch.taken[(size_t)g])
      std::fill_n(scratch.judged.begin() + (ptrdiff_t)(g * size), size, -INFINITY);
}

void route_row(const Experts& e, const float* scores, RouteScratch& scratch, int32_t* chosen, float* weights) {
  const ExpertsSetting& s = e.setting;
  const size_t count = (size_t)s.experts;
  scratch.shares.resize(count);
  if (s.scoring == SCORE_SIGMOID)
    kernels(F32).sigmoid(scores, scratch.shares.data(), s.experts);
  else
    softmax(scores, 1.0f, scratch.shares.data(), s.experts);
  scratch.judged = scratch.shares;
  for (size_t i = 0; i < e.correction.size(); i++) scratch.judged[i] += e.correction[i];
  if (s.top_groups < s.groups) keep_best_groups(s, scratch);
  scratch.taken.assign(count, 0);
  take_best(scratch.judged.data(), scratch.taken.data(), s.experts, s.top_k, chosen);
  float sum = 0.0f;
  for (int32_t k = 0; k < s.top_k; k++) {
    weights[k] = scratch.shares[(size_t)chosen[k]];
    sum += weights[k];
  }
  sum += 1e-20f;  // sigmoids may all be zero
  for (int32_t k = 0; k < s.top_k; k++) weights[k] = (s.normalise ? weights[k] / sum : weights[k]) * s.scale;
  if (s.shared == SHARED_NONE) return;
  chosen[s.top_k] = s.experts;
  weights[s.top_k] = 1.0f;
  if (s.shared == SHARED_GATED) kernels(F32).sigmoid(scores + s.experts, weights + s.top_k, 1);
}

// ------------------------------------------------------------------------------------------------- the sum

constexpr int64_t PART_BYTES = 48 << 10;   // of weights; less than this per task does not pay for the handover
constexpr int64_t RESULT_BYTES = 32 << 20;  // of results that wait to be added up: rows beyond that come after these
constexpr int64_t SERIAL = 1 << 14;         // sums below which a second thread costs more than it brings

struct Part {
  int32_t expert;
  int64_t begin, rows;  // of the rows sorted by expert
  int part, parts;
};

struct Mix {
  const Experts* experts;
  const uint8_t* x;
  std::vector<int32_t> row_of;    // of each sorted place: the row
  std::vector<int64_t> place_of;  // of each (row, k): its sorted place
  std::vector<Part> up, down;
  uint8_t* inner;  // [places, widest] of the input's dtype
  float* results;  // [places, hidden]
  const float* weights;
  uint8_t* out;
  int64_t rows;
  int64_t row_step;  // of a task of the last phase
  int threads;
};

// What the thread that has a task now probably reads next: threads take tasks in turns, first the ups', then the downs'.
const uint8_t* read_after(const Mix& mix, size_t task) {
  const size_t next = task + (size_t)mix.threads, ups = mix.up.size();
  if (next >= ups + mix.down.size()) return nullptr;
  const Part& part = next < ups ? mix.up[next] : mix.down[next - ups];
  const auto& layers = next < ups ? mix.experts->gate_up : mix.experts->down;
  return linear_part(layers[(size_t)part.expert], part.part, part.parts);
}

thread_local Scratch t_gathered, t_gate_up, t_inner, t_results;

// The columns of a gate | up layer that part `part` of `parts` computes, as a range of its gates.
void columns_of(const Linear& w, int part, int parts, int64_t* first, int64_t* last) {
  const int64_t half = w.outputs / 2;
  *first = std::min(w.panels * part / parts * 16, half);
  *last = std::min(w.panels * (part + 1) / parts * 16, half);
}

void run_up(void* raw, int task) {
  Mix& mix = *static_cast<Mix*>(raw);
  const Experts& e = *mix.experts;
  const Part& part = mix.up[(size_t)task];
  const Linear& w = *e.gate_up[(size_t)part.expert];
  const int64_t element = element_bytes(e.input), row_bytes = e.hidden * element, width = w.outputs / 2;
  const uint8_t* x = mix.x + mix.row_of[(size_t)part.begin] * row_bytes;
  if (part.rows > 1) {
    auto* gathered = static_cast<uint8_t*>(t_gathered.reserve((size_t)(part.rows * row_bytes)));
    for (int64_t i = 0; i < part.rows; i++)
      std::memcpy(gathered + i * row_bytes, mix.x + mix.row_of[(size_t)(part.begin + i)] * row_bytes, (size_t)row_bytes);
    x = gathered;
  }
  uint8_t* inner = mix.inner + part.begin * e.widest * element;
  LinearCall call{&w, x, e.hidden, inner, e.widest, e.input, part.rows, EP_SILU_MUL};
  if (e.setting.activation == ACT_SILU) {
    linear_run_part_before(&call, part.part, part.parts, read_after(mix, (size_t)task));
    return;
  }
  auto* both = static_cast<uint8_t*>(t_gate_up.reserve((size_t)(part.rows * w.outputs * element)));
  call.out = both;
  call.ldo = w.outputs;
  call.epilogue = EP_STORE;
  linear_run_part_before(&call, part.part, part.parts, read_after(mix, (size_t)task));
  int64_t first, last;
  columns_of(w, part.part, part.parts, &first, &last);
  for (int64_t r = 0; r < part.rows; r++) {
    const uint8_t* gate = both + (r * w.outputs + first) * element;
    kernels(e.input).gated((Activation)e.setting.activation, e.setting.alpha, e.setting.limit, gate, gate + width * element,
                           inner + (r * e.widest + first) * element, last - first);
  }
}

void run_down(void* raw, int task) {
  Mix& mix = *static_cast<Mix*>(raw);
  const Experts& e = *mix.experts;
  const Part& part = mix.down[(size_t)task];
  const Linear& w = *e.down[(size_t)part.expert];
  const uint8_t* inner = mix.inner + part.begin * e.widest * element_bytes(e.input);
  LinearCall call{&w, inner, e.widest, mix.results + part.begin * e.hidden, e.hidden, F32, part.rows, EP_STORE};
  linear_run_part_before(&call, part.part, part.parts, read_after(mix, mix.up.size() + (size_t)task));
}

void run_combine(void* raw, int task) {
  Mix& mix = *static_cast<Mix*>(raw);
  const Experts& e = *mix.experts;
  const int64_t chosen = e.chosen(), element = element_bytes(e.input);
  std::vector<const float*> parts((size_t)chosen);
  const int64_t begin = task * mix.row_step, end = std::min(begin + mix.row_step, mix.rows);
  for (int64_t r = begin; r < end; r++) {
    for (int64_t k = 0; k < chosen; k++)
      parts[(size_t)k] = mix.results + mix.place_of[(size_t)(r * chosen + k)] * e.hidden;
    kernels(e.input).combine(parts.data(), mix.weights + r * chosen, chosen, mix.out + r * e.hidden * element, e.hidden);
  }
}

// How a layer is cut: so that every thread finds enough to do, and no part is too small to be worth it.
void add_parts(const Linear& w, int32_t expert, int64_t begin, int64_t rows, int64_t wanted, std::vector<Part>& parts) {
  const int64_t work = w.panels * w.panel_bytes() * std::max<int64_t>(rows / 4, 1);
  const int64_t count = std::clamp<int64_t>(std::min(wanted, work / PART_BYTES), 1, w.panels);
  for (int64_t i = 0; i < count; i++) parts.push_back(Part{expert, begin, rows, (int)i, (int)count});
}

void run_rows(const Shares& shares, Mix& mix, const int32_t* chosen) {
  const Experts& e = *mix.experts;
  const int64_t per_row = e.chosen(), places = mix.rows * per_row, layers = (int64_t)e.gate_up.size();
  // sorted by expert, rows in order. Example, two of three experts: rows choose (2, 0), (0, 1): places of (row, k) are 0: (0, 1),
  // 1: (1, 0), 2: (1, 1), 3: (0, 0).
  std::vector<int64_t> begin((size_t)layers + 1, 0);
  for (int64_t i = 0; i < places; i++) {
    require(chosen[i] >= 0 && chosen[i] < layers, "expert");
    begin[(size_t)chosen[i] + 1]++;
  }
  int64_t hit = 0;
  for (size_t i = 0; i < (size_t)layers; i++) {
    hit += begin[i + 1] > 0;
    begin[i + 1] += begin[i];
  }
  mix.row_of.resize((size_t)places);
  mix.place_of.resize((size_t)places);
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for (int64_t i = 0; i < places; i++) {
    const int64_t place = next[(size_t)chosen[i]]++;
    mix.row_of[(size_t)place] = (int32_t)(i / per_row);
    mix.place_of[(size_t)i] = place;
  }
  mix.up.clear();
  mix.down.clear();
  const int64_t wanted = (shares.threads * 4 + hit - 1) / hit;
  for (int64_t i = 0; i < layers; i++) {
    const int64_t from = begin[(size_t)i], rows = begin[(size_t)i + 1] - from;
    if (rows == 0) continue;
    add_parts(*e.gate_up[(size_t)i], (int32_t)i, from, rows, wanted, mix.up);
    add_parts(*e.down[(size_t)i], (int32_t)i, from, rows, wanted, mix.down);
  }
  mix.inner = static_cast<uint8_t*>(t_inner.reserve((size_t)(places * e.widest * element_bytes(e.input))));
  mix.results = static_cast<float*>(t_results.reserve((size_t)(places * e.hidden) * 4));
  shares.run(shares.context, (int)mix.up.size(), run_up, &mix);
  shares.run(shares.context, (int)mix.down.size(), run_down, &mix);
  mix.row_step = std::max<int64_t>(1, SERIAL / (per_row * e.hidden));
  if (mix.rows * per_row * e.hidden < 2 * SERIAL) mix.row_step = mix.rows;
  shares.run(shares.context, (int)((mix.rows + mix.row_step - 1) / mix.row_step), run_combine, &mix);
}

}  // namespace

Experts* experts_create(const ExpertsSetting* setting, const Linear* const* gate_up, const Linear* const* down,
                        const float* correction) {
  const ExpertsSetting& s = *setting;
  require(s.experts >= 1 && s.top_k >= 1 && s.top_k <= s.experts, "numbers of experts");
  require(s.groups >= 1 && s.experts % s.groups == 0 && s.top_groups >= 1 && s.top_groups <= s.groups, "groups");
  require(s.group_rank >= 1 && s.group_rank <= s.experts / s.groups, "experts that judge a group");
  require(s.top_k <= s.experts / s.groups * s.top_groups, "experts in the groups that are left");
  auto made = std::make_unique<Experts>();
  made->setting = s;
  const int64_t layers = (int64_t)s.experts + (s.shared != SHARED_NONE);
  made->gate_up.assign(gate_up, gate_up + layers);
  made->down.assign(down, down + layers);
  if (correction != nullptr) made->correction.assign(correction, correction + s.experts);
  made->hidden = gate_up[0]->inputs;
  made->input = gate_up[0]->input;
  int64_t largest = 0;
  for (int64_t i = 0; i < layers; i++) {
    const Linear &first = *gate_up[i], &second = *down[i];
    require(first.paired && first.inputs == made->hidden && first.input == made->input, "gate and up");
    require(second.outputs == made->hidden && second.inputs * 2 == first.outputs && second.input == made->input, "down");
    made->widest = std::max(made->widest, second.inputs);
    const int64_t bytes = linear_bytes(&first) + linear_bytes(&second);
    if (i < s.experts)
      largest = std::max(largest, bytes);
    else
      made->step_bytes += bytes;
  }
  made->step_bytes += largest * s.top_k;
  return made.release();
}

void experts_free(Experts* experts) { delete experts; }
int64_t experts_chosen(const Experts* e) { return e->chosen(); }
int64_t experts_scores(const Experts* e) { return e->setting.experts + (e->setting.shared == SHARED_GATED); }
int64_t experts_step_bytes(const Experts* e) { return e->step_bytes; }

void experts_route(const Shares& shares, const Experts* e, const float* scores, int64_t rows, int32_t* chosen,
                   float* weights) {
  constexpr int64_t STEP = 32;  // rows of a task
  struct Context {
    const Experts* e;
    const float* scores;
    int32_t* chosen;
    float* weights;
    int64_t rows;
  } context{e, scores, chosen, weights, rows};
  shares.run(
      shares.context, (int)((rows + STEP - 1) / STEP),
      [](void* arg, int task) {
        const Context& c = *(const Context*)arg;
        RouteScratch scratch;
        const int64_t width = experts_scores(c.e), count = c.e->chosen();
        for (int64_t r = task * STEP; r < std::min((task + 1) * STEP, c.rows); r++)
          route_row(*c.e, c.scores + r * width, scratch, c.chosen + r * count, c.weights + r * count);
      },
      &context);
}

Shares shares_of(Pool* pool) {
  return Shares{pool,
                [](void* context, int tasks, void (*task)(void*, int), void* arg) {
                  struct Work {
                    void (*task)(void*, int);
                    void* arg;
                  } work{task, arg};
                  parallel_for((Pool*)context, tasks, [](void* raw, int number, int) {
                    const Work& w = *(const Work*)raw;
                    w.task(w.arg, number);
                  }, &work);
                },
                pool == nullptr ? 1 : pool_threads(pool)};
}

void experts_run(const Shares& shares, const ExpertsCall* call) {
  const Experts& e = *call->experts;
  const int64_t per_row = e.chosen(), row_bytes = e.hidden * element_bytes(e.input);
  const int64_t block = std::max<int64_t>(1, RESULT_BYTES / 4 / (per_row * e.hidden));
  Mix mix{};
  mix.experts = &e;
  mix.threads = shares.threads;
  for (int64_t r = 0; r < call->rows; r += block) {
    mix.rows = std::min(block, call->rows - r);
    mix.x = static_cast<const uint8_t*>(call->x) + r * row_bytes;
    mix.out = static_cast<uint8_t*>(call->out) + r * row_bytes;
    mix.weights = call->weights + r * per_row;
    run_rows(shares, mix, call->chosen + r * per_row);
  }
}

void experts_route_run(const Shares& shares, const Experts* e, const void* x, const float* scores, void* out, int64_t rows) {
  const size_t places = (size_t)(rows * e->chosen());
  std::vector<int32_t> chosen(places);
  std::vector<float> weights(places);
  experts_route(shares, e, scores, rows, chosen.data(), weights.data());
  ExpertsCall call{e, x, chosen.data(), weights.data(), out, rows};
  experts_run(shares, &call);
}

namespace {

// Calls body(r) for every row, which takes as long as `elements` plain ones.
template <class Body>
void over_rows(Pool* pool, int64_t rows, int64_t elements, const Body& body) {
  if (rows <= 0) return;
  struct Context {
    const Body* body;
    int64_t rows, step;
  } context{&body, rows, rows};
  if (rows * elements >= 2 * SERIAL) context.step = std::max<int64_t>(1, SERIAL / elements);
  parallel_for(
      pool, (int)((rows + context.step - 1) / context.step),
      [](void* arg, int task, int) {
        const Context& c = *(const Context*)arg;
        for (int64_t r = task * c.step; r < std::min((task + 1) * c.step, c.rows); r++) (*c.body)(r);
      },
      &context);
}

}  // namespace

void gated_rows(Pool* pool, DType dtype, Activation kind, float alpha, float limit, const void* gate_up, void* out,
                int64_t rows, int64_t width) {
  const int64_t bytes = width * element_bytes(dtype);
  over_rows(pool, rows, 4 * width, [&](int64_t r) {
    const auto* gate = (const uint8_t*)gate_up + r * 2 * bytes;
    kernels(dtype).gated(kind, alpha, limit, gate, gate + bytes, (uint8_t*)out + r * bytes, width);
  });
}

void scale_rows(Pool* pool, DType dtype, void* x, float factor, int64_t rows, int64_t width) {
  const int64_t bytes = width * element_bytes(dtype);
  over_rows(pool, rows, width, [&](int64_t r) { kernels(dtype).scale((uint8_t*)x + r * bytes, factor, width); });
}

void softcap_rows(Pool* pool, float* x, float cap, int64_t rows, int64_t width) {
  over_rows(pool, rows, 4 * width, [&](int64_t r) { kernels(F32).softcap(x + r * width, cap, width); });
}

void unary_rows(Pool* pool, DType dtype, Function function, const void* x, void* out, int64_t rows, int64_t width) {
  const int64_t bytes = width * element_bytes(dtype);
  over_rows(pool, rows, 4 * width, [&](int64_t r) {
    kernels(dtype).unary(function, (const uint8_t*)x + r * bytes, (uint8_t*)out + r * bytes, width);
  });
}

void mul_rows(Pool* pool, DType dtype, const void* x, const void* y, void* out, int64_t rows, int64_t width) {
  const int64_t bytes = width * element_bytes(dtype);
  over_rows(pool, rows, width, [&](int64_t r) {
    kernels(dtype).mul((const uint8_t*)x + r * bytes, (const uint8_t*)y + r * bytes, (uint8_t*)out + r * bytes, width);
  });
}

void layer_norm_rows(Pool* pool, DType dtype, const void* x, const float* weight, const float* bias, float eps,
                     void* out, int64_t rows, int64_t width) {
  const int64_t bytes = width * element_bytes(dtype);
  over_rows(pool, rows, 2 * width, [&](int64_t r) {
    kernels(dtype).layer_norm((const uint8_t*)x + r * bytes, weight, bias, eps, (uint8_t*)out + r * bytes, width);
  });
}

}  // namespace dw

// ------------------------------------------------------------------------------------------------------ C interface

DW_EXPORT dw::Experts* dw_experts_create(const dw::ExpertsSetting* setting, const dw::Linear* const* gate_up,
                                         const dw::Linear* const* down, const float* correction) {
  return dw::guarded([&] { return dw::experts_create(setting, gate_up, down, correction); });
}

DW_EXPORT void dw_experts_free(dw::Experts* experts) {
  dw::guarded([&] { dw::experts_free(experts); });
}

DW_EXPORT void dw_experts_route(dw::Pool* pool, const dw::Experts* experts, const float* scores, int64_t rows,
                                int32_t* chosen, float* weights) {
  dw::guarded([&] { dw::experts_route(dw::shares_of(pool), experts, scores, rows, chosen, weights); });
}

DW_EXPORT void dw_experts_run(dw::Pool* pool, const dw::Experts* experts, const void* x, const int32_t* chosen,
                              const float* weights, void* out, int64_t rows) {
  dw::guarded([&] {
    dw::ExpertsCall call{experts, x, chosen, weights, out, rows};
    dw::experts_run(dw::shares_of(pool), &call);
  });
}

DW_EXPORT void dw_gated_rows(dw::Pool* pool, int dtype, int kind, float alpha, float limit, const void* gate_up, void* out,
                             int64_t rows, int64_t width) {
  dw::guarded([&] {
    dw::gated_rows(pool, (dw::DType)dtype, (dw::Activation)kind, alpha, limit, gate_up, out, rows, width);
  });
}

DW_EXPORT void dw_scale_rows(dw::Pool* pool, int dtype, void* x, float factor, int64_t rows, int64_t width) {
  dw::guarded([&] { dw::scale_rows(pool, (dw::DType)dtype, x, factor, rows, width); });
}

DW_EXPORT void dw_softcap_rows(dw::Pool* pool, float* x, float cap, int64_t rows, int64_t width) {
  dw::guarded([&] { dw::softcap_rows(pool, x, cap, rows, width); });
}

DW_EXPORT void dw_unary_rows(dw::Pool* pool, int dtype, int function, const void* x, void* out, int64_t rows,
                             int64_t width) {
  dw::guarded([&] { dw::unary_rows(pool, (dw::DType)dtype, (dw::Function)function, x, out, rows, width); });
}

DW_EXPORT void dw_mul_rows(dw::Pool* pool, int dtype, const void* x, const void* y, void* out, int64_t rows,
                           int64_t width) {
  dw::guarded([&] { dw::mul_rows(pool, (dw::DType)dtype, x, y, out, rows, width); });
}

DW_EXPORT void dw_layer_norm_rows(dw::Pool* pool, int dtype, const void* x, const float* weight, const float* bias,
                                  float eps, void* out, int64_t rows, int64_t width) {
  dw::guarded([&] { dw::layer_norm_rows(pool, (dw::DType)dtype, x, weight, bias, eps, out, rows, width); });
}
