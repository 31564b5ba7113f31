// The vector layer (vec.h) on AVX2 with FMA and F16C: sixteen lanes are two registers of 256 bits. Written with the instructions by
// name: vectors wider than a register GCC keeps in memory, and it puts them together there number by number (attention over long
// contexts took eight times as long).
#pragma once

#include <immintrin.h>

namespace dw {
namespace {

// Of 16 registers: sums of scores take eight, and so do sums of values.
constexpr int SCORE_SUMS = 4, VALUE_ROWS = 2, VALUE_VECTORS = 2;

struct vi;
struct vu;

struct vf {
  __m256 a, b;
  vf() = default;
  DW_INLINE vf(__m256 a, __m256 b) : a(a), b(b) {}
  DW_INLINE explicit vf(vi);  // of these bits
  DW_INLINE explicit vf(vu);
  DW_INLINE float operator[](int i) const {
    float lanes[LANES];
    memcpy(lanes, this, sizeof lanes);
    return lanes[i];
  }
};
struct vi {
  __m256i a, b;
  vi() = default;
  DW_INLINE vi(__m256i a, __m256i b) : a(a), b(b) {}
  DW_INLINE explicit vi(vf);
};
struct vu {
  __m256i a, b;
  vu() = default;
  DW_INLINE vu(__m256i a, __m256i b) : a(a), b(b) {}
  DW_INLINE explicit vu(vf);
};
struct vq {  // eight lanes of 64 bits
  __m256i a, b;
  vq() = default;
  DW_INLINE vq(__m256i a, __m256i b) : a(a), b(b) {}
};

// R(f(x.a), f(x.b)), and the same of two vectors.
#define DW_MAP(R, f, x) R(f(x.a), f(x.b))
#define DW_MAP2(R, f, x, y) R(f(x.a, y.a), f(x.b, y.b))

DW_INLINE vf::vf(vi v) : vf(DW_MAP(vf, _mm256_castsi256_ps, v)) {}
DW_INLINE vf::vf(vu v) : vf(DW_MAP(vf, _mm256_castsi256_ps, v)) {}
DW_INLINE vi::vi(vf v) : vi(DW_MAP(vi, _mm256_castps_si256, v)) {}
DW_INLINE vu::vu(vf v) : vu(DW_MAP(vu, _mm256_castps_si256, v)) {}

DW_INLINE vf splat(float x) {
  __m256 v = _mm256_set1_ps(x);
  return vf(v, v);
}
DW_INLINE vi splat_i(int32_t x) {
  __m256i v = _mm256_set1_epi32(x);
  return vi(v, v);
}
DW_INLINE vi lane_numbers() {
  return vi(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
}

DW_INLINE vf operator+(vf x, vf y) { return DW_MAP2(vf, _mm256_add_ps, x, y); }
DW_INLINE vf operator-(vf x, vf y) { return DW_MAP2(vf, _mm256_sub_ps, x, y); }
DW_INLINE vf operator*(vf x, vf y) { return DW_MAP2(vf, _mm256_mul_ps, x, y); }
DW_INLINE vf operator/(vf x, vf y) { return DW_MAP2(vf, _mm256_div_ps, x, y); }
DW_INLINE vf operator-(vf x) {
  vf sign = splat(-0.0f);
  return DW_MAP2(vf, _mm256_xor_ps, x, sign);
}
DW_INLINE vf operator+(vf x, float y) { return x + splat(y); }
DW_INLINE vf operator-(vf x, float y) { return x - splat(y); }
DW_INLINE vf operator*(vf x, float y) { return x * splat(y); }
DW_INLINE vf operator/(vf x, float y) { return x / splat(y); }
DW_INLINE vf operator-(float x, vf y) { return splat(x) - y; }
DW_INLINE vf operator/(float x, vf y) { return splat(x) / y; }
DW_INLINE vf& operator+=(vf& x, vf y) { return x = x + y; }

DW_INLINE __m256i less(__m256 x, __m256 y) { return _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_LT_OQ)); }
DW_INLINE __m256i at_least(__m256 x, __m256 y) { return _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_GE_OQ)); }
DW_INLINE __m256i not_these(__m256i x) { return _mm256_xor_si256(x, _mm256_set1_epi32(-1)); }

// Masks: all bits of a lane, or none.
DW_INLINE vi operator<(vf x, vf y) { return DW_MAP2(vi, less, x, y); }
DW_INLINE vi operator>(vf x, vf y) { return y < x; }
DW_INLINE vi operator<(vf x, float y) { return x < splat(y); }
DW_INLINE vi operator>=(vf x, float y) {
  vf z = splat(y);
  return DW_MAP2(vi, at_least, x, z);
}
DW_INLINE vi operator~(vi x) { return DW_MAP(vi, not_these, x); }
DW_INLINE vi operator<(vi x, vi y) { return DW_MAP2(vi, _mm256_cmpgt_epi32, y, x); }
DW_INLINE vi operator<(vi x, int32_t y) { return x < splat_i(y); }
DW_INLINE vi operator>=(vi x, int32_t y) { return ~(x < y); }

DW_INLINE vi operator+(vi x, vi y) { return DW_MAP2(vi, _mm256_add_epi32, x, y); }
DW_INLINE vi operator-(vi x, vi y) { return DW_MAP2(vi, _mm256_sub_epi32, x, y); }
DW_INLINE vi operator&(vi x, vi y) { return DW_MAP2(vi, _mm256_and_si256, x, y); }
DW_INLINE vi operator+(vi x, int32_t y) { return x + splat_i(y); }
DW_INLINE vi operator-(vi x, int32_t y) { return x - splat_i(y); }
DW_INLINE vi operator-(int32_t x, vi y) { return splat_i(x) - y; }
DW_INLINE vi operator&(vi x, int32_t y) { return x & splat_i(y); }
DW_INLINE vi operator<<(vi x, int n) { return vi(_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)); }
DW_INLINE vi operator>>(vi x, int n) { return vi(_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)); }

DW_INLINE vf select(vi m, vf x, vf y) {
  return vf(_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m.a)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m.b)));
}
DW_INLINE vi select(vi m, vi x, vi y) { return vi(select(m, vf(x), vf(y))); }
DW_INLINE bool any(vi m) {
  __m256i both = _mm256_or_si256(m.a, m.b);
  return !_mm256_testz_si256(both, both);
}

DW_INLINE vi to_ints(vf x) { return DW_MAP(vi, _mm256_cvttps_epi32, x); }  // towards zero
DW_INLINE vf to_floats(vi x) { return DW_MAP(vf, _mm256_cvtepi32_ps, x); }

DW_INLINE vf fma(vf x, vf y, vf z) { return vf(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
DW_INLINE vf fma(float x, vf y, vf z) { return fma(splat(x), y, z); }
// The last bits of n are added to the exponent of x; what does not fit wraps.
DW_INLINE vf add_exponent(vf x, vf n) { return vf(vi(x) + (vi(n) << 23)); }

// The lanes' sum and maximum in one fixed tree: (i, i + 8), (i, i + 4), ...
DW_INLINE float sum_lanes(vf v) {
  __m256 eight = _mm256_add_ps(v.a, v.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
DW_INLINE float max_lanes(vf v) {  // max_ps(x, y) is x > y ? x : y
  __m256 eight = _mm256_max_ps(v.a, v.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// ------------------------------------------------------------------------------------------------ loads and stores

DW_INLINE __m128i load_half(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
DW_INLINE __m256i load_whole(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
DW_INLINE void store_half(void* p, __m128i v) { _mm_storeu_si128((__m128i*)p, v); }
DW_INLINE void store_whole(void* p, __m256i v) { _mm256_storeu_si256((__m256i*)p, v); }

DW_INLINE vf load(const float* p) { return vf(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
DW_INLINE __m256 widened(__m128i eight) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16)); }
DW_INLINE vf load(const bf16* p) { return vf(widened(load_half(p)), widened(load_half(p + 8))); }
DW_INLINE vf load(const f16* p) { return vf(_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))); }
// Fp8 has the exponent of float16 less 8, in the same place once its sign is apart: subnormal numbers, too.
DW_INLINE vf load(const f8* p) {
  __m256i wide = _mm256_cvtepu8_epi16(load_half(p));
  __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16((short)0x8000));
  __m256i half = _mm256_or_si256(sign, _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80)));
  return vf(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))) * 256.0f;
}
DW_INLINE vf load(const int8_t* p) {
  __m128i bytes = load_half(p);
  return to_floats(vi(_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))));
}

// The upper half is the nearest bfloat16, ties to even; a NaN keeps its sign and becomes quiet.
DW_INLINE __m256i rounded_up(__m256 v) {
  __m256i bits = _mm256_castps_si256(v);
  __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(even), _mm256_castsi256_ps(quiet), _mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}
// Sixteen lanes of 16 bits, of lanes of 32 bits below 2^16: they are packed within halves, 0 .. 3, 8 .. 11 | 4 .. 7, 12 .. 15.
DW_INLINE __m256i packed(__m256i x, __m256i y) { return _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8); }
DW_INLINE __m256i upper(__m256i x) { return _mm256_srli_epi32(x, 16); }
DW_INLINE __m256i upper_only(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32((int)0xffff0000u)); }

// Thirty-two bfloat16 as sixteen pairs: the even ones in the lower halves.
DW_INLINE vu load_pairs(const bf16* p) { return vu(load_whole(p), load_whole(p + 16)); }
DW_INLINE vf even(vu pairs) { return vf(vu(_mm256_slli_epi32(pairs.a, 16), _mm256_slli_epi32(pairs.b, 16))); }
DW_INLINE vf odd(vu pairs) { return vf(DW_MAP(vu, upper_only, pairs)); }

DW_INLINE void store(float* p, vf v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
DW_INLINE void store(bf16* p, vf v) { store_whole(p, packed(upper(rounded_up(v.a)), upper(rounded_up(v.b)))); }
DW_INLINE __m256i pair_up(__m256 even, __m256 odd) {
  return _mm256_or_si256(upper(rounded_up(even)), upper_only(rounded_up(odd)));
}
DW_INLINE void store_pairs(bf16* p, vf even, vf odd) {
  store_whole(p, pair_up(even.a, odd.a));
  store_whole(p + 16, pair_up(even.b, odd.b));
}
// Nearest, ties to even; what is beyond the largest number becomes that.
DW_INLINE __m128i half_of(__m256 v) {  // of NaN min_ps and max_ps give their second operand
  v = _mm256_max_ps(_mm256_set1_ps(-65504.0f), _mm256_min_ps(_mm256_set1_ps(65504.0f), v));
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
DW_INLINE void store(f16* p, vf v) {
  store_half(p, half_of(v.a));
  store_half(p + 8, half_of(v.b));
}
DW_INLINE void store(int32_t* p, vi v) {
  store_whole(p, v.a);
  store_whole(p + 8, v.b);
}
// The lower bytes of the first n lanes.
DW_INLINE void store_bytes(int8_t* p, vi v, int n) {
  vi low = v & 0xff;
  __m256i halves = packed(low.a, low.b);
  __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  if (n >= LANES) {
    store_half(p, bytes);
    return;
  }
  int8_t part[LANES];
  store_half(part, bytes);
  memcpy(p, part, (size_t)n);
}

// What a store followed by a load gives.
DW_INLINE vf rounded(vf v, const float*) { return v; }
DW_INLINE vf rounded(vf v, const bf16*) { return odd(DW_MAP(vu, rounded_up, v)); }

// Turns 8 rows of 8 lanes into columns.
DW_INLINE void transpose8(const __m256 r[8], __m256 out[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int k = 0; k < 2; k++) {
      __m256d x = _mm256_castps_pd(t[i + k]), y = _mm256_castps_pd(t[i + k + 2]);
      u[i + 2 * k] = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
      u[i + 2 * k + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
    }
  for (int i = 0; i < 4; i++) {  // u[i]: columns i and 4 + i of rows 0 .. 3; u[4 + i]: of rows 4 .. 7
    out[i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
    out[4 + i] = _mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
  }
}

// Turns 16 rows of 16 lanes into columns: four blocks of eight by eight.
DW_INLINE void transpose(vf r[LANES]) {
  __m256 rows[8], t[8];
  vf out[LANES];
  for (int block = 0; block < 4; block++) {
    const int down = block / 2 * 8, right = block % 2;
    for (int i = 0; i < 8; i++) rows[i] = right ? r[down + i].b : r[down + i].a;
    transpose8(rows, t);
    for (int i = 0; i < 8; i++) (down ? out[8 * right + i].b : out[8 * right + i].a) = t[i];
  }
  for (int i = 0; i < LANES; i++) r[i] = out[i];
}

// -------------------------------------------------------------------------------------------- lanes of 64 bits

DW_INLINE vq load(const uint64_t* p) { return vq(load_whole(p), load_whole(p + 4)); }
DW_INLINE vq operator+(vq x, uint64_t y) {
  const __m256i z = _mm256_set1_epi64x((long long)y);
  return vq(_mm256_add_epi64(x.a, z), _mm256_add_epi64(x.b, z));
}
DW_INLINE vq operator^(vq x, vq y) { return DW_MAP2(vq, _mm256_xor_si256, x, y); }
DW_INLINE vq operator>>(vq x, int n) { return vq(_mm256_srli_epi64(x.a, n), _mm256_srli_epi64(x.b, n)); }
// The lower 64 bits of a product: x0 y0 + 2^32 (x0 y1 + x1 y0), of halves of 32 bits.
DW_INLINE __m256i product(__m256i x, uint64_t y) {
  const __m256i low = _mm256_set1_epi64x((long long)y), high = _mm256_set1_epi64x((long long)(y >> 32));
  __m256i crossed = _mm256_add_epi64(_mm256_mul_epu32(x, high), _mm256_mul_epu32(_mm256_srli_epi64(x, 32), low));
  return _mm256_add_epi64(_mm256_mul_epu32(x, low), _mm256_slli_epi64(crossed, 32));
}
DW_INLINE vq operator*(vq x, uint64_t y) { return vq(product(x.a, y), product(x.b, y)); }
// Numbers below 2^52 as floats, rounded once: in the mantissa of a double they are exact.
DW_INLINE __m128 floats_of(__m256i x) {
  const __m256d magic = _mm256_set1_pd(0x1p52);
  return _mm256_cvtpd_ps(_mm256_sub_pd(_mm256_or_pd(_mm256_castsi256_pd(x), magic), magic));
}
DW_INLINE vf to_floats(vq x, vq y) {
  return vf(_mm256_set_m128(floats_of(x.b), floats_of(x.a)), _mm256_set_m128(floats_of(y.b), floats_of(y.a)));
}

#undef DW_MAP
#undef DW_MAP2

}  // namespace
}  // namespace dw
