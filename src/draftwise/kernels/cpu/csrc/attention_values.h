// Second half of an attention kernel: the sum of values, each weighed by its key's exponential.
#pragma once

#include "attention_work.h"

namespace dw {
namespace {

// The values of one key, as vectors: two or four of 16 dimensions, or n <= 16 dimensions in one. With `Mixed` (bfloat16 to
// bfloat16), two vectors hold the even and the odd ones of 32 dimensions: `store_values` puts them back in order.
template <bool Mixed, int N, class S>
DW_INLINE void load_values(const S* value, int n, vf* v) {
  if (N == 1) {
    v[0] = load_n(value, n);
    return;
  }
  for (int c = 0; c < N; c++) v[c] = load(value + c * LANES);
}
template <bool Mixed, int N>
DW_INLINE void load_values(const bf16* value, int n, vf* v) {
  if (N == 1) {
    v[0] = load_n(value, n);
    return;
  }
  for (int c = 0; c + 1 < N; c += 2) {
    if (Mixed) {
      vu pairs = load_pairs(value + c * LANES);
      v[c] = even(pairs);
      v[c + 1] = odd(pairs);
    } else {
      v[c] = load(value + c * LANES);
      v[c + 1] = load(value + (c + 1) * LANES);
    }
  }
}
template <bool Mixed, class T>
DW_INLINE void store_values(T* out, vf a, vf b) {
  if (Mixed) {
    store_pairs((bf16*)out, a, b);
  } else {
    store(out, a);
    store(out + LANES, b);
  }
}

// acc[r][d ..] += sum over keys j in [lo, hi) of p[r][j] * value[slots[j]][d ..], one chain in order of j.
template <class T, class S, int R, int N>
DW_INLINE void add_values(const Work<T, S>& w, const float* p, const int32_t* slots, int lo, int hi, int d, int n,
                          float* acc) {
  vf sums[R][N];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < N; c++) sums[r][c] = load(acc + r * w.padded + d + c * LANES);
  for (int j = lo; j < hi; j++) {
    vf v[N];
    load_values<BOTH_BF16<T, S>, N>(w.values + slots[j] * w.stride + d, n, v);
    const float scale = SCALED<S> ? w.value_scales[slots[j] * w.scale_stride] : 1.0f;
    for (int r = 0; r < R; r++) {
      float share = p[r * PARTITION + j];
      const float weight = SCALED<S> ? share * scale : share;
      for (int c = 0; c < N; c++) sums[r][c] = fma(weight, v[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < N; c++) store(acc + r * w.padded + d + c * LANES, sums[r][c]);
}

template <class T, class S, int R>
void add_values_rows(const Work<T, S>& w, const float* p, const int32_t* slots, int lo, int hi, float* acc) {
  if (lo >= hi) return;
  int d = 0;
  for (; d + 4 * LANES <= w.dim; d += 4 * LANES)
    for (int c = 0; c < 4; c += VALUE_VECTORS)
      add_values<T, S, R, VALUE_VECTORS>(w, p, slots, lo, hi, d + c * LANES, LANES, acc);
  for (; d < w.dim; d += LANES) add_values<T, S, R, 1>(w, p, slots, lo, hi, d, w.dim - d, acc);
}

// R query vectors over the keys that they see in the partition; those below `plain` are common to all.
template <class T, class S, int R>
DW_INLINE void weigh_rows(const Work<T, S>& w, int m, const float* weights, float* acc) {
  acc += m * w.padded;
  const float* p = weights + m * PARTITION;
  const int32_t *lo = w.at.lo + m, *hi = w.at.hi + m;
  const int plain = w.plain, own_base = w.rows.context - w.base;
  // All see [from, to); before and behind it each has keys that another lacks.
  int from = 0, to = plain;
  for (int r = 0; r < R; r++) {
    if (lo[r] > from) from = lo[r];
    if (hi[r] < to) to = hi[r];
  }
  if (from > plain) from = plain;  // a window may begin among a tree's own rows
  if (to < from) to = from;
  auto alone = [&](int r, int a, int b) {
    add_values_rows<T, S, 1>(w, p + r * PARTITION, w.at.slots, a, b, acc + r * w.padded);
  };
  for (int r = 0; r < R; r++) alone(r, lo[r], hi[r] < from ? hi[r] : from);
  add_values_rows<T, S, R>(w, p, w.at.slots, from, to, acc);
  for (int r = 0; r < R; r++) {
    alone(r, lo[r] > to ? lo[r] : to, hi[r] < plain ? hi[r] : plain);
    int a = lo[r] > plain ? lo[r] : plain;
    if (a < hi[r]) {
      // key j of the partition is entry j - own_base of the row's own path
      add_values_rows<T, S, 1>(w, p + r * PARTITION + own_base, w.at.path_slots + (m + r) / w.group * MAX_TREE_ROWS,
                               a - own_base, hi[r] - own_base, acc + r * w.padded);
    }
  }
}

}  // namespace
}  // namespace dw
