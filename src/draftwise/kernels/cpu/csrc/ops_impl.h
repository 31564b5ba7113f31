// Kernels of ops.h for one instruction set; the including file names the table: DW_TABLE.
#pragma once

#include "ops.h"
#include "vec.h"

namespace dw {
namespace {

constexpr int64_t MAX_HEAD_DIM = 1024;

DW_INLINE float root(float x) { return __builtin_sqrtf(x); }

// 1 / sqrt(mean(x^2) + eps): lanes over the width, sixteen partial sums, one tree.
template <class T>
DW_INLINE float inverse_rms(const T* x, int64_t width, float eps) {
  vf sum = splat(0.0f);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    vf v = load(x + i);
    sum = fma(v, v, sum);
  }
  if (i < width) {
    vf v = load_n(x + i, (int)(width - i));
    sum = fma(v, v, sum);
  }
  return 1.0f / root(sum_lanes(sum) / (float)width + eps);
}

template <class T>
DW_INLINE void scale_by(const T* x, const float* weight, float factor, T* out, int64_t width) {
  vf f = splat(factor);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(out + i, load(x + i) * f * load(weight + i));
  if (i < width) {
    int n = (int)(width - i);
    store_n(out + i, load_n(x + i, n) * f * load_n(weight + i, n), n);
  }
}

template <class T>
void rms_norm_rows(const void* x, const float* weight, float eps, void* out, int64_t width, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    const T* row = (const T*)x + r * width;
    scale_by(row, weight, inverse_rms(row, width, eps), (T*)out + r * width, width);
  }
}

template <class T>
DW_INLINE void add_row(const T* add, T* row, int64_t width) {
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(row + i, load(row + i) + load(add + i));
  if (i < width) {
    int n = (int)(width - i);
    store_n(row + i, load_n(row + i, n) + load_n(add + i, n), n);
  }
}

template <class T>
void add_only_rows(const void* x, void* residual, int64_t width, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) add_row((const T*)x + r * width, (T*)residual + r * width, width);
}

template <class T>
void add_rms_norm_rows(const void* x, void* residual, const float* weight, float eps, void* out, int64_t width,
                       int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    T* row = (T*)residual + r * width;
    add_row((const T*)x + r * width, row, width);
    scale_by(row, weight, inverse_rms(row, width, eps), (T*)out + r * width, width);
  }
}

template <class T>
void silu_mul_rows(const void* gate_up, void* out, int64_t width, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    const T* gate = (const T*)gate_up + r * 2 * width;
    const T* up = gate + width;
    T* to = (T*)out + r * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(to + i, silu(load(gate + i)) * load(up + i));
    if (i < width) {
      int n = (int)(width - i);
      store_n(to + i, silu(load_n(gate + i, n)) * load_n(up + i, n), n);
    }
  }
}

template <class T>
void silu_add_row(const void* x, const void* residual, void* out, int64_t width) {
  const T *given = (const T*)x, *before = (const T*)residual;
  T* to = (T*)out;
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) store(to + i, load(before + i) + silu(load(given + i)));
  if (i < width) {
    int n = (int)(width - i);
    store_n(to + i, load_n(before + i, n) + silu(load_n(given + i, n)), n);
  }
}

void softmax_row(const float* x, float scale, float* out, int64_t width) {
  vf high = splat(x[0]);
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) high = max(load(x + i), high);
  float top = max_lanes(high);
  for (; i < width; i++) top = x[i] > top ? x[i] : top;
  vf total = {};
  i = 0;
  for (; i + LANES <= width; i += LANES) {
    vf e = exp((load(x + i) - top) * scale);
    store(out + i, e);
    total += e;
  }
  float sum = 0.0f;
  for (int lane = 0; lane < LANES; lane++) sum += total[lane];
  if (i < width) {
    int n = (int)(width - i);
    vf e = exp((load_n(x + i, n) - top) * scale);
    store_n(out + i, e, n);
    for (int lane = 0; lane < n; lane++) sum += e[lane];
  }
  float inverse = 1.0f / sum;
  for (i = 0; i < width; i++) out[i] *= inverse;
}

// x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin, halves of a head; in may be out.
template <class T>
DW_INLINE void rotate(const T* in, const float* rotation, T* out, int64_t half) {
  const float *cosines = rotation, *sines = rotation + half;
  int64_t i = 0;
  for (; i < half; i += LANES) {
    int n = (int)(half - i < LANES ? half - i : LANES);
    vf a = load_n(in + i, n), b = load_n(in + half + i, n);
    vf c = load_n(cosines + i, n), s = load_n(sines + i, n);
    store_n(out + i, fma(a, c, -(b * s)), n);
    store_n(out + half + i, fma(b, c, a * s), n);
  }
}

// One head's keys or values into the cache: as they are, rounded to another type, or as int8 or fp8 with a scale.
template <class T, class S>
DW_INLINE void write_entry(const T* x, S* entry, float*, int64_t dim) {
  for (int64_t i = 0; i < dim; i += LANES) {
    int n = (int)(dim - i < LANES ? dim - i : LANES);
    store_n(entry + i, load_n(x + i, n), n);
  }
}
template <class T>
DW_INLINE float largest(const T* x, int64_t dim) {
  vf high = {};
  for (int64_t i = 0; i < dim; i += LANES) {
    vf v = load_n(x + i, (int)(dim - i < LANES ? dim - i : LANES));
    high = max(high, max(v, -v));
  }
  return max_lanes(high);
}
template <class T>
DW_INLINE void write_entry(const T* x, f8* entry, float* scale, int64_t dim) {
  const float top = largest(x, dim), inverse = top > 0.0f ? 448.0f / top : 0.0f;  // 448 is the largest number of fp8
  *scale = top / 448.0f;
  for (int64_t i = 0; i < dim; i += LANES) {
    int n = (int)(dim - i < LANES ? dim - i : LANES);
    store_bytes((int8_t*)entry + i, to_f8(load_n(x + i, n) * inverse), n);
  }
}
template <class T>
DW_INLINE void write_entry(const T* x, int8_t* entry, float* scale, int64_t dim) {
  const float top = largest(x, dim), inverse = top > 0.0f ? 127.0f / top : 0.0f;
  *scale = top / 127.0f;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  for (int64_t i = 0; i < dim; i += LANES) {
    int n = (int)(dim - i < LANES ? dim - i : LANES);
    vf v = load_n(x + i, n) * inverse + magic;
    store_bytes(entry + i, (vi)v - 0x4b400000, n);
  }
}

template <class T, class S>
void rope_write_rows(const RopeCall* call, int64_t begin, int64_t end) {
  const int64_t dim = call->head_dim, heads = call->num_heads, kv_heads = call->num_kv_heads;
  const int64_t entries = call->latent != 0 ? kv_heads : 2 * kv_heads;
  const int64_t width = (heads + entries) * dim;
  T normed[MAX_HEAD_DIM], key[MAX_HEAD_DIM];
  for (int64_t r = begin; r < end; r++) {
    T* row = (T*)call->qkv + r * width;
    const float* rotation = call->rotation + r * dim;
    S* entry = (S*)call->kv + call->slots[r] * entries * dim;
    float* scales = call->kv_scales == nullptr ? nullptr : call->kv_scales + call->slots[r] * entries;
    for (int64_t h = 0; h < heads + kv_heads; h++) {
      T* from = row + h * dim;
      T* to = h < heads ? from : key;
      const float* weight = h < heads ? call->q_norm : call->k_norm;
      if (weight != nullptr) {
        scale_by(from, weight, inverse_rms(from, dim, call->eps), normed, dim);
        from = normed;
      }
      rotate(from, rotation, to, dim / 2);
      if (h >= heads) write_entry(key, entry + (h - heads) * dim, scales + (h - heads), dim);
    }
    for (int64_t h = kv_heads; h < entries; h++)
      write_entry(row + (heads + h) * dim, entry + h * dim, scales + h, dim);
  }
}

}  // namespace

#define DW_ROPES(T) \
  {rope_write_rows<T, float>, rope_write_rows<T, bf16>, rope_write_rows<T, f16>, rope_write_rows<T, int8_t>, \
   rope_write_rows<T, f8>}
extern const RowKernels DW_TABLE[2] = {
    {rms_norm_rows<float>, add_rms_norm_rows<float>, add_only_rows<float>, silu_mul_rows<float>, silu_add_row<float>,
     DW_ROPES(float), softmax_row},
    {rms_norm_rows<bf16>, add_rms_norm_rows<bf16>, add_only_rows<bf16>, silu_mul_rows<bf16>, silu_add_row<bf16>,
     DW_ROPES(bf16), softmax_row},
};
#undef DW_ROPES

}  // namespace dw
