// The ways in and out of linear kernels, on the vector layer: rows quantised, sums finished. What they compute is what linear_impl.h
// computes one by one; only the exponential of SiLU is another.
#pragma once

#include "linear_kernels.h"
#include "linear_sum.h"
#include "vec.h"

namespace dw {
namespace {

DW_INLINE vf load_out(const void* out, int64_t at, DType dtype, int n) {
  return dtype == F32 ? load_n(static_cast<const float*>(out) + at, n) : load_n(static_cast<const bf16*>(out) + at, n);
}
DW_INLINE void store_out(void* out, int64_t at, DType dtype, int n, vf v) {
  if (dtype == F32)
    store_n(static_cast<float*>(out) + at, v, n);
  else
    store_n(static_cast<bf16*>(out) + at, v, n);
}
DW_INLINE vf rounded_to(vf v, DType dtype) {
  return dtype == F32 ? v : rounded(v, static_cast<const bf16*>(nullptr));
}

// x / (1 + e^-x), with e of a negative number on both sides, so that nothing overflows and large negative numbers give zero.
DW_INLINE vf silu_of(vf x) {
  const vi negative = x < 0.0f;
  const vf e = exp(select(negative, x, -x));
  return select(negative, x * e, x) / (e + 1.0f);
}

void finish_vectors(const Finish& f) {
  for (int r = 0; r < f.rows; ++r) {
    vf y[2];
    for (int half = 0; half < 2; ++half) {
      vf value = load(f.sums + r * f.sums_stride + half * LANES);
      if (f.integers) value = to_floats((vi)value);
      if (f.scale != nullptr) value = value * load(f.scale + half * LANES);
      if (f.row_scale != nullptr) value = value * f.row_scale[r];
      y[half] = f.bias == nullptr ? value : value + load(f.bias + half * LANES);
    }
    if (f.epilogue == EP_SILU_MUL) {
      vf gate = rounded_to(silu_of(rounded_to(y[0], f.dtype)), f.dtype);
      store_out(f.out, r * f.ldo + f.column[0], f.dtype, f.count[0], gate * rounded_to(y[1], f.dtype));
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      if (f.count[half] == 0) continue;
      const int64_t at = r * f.ldo + f.column[half];
      vf value = y[half];
      if (f.epilogue == EP_ADD) value = load_out(f.out, at, f.dtype, f.count[half]) + rounded_to(value, f.dtype);
      store_out(f.out, at, f.dtype, f.count[half], value);
    }
  }
}

template <class T>
DW_INLINE float quantize_row(const T* x, int64_t count, int8_t* q) {
  auto left = [count](int64_t i) { return int(count - i < LANES ? count - i : LANES); };
  vi largest = splat_i(0);  // of the bits without sign: ordered as the magnitudes, with infinity and NaN above all
  for (int64_t i = 0; i < count; i += LANES) {
    vi bits = (vi)load_n(x + i, left(i)) & 0x7fffffff;
    largest = select(largest < bits, bits, largest);
  }
  int32_t lanes[LANES], most = 0;
  store(lanes, largest);
  for (int32_t lane : lanes) most = lane > most ? lane : most;
  float top;
  memcpy(&top, &most, sizeof top);
  const float inverse = 127.0f / top;
  if (most >= 0x7f800000 || !(inverse < 0x1p127f)) {  // not finite; or nothing but zeros and the smallest numbers
    memset(q, 0, size_t(count));
    return most >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
  }
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even
  for (int64_t i = 0; i < count; i += LANES)
    store_bytes(q + i, (vi)(load_n(x + i, left(i)) * inverse + magic) - 0x4b400000, left(i));
  return top / 127.0f;
}

float quantize_vectors(const void* x, DType dtype, int64_t count, int8_t* q) {
  if (dtype == F32) return quantize_row(static_cast<const float*>(x), count, q);
  return quantize_row(static_cast<const bf16*>(x), count, q);
}

}  // namespace
}  // namespace dw
