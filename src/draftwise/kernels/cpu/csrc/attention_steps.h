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
  static constexpr int VECTORS = 64;  // of a tile: keys are packed once for all of them, and their scratch stays in cache
  static constexpr bool EVEN_ODD = BOTH_BF16<T, S>;  // the order of dimensions in sums, see load_values

  float *q, *kt;  // [M][padded] queries, columns of GROUP keys
  float* scores;  // [M][PARTITION] of the partition at hand; then weights

  VectorSteps(Arena& arena, int M, int dim, int)
      : q(arena.take<float>((int64_t)M * whole_vectors(dim))), kt(arena.take<float>((int64_t)GROUP * whole_vectors(dim))),
        scores(arena.take<float>((int64_t)M * PARTITION)) {}

  void begin(const Work<T, S>& w) {
    for (int m = 0; m < w.M; m++) pack_query<PAIRS<T, S>>(w.query(m), w.dim, q + m * w.padded);
  }
  void end() {}
  // w.at.own: scores of a tree's own keys.
  void score_own(Work<T, S>& w) { score_keys(w, q, kt, w.at.own_slots, w.rows.own_keys, w.at.own, MAX_TREE_ROWS); }
  // The state (attention_states.h) of the keys at positions `skip` and on of the partition at hand.
  void partition(Work<T, S>& w, int skip, float* top, float* sum, float* acc) {
    if (w.plain > skip) score_keys(w, q, kt, w.at.slots + skip, w.plain - skip, scores + skip, PARTITION);
    for (int m = 0; m < w.M; m++) {
      float* row = scores + m * PARTITION;
      w.put_own(m, row);
      const Seen seen{w.at.lo[m], w.at.hi[m]};
      const float scale = scale_left(w.call), peak = greatest(row, seen, w.call);
      sum[m] = soften<1>(row, seen, seen.lo / LANES * LANES, whole_vectors(seen.hi), scale, peak,
                         [row](int j, const vf* weights) { store(row + j, weights[0]); });
      top[m] = peak * scale;
    }
    memset(acc, 0, sizeof(float) * (size_t)w.M * (size_t)w.padded);
    int m = 0;
    if constexpr (VALUE_ROWS >= 4)
      for (; m + 4 <= w.M; m += 4) weigh_rows<T, S, 4>(w, m, scores, acc);
    for (; m + 2 <= w.M; m += 2) weigh_rows<T, S, 2>(w, m, scores, acc);
    for (; m < w.M; m++) weigh_rows<T, S, 1>(w, m, scores, acc);
  }
};

}  // namespace
}  // namespace dw
