// Mixtures of experts: a row goes through few of many small MLPs, which a router chooses, and gets the weighted sum of what they
// make of it.
//
// Same bits: (row, expert) is computed by the linear kernels, alone in its bits; a row's results are added in the order in which the router
// chose its experts, in float32. Rows are grouped by expert, so that a pass reads the weights of each expert that it hits once.
#pragma once

#include <cstdint>

#include "linear.h"
#include "pool.h"

namespace dw {

enum Activation : int32_t {
  ACT_SILU = 0,       // silu(gate) * up
  ACT_GELU_TANH = 1,  // gelu(gate) * up, with tanh
  ACT_CLAMPED = 2,    // g * sigmoid(alpha g) * (u + 1), g = min(gate, limit), u = up between -limit and limit
};

enum Scoring : int32_t { SCORE_SOFTMAX = 0, SCORE_SIGMOID = 1 };

// An expert that every row goes through, behind the others: with the weight 1, or the sigmoid of a score of its own.
enum Shared : int32_t { SHARED_NONE = 0, SHARED_PLAIN = 1, SHARED_GATED = 2 };

// Mirrored by experts.py.
struct ExpertsSetting {
  int32_t experts;     // that the router chooses from, E
  int32_t top_k;       // how many of them
  int32_t scoring;
  int32_t normalise;   // weights are divided by their sum
  int32_t groups;      // of experts, equally many in each; rows choose groups first if they may not choose from all
  int32_t top_groups;  // how many
  int32_t group_rank;  // how many of a group's best are added up to judge it
  int32_t shared;
  int32_t activation;
  float scale;         // of the weights
  float alpha, limit;  // of ACT_CLAMPED
};

struct Experts;

// `gate_up`, `down`: E layers each, and the shared one; gate_up packed as gate | up, [2 I, H] each, down [H, I], I of each pair its
// own. They are not kept alive. `correction` [E] is added to what experts are chosen by, not to their weights; or null. Throws
// std::invalid_argument if they do not fit.
Experts* experts_create(const ExpertsSetting*, const Linear* const* gate_up, const Linear* const* down, const float* correction);
void experts_free(Experts*);
int64_t experts_chosen(const Experts*);      // experts per row, the shared one included
int64_t experts_scores(const Experts*);      // scores per row
int64_t experts_step_bytes(const Experts*);  // what a row reads, at most

struct ExpertsCall {
  const Experts* experts;
  const void* x;          // [rows, H] of the layers' input
  const int32_t* chosen;  // [rows, experts_chosen], each 0 .. number of layers - 1
  const float* weights;   // [rows, experts_chosen]
  void* out;              // [rows, H] of the same dtype; may not overlap x
  int64_t rows;
};

// Who runs the tasks of one phase: task(arg, number) for each of them, all done when it returns.
struct Shares {
  void* context;
  void (*run)(void* context, int tasks, void (*task)(void* arg, int number), void* arg);
  int threads;
};

Shares shares_of(Pool*);

// Which experts rows go through, in the order of their scores (equal ones: the lower number first), then the shared one.
// scores [rows, experts_scores] -> chosen, weights [rows, experts_chosen].
void experts_route(const Shares&, const Experts*, const float* scores, int64_t rows, int32_t* chosen, float* weights);
void experts_run(const Shares&, const ExpertsCall*);
// Both: scores [rows, experts_scores].
void experts_route_run(const Shares&, const Experts*, const void* x, const float* scores, void* out, int64_t rows);

// gate_up [rows, 2 width] -> out [rows, width], of one dtype.
void gated_rows(Pool*, DType, Activation, float alpha, float limit, const void* gate_up, void* out, int64_t rows, int64_t width);

// x *= factor, [rows, width].
void scale_rows(Pool*, DType, void* x, float factor, int64_t rows, int64_t width);
// x = cap * tanh(x / cap), [rows, width].
void softcap_rows(Pool*, float* x, float cap, int64_t rows, int64_t width);

// Functions of one number. Mirrored by ops.py.
enum Function : int32_t { FN_SILU = 0, FN_GELU = 1, FN_GELU_TANH = 2, FN_RELU = 3, FN_TANH = 4, FN_SIGMOID = 5 };

// out = function(x), [rows, width]; out may be x.
void unary_rows(Pool*, DType, Function, const void* x, void* out, int64_t rows, int64_t width);
// out = x * y, [rows, width]; out may be either.
void mul_rows(Pool*, DType, const void* x, const void* y, void* out, int64_t rows, int64_t width);
// out = (x - mean) / sqrt(variance + eps) * weight + bias, [rows, width]; bias [width] or null. out may be x.
void layer_norm_rows(Pool*, DType, const void* x, const float* weight, const float* bias, float eps, void* out,
                     int64_t rows, int64_t width);

// Kernels of one instruction set and dtype of rows.
struct MixKernels {
  // gate and up [count] -> out [count].
  void (*gated)(Activation, float alpha, float limit, const void* gate, const void* up, void* out, int64_t count);
  // out[i] = sum over k, in order, of weights[k] * parts[k][i].
  void (*combine)(const float* const* parts, const float* weights, int64_t count, void* out, int64_t width);
  void (*sigmoid)(const float* x, float* out, int64_t count);
  void (*scale)(void* x, float factor, int64_t count);
  void (*softcap)(float* x, float cap, int64_t count);
  void (*unary)(Function, const void* x, void* out, int64_t count);
  void (*mul)(const void* x, const void* y, void* out, int64_t count);
  void (*layer_norm)(const void* x, const float* weight, const float* bias, float eps, void* out, int64_t width);
};

extern const MixKernels mix_kernels_portable[2];  // float32, bfloat16
#if DW_HAVE_AVX2
extern const MixKernels mix_kernels_avx2[2];
#endif
#if DW_HAVE_AVX512VNNI
extern const MixKernels mix_kernels_avx512vnni[2];
#endif
#if DW_HAVE_AVX512
extern const MixKernels mix_kernels_avx512[2];
#endif

}  // namespace dw
