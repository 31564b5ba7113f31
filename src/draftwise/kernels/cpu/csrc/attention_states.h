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
    for (int m = 0; m < M; m++) {
      float &a_top = top(i)[m], &a_sum = sum(i)[m];
      const float b_top = top(i + 1)[m], b_sum = sum(i + 1)[m];
      float* out = acc(i) + m * padded;
      const float* next = acc(i + 1) + m * padded;
      if (b_sum == 0.0f) continue;
      if (a_sum == 0.0f) {
        a_top = b_top;
        a_sum = b_sum;
        memcpy(out, next, sizeof(float) * (size_t)padded);
        continue;
      }
      const float peak = b_top > a_top ? b_top : a_top;
      const float down[LANES] = {a_top - peak, b_top - peak};
      const vf both = exp(load(down));
      const float a = both[0], b = both[1];
      vf sums = fma(splat(a_sum), splat(a), splat(b_sum) * b);
      a_sum = sums[0];
      a_top = peak;
      for (int d = 0; d < padded; d += LANES) store(out + d, fma(load(out + d), splat(a), load(next + d) * b));
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
