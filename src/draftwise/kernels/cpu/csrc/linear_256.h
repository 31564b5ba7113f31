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
#define DW_F32_SPAN(r) span<Wide256, r, W_F32>
#define DW_BF16_SPAN(r) span<Wide256, r, W_BF16>
#define DW_I8_SPAN(r) span<Wide256, r, W_I8>
#define DW_I4_SPAN(r) span_i4<Wide256, r>
#define DW_I8_BYTES(r) bytes_i8<r>
#define DW_I4_BYTES(r) bytes_i4<r>

#define DW_F32_WHOLE(r) span<Whole256, r, W_F32>
#define DW_BF16_WHOLE(r) span<Whole256, r, W_BF16>

// Accumulators are two vectors of each row, of sixteen registers in all. One or two rows have four: they read a panel from its
// first byte to its last, and there are enough independent sums to keep the processor busy. The lanes' sums are the same.
constexpr Fn kF32Few[] = {nullptr, DW_F32_WHOLE(1), DW_F32_WHOLE(2)};
constexpr Fn kBf16Few[] = {nullptr, DW_BF16_WHOLE(1), DW_BF16_WHOLE(2)};
constexpr Fn kI8One[] = {nullptr, span<Whole256, 1, W_I8>};
constexpr Fn kI4One[] = {nullptr, span_i4<Whole256, 1>};
constexpr Fn kI8DynamicOne[] = {nullptr, bytes_i8<1, 4>};
constexpr Fn kI4DynamicOne[] = {nullptr, bytes_i4<1, 4>};
constexpr Fn kF32[] = DW_ROWS_6(DW_F32_SPAN);
constexpr Fn kBf16[] = DW_ROWS_6(DW_BF16_SPAN);
constexpr Fn kI8[] = DW_ROWS_6(DW_I8_SPAN);
constexpr Fn kI4[] = DW_ROWS_6(DW_I4_SPAN);
constexpr Fn kI8Dynamic[] = DW_ROWS_6(DW_I8_BYTES);
constexpr Fn kI4Dynamic[] = DW_ROWS_6(DW_I4_BYTES);

template <int kMost, Fn const* kFew, Fn const* kMany>
void few_or_many(const Tile& t) {
  t.rows <= kMost ? all_spans<Whole256, kFew>(t) : all_spans<V256, kMany>(t);
}

}  // namespace

extern const LinearKernels DW_LINEAR_TABLE;
const LinearKernels DW_LINEAR_TABLE = {
    {few_or_many<2, kF32Few, kF32>, few_or_many<2, kBf16Few, kBf16>, few_or_many<1, kI8One, kI8>,
     few_or_many<1, kI8DynamicOne, kI8Dynamic>, few_or_many<1, kI4One, kI4>, few_or_many<1, kI4DynamicOne, kI4Dynamic>},
    finish_vectors,
    quantize_vectors,
    sum_bytes,
    {6, 6, 5, kVnni ? 6 : 4, 5, kVnni ? 5 : 4},
    {},
    {},
    nullptr,
    {0, 3, 2, 0, 2, 0},  // the kernels of many rows
    {3, 3, 2, 2, 2, 2}};

}  // namespace dw
