// The arithmetic of attention on vectors, as attention_impl.h wants it: sixteen keys side by side for scores, sixteen
// dimensions for values.
#pragma once

#include "attention_scores.h"
#include "attention_values.h"

namespace dw {
namespace {

template <class T, class S>
struct VectorSteps {
  using Row = T;
  using Cache = S;
  static constexpr int VECTORS = 16;  // of a tile: their scratch stays in cache
  static constexpr bool EVEN_ODD = BOTH_BF16<T, S>;  // the order of dimensions in sums, see load_values

  float *q, *kt;  // [M][padded] queries, columns of GROUP keys

  VectorSteps(Arena& arena, int M, int dim)
      : q(arena.take<float>((int64_t)M * whole_vectors(dim))),
        kt(arena.take<float>((int64_t)GROUP * whole_vectors(dim))) {}

  void begin(const Work<T, S>& w) {
    for (int m = 0; m < w.M; m++) pack_query<PAIRS<T, S>>(w.query(m), w.dim, q + m * w.padded);
  }
  void end() {}
  // scores[m][0 .. count): the keys in these slots.
  void score(Work<T, S>& w, const int32_t* slots, int count, float* scores, int score_stride) {
    score_keys(w, q, kt, slots, count, scores, score_stride);
  }
  // acc[M][padded] = values weighed by the exponentials in w.at.scores.
  void weigh(Work<T, S>& w, float* acc) {
    memset(acc, 0, sizeof(float) * (size_t)w.M * (size_t)w.padded);
    int m = 0;
    if constexpr (VALUE_ROWS >= 4)
      for (; m + 4 <= w.M; m += 4) weigh_rows<T, S, 4>(w, m, acc);
    for (; m + 2 <= w.M; m += 2) weigh_rows<T, S, 2>(w, m, acc);
    for (; m < w.M; m++) weigh_rows<T, S, 1>(w, m, acc);
  }
};

}  // namespace
}  // namespace dw
