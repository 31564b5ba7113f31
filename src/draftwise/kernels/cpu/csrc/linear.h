// Linear layers: out[r, n] = sum over k of x[r, k] * w[n, k] + bias[n], for any number of rows.
//
// Same bits: an output element is one lane that accumulates over k from 0 to K - 1 in float32, in an order that depends on the weight
// format and the instruction set only, never on the number of rows, the tile, the block of k or the thread.
#pragma once

#include <cstdint>

#include "pool.h"

namespace dw {

enum DType : int { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 };

// How the weights are stored, and what is multiplied with what.
enum Format : int {
  W_F32 = 0,     // float32 weights, float32 rows
  W_BF16 = 1,    // bfloat16 weights, bfloat16 rows, pairs of k
  W_I8 = 2,      // int8 weights with a scale per output; rows stay as they are ("weight-only")
  W_I8_DYN = 3,  // as W_I8, rows quantised to int8 with a scale per row; sums in int32
  W_I4 = 4,      // int4 weights with a scale (and zero point) per output and group of k; rows stay as they are
  W_I4_DYN = 5,  // as W_I4, rows quantised to int8 with a scale per row
};

// What happens to a row of sums y[N] (bias included) on its way out.
enum Epilogue : int {
  EP_STORE = 0,     // out[N] = y
  EP_ADD = 1,       // out[N] += y (rounded to the dtype of out first), in place: the residual stream
  EP_SILU_MUL = 2,  // out[N / 2] = silu(gate) * up; only for weights packed as gate | up
};

// What the 16 codes of W_I4 and W_I4_DYN stand for.
enum Numbers : int {
  NUMBERS_INTEGERS = 0,  // -8..7
  NUMBERS_E2M1 = 1,      // 0, 0.5, 1, 1.5, 2, 3, 4, 6, and behind them the same below zero (MXFP4)
};

struct Linear;

// `weight` is [outputs, inputs] in the dtype of the format, row stride ldw elements; it is read, not kept. `bias` [outputs]
// or null. `paired`: the rows are gate | up, each half of `outputs`; needed for EP_SILU_MUL, invisible otherwise. Throws
// std::invalid_argument if the arguments make no sense.
Linear* linear_pack(Pool*, Format, const void* weight, int64_t ldw, const float* bias, int64_t outputs, int64_t inputs,
                    bool paired);

// Quantised weights. `q` [outputs, inputs], one byte each: int8 -127..127, or int4 as 0..15. W_I8*: w = q * scales[n]. W_I4*:
// w = (q - zero) * scale with `scales` and `zeros` [outputs, ceil(inputs / group)]; without `zeros` the zero point is 8; `group` is a
// multiple of 8. Scales of groups are kept in float16 (times a power of two of the layer). `input`: BF16, or F32 for the
// formats that quantise rows. `numbers`: other than integers without zeros alone, and NF4 in W_I4 alone.
Linear* linear_pack_quantized(Pool*, Format, DType input, const uint8_t* q, const float* scales, const uint8_t* zeros,
                              int group, const float* bias, int64_t outputs, int64_t inputs, bool paired,
                              Numbers numbers = NUMBERS_INTEGERS);

int64_t linear_outputs(const Linear*);  // N
int64_t linear_inputs(const Linear*);   // K
DType linear_input_dtype(const Linear*);
int64_t linear_bytes(const Linear*);  // what a pass reads
void linear_free(Linear*);

struct LinearCall {
  const Linear* weights;
  const void* x;  // [rows, K] of linear_input_dtype, row stride ldx elements
  int64_t ldx;
  void* out;  // [rows, N] (or N / 2) of dtype io_out, row stride ldo elements; may not overlap x
  int64_t ldo;
  DType io_out;  // F32 or BF16
  int64_t rows;
  Epilogue epilogue;
};

// The whole product.
void linear_run(Pool*, const LinearCall*);

// One of `parts` equal parts of it, on the calling thread: for threads that share the work by themselves. Few rows only:
// each part packs them for itself.
void linear_run_part(const LinearCall*, int part, int parts);
// The pool, or null for a product that is quicker on the calling thread alone: it stands between passes, and is small.
Pool* pool_for(Pool*, const Linear*, int64_t rows);
// gate | up [rows, 2 width], what a paired product stored -> silu(gate) * up [rows, width], of one dtype: the bits of EP_SILU_MUL.
void linear_silu_mul(Pool*, DType, const void* gate_up, void* out, int64_t rows, int64_t width);
// With EP_STORE.
void linear_forward(Pool*, const Linear*, const void* x, int64_t ldx, void* out, int64_t ldo, DType io_out, int64_t rows);

}  // namespace dw
