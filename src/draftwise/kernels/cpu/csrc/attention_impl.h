// Kernels of attention.h for one instruction set; the including file names the table: DW_TABLE.
#pragma once

#include "attention_scores.h"
#include "attention_values.h"
#include "attention_work.h"

namespace dw {
namespace {

// (top, sum, out) of the keys so far, merged with those of the next partition.
DW_INLINE void merge_state(float* top, float* sum, float* out, float next_top, float next_sum, const float* next, int padded) {
  float peak = next_top > *top ? next_top : *top;
  vf both = {*top - peak, next_top - peak};
  both = exp(both);
  float a = both[0], b = both[1];
  vf sums = fma(splat(*sum), splat(a), splat(next_sum) * b);
  *sum = sums[0];
  *top = peak;
  for (int d = 0; d < padded; d += LANES) store(out + d, fma(load(out + d), splat(a), load(next + d) * b));
}

template <class T, class S>
DW_INLINE void start_state(Work<T, S>& w) {
  for (int m = 0; m < w.M; m++) {
    w.top[m] = MINUS_INF;
    w.sum[m] = 0.0f;
    memset(w.out + m * w.padded, 0, sizeof(float) * (size_t)w.padded);
  }
}

template <class T, class S>
DW_INLINE void write_out(Work<T, S>& w) {
  for (int m = 0; m < w.M; m++) {
    int row = w.first_row + w.item.tile.first + m / w.group, head = w.item.head * w.group + m % w.group;
    T* to = (T*)w.call.out + ((int64_t)row * w.call.num_heads + head) * w.dim;
    const float* from = w.out + m * w.padded;
    int d = 0;
    for (; d + 4 * LANES <= w.dim; d += 4 * LANES)
      for (int c = 0; c < 4 * LANES; c += 2 * LANES)
        store_values<BOTH_BF16<T, S>>(to + d + c, load(from + d + c) / w.sum[m], load(from + d + c + LANES) / w.sum[m]);
    for (; d < w.dim; d += LANES)
      store_n(to + d, load(from + d) / w.sum[m], w.dim - d < LANES ? w.dim - d : LANES);
  }
}

template <class T, class S>
void run_item(const AttentionItem* item) {
  Work<T, S> w(*item);
  const int count = item->tile.count;
  int32_t own[MAX_TREE_ROWS][MAX_TREE_ROWS];  // slots of each tree row's own path
  int32_t path[MAX_TREE_ROWS][MAX_TREE_ROWS];  // and which rows of the tree they are
  int lowest = INT32_MAX;                      // first key that any row sees
  for (int i = 0; i < count; i++) {
    int f = w.first_visible(w.position(item->tile.first + i));
    if (f < lowest) lowest = f;
  }
  for (int i = 0; i < count; i++) {
    const T* row = (const T*)w.call.q + (int64_t)(w.first_row + item->tile.first + i) * w.call.ldq +
                   (int64_t)item->head * w.group * w.dim;
    for (int g = 0; g < w.group; g++) pack_query<PAIRS<T, S>>(row + g * w.dim, w.dim, w.q + (i * w.group + g) * w.padded);
  }
  if (w.tree) {
    w.find_slots(w.context, w.own_keys, w.own_slots);
    for (int i = 0; i < count; i++) {
      int n = 0;
      for (uint64_t bits = w.ancestors(item->tile.first + i); bits != 0; bits &= bits - 1) {
        path[i][n] = __builtin_ctzll(bits);
        own[i][n] = w.own_slots[path[i][n]];
        n++;
      }
    }
    if (item->end * PARTITION > w.context) score_keys(w, w.own_slots, w.own_keys, w.own, MAX_TREE_ROWS);
  }
  start_state(w);

  for (int part = item->begin; part < item->end; part++) {
    const int base = part * PARTITION;
    w.look_ahead(part);
    int plain = w.plain_end() - base;  // keys of the partition that all share
    if (plain > PARTITION) plain = PARTITION;
    int skip = lowest > base ? (lowest - base) / LANES * LANES : 0;
    if (plain > skip) {
      w.find_slots(base + skip, plain - skip, w.slots + skip);
      score_keys(w, w.slots + skip, plain - skip, w.scores + skip, PARTITION);
    }
    if (plain < 0) plain = 0;
    const int own_base = w.context - base;
    float* partial = item->partials;
    if (partial != nullptr) partial += (int64_t)(part - item->begin) * w.M * (w.padded + 2);
    int lo[4], hi[4], filled = 0;
    float top[4], sum[4];
    for (int m = 0; m < w.M; m++) {
      int i = m / w.group, pos = w.position(item->tile.first + i);
      int f = w.first_visible(pos);
      int a = f > base ? f - base : 0, b = pos + 1 - base;
      if (b > PARTITION) b = PARTITION;
      float* scores = w.scores + m * PARTITION;
      if (w.tree)
        for (int j = a > plain ? a : plain; j < b; j++) scores[j] = w.own[m * MAX_TREE_ROWS + path[i][j - own_base]];
      top[filled] = MINUS_INF;
      sum[filled] = 0.0f;
      if (a < b) soften(scores, a, b, w.call.scale, w.call.softcap, &top[filled], &sum[filled]);
      lo[filled] = a < b ? a : 0;
      hi[filled] = a < b ? b : 0;
      memset(w.acc + m * w.padded, 0, sizeof(float) * (size_t)w.padded);
      filled++;
      if (filled < 4 && m + 1 < w.M) continue;
      int first = m + 1 - filled;
      if (filled == 4) {
        weigh_rows<T, S, 4>(w, first, lo, hi, plain, own, own_base);
      } else {
        int done = 0;
        if (filled >= 2) {
          weigh_rows<T, S, 2>(w, first, lo, hi, plain, own, own_base);
          done = 2;
        }
        for (; done < filled; done++)
          weigh_rows<T, S, 1>(w, first + done, lo + done, hi + done, plain, own, own_base);
      }
      for (int k = 0; k < filled; k++) {
        int mm = first + k;
        float* acc = w.acc + mm * w.padded;
        if (partial != nullptr) {
          float* to = partial + (int64_t)mm * (w.padded + 2);
          to[0] = top[k];
          to[1] = sum[k];
          memcpy(to + 2, acc, sizeof(float) * (size_t)w.padded);
        } else if (sum[k] != 0.0f) {
          merge_state(&w.top[mm], &w.sum[mm], w.out + mm * w.padded, top[k], sum[k], acc, w.padded);
        }
      }
      filled = 0;
    }
  }
  if (item->partials == nullptr) write_out(w);
}

template <class T, class S>
void merge_item(const AttentionItem* item) {
  Work<T, S> w(*item);
  start_state(w);
  for (int part = 0; part < item->end - item->begin; part++) {
    for (int m = 0; m < w.M; m++) {
      const float* from = item->partials + ((int64_t)part * w.M + m) * (w.padded + 2);
      if (from[1] != 0.0f)
        merge_state(&w.top[m], &w.sum[m], w.out + m * w.padded, from[0], from[1], from + 2, w.padded);
    }
  }
  write_out(w);
}

}  // namespace

#define DW_ENTRY(T, S) {run_item<T, S>, merge_item<T, S>}
extern const AttentionKernels DW_TABLE[2][KV_DTYPES] = {
    {DW_ENTRY(float, float), DW_ENTRY(float, bf16), DW_ENTRY(float, f16), DW_ENTRY(float, int8_t)},
    {DW_ENTRY(bf16, float), DW_ENTRY(bf16, bf16), DW_ENTRY(bf16, f16), DW_ENTRY(bf16, int8_t)},
};
#undef DW_ENTRY

}  // namespace dw
