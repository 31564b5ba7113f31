// Kernels of experts.h for one instruction set; the including file names the table: DW_TABLE.
#pragma once

#include "experts.h"
#include "vec.h"

namespace dw {
namespace {

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
DW_INLINE vf gelu_tanh(vf x) {
  vf inner = fma(x * x * x, splat(0.044715f), x) * 0.7978845608028654f;
  return x * 0.5f * (tanh(inner) + 1.0f);
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

// erf(x), absolute error below 2e-7 (Abramowitz and Stegun, 7.1.26).
DW_INLINE vf erf(vf x) {
  vf zero = splat(0.0f);
  vf size = select(x < zero, -x, x);
  vf t = 1.0f / (size * 0.3275911f + 1.0f);
  vf p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  vf value = 1.0f - p * t * exp(-(size * size));
  return select(x < zero, -value, value);
}

DW_INLINE vf function_lanes(Function function, vf x) {
  switch (function) {
    case FN_SILU: return silu(x);
    case FN_GELU: return x * 0.5f * (erf(x * 0.7071067811865476f) + 1.0f);
    case FN_GELU_TANH: return gelu_tanh(x);
    case FN_RELU: return select(x < splat(0.0f), splat(0.0f), x);
    case FN_TANH: return tanh(x);
    default: return 1.0f / (exp(-x) + 1.0f);
  }
}

template <class T>
void unary_row(Function function, const void* x, void* out, int64_t count) {
  const T* from = (const T*)x;
  T* to = (T*)out;
  for (int64_t i = 0; i < count; i += LANES) {
    int n = (int)(count - i < LANES ? count - i : LANES);
    store_n(to + i, function_lanes(function, load_n(from + i, n)), n);
  }
}

template <class T>
void mul_row(const void* x, const void* y, void* out, int64_t count) {
  const T *a = (const T*)x, *b = (const T*)y;
  T* to = (T*)out;
  for (int64_t i = 0; i < count; i += LANES) {
    int n = (int)(count - i < LANES ? count - i : LANES);
    store_n(to + i, load_n(a + i, n) * load_n(b + i, n), n);
  }
}

template <class T>
void layer_norm_row(const void* x, const float* weight, const float* bias, float eps, void* out, int64_t width) {
  const T* row = (const T*)x;
  T* to = (T*)out;
  vf sum = {};
  for (int64_t i = 0; i < width; i += LANES) sum = sum + load_n(row + i, (int)(width - i < LANES ? width - i : LANES));
  const float mean = sum_lanes(sum) / (float)width;
  vf squares = {};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    vf v = load(row + i) - mean;
    squares = fma(v, v, squares);
  }
  float rest = 0.0f;  // lanes behind the end are zero, and would be -mean
  for (; i < width; i++) {
    float v = to_float(row[i]) - mean;
    rest += v * v;
  }
  const float factor = 1.0f / __builtin_sqrtf((sum_lanes(squares) + rest) / (float)width + eps);
  for (i = 0; i < width; i += LANES) {
    int n = (int)(width - i < LANES ? width - i : LANES);
    vf v = (load_n(row + i, n) - mean) * factor * load_n(weight + i, n);
    if (bias != nullptr) v = v + load_n(bias + i, n);
    store_n(to + i, v, n);
  }
}

}  // namespace

extern const MixKernels DW_TABLE[2] = {
    {gated_row<float>, combine_row<float>, sigmoid_row, scale_row<float>, softcap_row, unary_row<float>, mul_row<float>,
     layer_norm_row<float>},
    {gated_row<bf16>, combine_row<bf16>, sigmoid_row, scale_row<bf16>, softcap_row, unary_row<bf16>, mul_row<bf16>,
     layer_norm_row<bf16>},
};

}  // namespace dw
