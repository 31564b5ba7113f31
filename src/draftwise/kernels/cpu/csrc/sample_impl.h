// Kernels of sample.h for one instruction set; the including file names the table: DW_TABLE.
#pragma once

#include "sample.h"
#include "vec.h"

namespace dw {
namespace {

constexpr float INF = __builtin_inff();

// The first n lanes; the others are `fill`.
DW_INLINE vf load_or(const float* p, int n, float fill) {
  if (n >= LANES) return load(p);
  float part[LANES];
  for (int i = 0; i < LANES; i++) part[i] = i < n ? p[i] : fill;
  return load(part);
}

DW_INLINE int lanes_left(int64_t n, int64_t i) { return (int)(n - i < LANES ? n - i : LANES); }

float max_row(const float* x, int64_t n) {
  vf a = splat(-INF), b = a;
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES) {
    a = max(load(x + i), a);
    b = max(load(x + i + LANES), b);
  }
  for (; i < n; i += LANES) a = max(load_or(x + i, lanes_left(n, i), -INF), a);
  return max_lanes(max(a, b));
}

// Where the largest stands: per lane its first place, then the lowest place of all. -1: nothing is above -INF, or
// something is NaN.
struct Best {
  vf value = splat(-INF);
  vi at = splat_i(-1);
  vi numbers = splat_i(-1);

  DW_INLINE void offer(vf v, int32_t first) {
    vi better = v > value;
    numbers = numbers & (v >= -INF);  // beside the chain of selections, which takes longer
    value = select(better, v, value);
    at = select(better, splat_i(first), at);
  }
  DW_INLINE int64_t place() const {
    if (any(~numbers)) return -1;
    float v[LANES];
    int32_t p[LANES];
    memcpy(v, &value, sizeof v);
    memcpy(p, &at, sizeof p);
    int64_t best = -1;
    float top = -INF;
    for (int i = 0; i < LANES; i++) {
      if (p[i] < 0 || v[i] < top) continue;
      int64_t place = p[i] + i;
      if (best < 0 || v[i] > top || place < best) best = place;
      top = v[i];
    }
    return best;
  }
};

int64_t argmax_row(const float* x, int64_t n) {
  Best best;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) best.offer(load(x + i), (int32_t)i);
  if (i < n) best.offer(load_or(x + i, lanes_left(n, i), -INF), (int32_t)i);
  return best.place();
}

double weights_row(const float* x, float top, float scale, float floor, float* out, double* sums, int64_t n) {
  double total = 0.0;
  for (int64_t start = 0; start < n; start += SUM_BLOCK) {
    vf sum = {};
    int64_t end = start + SUM_BLOCK < n ? start + SUM_BLOCK : n;
    for (int64_t i = start; i < end; i += LANES) {
      int left = lanes_left(end, i);
      vf v = load_or(x + i, left, -INF);
      vf w = exp((v - top) * scale);
      w = select(v < floor, vf{}, w);  // NaN stays
      if (out != nullptr) store_n(out + i, w, left);
      sum += w;
    }
    total += (double)sum_lanes(sum);
    sums[start / SUM_BLOCK] = total;
  }
  return total;
}

double residual_row(const float* p, float p_scale, const float* q, float q_scale, float* out, double* sums, int64_t n) {
  double total = 0.0;
  for (int64_t start = 0; start < n; start += SUM_BLOCK) {
    vf sum = {};
    int64_t end = start + SUM_BLOCK < n ? start + SUM_BLOCK : n;
    for (int64_t i = start; i < end; i += LANES) {
      int left = lanes_left(end, i);
      vf w = load_or(p + i, left, 0.0f) * p_scale - load_or(q + i, left, 0.0f) * q_scale;
      w = select(w < 0.0f, vf{}, w);
      if (out != nullptr) store_n(out + i, w, left);
      sum += w;
    }
    total += (double)sum_lanes(sum);
    sums[start / SUM_BLOCK] = total;
  }
  return total;
}

int64_t collect_row(const float* x, float limit, float* out, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += LANES) {
    vf v = load_or(x + i, lanes_left(n, i), -INF);
    vi found = v >= limit;
#if defined(__AVX512F__)
    __mmask16 mask = _mm512_movepi32_mask((__m512i)found);
    if (mask == 0) continue;
    _mm512_mask_compressstoreu_ps(out + count, mask, (__m512)v);
    count += __builtin_popcount(mask);
#else
    if (!any(found)) continue;
    int32_t hits[LANES];
    float values[LANES];
    store(hits, found);
    store(values, v);
    for (int lane = 0; lane < LANES; lane++)
      if (hits[lane]) out[count++] = values[lane];
#endif
  }
  return count;
}

// ---------------------------------------------------------------------------------------------------------- noise

DW_INLINE vq mixed(vq z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// log(1 + m) for m in [-1/4, 1/2], relative error 1e-7.
DW_INLINE vf log1p_near(vf m) {
  vf p = splat(-0.04490960862f);
  p = fma(p, m, splat(0.1044833157f));
  p = fma(p, m, splat(-0.1316223234f));
  p = fma(p, m, splat(0.1448206161f));
  p = fma(p, m, splat(-0.1664776712f));
  p = fma(p, m, splat(0.1999060674f));
  p = fma(p, m, splat(-0.2500005458f));
  p = fma(p, m, splat(0.3333345444f));
  p = fma(p, m, splat(-0.5f));
  return fma(p * m, m, m);
}

// k * 2^23 for the k with x * 2^-k in [3/4, 3/2), x > 0.
DW_INLINE vi exponent(vf x) { return ((vi)x - 0x3f400000) & (int32_t)0xff800000; }

DW_INLINE vf times_ln2(vi k23, vf low) {
  // in two parts: the first is exact for every exponent
  vf k = to_floats(k23 >> 23);
  return fma(k, splat(0.693359375f), fma(k, splat(-2.12194440e-4f), low));
}

// log(x), x > 0
DW_INLINE vf log(vf x) {
  vi k = exponent(x);
  return times_ln2(k, log1p_near((vf)((vi)x - k) - 1.0f));
}

// -log(-log(1 - u)) for u = (bits + 1/2) 2^-40, at most 1 - 2^-24; log(1 - u) keeps its relative precision near 0.
DW_INLINE vf gumbel_of(vf bits) {
  vf u = (bits + 0.5f) * 0x1p-40f;
  vf high = splat(1.0f - 0x1p-24f);
  u = select(u > high, high, u);
  vi k = exponent(1.0f - u);
  vf power = (vf)(0x3f800000 - k);  // 2^-k: (1 - u) 2^-k - 1 = (2^-k - 1) - u 2^-k, without rounding 1 - u
  vf m = (power - 1.0f) - u * power;
  vf e = -times_ln2(k, log1p_near(m));
  return -log(e);
}

// What splitmix64 adds to its seed before output `token`: (token + 1) * golden.
struct Counters {
  vq low, high;

  DW_INLINE Counters() {
    uint64_t first[LANES];
    for (int i = 0; i < LANES; i++) first[i] = (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u;
    low = load(first);
    high = load(first + 8);
  }
  DW_INLINE void advance() {
    const uint64_t step = LANES * 0x9E3779B97F4A7C15u;
    low = low + step;
    high = high + step;
  }
  // Those of the first n ids instead.
  DW_INLINE void of(const int64_t* ids, int n) {
    uint64_t part[LANES] = {};
    for (int i = 0; i < n; i++) part[i] = (uint64_t)(ids[i] + 1) * 0x9E3779B97F4A7C15u;
    low = load(part);
    high = load(part + 8);
  }
  DW_INLINE vf noise(uint64_t key) const {
    return gumbel_of(to_floats(mixed(low + key) >> 24, mixed(high + key) >> 24));
  }
};

int64_t argmax_gumbel_row(const float* x, float scale, float floor, uint64_t key, const int64_t* ids, int64_t n) {
  Best best;
  Counters counters;
  for (int64_t i = 0; i < n; i += LANES) {
    int left = lanes_left(n, i);
    if (ids != nullptr) counters.of(ids + i, left);
    vf v = load_or(x + i, left, -INF);
    vf score = v * scale + counters.noise(key);
    best.offer(select(v < floor, splat(-INF), score), (int32_t)i);
    counters.advance();
  }
  return best.place();
}

void gumbel_row(uint64_t key, const int64_t* ids, float* out, int64_t n) {
  Counters counters;
  for (int64_t i = 0; i < n; i += LANES) {
    int left = lanes_left(n, i);
    if (ids != nullptr) counters.of(ids + i, left);
    store_n(out + i, counters.noise(key), left);
    counters.advance();
  }
}

}  // namespace

extern const SampleKernels DW_TABLE = {max_row,     argmax_row,        weights_row, residual_row,
                                       collect_row, argmax_gumbel_row, gumbel_row};

}  // namespace dw
