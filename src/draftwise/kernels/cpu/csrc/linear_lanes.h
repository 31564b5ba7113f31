// Rows and vectors of ARM's linear kernels. A product there takes one factor from a lane of a register: a number of up to four rows is
// loaded at once, and nothing has to be broadcast.
#pragma once

#include <arm_neon.h>
#include <string.h>

#include "linear_kernels.h"
#include "linear_twice.h"

namespace dw {
namespace {

// A row's number as a constant, which lanes of instructions are: each_row<R>([&](auto row) { ... row.value ... }).
template <int N>
struct Index {
  static constexpr int value = N;
};
template <int R, int N = 0, class Body>
DW_ALWAYS void each_row(const Body& body) {
  body(Index<N>{});
  if constexpr (N + 1 < R) each_row<R, N + 1>(body);
}

// One dword of each of R rows, at x: row r is lane r % 4 of v[r / 4]. Nothing behind them is read.
template <int R>
struct RowLanes {
  uint32x4_t v[(R + 3) / 4];

  DW_ALWAYS explicit RowLanes(const uint32_t* x, Half half = Half::kWhole) {
    for (int i = 0; i < (R + 3) / 4; ++i) {
      const uint32x4_t four = some(x + 4 * i, R - 4 * i);
      v[i] = half == Half::kEven ? vshlq_n_u32(four, 16) : half == Half::kOdd ? vandq_u32(four, vdupq_n_u32(0xffff0000u)) : four;
    }
  }

 private:
  static DW_ALWAYS uint32x4_t some(const uint32_t* x, int left) {
    if (left >= 4) return vld1q_u32(x);
    if (left == 1) return vld1q_dup_u32(x);
    return vcombine_u32(vld1_u32(x), vld1_dup_u32(x + left - 1));
  }
};

// Four outputs, or as many bytes: one register.
struct V128 {
  using F = float32x4_t;
  using I = uint8x16_t;
  static constexpr int kBytes = 16;
  static DW_ALWAYS F zero() { return vdupq_n_f32(0); }
  static DW_ALWAYS I set(int bits) { return vreinterpretq_u8_s32(vdupq_n_s32(bits)); }
  static DW_ALWAYS I set_float(float value) { return vreinterpretq_u8_f32(vdupq_n_f32(value)); }
  static DW_ALWAYS I load(const uint8_t* from) { return vld1q_u8(from); }
  static DW_ALWAYS I repeat(const uint8_t* sixteen) { return vld1q_u8(sixteen); }
  static DW_ALWAYS F load_floats(const float* from) { return vld1q_f32(from); }
  static DW_ALWAYS void store_floats(float* to, F v) { vst1q_f32(to, v); }
  static DW_ALWAYS F load_halves(const uint8_t* from) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from))); }
  static DW_ALWAYS F load_bytes(const uint8_t* from) {  // int8
    uint32_t four;
    memcpy(&four, from, 4);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
  }
  static DW_ALWAYS F as_floats(I v) { return vreinterpretq_f32_u8(v); }
  static DW_ALWAYS F to_floats(I v) { return vcvtq_f32_s32(vreinterpretq_s32_u8(v)); }
  static DW_ALWAYS F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static DW_ALWAYS F times(F a, F b) { return vmulq_f32(a, b); }
  static DW_ALWAYS F minus(F a, F b) { return vsubq_f32(a, b); }
  static DW_ALWAYS F floats_or(F a, F b) { return as_floats(vorrq_u8(vreinterpretq_u8_f32(a), vreinterpretq_u8_f32(b))); }
  static DW_ALWAYS I bits_and(I a, I b) { return vandq_u8(a, b); }
  static DW_ALWAYS I shift_left_16(I v) { return vreinterpretq_u8_u32(vshlq_n_u32(vreinterpretq_u32_u8(v), 16)); }
  static DW_ALWAYS I shift_right_4(I v) { return vshrq_n_u8(v, 4); }
  static DW_ALWAYS I shuffle(I v, I by) { return vqtbl1q_u8(v, by); }  // 0 where `by` is beyond 15
  static DW_ALWAYS I low_pairs(I a, I b) { return vzip1q_u8(a, b); }
  static DW_ALWAYS I high_pairs(I a, I b) { return vzip2q_u8(a, b); }
  template <int kLane>
  static DW_ALWAYS F fma_lane(F w, float32x4_t rows, F c) {
    return vfmaq_n_f32(c, w, rows[kLane]);  // not vfmaq_laneq_f32: GCC then keeps sums in memory, too
  }
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  template <int kLane>
  static DW_ALWAYS F dot_lane(I w, uint32x4_t rows, F c) {
    return vbfdotq_laneq_f32(c, vreinterpretq_bf16_u8(w), vreinterpretq_bf16_u32(rows), kLane);
  }
#endif
};

// As linear_widen.h wants them.
template <class B>
struct Lanes : B {
  using F = typename B::F;
  using I = typename B::I;

  template <int R, Half kHalf>
  static DW_ALWAYS void add_rows(F (&acc)[R][2], const F (&w)[2], const uint32_t* x) {
    const RowLanes<R> rows(x, kHalf);
    each_row<R>([&](auto row) __attribute__((always_inline)) {
      constexpr int r = decltype(row)::value;
      for (int v = 0; v < 2; ++v)
        acc[r][v] = B::template fma_lane<r % 4>(w[v], vreinterpretq_f32_u32(rows.v[r / 4]), acc[r][v]);
    });
  }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  // BFDOT, for every number of rows: what it rounds, and how, is its own (two products are rounded to odd, added, rounded to odd again,
  // numbers below the normal ones are zero), but the same for every lane. BFMMLA, which does twice as much, is not used: a
  // single row would have to go through it as well, half of it for nothing, since nobody promises that it rounds as BFDOT does.
  static constexpr bool kPairs = true, kWide = false;
  template <int R>
  static DW_ALWAYS void add_pairs(F (&acc)[R][2], const I (&pairs)[2], const uint32_t* x) {
    const RowLanes<R> rows(x);
    each_row<R>([&](auto row) __attribute__((always_inline)) {
      constexpr int r = decltype(row)::value;
      for (int v = 0; v < 2; ++v) acc[r][v] = B::template dot_lane<r % 4>(pairs[v], rows.v[r / 4], acc[r][v]);
    });
  }
#else
  static constexpr bool kPairs = false, kWide = false;
#endif
};

using Half128 = Lanes<Twice<V128>>;         // two of them: half a panel
using Whole128 = Lanes<Twice<Twice<V128>>>;  // two of them: a panel

}  // namespace
}  // namespace dw
