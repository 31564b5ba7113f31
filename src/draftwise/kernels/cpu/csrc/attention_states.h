// States of blocks of partitions (attention_blocks.h), and how two become one.
//
// A state is, for each of M query vectors, the greatest score, the sum of exponentials and the weighted sum of values over some keys:
// [M] tops, [M] sums, [M][padded]. A vector that sees none of these keys has the sum 0; a merge leaves the other side as it is.
#pragma once

#include "attention_blocks.h"
#include "attention_work.h"

namespace dw {
namespace {

DW_INLINE int64_t state_floats(int64_t M, int64_t padded) { return M * (padded + 2); }

struct States {
  float* memory;  // [most_blocks] states
  int M, padded;
  BlockStack blocks;

  States(float* at, int vectors, int floats, bool from_start)
      : memory(at), M(vectors), padded(floats), blocks(from_start) {}

  DW_INLINE float* top(int at) const { return memory + at * state_floats(M, padded); }
  DW_INLINE float* sum(int at) const { return top(at) + M; }
  DW_INLINE float* acc(int at) const { return top(at) + 2 * M; }
  DW_INLINE int next() const { return blocks.depth; }  // where the next block is computed

  // State i + 1 into state i.
  void merge(int i) const {
    for (int first = 0; first < M; first += LANES) {
      const int n = M - first < LANES ? M - first : LANES;
      const vf a_top = load_n(top(i) + first, n), b_top = load_n(top(i + 1) + first, n);
      const vf a_sum = load_n(sum(i) + first, n), b_sum = load_n(sum(i + 1) + first, n);
      const vi seen = ((vi)a_sum & 0x7fffffff) >= 1, next_seen = ((vi)b_sum & 0x7fffffff) >= 1;  // NaN is
      // Where one side sees nothing, the other one stays as it is.
      const vf peak = select(seen & next_seen, max(b_top, a_top), select(next_seen, b_top, a_top));
      const vf a = select(seen, exp(a_top - peak), splat(0.0f)), b = select(next_seen, exp(b_top - peak), splat(0.0f));
      store_n(top(i) + first, peak, n);
      store_n(sum(i) + first, fma(a_sum, a, b_sum * b), n);
      float kept[LANES], added[LANES], sums[2][LANES];
      store(kept, a);
      store(added, b);
      store(sums[0], a_sum);
      store(sums[1], b_sum);
      for (int m = 0; m < n; m++) {
        float* out = acc(i) + (first + m) * padded;
        const float* next = acc(i + 1) + (first + m) * padded;
        if (sums[1][m] == 0.0f) continue;
        if (sums[0][m] == 0.0f) {
          memcpy(out, next, sizeof(float) * (size_t)padded);
          continue;
        }
        for (int d = 0; d < padded; d += LANES) store(out + d, fma(load(out + d), splat(kept[m]), load(next + d) * added[m]));
      }
    }
  }
  // What was computed at `next` is this block.
  DW_INLINE void push(int level, int index) {
    blocks.push(level, index, [this](int i) { merge(i); });
  }
  // Everything in one state, the first.
  void finish() {
    for (; blocks.depth > 1; blocks.depth--) merge(blocks.depth - 2);
  }
};

}  // namespace
}  // namespace dw
