// What the steps of an attention kernel share: one item's part of the call, and where it lies in scratch memory.
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
  int32_t* ahead;      // [PARTITION] slots that are read after this item
  int num_ahead = 0, done_ahead = 0;

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
    ahead = (int32_t*)take(PARTITION);
  }

  // What is read after a partition: the next one, or the first one of the next request.
  void look_ahead(int part) {
    const bool same = part + 1 < item.end;
    num_ahead = done_ahead = 0;
    if (!same && item.next_request < 0) return;
    const int request = same ? item.tile.request : item.next_request, first = same ? (part + 1) * PARTITION : 0;
    num_ahead = batch.context_len[request] - first;
    if (num_ahead > PARTITION) num_ahead = PARTITION;
    find_slots(first, num_ahead, ahead, request);
  }
  // Fetches up to `count` of these keys and values into the second level of the cache.
  DW_INLINE void fetch_ahead(int count) {
    const int64_t bytes = dim * (int64_t)sizeof(S);
    for (; count > 0 && done_ahead < num_ahead; count--, done_ahead++) {
      const char* key = (const char*)(keys + ahead[done_ahead] * stride);
      const char* value = (const char*)(values + ahead[done_ahead] * stride);
      for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(key + b, 0, 2);
        __builtin_prefetch(value + b, 0, 2);
      }
    }
  }

  // Slots of keys [first, first + count).
  void find_slots(int first, int count, int32_t* out) const { find_slots(first, count, out, item.tile.request); }
  void find_slots(int first, int count, int32_t* out, int request) const {
    const int32_t* table = batch.block_tables + request * batch.table_stride;
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

}  // namespace
}  // namespace dw
