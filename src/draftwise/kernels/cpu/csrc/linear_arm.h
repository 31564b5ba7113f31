// The linear kernels of one level of ARM; DW_LINEAR_TABLE names them. What they may use, the compiler's flags say.
#pragma once

#include "linear_bytes_neon.h"
#include "linear_way_out.h"
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "linear_matrix_neon.h"
#endif

namespace dw {
namespace {

using Fn = void (*)(const Tile&, int, int);

#define DW_TO_2(kernel) {nullptr, kernel(1), kernel(2)}
#define DW_TO_4(kernel) {nullptr, kernel(1), kernel(2), kernel(3), kernel(4)}
#define DW_TO_6(kernel) {nullptr, kernel(1), kernel(2), kernel(3), kernel(4), kernel(5), kernel(6)}
#define DW_F32_WHOLE(r) span<Whole128, r, W_F32>
#define DW_F32_HALF(r) span<Half128, r, W_F32>
#define DW_BF16_WHOLE(r) span<Whole128, r, W_BF16>
#define DW_BF16_HALF(r) span<Half128, r, W_BF16>
#define DW_I8_HALF(r) span<Half128, r, W_I8>
#define DW_I4_HALF(r) span_i4<Half128, r>
#define DW_I8_BYTES(r) bytes_i8<r>
#define DW_I4_BYTES(r) bytes_i4<r>

// Sums stand in registers, of which there are 32. One or two rows take a panel at a time, 8 registers each, so that there are enough
// independent sums to keep the processor busy; more rows take half of one. The lanes' sums are the same. Formats that are
// widened need registers for that.
constexpr Fn kF32Few[] = DW_TO_2(DW_F32_WHOLE), kF32[] = DW_TO_6(DW_F32_HALF);
constexpr Fn kBf16Few[] = DW_TO_2(DW_BF16_WHOLE), kBf16[] = DW_TO_6(DW_BF16_HALF);
constexpr Fn kI8[] = DW_TO_4(DW_I8_HALF);
constexpr Fn kI4[] = DW_TO_4(DW_I4_HALF);
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kI8Rows = 4, kI4Rows = 4;
constexpr Fn kI8Dynamic[] = {nullptr, bytes_i8<1>, matrix_i8<2>, matrix_i8<3>, matrix_i8<4>};
constexpr Fn kI4Dynamic[] = {nullptr, bytes_i4<1>, matrix_i4<2>, matrix_i4<3>, matrix_i4<4>};
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kI8Rows = 6, kI4Rows = 4;
constexpr Fn kI8Dynamic[] = DW_TO_6(DW_I8_BYTES);
constexpr Fn kI4Dynamic[] = DW_TO_4(DW_I4_BYTES);
#else
constexpr int kI8Rows = 4, kI4Rows = 4;
constexpr Fn kI8Dynamic[] = DW_TO_4(DW_I8_BYTES);
constexpr Fn kI4Dynamic[] = DW_TO_4(DW_I4_BYTES);
#endif

template <Fn const* kFew, Fn const* kMany>
void few_or_many(const Tile& t) {
  t.rows <= 2 ? all_spans<Whole128, kFew>(t) : all_spans<Half128, kMany>(t);
}

}  // namespace

extern const LinearKernels DW_LINEAR_TABLE;
const LinearKernels DW_LINEAR_TABLE = {
    {few_or_many<kF32Few, kF32>, few_or_many<kBf16Few, kBf16>, all_spans<Half128, kI8>, all_spans<Half128, kI8Dynamic>,
     all_spans<Half128, kI4>, all_spans<Half128, kI4Dynamic>},
    finish_vectors,
    quantize_vectors,
    sum_bytes,
    {6, 6, 4, kI8Rows, 4, kI4Rows},
    {},
    {},
    nullptr,
    {},
    {}};

}  // namespace dw
