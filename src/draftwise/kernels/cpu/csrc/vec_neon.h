// The vector layer (vec.h) on ARM: sixteen lanes are four registers of 128 bits. Written with the instructions by name: of vectors
// wider than a register GCC makes loops over single numbers as soon as they are compared, converted or put in another order.
#pragma once

#include <arm_neon.h>

namespace dw {
namespace {

// Of 32 registers: sums of scores take sixteen, and so do sums of values.
constexpr int SCORE_SUMS = 4, VALUE_ROWS = 2, VALUE_VECTORS = 2;

struct vi;
struct vu;

struct vf {
  float32x4_t a, b, c, d;
  vf() = default;
  DW_INLINE vf(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) : a(a), b(b), c(c), d(d) {}
  DW_INLINE explicit vf(vi);  // of these bits
  DW_INLINE explicit vf(vu);
  DW_INLINE float operator[](int i) const { return (i < 4 ? a : i < 8 ? b : i < 12 ? c : d)[i % 4]; }
};
struct vi {
  int32x4_t a, b, c, d;
  vi() = default;
  DW_INLINE vi(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) : a(a), b(b), c(c), d(d) {}
  DW_INLINE explicit vi(vf);
};
struct vu {
  uint32x4_t a, b, c, d;
  vu() = default;
  DW_INLINE vu(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) : a(a), b(b), c(c), d(d) {}
  DW_INLINE explicit vu(vf);
};
struct vq {  // eight lanes of 64 bits
  uint64x2_t a, b, c, d;
  vq() = default;
  DW_INLINE vq(uint64x2_t a, uint64x2_t b, uint64x2_t c, uint64x2_t d) : a(a), b(b), c(c), d(d) {}
};

// R(f(x.a), f(x.b), ...), and the same of two vectors.
#define DW_MAP(R, f, x) R(f(x.a), f(x.b), f(x.c), f(x.d))
#define DW_MAP2(R, f, x, y) R(f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d))

DW_INLINE vf::vf(vi v) : vf(DW_MAP(vf, vreinterpretq_f32_s32, v)) {}
DW_INLINE vf::vf(vu v) : vf(DW_MAP(vf, vreinterpretq_f32_u32, v)) {}
DW_INLINE vi::vi(vf v) : vi(DW_MAP(vi, vreinterpretq_s32_f32, v)) {}
DW_INLINE vu::vu(vf v) : vu(DW_MAP(vu, vreinterpretq_u32_f32, v)) {}

DW_INLINE vf splat(float x) {
  float32x4_t v = vdupq_n_f32(x);
  return vf(v, v, v, v);
}
DW_INLINE vi splat_i(int32_t x) {
  int32x4_t v = vdupq_n_s32(x);
  return vi(v, v, v, v);
}
DW_INLINE vi lane_numbers() {
  const int32x4_t first = {0, 1, 2, 3};
  return vi(first, first + 4, first + 8, first + 12);
}

DW_INLINE vf operator+(vf x, vf y) { return DW_MAP2(vf, vaddq_f32, x, y); }
DW_INLINE vf operator-(vf x, vf y) { return DW_MAP2(vf, vsubq_f32, x, y); }
DW_INLINE vf operator*(vf x, vf y) { return DW_MAP2(vf, vmulq_f32, x, y); }
DW_INLINE vf operator/(vf x, vf y) { return DW_MAP2(vf, vdivq_f32, x, y); }
DW_INLINE vf operator-(vf x) { return DW_MAP(vf, vnegq_f32, x); }
DW_INLINE vf operator+(vf x, float y) { return x + splat(y); }
DW_INLINE vf operator-(vf x, float y) { return x - splat(y); }
DW_INLINE vf operator*(vf x, float y) { return x * splat(y); }
DW_INLINE vf operator/(vf x, float y) { return x / splat(y); }
DW_INLINE vf operator-(float x, vf y) { return splat(x) - y; }
DW_INLINE vf operator/(float x, vf y) { return splat(x) / y; }
DW_INLINE vf& operator+=(vf& x, vf y) { return x = x + y; }

DW_INLINE int32x4_t less(float32x4_t x, float32x4_t y) { return vreinterpretq_s32_u32(vcltq_f32(x, y)); }
DW_INLINE int32x4_t at_least(float32x4_t x, float32x4_t y) { return vreinterpretq_s32_u32(vcgeq_f32(x, y)); }
DW_INLINE int32x4_t less_i(int32x4_t x, int32x4_t y) { return vreinterpretq_s32_u32(vcltq_s32(x, y)); }
DW_INLINE int32x4_t at_least_i(int32x4_t x, int32x4_t y) { return vreinterpretq_s32_u32(vcgeq_s32(x, y)); }

// Masks: all bits of a lane, or none.
DW_INLINE vi operator<(vf x, vf y) { return DW_MAP2(vi, less, x, y); }
DW_INLINE vi operator>(vf x, vf y) { return y < x; }
DW_INLINE vi operator<(vf x, float y) { return x < splat(y); }
DW_INLINE vi operator>=(vf x, float y) {
  vf z = splat(y);
  return DW_MAP2(vi, at_least, x, z);
}
DW_INLINE vi operator<(vi x, vi y) { return DW_MAP2(vi, less_i, x, y); }
DW_INLINE vi operator<(vi x, int32_t y) { return x < splat_i(y); }
DW_INLINE vi operator>=(vi x, int32_t y) {
  vi z = splat_i(y);
  return DW_MAP2(vi, at_least_i, x, z);
}

DW_INLINE vi operator+(vi x, vi y) { return DW_MAP2(vi, vaddq_s32, x, y); }
DW_INLINE vi operator-(vi x, vi y) { return DW_MAP2(vi, vsubq_s32, x, y); }
DW_INLINE vi operator&(vi x, vi y) { return DW_MAP2(vi, vandq_s32, x, y); }
DW_INLINE vi operator~(vi x) { return DW_MAP(vi, vmvnq_s32, x); }
DW_INLINE vi operator+(vi x, int32_t y) { return x + splat_i(y); }
DW_INLINE vi operator-(vi x, int32_t y) { return x - splat_i(y); }
DW_INLINE vi operator-(int32_t x, vi y) { return splat_i(x) - y; }
DW_INLINE vi operator&(vi x, int32_t y) { return x & splat_i(y); }
DW_INLINE vi operator<<(vi x, int n) { return vi(x.a << n, x.b << n, x.c << n, x.d << n); }
DW_INLINE vi operator>>(vi x, int n) { return vi(x.a >> n, x.b >> n, x.c >> n, x.d >> n); }

DW_INLINE float32x4_t chosen(int32x4_t mask, float32x4_t yes, float32x4_t no) {
  return vbslq_f32(vreinterpretq_u32_s32(mask), yes, no);
}
DW_INLINE vf select(vi m, vf x, vf y) {
  return vf(chosen(m.a, x.a, y.a), chosen(m.b, x.b, y.b), chosen(m.c, x.c, y.c), chosen(m.d, x.d, y.d));
}
DW_INLINE vi select(vi m, vi x, vi y) { return vi(select(m, vf(x), vf(y))); }
DW_INLINE bool any(vi m) {
  int32x4_t all = vorrq_s32(vorrq_s32(m.a, m.b), vorrq_s32(m.c, m.d));
  return vmaxvq_u32(vreinterpretq_u32_s32(all)) != 0;
}

DW_INLINE vi to_ints(vf x) { return DW_MAP(vi, vcvtq_s32_f32, x); }  // towards zero
DW_INLINE vf to_floats(vi x) { return DW_MAP(vf, vcvtq_f32_s32, x); }

DW_INLINE vf fma(vf x, vf y, vf z) {
  return vf(vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d));
}
DW_INLINE vf fma(float x, vf y, vf z) {
  return vf(vfmaq_n_f32(z.a, y.a, x), vfmaq_n_f32(z.b, y.b, x), vfmaq_n_f32(z.c, y.c, x), vfmaq_n_f32(z.d, y.d, x));
}
// The last bits of n are added to the exponent of x; what does not fit wraps.
DW_INLINE vf add_exponent(vf x, vf n) { return vf(vi(x) + (vi(n) << 23)); }

// The lanes' sum and maximum in one fixed tree: (i, i + 8), (i, i + 4), ...
DW_INLINE float sum_lanes(vf v) {
  float32x4_t four = (v.a + v.c) + (v.b + v.d);
  float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return two[0] + two[1];
}
DW_INLINE float max_lanes(vf v) {
  float32x4_t left = chosen(less(v.c, v.a), v.a, v.c), right = chosen(less(v.d, v.b), v.b, v.d);
  float32x4_t four = chosen(less(right, left), left, right);
  float x = four[0] > four[2] ? four[0] : four[2], y = four[1] > four[3] ? four[1] : four[3];
  return x > y ? x : y;
}

// ------------------------------------------------------------------------------------------------ loads and stores

DW_INLINE vf load(const float* p) { return vf(vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)); }
DW_INLINE vf load(const bf16* p) {
  const uint16x8_t zero = vdupq_n_u16(0);
  uint16x8_t low = vld1q_u16(&p->bits), high = vld1q_u16(&p->bits + 8);
  return vf(vreinterpretq_f32_u16(vzip1q_u16(zero, low)), vreinterpretq_f32_u16(vzip2q_u16(zero, low)),
            vreinterpretq_f32_u16(vzip1q_u16(zero, high)), vreinterpretq_f32_u16(vzip2q_u16(zero, high)));
}
DW_INLINE vf load(const f16* p) {
  float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(&p->bits)), high = vreinterpretq_f16_u16(vld1q_u16(&p->bits + 8));
  return vf(vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
            vcvt_high_f32_f16(high));
}
// Fp8 has the exponent of float16 less 8, in the same place once its sign is apart: subnormal numbers, too.
DW_INLINE uint16x8_t as_half(uint8x8_t b) {
  uint16x8_t wide = vmovl_u8(b);
  return vorrq_u16(vandq_u16(vshlq_n_u16(wide, 8), vdupq_n_u16(0x8000)), vandq_u16(vshlq_n_u16(wide, 7), vdupq_n_u16(0x3f80)));
}
DW_INLINE vf load(const f8* p) {
  uint8x16_t bytes = vld1q_u8(&p->bits);
  f16 halves[LANES];
  vst1q_u16(&halves->bits, as_half(vget_low_u8(bytes)));
  vst1q_u16(&halves->bits + 8, as_half(vget_high_u8(bytes)));
  return load(halves) * 256.0f;
}
DW_INLINE vf load(const int8_t* p) {
  int8x16_t bytes = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return to_floats(vi(vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)));
}

// The upper half is the nearest bfloat16, ties to even; a NaN keeps its sign and becomes quiet.
DW_INLINE uint32x4_t rounded_up(float32x4_t v) {
  uint32x4_t bits = vreinterpretq_u32_f32(v);
  uint32x4_t even = vaddq_u32(bits, vaddq_u32(vdupq_n_u32(0x7fff), vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1))));
  return vbslq_u32(vceqq_f32(v, v), even, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}
DW_INLINE uint16x8_t upper_halves(uint32x4_t x, uint32x4_t y) {
  return vuzp2q_u16(vreinterpretq_u16_u32(x), vreinterpretq_u16_u32(y));
}

// Thirty-two bfloat16 as sixteen pairs: the even ones in the lower halves.
DW_INLINE vu load_pairs(const bf16* p) { return vu(load(reinterpret_cast<const float*>(p))); }
DW_INLINE vf even(vu pairs) {
  return vf(vu(vshlq_n_u32(pairs.a, 16), vshlq_n_u32(pairs.b, 16), vshlq_n_u32(pairs.c, 16), vshlq_n_u32(pairs.d, 16)));
}
DW_INLINE vf odd(vu pairs) {
  const uint32x4_t mask = vdupq_n_u32(0xffff0000u);
  return vf(vu(pairs.a & mask, pairs.b & mask, pairs.c & mask, pairs.d & mask));
}

DW_INLINE void store(float* p, vf v) {
  vst1q_f32(p, v.a);
  vst1q_f32(p + 4, v.b);
  vst1q_f32(p + 8, v.c);
  vst1q_f32(p + 12, v.d);
}
DW_INLINE void store(bf16* p, vf v) {
  vst1q_u16(&p->bits, upper_halves(rounded_up(v.a), rounded_up(v.b)));
  vst1q_u16(&p->bits + 8, upper_halves(rounded_up(v.c), rounded_up(v.d)));
}
DW_INLINE uint32x4_t pair_up(float32x4_t even, float32x4_t odd) { return vsriq_n_u32(rounded_up(odd), rounded_up(even), 16); }
DW_INLINE void store_pairs(bf16* p, vf even, vf odd) {
  store(reinterpret_cast<float*>(p), vf(DW_MAP2(vu, pair_up, even, odd)));
}
// Nearest, ties to even; what is beyond the largest number becomes that.
DW_INLINE void store(f16* p, vf v) {
  vf top = splat(65504.0f), bottom = splat(-65504.0f);
  v = select(v > top, top, v);
  v = select(v < bottom, bottom, v);
  vst1q_u16(&p->bits, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.a), v.b)));
  vst1q_u16(&p->bits + 8, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.c), v.d)));
}
DW_INLINE void store(int32_t* p, vi v) { store(reinterpret_cast<float*>(p), vf(v)); }
// The lower bytes of the first n lanes.
DW_INLINE void store_bytes(int8_t* p, vi v, int n) {
  int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(v.a), vreinterpretq_s16_s32(v.b));
  int16x8_t high = vuzp1q_s16(vreinterpretq_s16_s32(v.c), vreinterpretq_s16_s32(v.d));
  int8x16_t bytes = vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high));
  if (n >= LANES) {
    vst1q_s8(p, bytes);
    return;
  }
  int8_t part[LANES];
  vst1q_s8(part, bytes);
  memcpy(p, part, (size_t)n);
}

// What a store followed by a load gives.
DW_INLINE vf rounded(vf v, const float*) { return v; }
DW_INLINE vf rounded(vf v, const bf16*) { return odd(DW_MAP(vu, rounded_up, v)); }

// Turns 16 rows of 16 lanes into columns: blocks of four by four are turned, and block (i, j) goes to (j, i).
DW_INLINE void transpose(vf r[LANES]) {
  float32x4_t t[4][LANES];  // [block of columns][row], turned: row 4 i + k of t[j] is column 4 j + k of rows 4 i ..
  for (int i = 0; i < LANES; i += 4) {
    for (int j = 0; j < 4; j++) {
      float32x4_t x[4];
      for (int k = 0; k < 4; k++) x[k] = j == 0 ? r[i + k].a : j == 1 ? r[i + k].b : j == 2 ? r[i + k].c : r[i + k].d;
      float64x2_t low[2] = {vreinterpretq_f64_f32(vtrn1q_f32(x[0], x[1])), vreinterpretq_f64_f32(vtrn1q_f32(x[2], x[3]))};
      float64x2_t high[2] = {vreinterpretq_f64_f32(vtrn2q_f32(x[0], x[1])), vreinterpretq_f64_f32(vtrn2q_f32(x[2], x[3]))};
      t[j][i] = vreinterpretq_f32_f64(vtrn1q_f64(low[0], low[1]));
      t[j][i + 1] = vreinterpretq_f32_f64(vtrn1q_f64(high[0], high[1]));
      t[j][i + 2] = vreinterpretq_f32_f64(vtrn2q_f64(low[0], low[1]));
      t[j][i + 3] = vreinterpretq_f32_f64(vtrn2q_f64(high[0], high[1]));
    }
  }
  for (int j = 0; j < 4; j++)
    for (int k = 0; k < 4; k++) r[4 * j + k] = vf(t[j][k], t[j][4 + k], t[j][8 + k], t[j][12 + k]);
}

// -------------------------------------------------------------------------------------------- lanes of 64 bits

DW_INLINE vq load(const uint64_t* p) { return vq(vld1q_u64(p), vld1q_u64(p + 2), vld1q_u64(p + 4), vld1q_u64(p + 6)); }
DW_INLINE vq operator+(vq x, uint64_t y) {
  const uint64x2_t z = vdupq_n_u64(y);
  return vq(x.a + z, x.b + z, x.c + z, x.d + z);
}
DW_INLINE vq operator^(vq x, vq y) { return DW_MAP2(vq, veorq_u64, x, y); }
DW_INLINE vq operator>>(vq x, int n) { return vq(x.a >> n, x.b >> n, x.c >> n, x.d >> n); }
// The lower 64 bits of a product: x0 y0 + 2^32 (x0 y1 + x1 y0), of halves of 32 bits.
DW_INLINE uint64x2_t product(uint64x2_t x, uint64_t y) {
  uint32x4_t halves = vreinterpretq_u32_u64(vdupq_n_u64(y));
  uint32x4_t crossed = vmulq_u32(vrev64q_u32(vreinterpretq_u32_u64(x)), halves);
  return vmlal_u32(vshlq_n_u64(vpaddlq_u32(crossed), 32), vmovn_u64(x), vget_low_u32(vuzp1q_u32(halves, halves)));
}
DW_INLINE vq operator*(vq x, uint64_t y) {
  return vq(product(x.a, y), product(x.b, y), product(x.c, y), product(x.d, y));
}
// Numbers below 2^52 as floats, rounded once: a double holds them exactly.
DW_INLINE float64x2_t exactly(uint64x2_t x) { return vcvtq_f64_u64(x); }
DW_INLINE vf to_floats(vq x, vq y) {
  return vf(vcvt_high_f32_f64(vcvt_f32_f64(exactly(x.a)), exactly(x.b)),
            vcvt_high_f32_f64(vcvt_f32_f64(exactly(x.c)), exactly(x.d)),
            vcvt_high_f32_f64(vcvt_f32_f64(exactly(y.a)), exactly(y.b)),
            vcvt_high_f32_f64(vcvt_f32_f64(exactly(y.c)), exactly(y.d)));
}

#undef DW_MAP
#undef DW_MAP2

}  // namespace
}  // namespace dw
