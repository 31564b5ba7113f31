// What the steps of an attention kernel share: one item's part of the call, and where it lies in scratch memory.
#pragma once

#include "attention.h"
#include "attention_blocks.h"
#include "attention_rows.h"
#include "vec.h"

namespace dw {
namespace {

constexpr float MINUS_INF = -__builtin_inff();

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
constexpr bool SCALED = Same<S, int8_t>::value || Same<S, f8>::value;

// Memory given out in whole cache lines; without memory, counted.
struct Arena {
  float* memory;
  int64_t floats = 0;
  template <class X>
  DW_INLINE X* take(int64_t count) {
    X* at = memory != nullptr ? (X*)(memory + floats) : nullptr;
    floats += (count * (int64_t)sizeof(X) + 63) / 64 * LANES;
    return at;
  }
};

DW_INLINE int whole_vectors(int dim) { return (dim + LANES - 1) / LANES * LANES; }

// What every kernel keeps for an item of M query vectors; m = row * group + head of the group.
struct Scratch {
  float* own;           // [M][MAX_TREE_ROWS] scores of a tree's own keys
  int32_t *lo, *hi;     // [M] keys that a vector sees in the partition, counted from its beginning
  int32_t* slots;       // [PARTITION] of committed (and causal own) keys of the partition
  int32_t* own_slots;   // [MAX_TREE_ROWS]
  int32_t* path;        // [M][MAX_TREE_ROWS] by row of the tile: which rows of the tree are on its path
  int32_t* path_slots;  // and their slots
  int32_t* ahead;       // [PARTITION] slots that are read after the partition
  float* states;        // attention_states.h

  Scratch(Arena& arena, int M, int padded, int partitions) {
    own = arena.take<float>((int64_t)M * MAX_TREE_ROWS);
    lo = arena.take<int32_t>(M);
    hi = arena.take<int32_t>(M);
    slots = arena.take<int32_t>(PARTITION);
    own_slots = arena.take<int32_t>(MAX_TREE_ROWS);
    path = arena.take<int32_t>((int64_t)M * MAX_TREE_ROWS);
    path_slots = arena.take<int32_t>((int64_t)M * MAX_TREE_ROWS);
    ahead = arena.take<int32_t>(PARTITION);
    states = arena.take<float>((int64_t)most_blocks(partitions) * M * (padded + 2));
  }
};

// T: rows, S: cache.
template <class T, class S>
struct Work {
  const AttentionItem& item;
  const AttentionCall& call;
  const BatchView& batch;
  int dim, padded;  // head size, and rounded up to whole vectors
  int group;        // query heads per key/value head
  int M;
  RequestRows rows;
  const T* queries;  // of this head's group, first row of the tile
  const S* keys;     // of this head, slot 0
  const S* values;
  const float *key_scales, *value_scales;  // of this head, slot 0; of a cache of codes
  int64_t stride;        // elements from slot to slot
  int64_t scale_stride;  // scales from slot to slot
  Scratch at;
  int base = 0;   // first key of the partition at hand
  int plain = 0;  // keys of the partition that stand where their position says; a tree's own are behind them
  int num_ahead = 0, done_ahead = 0;

  Work(const AttentionItem& it, Arena& arena)
      : item(it), call(*it.call), batch(*it.batch), dim(call.head_dim), padded(whole_vectors(dim)),
        group(call.num_heads / call.num_kv_heads), M(it.tile.count * group),
        rows(batch, it.tile.request, call.window, call.whole != 0), at(arena, M, padded, it.end - it.begin) {
    queries = (const T*)call.q + (int64_t)(rows.first_row + it.tile.first) * call.ldq + (int64_t)it.head * group * dim;
    const int entries = call.latent != 0 ? call.num_kv_heads : 2 * call.num_kv_heads;
    stride = (int64_t)entries * dim;
    keys = (const S*)call.kv + (int64_t)it.head * dim;
    values = call.latent != 0 ? keys : keys + (int64_t)call.num_kv_heads * dim;
    scale_stride = entries;
    key_scales = SCALED<S> ? call.kv_scales + it.head : nullptr;
    value_scales = !SCALED<S> || call.latent != 0 ? key_scales : key_scales + call.num_kv_heads;
  }

  const T* query(int m) const { return queries + (int64_t)(m / group) * call.ldq + m % group * dim; }

  // What is read after a partition: the next one, or the first one of the next request.
  void look_ahead(int part) {
    const bool same = part + 1 < item.end;
    num_ahead = done_ahead = 0;
    if (!same && item.next == nullptr) return;
    const int request = same ? item.tile.request : item.next->request;
    const int first = (same ? part + 1 : item.next->begin) * PARTITION;
    num_ahead = batch.context_len[request] - first;
    if (num_ahead > PARTITION) num_ahead = PARTITION;
    find_slots(first, num_ahead, at.ahead, request);
  }
  // Fetches up to `count` of these keys and values into the second level of the cache.
  DW_INLINE void fetch_ahead(int count) {
    const int64_t bytes = dim * (int64_t)sizeof(S);
    for (; count > 0 && done_ahead < num_ahead; count--, done_ahead++) {
      const char* key = (const char*)(keys + at.ahead[done_ahead] * stride);
      const char* value = (const char*)(values + at.ahead[done_ahead] * stride);
      for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(key + b, 0, 2);
        __builtin_prefetch(value + b, 0, 2);
      }
    }
  }
  // Keys and values of a tile that will be scored soon, and what is read after the partition.
  DW_INLINE void fetch_soon(const int32_t* slots, int start, int count) {
    // Slots lie too far apart for the processor to guess: keys of the next but one tile, and the values of this one,
    // which are read next.
    const int ahead = start + 2 * LANES;
    if (ahead < count) fetch(keys, slots + ahead, count - ahead < LANES ? count - ahead : LANES);
    fetch(values, slots + start, count - start < LANES ? count - start : LANES);
    fetch_ahead(LANES);
  }
  DW_INLINE void fetch(const S* from, const int32_t* slots, int count) const {
    const int64_t bytes = dim * (int64_t)sizeof(S);
    for (int i = 0; i < count; i++)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)(from + slots[i] * stride) + b);
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
  int position(int row) const { return rows.position(item.tile.first + row); }  // of a row of the tile
  // Keys that stand where their position says: all of a causal request, the committed ones of a tree.
  int plain_end() const {
    if (rows.tree) return rows.context;
    return rows.last_visible(item.tile.first + item.tile.count - 1) + 1;
  }

  // What each vector sees of the partition at hand.
  void find_seen() {
    for (int i = 0; i < item.tile.count; i++) {
      const int first = rows.first_visible(position(i)), behind = rows.last_visible(item.tile.first + i) + 1;
      int a = first > base ? first - base : 0, b = behind - base < PARTITION ? behind - base : PARTITION;
      if (a >= b) a = b = 0;
      for (int m = i * group; m < (i + 1) * group; m++) {
        at.lo[m] = a;
        at.hi[m] = b;
      }
    }
  }
  // Scores of a tree's own keys that vector m sees go to their positions among the scores of the partition.
  void put_own(int m, float* scores) const {
    if (!rows.tree) return;
    const int own_base = rows.context - base;
    const int32_t* row_path = at.path + m / group * MAX_TREE_ROWS;
    for (int j = at.lo[m] > plain ? at.lo[m] : plain; j < at.hi[m]; j++)
      scores[j] = at.own[m * MAX_TREE_ROWS + row_path[j - own_base]];
  }

  // Paths of a tree's rows, in the order of their keys' positions.
  void find_paths() {
    find_slots(rows.context, rows.own_keys, at.own_slots);
    for (int i = 0; i < item.tile.count; i++) {
      int n = 0;
      for (uint64_t bits = rows.path(item.tile.first + i); bits != 0; bits &= bits - 1, n++) {
        at.path[i * MAX_TREE_ROWS + n] = __builtin_ctzll(bits);
        at.path_slots[i * MAX_TREE_ROWS + n] = at.own_slots[__builtin_ctzll(bits)];
      }
    }
  }
};

}  // namespace
}  // namespace dw
