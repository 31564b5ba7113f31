// Attention of a ragged batch over paged keys and values, with grouped heads, sliding windows, soft caps and trees.
//
// Same bits: what a row computes depends on the *logical positions* of the keys it sees, never on slots, on the rows
// beside it, or on how the work is cut. Logical key j of a row is committed token j for j < context, and behind it the
// row's own path: rows 0..i of a causal request, the set bits of its ancestor mask in a tree, in order. A tree's rows may
// have been stored by several passes; its bits count them all.
//   * a score is one float32 chain over the head's dimensions in order;
//   * keys fall into partitions of PARTITION consecutive positions; within one, the maximum, the sum of exponentials
//     (lane = position mod 16, then one tree) and the weighted sum of values (one chain in order of position);
//   * partitions are merged in order, by the same formula whether one thread did them all or many.
#pragma once

#include <cstdint>

#include "isa.h"
#include "linear.h"
#include "pool.h"

namespace dw {

constexpr int PARTITION = 256;
constexpr int MAX_TREE_ROWS = 64;

// types.AttentionBatch as pointers.
struct BatchView {
  const int32_t* query_start;   // [requests + 1]
  const int32_t* context_len;   // [requests]
  const uint8_t* is_tree;       // [requests]
  const int32_t* block_tables;  // [requests, table_stride]
  const uint64_t* ancestors;    // [rows]; null when no request is a tree
  const int32_t* first_key;     // [requests] keys before it are never read into a result; null: 0
  const int32_t* tree_start;    // [requests] rows of a tree at keys context_len .. that earlier passes stored; null: 0
  int64_t table_stride;
  int32_t requests;
  int32_t block_size;

  // Keys of a request behind its committed ones: its tree's rows of earlier passes, then its own rows.
  int32_t own_keys(int r) const {
    return query_start[r + 1] - query_start[r] + (tree_start != nullptr ? tree_start[r] : 0);
  }
};

struct AttentionCall {
  const void* q;  // [rows, Hq, D], row stride ldq elements
  const void* kv;  // [slots, 2 Hkv, D] of kv_dtype
  const float* kv_scales;  // [slots, 2 Hkv] of an I8 cache: an entry is code * scale
  void* out;      // [rows, Hq * D]
  int64_t ldq;
  int32_t num_heads, num_kv_heads, head_dim;
  int32_t window;  // positions; 0: full attention
  int32_t kv_dtype;
  float scale;
  float softcap;  // scores become cap * tanh(score / cap); 0: none
};

// Rows first .. first + count - 1 of one request.
struct Tile {
  int32_t request, first, count;
};

// One tile and key/value head over partitions [begin, end): with `partials`, the state of each partition goes there
// ([end - begin][partial_floats]); without, [begin, end) is everything and the result goes to `out`.
struct AttentionItem {
  const AttentionCall* call;
  const BatchView* batch;
  Tile tile;
  int32_t head;
  int32_t begin, end;
  float* scratch;  // scratch_floats
  float* partials;
  int32_t next_request;  // whose keys this thread is likely to read next; -1: nobody else's
};

struct AttentionKernels {
  void (*run)(const AttentionItem*);
  void (*merge)(const AttentionItem*);  // partials of partitions [begin, end) -> out
};

constexpr int KV_DTYPES = 4;  // every DType

// By the dtype of rows (float32, bfloat16), then by that of the cache.
extern const AttentionKernels attention_kernels_portable[2][KV_DTYPES];
#if DW_HAVE_AVX2
extern const AttentionKernels attention_kernels_avx2[2][KV_DTYPES];
#endif
#if DW_HAVE_AVX512VNNI
extern const AttentionKernels attention_kernels_avx512vnni[2][KV_DTYPES];
#endif
#if DW_HAVE_AVX512
extern const AttentionKernels attention_kernels_avx512[2][KV_DTYPES];
#endif

int64_t attention_scratch_floats(const AttentionCall*, int tile_rows);
int64_t attention_partial_floats(const AttentionCall*, int tile_rows);

// One call, cut into tasks of two phases: the second one merges partitions, and is empty where they were not cut.
struct AttentionRun {
  const AttentionCall* call;
  const BatchView* batch;
  const AttentionKernels* kernels;
  const Tile* tiles;
  int num_tiles;
  int tile_rows;
  int splits;              // pieces that the partitions of a tile are cut into
  int64_t partial_stride;  // floats of one (tile, head)
  float* partials;
  int tasks[2];
  bool one_thread;  // too little work to share
};

// Cuts a call for `threads` threads; `serial`: products below which one thread does it alone. The run points to memory of the
// calling thread, valid until its next plan.
AttentionRun attention_plan(DType, const AttentionCall*, const BatchView*, int threads, int64_t serial);
void attention_task(const AttentionRun*, int phase, int task);

void attention(Pool*, DType, const AttentionCall*, const BatchView*);

}  // namespace dw
