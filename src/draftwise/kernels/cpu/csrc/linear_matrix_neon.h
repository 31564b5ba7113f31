// Linear kernels of ARM for rows quantised to int8 that multiply small matrices: USMMLA takes 2 outputs x 8 k (bytes without sign) and
// 2 rows x 8 k (bytes with sign), and adds the four sums of eight products to a register [output 0: row 0, row 1; output 1: row 0,
// row 1]. Rows go in twos; of an odd number of them the last one is its own neighbour, whose sums nobody takes.
//
// A unit has four k of an output (int8), or two times four (int4): two steps side by side make eight. Example, outputs 0..3 of units
// u, u + 1, a number being (output, k):
//   w0 = 00 01 02 03  10 11 12 13  20 ..      zip1 = 00 01 02 03 04 05 06 07  10 11 .. 17     outputs 0, 1
//   w1 = 04 05 06 07  14 15 16 17  24 ..      zip2 = 20 21 ..                                 outputs 2, 3
#pragma once

#include "linear_bytes_neon.h"

namespace dw {
namespace {

// Sums of two rows: v[2 q] of outputs 4 q and 4 q + 1, v[2 q + 1] of the next two.
struct TwoRows {
  int32x4_t v[2 * kQuarters];

  DW_ALWAYS void from(const Outputs& first, const Outputs& second) {
    DW_UNROLLED
    for (int q = 0; q < kQuarters; ++q) {
      v[2 * q] = vzip1q_s32(first.v[q], second.v[q]);
      v[2 * q + 1] = vzip2q_s32(first.v[q], second.v[q]);
    }
  }
  DW_ALWAYS Outputs first() const {
    return {{vuzp1q_s32(v[0], v[1]), vuzp1q_s32(v[2], v[3]), vuzp1q_s32(v[4], v[5]), vuzp1q_s32(v[6], v[7])}};
  }
  DW_ALWAYS Outputs second() const {
    return {{vuzp2q_s32(v[0], v[1]), vuzp2q_s32(v[2], v[3]), vuzp2q_s32(v[4], v[5]), vuzp2q_s32(v[6], v[7])}};
  }
};

// Eight k of rows 2 p and 2 p + 1, from two steps of R rows.
template <int R>
DW_ALWAYS int8x16_t two_rows(const uint32_t* step, const uint32_t* next, int p) {
  const bool alone = 2 * p + 1 == R;
  const uint32x2_t a = alone ? vld1_dup_u32(step + 2 * p) : vld1_u32(step + 2 * p);
  const uint32x2_t b = alone ? vld1_dup_u32(next + 2 * p) : vld1_u32(next + 2 * p);
  return vreinterpretq_s8_u32(vcombine_u32(vzip1_u32(a, b), vzip2_u32(a, b)));
}

// Outputs 4 q .. 4 q + 3: eight k as two steps of four.
template <int P>
DW_ALWAYS void add_eight(TwoRows (&acc)[P], int q, uint8x16_t w0, uint8x16_t w1, const int8x16_t (&rows)[P]) {
  const uint32x4_t a = vreinterpretq_u32_u8(w0), b = vreinterpretq_u32_u8(w1);
  const uint8x16_t low = vreinterpretq_u8_u32(vzip1q_u32(a, b)), high = vreinterpretq_u8_u32(vzip2q_u32(a, b));
  DW_UNROLLED
  for (int p = 0; p < P; ++p) {
    acc[p].v[2 * q] = vusmmlaq_s32(acc[p].v[2 * q], low, rows[p]);
    acc[p].v[2 * q + 1] = vusmmlaq_s32(acc[p].v[2 * q + 1], high, rows[p]);
  }
}

template <int R>
void matrix_i8(const Tile& t, int panel, int part) {
  constexpr int P = (R + 1) / 2;
  const uint8_t* w = t.w + panel * t.panel_stride + part * 64;
  const uint32_t* x = t.x;
  float* sums = t.sums + panel * kPanel + part * 16;
  const int64_t stride = int64_t(kPanel) * t.panels;
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  auto start = [&](int r) { return t.load ? load_sums(sums + r * stride) : all(x_sums[r]); };
  TwoRows acc[P];
  DW_UNROLLED
  for (int p = 0; p < P; ++p) acc[p].from(start(2 * p), start(2 * p + 1 < R ? 2 * p + 1 : 2 * p));
  for (int64_t u = 0; u + 1 < t.units; u += 2) {
    __builtin_prefetch(w + 2048);
    __builtin_prefetch(w + 2048 + kUnitBytes);
    int8x16_t rows[P];
    DW_UNROLLED
    for (int p = 0; p < P; ++p) rows[p] = two_rows<R>(x, x + R, p);
    DW_UNROLLED
    for (int q = 0; q < kQuarters; ++q)
      add_eight<P>(acc, q, vld1q_u8(w + 16 * q), vld1q_u8(w + kUnitBytes + 16 * q), rows);
    w += 2 * kUnitBytes;
    x += 2 * R;
  }
  if (t.units % 2 != 0) {  // four k are left: times nothing
    int8x16_t rows[P];
    DW_UNROLLED
    for (int p = 0; p < P; ++p) rows[p] = two_rows<R>(x, x, p);
    DW_UNROLLED
    for (int q = 0; q < kQuarters; ++q) add_eight<P>(acc, q, vld1q_u8(w + 16 * q), vdupq_n_u8(0), rows);
  }
  DW_UNROLLED
  for (int p = 0; p < P; ++p) {
    store_sums(sums + 2 * p * stride, acc[p].first());
    if (2 * p + 1 < R) store_sums(sums + (2 * p + 1) * stride, acc[p].second());
  }
}

template <int R, bool kLookUp>
void matrix_i4_of(const Tile& t, int panel, int part) {
  constexpr int P = (R + 1) / 2;
  const uint8_t* at = t.w + panel * t.panel_stride;
  float* sums = t.sums + panel * kPanel + part * 16;
  const uint32_t* x = t.x;
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  const int header = t.zeros ? 2 * kHeader : kHeader;
  const int64_t groups = t.units / t.group_units;
  const uint8x16_t mask = vdupq_n_u8(15), table = vld1q_u8(t.nibbles->integers);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* w = at + header + part * 64;
    TwoRows acc[P];
    DW_UNROLLED
    for (int p = 0; p < P; ++p) acc[p].from(all(x_sums[2 * p]), all(x_sums[2 * p + 1 < R ? 2 * p + 1 : 2 * p]));
    for (int u = 0; u < t.group_units; ++u) {
      __builtin_prefetch(w + 2048);
      int8x16_t rows[P];
      DW_UNROLLED
      for (int p = 0; p < P; ++p) rows[p] = two_rows<R>(x, x + R, p);
      DW_UNROLLED
      for (int q = 0; q < kQuarters; ++q) {
        const uint8x16_t bits = vld1q_u8(w + 16 * q);
        add_eight<P>(acc, q, integers_of<kLookUp>(table, vandq_u8(bits, mask)),
                     integers_of<kLookUp>(table, vshrq_n_u8(bits, 4)), rows);
      }
      w += kUnitBytes;
      x += 2 * R;
    }
    Outputs each[R];
    DW_UNROLLED
    for (int r = 0; r < R; ++r) each[r] = r % 2 == 0 ? acc[r / 2].first() : acc[r / 2].second();
    end_integers<R>(t, sums, at, part, each, x_sums, g == 0 && !t.load);
    x_sums += R;
    at += header + t.group_units * kUnitBytes;
  }
}

template <int R>
void matrix_i4(const Tile& t, int panel, int part) {
  t.nibbles->plain ? matrix_i4_of<R, false>(t, panel, part) : matrix_i4_of<R, true>(t, panel, part);
}

}  // namespace
}  // namespace dw
