// Drawing tokens from rows of logits, a row at a time in one order of arithmetic. The reference is
// draftwise/sampling/draw.py, in torch.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "isa.h"
#include "pool.h"

namespace dw {

constexpr int64_t SUM_BLOCK = 64;  // tokens whose weights are summed in float32; blocks add up in double

// Kernels of one instruction set, on one row of n numbers. `sums` [blocks of 64]: running totals.
struct SampleKernels {
  float (*max)(const float* x, int64_t n);
  // The lowest of the largest. -1: nothing is above -INF, or something is NaN.
  int64_t (*argmax)(const float* x, int64_t n);
  // exp((x - top) * scale), 0 where x < floor; `out` may be null. Returns the total.
  double (*weights)(const float* x, float top, float scale, float floor, float* out, double* sums, int64_t n);
  // max(p * p_scale - q * q_scale, 0). `out` may be p, or null. Returns the total.
  double (*residual)(const float* p, float p_scale, const float* q, float q_scale, float* out, double* sums, int64_t n);
  // The x >= limit, in order: how many.
  int64_t (*collect)(const float* x, float limit, float* out, int64_t n);
  // The largest of x * scale + g over x >= floor, g the Gumbel noise of tokens ids[i] (i itself if null) under `key`.
  // -1: there is none.
  int64_t (*argmax_gumbel)(const float* x, float scale, float floor, uint64_t key, const int64_t* ids, int64_t n);
  // That noise.
  void (*gumbel)(uint64_t key, const int64_t* ids, float* out, int64_t n);
};

extern const SampleKernels sample_kernels_portable;
#if DW_HAVE_AVX2
extern const SampleKernels sample_kernels_avx2;
#endif
#if DW_HAVE_AVX512VNNI
extern const SampleKernels sample_kernels_avx512vnni;
#endif
#if DW_HAVE_AVX512
extern const SampleKernels sample_kernels_avx512;
#endif
const SampleKernels& sample_kernels();  // those of the current instruction set

// Inverse CDF: the index i where the running sum of weights exceeds u * total. A weight of 0 is never drawn; -1: there
// is no weight. Example: weights (.5, 0, .5), u = .5 -> 2.
int64_t pick(const float* weights, const double* sums, int64_t n, double u);

// Its two steps: the block in which the target lies, and the token in a block (`weights`: the block's `count`;
// `before`: the total before it; -1: none has a weight).
int64_t block_of(const double* sums, int64_t blocks, double target);
int64_t within(const float* weights, int64_t count, double before, double target);

inline int64_t num_blocks(int64_t n) { return (n + SUM_BLOCK - 1) / SUM_BLOCK; }
constexpr double BELOW_ONE = 1.0 - 0x1p-52;  // times a total it stays below it after rounding

// What is left of softmax(scale * logits).
struct Shape {
  double top_p;     // 1: all
  float scale;      // one over the temperature
  float log_min_p;  // -inf: all
  int32_t top_k;    // 0: all

  bool cuts() const { return top_k > 0 || top_p < 1.0 || log_min_p > -std::numeric_limits<float>::infinity(); }
};

// Finds the logit below which min_p, top_k and top_p exclude tokens, in this order; what ties with the last one that is
// kept stays. The reference is draftwise/sampling/logits.py.
class Floor {
 public:
  // x [n], the largest of which is `top` -> the floor; -inf: nothing is excluded.
  float find(const float* x, float top, const Shape& shape, int64_t n);

 private:
  float of_head(const float* x, float top, float floor, const Shape& shape, int64_t n);

  std::vector<float> head_, weights_;
  std::vector<double> sums_;
};

// A request's place in a chain that is drafted natively. Mirrored by program.py.
struct ChainKey {
  uint64_t seed;
  uint32_t sample_index;
  int32_t base;  // committed tokens
  int32_t node;  // of the first token that is drawn
  float scale;   // this and the following: its Shape
  float log_min_p;
  int32_t top_k;
  double top_p;
};

// One draft. SHARED_NOISE: the largest of scale * logits + noise; DRAFT_NOISE: by inverse CDF of
// q [vocab] = softmax(scale * logits), which is written; of what the key's shape leaves, both.
int64_t draw_draft(const float* logits, const ChainKey& key, int stream, int64_t step, const int64_t* target_ids,
                   float* q, int64_t vocab);

}  // namespace dw
