// The vector layer (vec.h) with AVX-512 and elsewhere: vectors of 64 bytes, of which the compiler makes one register of AVX-512, or what it
// can.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace dw {
namespace {

// How many sums of scores, and how many rows times how many vectors of values, a kernel keeps in registers.
constexpr int SCORE_SUMS = 16, VALUE_ROWS = 4, VALUE_VECTORS = 4;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int8_t vb __attribute__((vector_size(16)));
typedef uint8_t vub __attribute__((vector_size(16)));
typedef uint64_t vq __attribute__((vector_size(64)));  // eight lanes of 64 bits

// Written out: 0 + x would be an addition, since it is no x where that is -0.
DW_INLINE vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
DW_INLINE vi splat_i(int32_t x) { return vi{} + x; }
DW_INLINE vi lane_numbers() { return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// Masks have all bits of a lane, or none.
DW_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
DW_INLINE vi select(vi mask, vi yes, vi no) { return mask ? yes : no; }
DW_INLINE bool any(vi mask) {
  int32_t found = 0;
  for (int lane = 0; lane < LANES; lane++) found |= mask[lane];
  return found != 0;
}

DW_INLINE vi to_ints(vf x) { return __builtin_convertvector(x, vi); }  // towards zero
DW_INLINE vf to_floats(vi x) { return __builtin_convertvector(x, vf); }

DW_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FP_FAST_FMAF)
  vf r;
  for (int i = 0; i < LANES; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}
DW_INLINE vf fma(float a, vf b, vf c) { return fma(splat(a), b, c); }
// The last bits of n are added to the exponent of x; what does not fit wraps.
DW_INLINE vf add_exponent(vf x, vf n) { return (vf)((vu)x + ((vu)n << 23)); }

// The lanes' sum and maximum in one fixed tree: (i, i + 8), (i, i + 4), ...
#if defined(__AVX512F__)
#define DW_REDUCE(name, instruction)                                                                                     \
  DW_INLINE float name(vf v) {                                                                                           \
    const __m256d halves = _mm512_extractf64x4_pd((__m512d)v, 1);                                                        \
    const __m256 eight = _mm256_##instruction##_ps(_mm512_castps512_ps256((__m512)v), (__m256)halves);                   \
    __m128 x = _mm_##instruction##_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));                   \
    x = _mm_##instruction##_ps(x, _mm_movehl_ps(x, x));                                                                  \
    return _mm_cvtss_f32(_mm_##instruction##_ss(x, _mm_movehdup_ps(x)));                                                 \
  }
DW_REDUCE(sum_lanes, add)
DW_REDUCE(max_lanes, max)
#undef DW_REDUCE
#else
DW_INLINE float sum_lanes(vf v) {
  float x[LANES];
  memcpy(x, &v, sizeof x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) x[i] += x[i + width];
  return x[0];
}

DW_INLINE float max_lanes(vf v) {
  float x[LANES];
  memcpy(x, &v, sizeof x);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
}
#endif

// ------------------------------------------------------------------------------------------------ loads and stores

DW_INLINE vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
DW_INLINE vf load(const bf16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}

DW_INLINE vf from_half(vh h) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#else
  vu bits = __builtin_convertvector(h, vu);
  // The exponent is 112 too small: a product puts that right, subnormal numbers included.
  vf number = (vf)((bits & 0x7fffu) << 13) * 0x1p112f;
  vu special = (vu)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;  // infinity, NaN
  return (vf)((vu)number | special | (bits & 0x8000u) << 16);
#endif
}
DW_INLINE vf load(const f16* p) {
  vh h;
  memcpy(&h, p, sizeof h);
  return from_half(h);
}
// Fp8 has the exponent of float16 less 8, in the same place once its sign is apart: subnormal numbers, too.
DW_INLINE vf load(const f8* p) {
  vub b;
  memcpy(&b, p, sizeof b);
  vh h = __builtin_convertvector(b, vh);
  return from_half((h << 8 & 0x8000) | (h << 7 & 0x3f80)) * 256.0f;
}
DW_INLINE vf load(const int8_t* p) {
  vb b;
  memcpy(&b, p, sizeof b);
#if defined(__AVX512F__)  // what GCC makes of the general way takes twice as long
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b));
#else
  return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
#endif
}

// Nearest, ties to even; a NaN keeps its sign and becomes quiet.
DW_INLINE vh to_bf16(vf v) {
#if defined(__AVX512BF16__)  // which makes zeros of denormals: where there are some, it is done by hand
  if (__builtin_expect(_mm512_testn_epi32_mask((__m512i)v, _mm512_set1_epi32(0x7f800000)) == 0, 1))
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#endif
  vu bits = (vu)v;
  vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  vu quiet = (bits >> 16) | 0x40u;
  vi number = v == v;
  vu chosen = ((vu)number & rounded) | (~(vu)number & quiet);
  return __builtin_convertvector(chosen, vh);
}

// Thirty-two bfloat16 as sixteen pairs: the even ones in the lower halves.
DW_INLINE vu load_pairs(const bf16* p) {
  vu v;
  memcpy(&v, p, sizeof v);
  return v;
}
DW_INLINE vf even(vu pairs) { return (vf)(pairs << 16); }
DW_INLINE vf odd(vu pairs) { return (vf)(pairs & 0xffff0000u); }

DW_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
DW_INLINE void store(bf16* p, vf v) {
  vh h = to_bf16(v);
  memcpy(p, &h, sizeof h);
}

// Nearest, ties to even; what is beyond the largest number becomes that.
DW_INLINE void store(f16* p, vf v) {
  vf top = splat(65504.0f);
  v = v > top ? top : v;
  v = v < -top ? -top : v;
#if defined(__AVX512F__)
  __m256i h = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vu bits = (vu)v, size = bits & 0x7fffffffu;
  vu normal = ((size + 0xfffu + ((size >> 13) & 1u)) >> 13) - (112u << 10);
  vu small = (vu)((vf)size + 0.5f) - 0x3f000000u;  // 0.5 has the steps of subnormal numbers
  vu chosen = size < 0x38800000u ? small : normal;
  chosen = size > 0x7f800000u ? vu{} + 0x7e00u : chosen;
  vh h = __builtin_convertvector(chosen | (bits >> 16 & 0x8000u), vh);
#endif
  memcpy(p, &h, sizeof h);
}
DW_INLINE void store_pairs(bf16* p, vf even, vf odd) {
  vu pairs = __builtin_convertvector(to_bf16(even), vu) | __builtin_convertvector(to_bf16(odd), vu) << 16;
  memcpy(p, &pairs, sizeof pairs);
}
DW_INLINE void store(int32_t* p, vi v) { memcpy(p, &v, sizeof v); }
// The lower bytes of the first n lanes.
DW_INLINE void store_bytes(int8_t* p, vi v, int n) {
  vb bytes = __builtin_convertvector(v, vb);
  memcpy(p, &bytes, (size_t)(n < LANES ? n : LANES));
}

// What a store followed by a load gives.
DW_INLINE vf rounded(vf v, const float*) { return v; }
DW_INLINE vf rounded(vf v, const bf16*) { return (vf)(__builtin_convertvector(to_bf16(v), vu) << 16); }

// Turns 16 rows of 16 lanes into columns.
DW_INLINE void transpose(vf r[LANES]) {
  vf t[LANES];
#define DW_PAIR(a, b, lo, hi)                                                                            \
  lo = DW_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);          \
  hi = DW_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
#define DW_QUAD(a, b, lo, hi)                                                                            \
  lo = DW_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);          \
  hi = DW_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#define DW_EVEN(a, b) DW_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define DW_ODD(a, b) DW_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
  for (int i = 0; i < LANES; i += 2) { DW_PAIR(r[i], r[i + 1], t[i], t[i + 1]) }
  for (int i = 0; i < LANES; i += 4) {
    DW_QUAD(t[i], t[i + 2], r[i], r[i + 1])
    DW_QUAD(t[i + 1], t[i + 3], r[i + 2], r[i + 3])
  }
  // r[4 g + c]: column 4 s + c of rows 4 g .. 4 g + 3 in 128-bit segment s
  for (int c = 0; c < 4; c++) {
    t[c] = DW_EVEN(r[c], r[4 + c]);        // segments 0, 2 of row groups 0, 1
    t[4 + c] = DW_ODD(r[c], r[4 + c]);     // segments 1, 3
    t[8 + c] = DW_EVEN(r[8 + c], r[12 + c]);
    t[12 + c] = DW_ODD(r[8 + c], r[12 + c]);
  }
  for (int c = 0; c < 4; c++) {
    r[c] = DW_EVEN(t[c], t[8 + c]);            // column c
    r[8 + c] = DW_ODD(t[c], t[8 + c]);         // column 8 + c
    r[4 + c] = DW_EVEN(t[4 + c], t[12 + c]);   // column 4 + c
    r[12 + c] = DW_ODD(t[4 + c], t[12 + c]);   // column 12 + c
  }
#undef DW_PAIR
#undef DW_QUAD
#undef DW_EVEN
#undef DW_ODD
}

// -------------------------------------------------------------------------------------------- lanes of 64 bits

DW_INLINE vq load(const uint64_t* p) {
  vq v;
  memcpy(&v, p, sizeof v);
  return v;
}
// Numbers below 2^52 as floats, rounded once: in the mantissa of a double they are exact.
DW_INLINE vf to_floats(vq low, vq high) {
  typedef double vd __attribute__((vector_size(64)));
  typedef float vhalf __attribute__((vector_size(32)));
  union {
    vhalf half[2];
    vf whole;
  } v;
  v.half[0] = __builtin_convertvector((vd)(low | 0x4330000000000000u) - 0x1p52, vhalf);
  v.half[1] = __builtin_convertvector((vd)(high | 0x4330000000000000u) - 0x1p52, vhalf);
  return v.whole;
}

}  // namespace
}  // namespace dw
