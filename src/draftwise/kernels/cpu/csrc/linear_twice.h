// Vectors of linear_widen.h that are two registers each.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>

#define DW_ALWAYS inline __attribute__((always_inline))

namespace dw {
namespace {

// Two vectors as one: the second stands behind the first.
template <class H>
struct Twice {
  struct F {
    typename H::F low, high;
  };
  struct I {
    typename H::I low, high;
  };
  static constexpr int kBytes = 2 * H::kBytes;
  static DW_ALWAYS F zero() { return {H::zero(), H::zero()}; }
  static DW_ALWAYS I set(int bits) { return {H::set(bits), H::set(bits)}; }
  static DW_ALWAYS I set_float(float value) { return {H::set_float(value), H::set_float(value)}; }
  static DW_ALWAYS I load(const uint8_t* from) { return {H::load(from), H::load(from + H::kBytes)}; }
  static DW_ALWAYS I repeat(const uint8_t* sixteen) { return {H::repeat(sixteen), H::repeat(sixteen)}; }
  static DW_ALWAYS F load_floats(const float* from) {
    return {H::load_floats(from), H::load_floats(from + H::kBytes / 4)};
  }
  static DW_ALWAYS void store_floats(float* to, F v) {
    H::store_floats(to, v.low);
    H::store_floats(to + H::kBytes / 4, v.high);
  }
  static DW_ALWAYS F load_halves(const uint8_t* from) {
    return {H::load_halves(from), H::load_halves(from + H::kBytes / 2)};
  }
  static DW_ALWAYS F load_bytes(const uint8_t* from) {
    return {H::load_bytes(from), H::load_bytes(from + H::kBytes / 4)};
  }
  static DW_ALWAYS F as_floats(I v) { return {H::as_floats(v.low), H::as_floats(v.high)}; }
  static DW_ALWAYS F to_floats(I v) { return {H::to_floats(v.low), H::to_floats(v.high)}; }
  static DW_ALWAYS F fma(F a, F b, F c) { return {H::fma(a.low, b.low, c.low), H::fma(a.high, b.high, c.high)}; }
  static DW_ALWAYS F times(F a, F b) { return {H::times(a.low, b.low), H::times(a.high, b.high)}; }
  static DW_ALWAYS F minus(F a, F b) { return {H::minus(a.low, b.low), H::minus(a.high, b.high)}; }
  static DW_ALWAYS F floats_or(F a, F b) { return {H::floats_or(a.low, b.low), H::floats_or(a.high, b.high)}; }
  static DW_ALWAYS I bits_and(I a, I b) { return {H::bits_and(a.low, b.low), H::bits_and(a.high, b.high)}; }
  static DW_ALWAYS I shift_left_16(I v) { return {H::shift_left_16(v.low), H::shift_left_16(v.high)}; }
  static DW_ALWAYS I shift_right_4(I v) { return {H::shift_right_4(v.low), H::shift_right_4(v.high)}; }
  static DW_ALWAYS I shuffle(I v, I by) { return {H::shuffle(v.low, by.low), H::shuffle(v.high, by.high)}; }
  static DW_ALWAYS I low_pairs(I a, I b) { return {H::low_pairs(a.low, b.low), H::low_pairs(a.high, b.high)}; }
  static DW_ALWAYS I high_pairs(I a, I b) { return {H::high_pairs(a.low, b.low), H::high_pairs(a.high, b.high)}; }
#if defined(__aarch64__)
  template <int kLane>
  static DW_ALWAYS F fma_lane(F w, float32x4_t rows, F c) {
    return {H::template fma_lane<kLane>(w.low, rows, c.low), H::template fma_lane<kLane>(w.high, rows, c.high)};
  }
  template <int kLane>
  static DW_ALWAYS F dot_lane(I w, uint32x4_t rows, F c) {
    return {H::template dot_lane<kLane>(w.low, rows, c.low), H::template dot_lane<kLane>(w.high, rows, c.high)};
  }
#endif
};

}  // namespace
}  // namespace dw
