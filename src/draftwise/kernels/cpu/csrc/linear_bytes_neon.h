// Linear kernels of ARM for rows quantised to int8: R rows times 16 outputs, the `part`-th half of a panel. Sums are integers: exact,
// whatever the order, and so the same as on every other instruction set. By what the processor has:
//   NEON     products into 16 bits, pairs of them added there: 2 * 128 * 127 = 32,512 at most; int4, 0..15: 2 * 2 * 15 * 127
//   dotprod  SDOT: four bytes with sign times four with sign
//   i8mm     USDOT for one row: four bytes without sign times four with; USMMLA for more: 2 outputs x 8 k times 2 rows x 8 k
// int8 weights are stored plus 128. Where bytes have a sign, the highest bit is turned: 0x80 ^ (w + 128) = w. Else what is too
// much comes off through `Tile::x_sums`. int4 weights are 0..15 for -8..7: eight times the sum of the row comes off. E2M1 has 0..24 for
// -12..12, from a table.
#pragma once

#include "linear_lanes.h"
#include "linear_widen.h"

namespace dw {
namespace {

constexpr int kQuarters = 4;  // registers of 16 outputs

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kStoredAsTheyAre = true;
template <int kLane>
DW_ALWAYS int32x4_t dot(int32x4_t acc, uint8x16_t w, uint32x4_t rows) {
  return vusdotq_laneq_s32(acc, w, vreinterpretq_s8_u32(rows), kLane);
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool kStoredAsTheyAre = false;
template <int kLane>
DW_ALWAYS int32x4_t dot(int32x4_t acc, uint8x16_t w, uint32x4_t rows) {
  return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(w), vreinterpretq_s8_u32(rows), kLane);
}
#else
constexpr bool kStoredAsTheyAre = false;
template <int kLane>
DW_ALWAYS int32x4_t dot(int32x4_t acc, uint8x16_t w, uint32x4_t rows) {
  const int8x16_t bytes = vreinterpretq_s8_u8(w), row = vreinterpretq_s8_u32(vdupq_laneq_u32(rows, kLane));
  const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(row)), high = vmull_high_s8(bytes, row);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
}
#endif

// Two steps of int4.
#if defined(__ARM_FEATURE_DOTPROD)
template <int kLane>
DW_ALWAYS int32x4_t dot_twice(int32x4_t acc, uint8x16_t first, uint32x4_t rows, uint8x16_t second, uint32x4_t next) {
  return dot<kLane>(dot<kLane>(acc, first, rows), second, next);
}
#else
template <int kLane>
DW_ALWAYS int32x4_t dot_twice(int32x4_t acc, uint8x16_t first, uint32x4_t rows, uint8x16_t second, uint32x4_t next) {
  const int8x16_t a = vreinterpretq_s8_u8(first), x = vreinterpretq_s8_u32(vdupq_laneq_u32(rows, kLane));
  const int8x16_t b = vreinterpretq_s8_u8(second), y = vreinterpretq_s8_u32(vdupq_laneq_u32(next, kLane));
  const int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(a), vget_low_s8(x)), vget_low_s8(b), vget_low_s8(y));
  const int16x8_t high = vmlal_high_s8(vmull_high_s8(a, x), b, y);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
}
#endif

struct Outputs {  // of one row
  int32x4_t v[kQuarters];
};

DW_ALWAYS Outputs load_sums(const float* from) {
  auto* integers = reinterpret_cast<const int32_t*>(from);
  return {{vld1q_s32(integers), vld1q_s32(integers + 4), vld1q_s32(integers + 8), vld1q_s32(integers + 12)}};
}
DW_ALWAYS void store_sums(float* to, const Outputs& sums) {
  auto* integers = reinterpret_cast<int32_t*>(to);
  DW_UNROLLED
  for (int q = 0; q < kQuarters; ++q) vst1q_s32(integers + 4 * q, sums.v[q]);
}
DW_ALWAYS Outputs all(int32_t value) {
  const int32x4_t v = vdupq_n_s32(value);
  return {{v, v, v, v}};
}

// The group's sums into the totals (linear_widen.h).
template <int R>
DW_ALWAYS void end_integers(const Tile& t, float* sums, const uint8_t* header, int part, const Outputs (&acc)[R],
                            const int32_t* x_sums, bool start) {
  Half128::F values[R][2];
  float x_sum[R];
  DW_UNROLLED
  for (int r = 0; r < R; ++r) {
    DW_UNROLLED
    for (int v = 0; v < 2; ++v)
      values[r][v] = {vcvtq_f32_s32(acc[r].v[2 * v]), vcvtq_f32_s32(acc[r].v[2 * v + 1])};
    x_sum[r] = float(x_sums[r]) * -0.125f;
  }
  end_span_group<Half128, R>(t, sums, header, part, values, x_sum, start);
}

template <int R>
void bytes_i8(const Tile& t, int panel, int part) {
  const uint8_t* w = t.w + panel * t.panel_stride + part * 64;
  const uint32_t* x = t.x;
  float* sums = t.sums + panel * kPanel + part * 16;
  const int64_t stride = int64_t(kPanel) * t.panels;
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  const uint8x16_t sign = vdupq_n_u8(kStoredAsTheyAre ? 0 : 0x80);
  Outputs acc[R];
  DW_UNROLLED
  for (int r = 0; r < R; ++r) acc[r] = t.load ? load_sums(sums + r * stride) : all(kStoredAsTheyAre ? x_sums[r] : 0);
  for (int64_t u = 0; u < t.units; ++u) {
    __builtin_prefetch(w + 2048);
    uint8x16_t bytes[kQuarters];
    DW_UNROLLED
    for (int q = 0; q < kQuarters; ++q) bytes[q] = veorq_u8(vld1q_u8(w + 16 * q), sign);
    const RowLanes<R> rows(x);
    each_row<R>([&](auto row) __attribute__((always_inline)) {
      constexpr int r = decltype(row)::value;
      DW_UNROLLED
      for (int q = 0; q < kQuarters; ++q) acc[r].v[q] = dot<r % 4>(acc[r].v[q], bytes[q], rows.v[r / 4]);
    });
    w += kUnitBytes;
    x += R;
  }
  DW_UNROLLED
  for (int r = 0; r < R; ++r) store_sums(sums + r * stride, acc[r]);
}

// The integers of 16 codes: themselves, or what a table says (kLookUp).
template <bool kLookUp>
DW_ALWAYS uint8x16_t integers_of(uint8x16_t table, uint8x16_t codes) {
  return kLookUp ? vqtbl1q_u8(table, codes) : codes;
}

template <int R, bool kLookUp>
void bytes_i4_of(const Tile& t, int panel, int part) {
  const uint8_t* at = t.w + panel * t.panel_stride;
  float* sums = t.sums + panel * kPanel + part * 16;
  const uint32_t* x = t.x;
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  const int header = t.zeros ? 2 * kHeader : kHeader;
  const int64_t groups = t.units / t.group_units;
  const uint8x16_t mask = vdupq_n_u8(15), table = vld1q_u8(t.nibbles->integers);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* w = at + header + part * 64;
    Outputs acc[R];
    DW_UNROLLED
    for (int r = 0; r < R; ++r) acc[r] = all(x_sums[r]);
    for (int u = 0; u < t.group_units; ++u) {
      __builtin_prefetch(w + 2048);
      uint8x16_t low[kQuarters], high[kQuarters];
      DW_UNROLLED
      for (int q = 0; q < kQuarters; ++q) {
        const uint8x16_t bits = vld1q_u8(w + 16 * q);
        low[q] = integers_of<kLookUp>(table, vandq_u8(bits, mask));
        high[q] = integers_of<kLookUp>(table, vshrq_n_u8(bits, 4));
      }
      const RowLanes<R> rows(x), next(x + R);
      each_row<R>([&](auto row) __attribute__((always_inline)) {
        constexpr int r = decltype(row)::value;
        DW_UNROLLED
        for (int q = 0; q < kQuarters; ++q)
          acc[r].v[q] = dot_twice<r % 4>(acc[r].v[q], low[q], rows.v[r / 4], high[q], next.v[r / 4]);
      });
      w += kUnitBytes;
      x += 2 * R;
    }
    end_integers<R>(t, sums, at, part, acc, x_sums, g == 0 && !t.load);
    x_sums += R;
    at += header + t.group_units * kUnitBytes;
  }
}

template <int R>
void bytes_i4(const Tile& t, int panel, int part) {
  t.nibbles->plain ? bytes_i4_of<R, false>(t, panel, part) : bytes_i4_of<R, true>(t, panel, part);
}

}  // namespace
}  // namespace dw
