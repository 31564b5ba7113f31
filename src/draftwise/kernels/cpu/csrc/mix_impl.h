// Kernels of experts.h for one instruction set; the including file names the table: DW_TABLE.
#pragma once

#include "experts.h"
#include "vec.h"

namespace dw {
namespace {

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
DW_INLINE vf gelu_tanh(vf x) {
  vf inner = fma(x * x * x, splat(0.044715f), x) * 0.7978845608028654f;
  return 0.5f * x * (tanh(inner) + 1.0f);
}

DW_INLINE vf gated_lanes(Activation kind, float alpha, float limit, vf gate, vf up) {
  if (kind == ACT_SILU) return silu(gate) * up;
  if (kind == ACT_GELU_TANH) return gelu_tanh(gate) * up;
  vf high = splat(limit), low = splat(-limit);
  gate = select(gate > high, high, gate);
  up = select(up > high, high, up);
  up = select(up < low, low, up);
  return gate / (exp(-(gate * alpha)) + 1.0f) * (up + 1.0f);
}

template <class T>
void gated_row(Activation kind, float alpha, float limit, const void* gate, const void* up, void* out, int64_t count) {
  const T *g = (const T*)gate, *u = (const T*)up;
  T* to = (T*)out;
  for (int64_t i = 0; i < count; i += LANES) {
    int n = (int)(count - i < LANES ? count - i : LANES);
    store_n(to + i, gated_lanes(kind, alpha, limit, load_n(g + i, n), load_n(u + i, n)), n);
  }
}

template <class T>
void combine_row(const float* const* parts, const float* weights, int64_t count, void* out, int64_t width) {
  T* to = (T*)out;
  for (int64_t i = 0; i < width; i += LANES) {
    int n = (int)(width - i < LANES ? width - i : LANES);
    vf sum = {};
    for (int64_t k = 0; k < count; k++) sum = fma(weights[k], load_n(parts[k] + i, n), sum);
    store_n(to + i, sum, n);
  }
}

void sigmoid_row(const float* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    int n = (int)(count - i < LANES ? count - i : LANES);
    store_n(out + i, 1.0f / (exp(-load_n(x + i, n)) + 1.0f), n);
  }
}

template <class T>
void scale_row(void* x, float factor, int64_t count) {
  T* at = (T*)x;
  for (int64_t i = 0; i < count; i += LANES) {
    int n = (int)(count - i < LANES ? count - i : LANES);
    store_n(at + i, load_n(at + i, n) * factor, n);
  }
}

void softcap_row(float* x, float cap, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    int n = (int)(count - i < LANES ? count - i : LANES);
    store_n(x + i, tanh(load_n(x + i, n) * (1.0f / cap)) * cap, n);
  }
}

}  // namespace

extern const MixKernels DW_TABLE[2] = {
    {gated_row<float>, combine_row<float>, sigmoid_row, scale_row<float>, softcap_row},
    {gated_row<bf16>, combine_row<bf16>, sigmoid_row, scale_row<bf16>, softcap_row},
};

}  // namespace dw
