// First half of an attention kernel: queries with keys, from the packing of both to exponentials.
#pragma once

#include "attention_work.h"

namespace dw {
namespace {

constexpr int GROUP = 4 * LANES;  // keys transposed at a time

// A score is one chain of products over the head's dimensions: fused float32 products, or, where there is an
// instruction for it, pairs of bfloat16 products. `steps` vectors of a tile hold one dimension (or pair) of 16 keys each.
template <bool P>
struct Dot {
  static int steps(int dim) { return dim; }
  static DW_INLINE vf add(vf sum, float x, vf keys) { return fma(x, keys, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<true> {
  static int steps(int dim) { return (dim + 1) / 2; }
  static DW_INLINE vf add(vf sum, float x, vf keys) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)splat(x), (__m512bh)keys);
  }
};
template <class T, class S>
constexpr bool PAIRS = BOTH_BF16<T, S>;
#else
template <class T, class S>
constexpr bool PAIRS = false;
#endif

// Columns of up to 16 keys: kt[step][lane] of key lane. A lane without a key repeats the last one.
template <bool P, class S>
DW_INLINE void pack_tile(const S* keys, int64_t stride, const int32_t* slots, int count, int dim, float* kt) {
  for (int d = 0; d < dim; d += LANES) {
    int n = dim - d < LANES ? dim - d : LANES;
    vf rows[LANES];
    for (int i = 0; i < LANES; i++) rows[i] = load_n(keys + slots[i < count ? i : count - 1] * stride + d, n);
    transpose(rows);
    for (int i = 0; i < n; i++) store(kt + (d + i) * LANES, rows[i]);
  }
}

template <bool P>
DW_INLINE void pack_tile(const bf16* keys, int64_t stride, const int32_t* slots, int count, int dim, float* kt) {
  for (int d = 0; d < dim; d += 2 * LANES) {
    int n = dim - d < 2 * LANES ? dim - d : 2 * LANES;
    vf rows[LANES];
    for (int i = 0; i < LANES; i++) {
      const bf16* key = keys + slots[i < count ? i : count - 1] * stride + d;
      if (n == 2 * LANES) {
        rows[i] = (vf)load_pairs(key);
      } else {
        bf16 part[2 * LANES] = {};
        memcpy(part, key, sizeof(bf16) * (size_t)n);
        rows[i] = (vf)load_pairs(part);
      }
    }
    transpose(rows);
    for (int i = 0; i < (n + 1) / 2; i++) {
      if (P) {
        store(kt + (d / 2 + i) * LANES, rows[i]);
      } else {
        store(kt + (d + 2 * i) * LANES, even((vu)rows[i]));
        if (2 * i + 1 < n) store(kt + (d + 2 * i + 1) * LANES, odd((vu)rows[i]));
      }
    }
  }
}

// A query as `Dot` wants it: one float, or one pair of bfloat16, per step.
template <bool P, class T>
DW_INLINE void pack_query(const T* q, int dim, float* out) {
  if (P) {
    out[(dim - 1) / 2] = 0.0f;
    memcpy(out, q, sizeof(T) * (size_t)dim);
  } else {
    for (int d = 0; d < dim; d += LANES) store(out + d, load_n(q + d, dim - d < LANES ? dim - d : LANES));
  }
}

// scores[r][16 t + lane]: R queries with the keys of N tiles.
template <bool P, int R, int N>
DW_INLINE void score_block(const float* q, int q_stride, const float* kt, int kt_stride, int steps, float* scores,
                           int score_stride) {
  vf sums[R][N];
  for (int r = 0; r < R; r++)
    for (int t = 0; t < N; t++) sums[r][t] = splat(0.0f);
  for (int d = 0; d < steps; d++) {
    vf k[N];
    for (int t = 0; t < N; t++) k[t] = load(kt + t * kt_stride + d * LANES);
    for (int r = 0; r < R; r++)
      for (int t = 0; t < N; t++) sums[r][t] = Dot<P>::add(sums[r][t], q[r * q_stride + d], k[t]);
  }
  for (int r = 0; r < R; r++)
    for (int t = 0; t < N; t++) store(scores + r * score_stride + t * LANES, sums[r][t]);
}

// R rows at a time, and as many tiles as there are registers for their sums; tiles that are left over by halves of that.
template <bool P, int R, int N = SCORE_SUMS / R < 4 ? SCORE_SUMS / R : 4>
DW_INLINE void score_tiles(const float* q, int q_stride, int rows, const float* kt, int kt_stride, int tiles, int steps,
                           float* scores, int score_stride) {
  int t = 0;
  for (; t + N <= tiles; t += N)
    for (int m = 0; m < rows; m += R)
      score_block<P, R, N>(q + m * q_stride, q_stride, kt + t * kt_stride, kt_stride, steps,
                           scores + m * score_stride + t * LANES, score_stride);
  if constexpr (N > 1)
    score_tiles<P, R, N / 2>(q, q_stride, rows, kt + t * kt_stride, kt_stride, tiles - t, steps, scores + t * LANES,
                             score_stride);
}

// Example: of 7 rows, four are scored together, then two, then one.
template <bool P>
void score_rows(const float* q, int q_stride, int M, const float* kt, int kt_stride, int tiles, int steps, float* scores,
                int score_stride) {
  const int fours = M & ~3;
  score_tiles<P, 4>(q, q_stride, fours, kt, kt_stride, tiles, steps, scores, score_stride);
  q += fours * q_stride;
  scores += fours * score_stride;
  score_tiles<P, 2>(q, q_stride, M & 2, kt, kt_stride, tiles, steps, scores, score_stride);
  q += (M & 2) * q_stride;
  scores += (M & 2) * score_stride;
  score_tiles<P, 1>(q, q_stride, M & 1, kt, kt_stride, tiles, steps, scores, score_stride);
}

// Scores of all query vectors q [M][padded] with `count` keys, to scores[m][0 .. count rounded up to 16). `kt`: GROUP * padded.
template <class T, class S>
void score_keys(Work<T, S>& w, const float* q, float* kt, const int32_t* slots, int count, float* scores,
                int score_stride) {
  constexpr bool P = PAIRS<T, S>;
  const int kt_stride = w.padded * LANES, steps = Dot<P>::steps(w.dim);
  for (int start = 0; start < count; start += GROUP) {
    int n = count - start < GROUP ? count - start : GROUP;
    int tiles = (n + LANES - 1) / LANES;
    for (int t = 0; t < tiles; t++) {
      const int at = start + t * LANES, left = count - at;
      w.fetch_soon(slots, at, count);
      pack_tile<P>(w.keys, w.stride, slots + at, left < LANES ? left : LANES, w.dim, kt + t * kt_stride);
    }
    float* to = scores + start;
    score_rows<P>(q, w.padded, w.M, kt, kt_stride, tiles, steps, to, score_stride);
    if (SCALED<S>) {
      for (int t = 0; t < tiles; t++) {
        float key_scales[LANES];
        for (int i = 0; i < LANES; i++) {
          int at = start + t * LANES + i;
          key_scales[i] = w.key_scales[slots[at < count ? at : count - 1] * w.scale_stride];
        }
        vf factor = load(key_scales);
        for (int m = 0; m < w.M; m++) {
          float* tile = to + m * score_stride + t * LANES;
          store(tile, load(tile) * factor);
        }
      }
    }
  }
}

// What a query vector sees of a partition's scores: keys [lo, hi).
struct Seen {
  int lo, hi;
  DW_INLINE bool whole(int j) const { return j >= lo && j + LANES <= hi; }  // all lanes of a vector
  DW_INLINE vi lanes(int j) const {
    const vi all = lane_numbers();
    return (all >= lo - j) & (all < hi - j);
  }
};

// Scores that have a cap, or a scale that turns them around, are changed before the greatest is looked for. The others are multiplied on
// the way to weights: the greatest one is the same.
DW_INLINE bool scales_first(const AttentionCall& call) { return call.softcap > 0 || !(call.scale > 0); }
DW_INLINE float scale_left(const AttentionCall& call) { return scales_first(call) ? 1.0f : call.scale; }

// The greatest of the scores that are seen; `scale_left` is still to be multiplied in.
DW_INLINE float greatest(float* scores, Seen seen, const AttentionCall& call) {
  const int first = seen.lo / LANES * LANES;
  if (scales_first(call)) {
    for (int j = first; j < seen.hi; j += LANES) {
      vf s = load(scores + j) * call.scale;
      if (call.softcap > 0) s = tanh(s * (1.0f / call.softcap)) * call.softcap;
      store(scores + j, s);
    }
  }
  vf high = splat(MINUS_INF);
  for (int j = first; j < seen.hi; j += LANES) {
    const vf s = load(scores + j);
    high = max(seen.whole(j) ? s : select(seen.lanes(j), s, splat(MINUS_INF)), high);
  }
  return max_lanes(high);
}

// Scores -> exp(scale * (score - peak)) of vectors [begin, end), 0 where a key is not seen; returns the sum. `write(j, weights)` gets N
// vectors at a time, after their scores were read.
template <int N, bool All, class Write>
DW_INLINE float soften(const float* scores, Seen seen, int begin, int end, float scale, float peak, const Write& write) {
  const float factor = scale * 1.44269504088896341f;  // 2^(x / ln 2) is e^x
  const vf down = splat(-(peak * factor));
  vf total = splat(0.0f);
  for (int j = begin; j < end; j += N * LANES) {
    vf weights[N];
    for (int i = 0; i < N; i++) {
      const int at = j + i * LANES;
      weights[i] = exp2(fma(load(scores + at), splat(factor), down));
      if (!All && !seen.whole(at)) weights[i] = select(seen.lanes(at), weights[i], splat(0.0f));
      total += weights[i];
    }
    write(j, weights);
  }
  return sum_lanes(total);
}
template <int N, class Write>
DW_INLINE float soften(const float* scores, Seen seen, int begin, int end, float scale, float peak, const Write& write) {
  if (seen.lo <= begin && end <= seen.hi) return soften<N, true>(scores, seen, begin, end, scale, peak, write);
  return soften<N, false>(scores, seen, begin, end, scale, peak, write);
}

}  // namespace
}  // namespace dw
