// A decoder's pass as a list of operations, recorded once and replayed with one call. Nothing in an operation depends
// on the number of rows: buffers are named by number, and their addresses follow from the arena of the day.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.h"
#include "linear.h"
#include "ops.h"
#include "pool.h"
#include "sample.h"

namespace dw {

enum OpKind : int32_t {
  OP_GATHER = 0,        // out = weight[x], rows of `width` bytes, `out_width` of them; x: int64 ids
  OP_COPY = 1,          // out = x, rows of `width` bytes
  OP_RMS_NORM = 2,      // out = norm(x), rows of `width` elements
  OP_ADD_RMS_NORM = 3,  // y += x; out = norm(y)
  OP_SILU_MUL = 4,      // out = silu(gate) * up of x; `width` of out; `epilogue`: with the bits of EP_SILU_MUL
  OP_LINEAR = 5,        // out = x * weight, epilogue; x rows of `width`, out rows of `out_width` elements of dtype `out_dtype`
  OP_ROPE_WRITE = 6,    // x: packed q/k/v, rotated in place by y (rows of rotations); k and v to `kv` of `width` slots; `epilogue`: latent
  OP_ATTENTION = 7,     // out = attention(x: rows of `width`, q first) over `kv`; `epilogue`: 1 latent, 2 whole
  OP_PICK = 8,          // out = the rows of x that the head wants, `width` bytes each
  OP_CONCAT = 9,        // out = x | y, rows of `width` and `out_width` bytes
  OP_ADD = 10,          // y += x, rows of `width` elements
  OP_CLEAR_FIRST = 11,  // rows of x, of `width` bytes, whose position (y: int64) is 0 become 0
  OP_EXPERTS = 12,      // out = the experts (`weight`) that the scores y (float32) choose, of x; rows of `width` elements
  OP_GATED = 13,        // out = activation(gate) * up of x; `width` of out, `epilogue` an Activation of `scale` and `softcap`
  OP_SCALE = 14,        // x *= `scale`, rows of `width` elements
  OP_SOFTCAP = 15,      // x = `softcap` * tanh(x / `softcap`), float32 rows of `width` elements
  OP_LAYER_NORM = 16,   // out = (x - mean) / deviation * `weight` + `weight2` (or null), rows of `width` elements
  OP_UNARY = 17,        // out = a Function (`epilogue`) of x, rows of `width` elements
  OP_MUL = 18,          // out = x * y, rows of `width` elements
  OP_HEADS = 19,        // out = each head of x times a layer of its own (`weight`); rows of `width` and `out_width` elements
  OP_COLUMNS = 20,      // out = `out_width` bytes of each row of x, of `width` bytes, from byte `head_dim` on
  OP_NARROW = 21,       // from here on, if the pass is narrowed (narrow.h), only rows of the head: those of x, `width` bytes each, move up
  OP_ADAPT = 22,        // out += what the adapter of each request adds at site `num_heads` of `weight` (Adapters*), of x; rows of `width` and
                        // `out_width` elements; `weight2`: the Ranks* that sum up the first product, or null
  // Of ranks (ranks.h); `weight` is a Ranks*.
  OP_SUM_RANKS = 60,     // x = the sum over all ranks, rows of `width` elements
  OP_GATHER_RANKS = 61,  // out = rows of all ranks' x side by side, float32; of `out_width`, each rank's `width` of them
  OP_GATHER_PART = 62,   // as OP_GATHER from a part of a table, from row `num_heads` on; zeros for ids that are elsewhere
};

// Mirrored by program.py.
struct ProgramOp {
  int32_t kind;
  int32_t dtype;
  int32_t out_dtype;
  int32_t epilogue;
  int32_t x, y, out;  // buffers
  int32_t num_heads, num_kv_heads, head_dim, window;
  float scale, softcap;  // of attention; OP_GATED: alpha and limit
  float eps;
  int32_t kv_dtype;
  int64_t width, out_width;
  const void* weight;   // dw::Linear*, dw::Experts*, dw::Heads*, table or norm; OP_ATTENTION: sinks or null
  const void* weight2;  // OP_ROPE_WRITE: norms of q (weight) and k
  void* kv;
  float* kv_scales;  // of an int8 or fp8 cache
};

// What differs from pass to pass. Mirrored by program.py.
struct PassInput {
  int64_t rows;
  int64_t head_rows;         // rows of `head` operations; 0: they are not run
  const int64_t* head_index;  // [head_rows] rows of the pass; null: the first head_rows
  int64_t head_only;          // not 0: nobody reads results of other rows (narrow.h)
  char* arena;
  int64_t capacity;           // rows that the arena has room for
  void** externals;           // addresses of the external buffers, in order
  const int64_t* adapters;    // [requests] the adapter of each, 0: none; null: nobody has one
  BatchView batch;
};

// A continuation: a token is drawn behind each request's last row and fed to the next pass, `steps` times. Which one is
// said by `stream` (sample.h: draw_draft), or, with NO_NOISE, the most likely. A draft head also reads a row of features,
// its own output for the row before, and may speak a vocabulary of its own. Mirrored by program.py.
constexpr int32_t NO_NOISE = -1;

struct ChainOutput {
  int64_t steps;              // of the longest chain
  int64_t vocab;
  int64_t* tokens;            // [requests, steps]
  const int64_t* positions;  // [requests] which key the first of them is
  const ChainKey* keys;       // [requests], or null
  float* q;                   // [requests, steps, vocab] float32: what tokens were drawn from; or null
  const int64_t* target_ids;  // [vocab] the token that each drawn id stands for, or null
  int64_t key_offset;         // by how much a row's position is less than its key
  int64_t feature_bytes;      // of a row
  int32_t feature_in;         // the external buffer of the rows of features; -1: none
  int32_t feature_out;        // where a pass leaves those of the next one
  int32_t stream;             // NoiseStream or NO_NOISE
  const int32_t* lengths;     // [requests] tokens of each; null: `steps` of them. Behind the first one no more are written
};

struct Program;

size_t num_externals(const Program*);
// Whether it was narrowed: results have the head's rows only, in its order.
bool run_pass(const Program*, Pool*, const PassInput*);

// The token of draft number `step` of every request, from rows of logits [requests, vocab]. `going`: whose rows these are; null: of
// request 0, 1, 2, ...
void draw_all(Pool*, const float* logits, const ChainOutput*, int64_t requests, int64_t step, const int32_t* going = nullptr);

// Continues each request of a first pass by `steps` drafts at most, which has one head row for each; in the others each request has one row. The external
// buffers of the results must have room for one row per request, and block tables reach as far as tokens are fed.
void draft_chains(const Program*, Pool*, const PassInput* first, const ChainOutput*);

}  // namespace dw
