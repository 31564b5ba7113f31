// The operations of a decoder between its linear layers and attention: each works row by row, so that a row's bits do
// not depend on the rows beside it. Everything is float32 inside; rows are float32 or bfloat16.
#pragma once

#include <cstdint>

#include "isa.h"
#include "linear.h"
#include "pool.h"

namespace dw {

// One layer's packed q/k/v rows: [Hq * D | Hkv * D | Hkv * D]; latent, where keys are their own values, [Hq * D | Hkv * D].
struct RopeCall {
  void* qkv;             // [rows, (Hq + 2 Hkv) D], q is rotated in place
  const float* rotation;  // [rows, 2, D / 2]: cosines, sines
  const int64_t* slots;  // [rows]
  void* kv;              // [slots, 2 Hkv, D] of kv_dtype
  float* kv_scales;      // [slots, 2 Hkv] of an I8 cache: one per token and head, the largest number / 127
  const float* q_norm;   // [D] or null
  const float* k_norm;   // [D] or null
  float eps;
  int64_t rows;
  int num_heads, num_kv_heads, head_dim;
  int kv_dtype;
  int64_t num_slots;
  int64_t latent;  // not 0: `kv` is [slots, Hkv, D], `kv_scales` [slots, Hkv]
};

// Kernels of one instruction set, on rows [begin, end).
struct RowKernels {
  void (*rms_norm)(const void* x, const float* weight, float eps, void* out, int64_t width, int64_t begin, int64_t end);
  void (*add_rms_norm)(const void* x, void* residual, const float* weight, float eps, void* out, int64_t width,
                       int64_t begin, int64_t end);
  void (*add)(const void* x, void* residual, int64_t width, int64_t begin, int64_t end);
  void (*silu_mul)(const void* gate_up, void* out, int64_t width, int64_t begin, int64_t end);
  void (*silu_add)(const void* x, const void* residual, void* out, int64_t width);  // one row; out may be residual
  void (*rope_write[5])(const RopeCall*, int64_t begin, int64_t end);  // by the dtype of the cache
  void (*softmax)(const float* x, float scale, float* out, int64_t width);
};

extern const RowKernels row_kernels_portable[2];  // float32, bfloat16
#if DW_HAVE_AVX2
extern const RowKernels row_kernels_avx2[2];
#endif
#if DW_HAVE_AVX512VNNI
extern const RowKernels row_kernels_avx512vnni[2];
#endif
#if DW_HAVE_AVX512
extern const RowKernels row_kernels_avx512[2];
#endif

// out [rows, width], contiguous all of them; out may be x.
void rms_norm(Pool*, DType, const void* x, const float* weight, float eps, void* out, int64_t rows, int64_t width);
// residual += x, then the norm of the sum.
void add_rms_norm(Pool*, DType, const void* x, void* residual, const float* weight, float eps, void* out, int64_t rows,
                  int64_t width);
// residual += x.
void add_rows(Pool*, DType, const void* x, void* residual, int64_t rows, int64_t width);
// out[i] = a[i] | b[i], rows of `a_bytes` and `b_bytes`.
void concat_rows(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes, void* out, int64_t rows);
// Rows of x whose position is 0 become 0.
void clear_first_rows(void* x, const int64_t* positions, int64_t rows, int64_t bytes);
// gate_up [rows, 2 width] -> silu(gate) * up [rows, width].
void silu_mul(Pool*, DType, const void* gate_up, void* out, int64_t rows, int64_t width);
// residual + silu(x), one row [width].
void silu_add(DType, const void* x, const void* residual, void* out, int64_t width);
// Normalise q and k per head if asked, rotate both, write k and v to the cache. Throws std::invalid_argument for slots that are
// not in it.
void rope_write(Pool*, DType, const RopeCall*);
// exp(scale x) / sum of it, one row [width].
void softmax(const float* x, float scale, float* out, int64_t width);
// out[i] = table[ids[i]], rows of `bytes` bytes. Throws std::invalid_argument for ids that are not in [0, table_rows).
void gather_rows(const void* table, int64_t table_rows, const int64_t* ids, void* out, int64_t rows, int64_t bytes);

}  // namespace dw
