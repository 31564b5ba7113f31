// Linear kernels for AVX-512 with VNNI: weights that are not multiplied as bytes are widened to float32.
#include "linear_512.h"
#include "linear_vectors.h"
#include "linear_widen.h"

#include <type_traits>

namespace dw {
namespace {

using Fn = void (*)(const Tile&, int, int);

// Tiles of so many rows and more have wide rows: a number of them is loaded into all lanes at once. Parting the halves of pairs takes
// one of the two units that multiply, for each row. Measured on an Intel Xeon, where this level is chosen: 8 rows of bytes take 0.8 of the
// time, 16 of bfloat16 0.75. Up to six rows of bfloat16 wait for memory, and pairs are half as much to read.
constexpr int kWideBf16 = 7, kWideBytes = 2;
template <int R, int kFrom>
using V = std::conditional_t<(R >= kFrom), Wide512, V512>;

#define DW_ROWS_12(kernel)                                                                                            \
  {nullptr,   kernel(1), kernel(2), kernel(3),  kernel(4),  kernel(5), kernel(6),                                      \
   kernel(7), kernel(8), kernel(9), kernel(10), kernel(11), kernel(12)}
#define DW_BF16_SPAN(r) span<V<r, kWideBf16>, r, W_BF16>
#define DW_I8_SPAN(r) span<V<r, kWideBytes>, r, W_I8>
#define DW_I4_SPAN(r) span_i4<V<r, kWideBytes>, r>

constexpr Fn kBf16[] = DW_ROWS_12(DW_BF16_SPAN);
constexpr Fn kI8[] = DW_ROWS_12(DW_I8_SPAN);
constexpr Fn kI4[] = DW_ROWS_12(DW_I4_SPAN);

#define DW_F32_TILE(r, p) tile<false, r, p>
#define DW_I8_DYN_TILE(r, p) tile_i8_dynamic<r, p>
#define DW_I4_DYN_TILE(r, p) tile_i4_dynamic<r, p>

}  // namespace

extern const LinearKernels linear_avx512vnni;
const LinearKernels linear_avx512vnni = {
    {DW_ROWS(DW_F32_TILE), all_spans<V512, kBf16>, all_spans<V512, kI8>, DW_ROWS(DW_I8_DYN_TILE), all_spans<V512, kI4>,
     DW_ROWS(DW_I4_DYN_TILE)},
    finish,
    quantize,
    sum,
    {12, 12, 10, 12, 10, 12},
    {6, 0, 0, 0, 0, 0},
    {},
    nullptr,
    {0, kWideBf16, kWideBytes, 0, kWideBytes, 0},
    {}};

}  // namespace dw
