// The linear kernels of one instruction set with vectors of 256 bits; DW_LINEAR_TABLE names them.
#pragma once

#include "linear_way_out.h"
#include "linear_vectors.h"
#include "linear_widen.h"
#include "linear_bytes256.h"

namespace dw {
namespace {

using Fn = void (*)(const Tile&, int, int);

#define DW_ROWS_6(kernel) {nullptr, kernel(1), kernel(2), kernel(3), kernel(4), kernel(5), kernel(6)}
#define DW_F32_SPAN(r) span<V256, r, W_F32>
#define DW_BF16_SPAN(r) span<V256, r, W_BF16>
#define DW_I8_SPAN(r) span<V256, r, W_I8>
#define DW_I4_SPAN(r) span_i4<V256, r>
#define DW_I8_BYTES(r) bytes_i8<r>
#define DW_I4_BYTES(r) bytes_i4<r>

// Accumulators are two vectors of each row, of sixteen registers in all.
constexpr Fn kF32[] = DW_ROWS_6(DW_F32_SPAN);
constexpr Fn kBf16[] = DW_ROWS_6(DW_BF16_SPAN);
constexpr Fn kI8[] = DW_ROWS_6(DW_I8_SPAN);
constexpr Fn kI4[] = DW_ROWS_6(DW_I4_SPAN);
constexpr Fn kI8Dynamic[] = DW_ROWS_6(DW_I8_BYTES);
constexpr Fn kI4Dynamic[] = DW_ROWS_6(DW_I4_BYTES);

}  // namespace

extern const LinearKernels DW_LINEAR_TABLE;
const LinearKernels DW_LINEAR_TABLE = {
    {all_spans<V256, kF32>, all_spans<V256, kBf16>, all_spans<V256, kI8>, all_spans<V256, kI8Dynamic>,
     all_spans<V256, kI4>, all_spans<V256, kI4Dynamic>},
    finish_vectors,
    quantize_vectors,
    {6, 6, 5, kVnni ? 6 : 4, 5, kVnni ? 5 : 4},
    {},
    {},
    nullptr};

}  // namespace dw
