// Linear kernels for AVX-512 with BF16, VBMI and VNNI.
#include "linear_512.h"
#include "linear_bytes_to_pairs.h"

namespace dw {
namespace {

template <int R, int P>
void tile_i8(const Tile& t) {
  __m512 acc[R][2 * P];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v)
      acc[r][v] = t.load ? _mm512_loadu_ps(t.sums + (r * P * 2 + v) * 16) : _mm512_setzero_ps();
  Stream<P> s(t);
  const uint32_t* x = t.x;
  do {
    s.prefetch(t.panel_stride);
    __m512i first[2 * P], second[2 * P];
    for (int v = 0; v < 2 * P; ++v) {
      widen_bytes(load_w(s.w + v / 2 * t.panel_stride + v % 2 * 64), first[v], second[v]);
    }
    add_steps<R, P, true>(acc, first, x);
    add_steps<R, P, true>(acc, second, x + R);
    x += 2 * R;
  } while (s.next_unit());
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v) _mm512_storeu_ps(t.sums + (r * P * 2 + v) * 16, acc[r][v]);
}

template <bool kZeros, int R, int P>
void tile_i4_groups(const Tile& t) {
  constexpr int header = kZeros ? 2 * kHeader : kHeader;
  const auto* x_sums = static_cast<const float*>(t.x_sums);
  const NibbleTables tables(*t.nibbles);
  start_totals<R, P>(t);
  Stream<P> s(t);
  const uint32_t* x = t.x;
  const int64_t stride = t.panel_stride;
  const int group_units = t.group_units;
  int64_t groups = t.units / group_units;
  float* sums = t.sums;
  do {
    const uint8_t* group = s.w;
    __m512 acc[R][2 * P];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2 * P; ++v) acc[r][v] = _mm512_setzero_ps();
    s.skip_header(stride, header);
    int u = group_units;
    do {  // at least once: a loop that may not run makes the compiler spill
      s.prefetch(stride);
      for (int half = 0; half < 2; ++half) {
        __m512i first[2 * P], second[2 * P];
        for (int v = 0; v < 2 * P; ++v) {
          widen_nibbles(tables, load_w(s.w + v / 2 * stride + v % 2 * 64), half, first[v], second[v]);
        }
        add_steps<R, P, true>(acc, first, x + 2 * half * R);
        add_steps<R, P, true>(acc, second, x + (2 * half + 1) * R);
      }
      s.next_unit();
      x += 4 * R;
    } while (--u > 0);
    float x_sum[R];
    if (kZeros)
      for (int r = 0; r < R; ++r) x_sum[r] = x_sums[r];
    end_group<kZeros, R, P>(
        sums, group, stride, [&](int r, int v) { return acc[r][v]; }, x_sum);
    x_sums += R;
  } while (--groups > 0);
}

template <int R, int P>
void tile_i4(const Tile& t) {
  t.zeros ? tile_i4_groups<true, R, P>(t) : tile_i4_groups<false, R, P>(t);
}

#define DW_F32_TILE(r, p) tile<false, r, p>
#define DW_BF16_TILE(r, p) tile<true, r, p>
#define DW_I8_TILE(r, p) tile_i8<r, p>
#define DW_I8_DYN_TILE(r, p) tile_i8_dynamic<r, p>
#define DW_I4_TILE(r, p) tile_i4<r, p>
#define DW_I4_DYN_TILE(r, p) tile_i4_dynamic<r, p>

}  // namespace

extern const LinearKernels linear_avx512;
const LinearKernels linear_avx512 = {
    {DW_ROWS(DW_F32_TILE), DW_ROWS(DW_BF16_TILE), DW_ROWS(DW_I8_TILE), DW_ROWS(DW_I8_DYN_TILE), DW_ROWS(DW_I4_TILE),
     DW_ROWS(DW_I4_DYN_TILE)},
    finish,
    quantize,
    sum,
    {12, 12, 8, 12, 8, 12},  // what registers hold next to the tables of the widening formats
    {6, 0, 0, 0, 0, 0},  // weights that come from memory are read faster in one stream than in two
    {},
    nullptr,
    {},
    {}};

}  // namespace dw
