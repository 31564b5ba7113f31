// Sixteen float lanes on every instruction set, so that one source of a kernel serves all: a register of 512 bits, two of 256, four of
// 128 on ARM, or whatever the compiler makes of its vector extension. Types and operations that depend on it are in vec_neon.h,
// vec_avx2.h and vec_extension.h, which have the same ones; what is made of them is here.
//
// Include it only from files of one instruction set (`*_avx512.cpp`, `*_avx2.cpp`, `*_portable.cpp`): everything here
// is in an anonymous namespace, so that no copy made with AVX-512 serves the others.
//
// Same bits: a kernel calls `fma` where it wants a fused product and sum, and those files are compiled with
// -ffp-contract=off, so that the compiler never fuses in one loop what it keeps apart in another.
//
//   vf, vi, vu    16 floats, int32 (also masks), uint32: + - * / & ~ << >> and comparisons, lane by lane, also with a number
//   vq            8 uint64
//   (vi)v, (vf)v  the same bits; to_ints, to_floats: the same number
#pragma once

#include <cstdint>
#include <cstring>

#include "compiler.h"
#include "linear.h"

// Vectors never cross a call: every function of the kernels that takes one is inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

#define DW_INLINE inline __attribute__((always_inline))

namespace dw {
namespace {

constexpr int LANES = 16;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct f8 {  // e4m3: a sign, four bits of exponent less 7, three of fraction; no infinity
  uint8_t bits;
};

}  // namespace
}  // namespace dw

#if defined(__aarch64__)
#include "vec_neon.h"
#elif defined(__AVX2__) && !defined(__AVX512F__)
#include "vec_avx2.h"
#else
#include "vec_extension.h"
#endif

namespace dw {
namespace {

DW_INLINE float to_float(float x) { return x; }
DW_INLINE float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

DW_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }

// The first n lanes; the others are zero.
template <class T>
DW_INLINE vf load_n(const T* p, int n) {
  if (n >= LANES) return load(p);
  T part[LANES] = {};
  memcpy(part, p, sizeof(T) * (size_t)n);
  return load(part);
}

// The nearest fp8, ties to even, in the lower byte of each lane, of numbers below 464.
// Example: 3.3 = 0x40533333 lies between codes 0x45 (3.25) and 0x46 (3.5): 0x4053 >> 4 = 0x405, less 0x3c0 is 0x45.
DW_INLINE vi to_f8(vf v) {
  vi bits = (vi)v, size = bits & 0x7fffffff;
  vi normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3);
  vi small = (vi)((vf)size + splat(16384.0f)) - 0x46800000;  // 2^14 has the steps of subnormal numbers, 2^-9
  return select((vf)size < splat(0.015625f), small, normal) + ((bits >> 24) & 0x80);
}

template <class T>
DW_INLINE void store_n(T* p, vf v, int n) {
  if (n >= LANES) {
    store(p, v);
    return;
  }
  T part[LANES];
  store(part, v);
  memcpy(p, part, sizeof(T) * (size_t)n);
}

// ------------------------------------------------------------------------------------------------------ functions

// exp(x), relative error below 2e-7; 0 below -87.3 (also for -inf), clamped above 88.
DW_INLINE vf exp(vf x) {
  vf low = splat(-87.3f), high = splat(88.0f);
  vi tiny = x < low;
  x = select(tiny, low, x);
  x = select(x > high, high, x);
  // x = n ln 2 + r; adding 1.5 * 2^23 rounds to a whole number
  vf magic = splat(12582912.0f);
  vf n = fma(x, splat(1.44269504088896341f), magic) - magic;
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  vi scaled = (vi)p + (to_ints(n) << 23);
  return (vf)(scaled & ~tiny);
}

// 2^x for x up to 127, relative error below 2e-7; 0 below -126 (also for -inf).
DW_INLINE vf exp2(vf x) {
  // x = n + f; adding 1.5 * 2^23 rounds to a whole number, which stands in the last bits of the sum
  const vf magic = splat(12582912.0f), shifted = x + magic;
  const vf f = x - (shifted - magic);
  vf p = splat(1.3264727e-3f);
  p = fma(p, f, splat(9.671513e-3f));
  p = fma(p, f, splat(5.5507336e-2f));
  p = fma(p, f, splat(2.4022242e-1f));
  p = fma(p, f, splat(6.93147e-1f));
  p = fma(p, f, splat(1.0f));
  return (vf)((vi)add_exponent(p, shifted) & ~(x < splat(-126.0f)));
}

// x / (1 + exp(-x))
DW_INLINE vf silu(vf x) { return x / (exp(-x) + 1.0f); }

// tanh(x) = 1 - 2 / (exp(2 x) + 1)
DW_INLINE vf tanh(vf x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

}  // namespace
}  // namespace dw
