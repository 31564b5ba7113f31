// Attention of a ragged batch over paged keys and values, with grouped heads, sliding windows, soft caps and trees.
//
// Same bits: what a row computes depends on the *logical positions* of the keys it sees, never on slots, on the rows
// beside it, or on how the work is cut. Logical key j of a row is committed token j for j < context, and behind it the
// row's own path: rows 0..i of a causal request (all of its rows, if the call says `whole`), the set bits of its ancestor mask in
// a tree, in order. A tree's rows may
// have been stored by several passes; its bits count them all.
//   * a score is one float32 chain over the head's dimensions in order;
//   * keys fall into partitions of PARTITION consecutive positions; within one, the maximum, the sum of exponentials
//     (lane = position mod 16, then one tree) and the weighted sum of values (one chain in order of position);
//   * partitions are merged in pairs, the results in pairs again, and so on: 0 with 1, 2 with 3, then (0, 1) with (2, 3).
//     Partitions that a row does not see change nothing (attention_states.h).
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
  int32_t latent;  // not 0: a key is its own value, `kv` is [slots, Hkv, D] and `kv_scales` [slots, Hkv]
  const float* sinks;  // [Hq] of each head a score of one key more, whose value is zero; or null
  int32_t whole;       // not 0: rows of a request that is no tree see all of its rows, those behind them, too
};

// Rows first .. first + count - 1 of one request, and the partitions [begin, end) that they see.
struct QueryTile {
  int32_t request, first, count;
  int32_t begin, end;
};

// One tile and key/value head over partitions [begin, end): all of the tile's, then the result goes to `out`, or some of them, then
// states go to `partials` (attention_states.h).
struct AttentionItem {
  const AttentionCall* call;
  const BatchView* batch;
  QueryTile tile;
  int32_t head;
  int32_t begin, end;
  float* scratch;         // scratch_floats
  float* partials;        // null: the item is whole
  const QueryTile* next;  // of another request, whose keys this thread is likely to read next; or null
};

// Partitions [begin, end) of one item. A piece of a cut item leaves its states at `partial` (floats from the beginning of the
// call's partials); -1: the item is whole.
struct AttentionPiece {
  int32_t item;  // tile * heads + head
  int32_t begin, end;
  int64_t partial;
};

// Pieces of one item that were written apart, for the query vectors [first, last) of the tile.
struct AttentionMerge {
  AttentionItem item;
  const AttentionPiece* pieces;
  int32_t count;
  const float* partials;  // of the call
  int32_t first, last;
};

struct AttentionKernels {
  void (*run)(const AttentionItem*);
  void (*merge)(const AttentionMerge*);
  // Scratch of one thread for tiles of `vectors` query vectors, over at most `partitions`.
  int64_t (*scratch_floats)(const AttentionCall*, int vectors, int partitions);
  int vectors;  // of a tile: rows times heads of a group
};

constexpr int KV_DTYPES = 5;  // float, bfloat16, float16, int8, fp8

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

// On tiles: bfloat16 rows over a bfloat16 cache. Everything else is done on vectors at these levels, too.
#if DW_HAVE_EMULATED
extern const AttentionKernels attention_kernels_emulated;
#endif
#if DW_HAVE_AMX
extern const AttentionKernels attention_kernels_amx;
#endif

// The kernels that the current instruction set has for rows and a cache of these types.
const AttentionKernels& attention_kernels(DType rows, int kv_dtype);

void attention(Pool*, DType, const AttentionCall*, const BatchView*);

}  // namespace dw
