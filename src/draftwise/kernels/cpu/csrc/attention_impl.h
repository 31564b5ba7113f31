// Kernels of attention.h for one instruction set; the including file names the table: DW_TABLE.
#pragma once

#include "attention.h"
#include "vec.h"

namespace dw {
namespace {

constexpr float MINUS_INF = -__builtin_inff();
constexpr int GROUP = 4 * LANES;  // keys transposed at a time

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};
// bfloat16 rows over a bfloat16 cache: vectors hold pairs of dimensions, and there may be an instruction for them.
template <class T, class S>
constexpr bool BOTH_BF16 = Same<T, bf16>::value && Same<S, bf16>::value;
template <class S>
constexpr bool SCALED = Same<S, int8_t>::value;

// Where everything of one item lies in its scratch. m counts the tile's query vectors: m = row * group + head of the
// group. Sizes must agree with attention_scratch_floats. T: rows, S: cache.
template <class T, class S>
struct Work {
  const AttentionItem& item;
  const AttentionCall& call;
  const BatchView& batch;
  int dim, padded;  // head size, and rounded up to whole vectors
  int group;        // query heads per key/value head
  int M;
  int context, first_row;  // of the request
  int own_keys;            // keys behind the committed ones
  int first_key;           // nobody sees a key before it
  bool tree;
  const S* keys;     // of this head, slot 0
  const S* values;
  const float *key_scales, *value_scales;  // of this head, slot 0; of an int8 cache
  int64_t stride;        // elements from slot to slot
  int64_t scale_stride;  // scales from slot to slot
  float *q, *kt, *scores, *own, *acc, *out, *top, *sum;
  int32_t* slots;      // [PARTITION] of committed (and causal own) keys of the partition at hand
  int32_t* own_slots;  // [MAX_TREE_ROWS]

  explicit Work(const AttentionItem& it) : item(it), call(*it.call), batch(*it.batch) {
    dim = call.head_dim;
    padded = (dim + LANES - 1) / LANES * LANES;
    group = call.num_heads / call.num_kv_heads;
    M = it.tile.count * group;
    int r = it.tile.request;
    context = batch.context_len[r];
    first_row = batch.query_start[r];
    own_keys = batch.own_keys(r);
    first_key = batch.first_key != nullptr ? batch.first_key[r] : 0;
    tree = batch.is_tree[r] != 0;
    stride = (int64_t)2 * call.num_kv_heads * dim;
    keys = (const S*)call.kv + (int64_t)it.head * dim;
    values = keys + (int64_t)call.num_kv_heads * dim;
    scale_stride = (int64_t)2 * call.num_kv_heads;
    key_scales = SCALED<S> ? call.kv_scales + it.head : nullptr;
    value_scales = SCALED<S> ? key_scales + call.num_kv_heads : nullptr;
    float* at = it.scratch;
    auto take = [&](int64_t n) {
      float* p = at;
      at += (n + LANES - 1) / LANES * LANES;
      return p;
    };
    q = take((int64_t)M * padded);
    kt = take((int64_t)GROUP * padded);
    scores = take((int64_t)M * PARTITION);
    own = take((int64_t)M * MAX_TREE_ROWS);
    acc = take((int64_t)M * padded);
    out = take((int64_t)M * padded);
    top = take(M);
    sum = take(M);
    slots = (int32_t*)take(PARTITION);
    own_slots = (int32_t*)take(MAX_TREE_ROWS);
  }

  // Slots of keys [first, first + count).
  void find_slots(int first, int count, int32_t* out) const {
    const int32_t* table = batch.block_tables + item.tile.request * batch.table_stride;
    const int size = batch.block_size;
    int block = first / size, offset = first % size;
    for (int done = 0; done < count; block++, offset = 0) {
      int n = size - offset < count - done ? size - offset : count - done;
      int32_t slot = table[block] * size + offset;
      for (int i = 0; i < n; i++) out[done + i] = slot + i;
      done += n;
    }
  }
  uint64_t ancestors(int row) const { return batch.ancestors[first_row + row]; }
  int position(int row) const {
    return tree ? context + __builtin_popcountll(ancestors(row)) - 1 : context + row;
  }
  int first_visible(int pos) const {
    int from = call.window > 0 && pos >= call.window ? pos - call.window + 1 : 0;
    return from > first_key ? from : first_key;
  }
  // Keys of the partition that stand where their position says: all of a causal request, the committed ones of a tree.
  int plain_end() const { return tree ? context : context + item.tile.first + item.tile.count; }
};

// A score is one chain of products over the head's dimensions: fused float32 products, or, where there is an
// instruction for it, pairs of bfloat16 products. `steps` vectors of a tile hold one dimension (or pair) of 16 keys each.
template <bool P>
struct Dot {
  static int steps(int dim) { return dim; }
  static DW_INLINE vf add(vf sum, float x, vf keys) { return fma(splat(x), keys, sum); }
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

template <bool P, int N>
void score_rows(const float* q, int q_stride, int M, const float* kt, int kt_stride, int steps, float* scores,
                int score_stride) {
  int m = 0;
  for (; m + 4 <= M; m += 4)
    score_block<P, 4, N>(q + m * q_stride, q_stride, kt, kt_stride, steps, scores + m * score_stride, score_stride);
  for (; m + 2 <= M; m += 2)
    score_block<P, 2, N>(q + m * q_stride, q_stride, kt, kt_stride, steps, scores + m * score_stride, score_stride);
  for (; m < M; m++)
    score_block<P, 1, N>(q + m * q_stride, q_stride, kt, kt_stride, steps, scores + m * score_stride, score_stride);
}

DW_INLINE void prefetch_rows(const void* base, int64_t stride, const int32_t* slots, int count, int bytes) {
  for (int i = 0; i < count; i++)
    for (int b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)base + slots[i] * stride + b);
}

// Scores of all query vectors with `count` keys, to scores[m][0 .. count rounded up to 16).
template <class T, class S>
void score_keys(Work<T, S>& w, const int32_t* slots, int count, float* scores, int score_stride) {
  constexpr bool P = PAIRS<T, S>;
  const int kt_stride = w.padded * LANES, steps = Dot<P>::steps(w.dim);
  for (int start = 0; start < count; start += GROUP) {
    int n = count - start < GROUP ? count - start : GROUP;
    int tiles = (n + LANES - 1) / LANES;
    for (int t = 0; t < tiles; t++) {
      int left = n - t * LANES;
      // Slots lie too far apart for the processor to guess: keys of the next but one tile, and the values of this one,
      // which are read next.
      const int at = start + t * LANES, ahead = at + 2 * LANES, bytes = w.dim * (int)sizeof(S);
      const int64_t row_bytes = w.stride * (int64_t)sizeof(S);
      if (ahead < count)
        prefetch_rows(w.keys, row_bytes, slots + ahead, count - ahead < LANES ? count - ahead : LANES, bytes);
      prefetch_rows(w.values, row_bytes, slots + at, left < LANES ? left : LANES, bytes);
      pack_tile<P>(w.keys, w.stride, slots + at, left < LANES ? left : LANES, w.dim, w.kt + t * kt_stride);
    }
    float* to = scores + start;
    switch (tiles) {
      case 4: score_rows<P, 4>(w.q, w.padded, w.M, w.kt, kt_stride, steps, to, score_stride); break;
      case 3: score_rows<P, 3>(w.q, w.padded, w.M, w.kt, kt_stride, steps, to, score_stride); break;
      case 2: score_rows<P, 2>(w.q, w.padded, w.M, w.kt, kt_stride, steps, to, score_stride); break;
      default: score_rows<P, 1>(w.q, w.padded, w.M, w.kt, kt_stride, steps, to, score_stride);
    }
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

// Scores -> exponentials, in place, for keys [lo, hi) of a partition; the other lanes of their vectors become 0.
DW_INLINE void soften(float* scores, int lo, int hi, float scale, float softcap, float* top, float* sum) {
  vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int begin = lo / LANES * LANES;
  vf high = splat(MINUS_INF);
  for (int j = begin; j < hi; j += LANES) {
    vf s = load(scores + j) * scale;
    if (softcap > 0) s = tanh(s * (1.0f / softcap)) * softcap;
    vi at = lanes + j;
    vi seen = (at >= lo) & (at < hi);
    s = seen ? s : splat(MINUS_INF);
    high = max(s, high);
    store(scores + j, s);
  }
  float peak = max_lanes(high);
  vf total = splat(0.0f);
  for (int j = begin; j < hi; j += LANES) {
    vf p = exp(load(scores + j) - peak);
    total += p;
    store(scores + j, p);
  }
  *top = peak;
  *sum = sum_lanes(total);
}

// The values of one key, as vectors: four of 16 dimensions, or n <= 16 dimensions in one. With `Mixed` (bfloat16 to
// bfloat16), four vectors hold the even and the odd ones of two times 32 dimensions: `store_values` puts them back in order.
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
    vu pairs = __builtin_convertvector(to_bf16(a), vu) | __builtin_convertvector(to_bf16(b), vu) << 16;
    memcpy(out, &pairs, sizeof pairs);
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
      vf weight = splat(SCALED<S> ? share * scale : share);
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
  for (; d + 4 * LANES <= w.dim; d += 4 * LANES) add_values<T, S, R, 4>(w, p, slots, lo, hi, d, LANES, acc);
  for (; d < w.dim; d += LANES) add_values<T, S, R, 1>(w, p, slots, lo, hi, d, w.dim - d, acc);
}

// R query vectors over their keys [lo[r], hi[r]) of the partition; those below `plain` are common to all.
template <class T, class S, int R>
DW_INLINE void weigh_rows(Work<T, S>& w, int m, const int* lo, const int* hi, int plain, const int32_t (*own)[MAX_TREE_ROWS],
                          int own_base) {
  float* acc = w.acc + m * w.padded;
  const float* p = w.scores + m * PARTITION;
  // All see [from, to); before and behind it each has keys that another lacks.
  int from = 0, to = plain;
  for (int r = 0; r < R; r++) {
    if (lo[r] > from) from = lo[r];
    if (hi[r] < to) to = hi[r];
  }
  if (from > plain) from = plain;  // a window may begin among a tree's own rows
  if (to < from) to = from;
  auto alone = [&](int r, int a, int b) {
    add_values_rows<T, S, 1>(w, p + r * PARTITION, w.slots, a, b, acc + r * w.padded);
  };
  for (int r = 0; r < R; r++) alone(r, lo[r], hi[r] < from ? hi[r] : from);
  add_values_rows<T, S, R>(w, p, w.slots, from, to, acc);
  for (int r = 0; r < R; r++) {
    alone(r, lo[r] > to ? lo[r] : to, hi[r] < plain ? hi[r] : plain);
    int a = lo[r] > plain ? lo[r] : plain;
    if (a < hi[r]) {
      // key j of the partition is entry j - own_base of the row's own path
      add_values_rows<T, S, 1>(w, p + r * PARTITION + own_base, own[(m + r) / w.group], a - own_base, hi[r] - own_base,
                               acc + r * w.padded);
    }
  }
}

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
