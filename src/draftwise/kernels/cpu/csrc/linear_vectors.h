// Vectors of 256 bits as `linear_widen.h` wants them, and, where they are there, those of 512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "linear_kernels.h"
#include "linear_twice.h"

namespace dw {
namespace {

// V::add_rows where a row's number has to be broadcast to be multiplied: as it is loaded, and the halves are parted in vectors. For few
// rows: of many, GCC would keep the whole dwords, for which there are no registers left. Those are wide.
template <class V, int R, Half kHalf>
inline void broadcast_rows(typename V::F (&acc)[R][2], const typename V::F (&w)[2], const uint32_t* x) {
  static_assert(R <= 8, "many rows are wide");
  for (int r = 0; r < R; ++r) {
    typename V::I row = V::set(int(x[r]));
    if (kHalf != Half::kWhole) row = kHalf == Half::kEven ? V::shift_left_16(row) : V::bits_and(row, V::set(int(0xffff0000u)));
    for (int v = 0; v < 2; ++v) acc[r][v] = V::fma(w[v], V::as_floats(row), acc[r][v]);
  }
}

struct V256 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kBytes = 32;
  static constexpr bool kPairs = false, kWide = false;
  static F zero() { return _mm256_setzero_ps(); }
  static I set(int bits) { return _mm256_set1_epi32(bits); }
  static I set_float(float value) { return _mm256_castps_si256(_mm256_set1_ps(value)); }
  static I load(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const I*>(from)); }
  static I repeat(const uint8_t* sixteen) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(sixteen)));
  }
  static F load_floats(const float* from) { return _mm256_loadu_ps(from); }
  static void store_floats(float* to, F v) { _mm256_storeu_ps(to, v); }
  static F load_halves(const uint8_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static F load_bytes(const uint8_t* from) {  // int8
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static F as_floats(I v) { return _mm256_castsi256_ps(v); }
  static F to_floats(I v) { return _mm256_cvtepi32_ps(v); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F times(F a, F b) { return _mm256_mul_ps(a, b); }
  static F minus(F a, F b) { return _mm256_sub_ps(a, b); }
  static F floats_or(F a, F b) { return _mm256_or_ps(a, b); }
  static I bits_and(I a, I b) { return _mm256_and_si256(a, b); }
  static I shift_left_16(I v) { return _mm256_slli_epi32(v, 16); }
  static I shift_right_4(I v) { return _mm256_srli_epi16(v, 4); }
  static I shuffle(I v, I by) { return _mm256_shuffle_epi8(v, by); }
  static I low_pairs(I a, I b) { return _mm256_unpacklo_epi8(a, b); }
  static I high_pairs(I a, I b) { return _mm256_unpackhi_epi8(a, b); }
};

// Rows that are float32 already, from three on. Each product is written in assembly: GCC would add up in the register of the row's number,
// and move sums of six rows to memory and back. What the assembly names as memory keeps numbers of later steps from being loaded early.
struct Wide256 : V256 {
  static constexpr bool kWide = true;
  template <int R, Half kHalf>
  static void add_rows(F (&acc)[R][2], const F (&w)[2], const uint32_t* x) {
    static_assert(kHalf == Half::kWhole, "wide rows have one number in a dword");
    for (int r = 0; r < R; ++r) {
      const F row = _mm256_broadcast_ss(reinterpret_cast<const float*>(x) + r);
      for (int v = 0; v < 2; ++v) __asm__("vfmadd231ps %2, %1, %0" : "+x"(acc[r][v]) : "x"(w[v]), "x"(row));
    }
    __asm__ volatile("" ::: "memory");
  }
};

// A panel is two of them.
struct Whole256 : Twice<V256> {
  static constexpr bool kPairs = false, kWide = false;
  template <int R, Half kHalf>
  static DW_ALWAYS void add_rows(F (&acc)[R][2], const F (&w)[2], const uint32_t* x) {
    broadcast_rows<Whole256, R, kHalf>(acc, w, x);
  }
};

#if defined(__AVX512BW__)
struct V512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int kBytes = 64;
  static constexpr bool kPairs = false, kWide = false;
  template <int R, Half kHalf>
  static void add_rows(F (&acc)[R][2], const F (&w)[2], const uint32_t* x) {
    broadcast_rows<V512, R, kHalf>(acc, w, x);
  }
  static F zero() { return _mm512_setzero_ps(); }
  static I set(int bits) { return _mm512_set1_epi32(bits); }
  static I set_float(float value) { return _mm512_castps_si512(_mm512_set1_ps(value)); }
  static I load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static I repeat(const uint8_t* sixteen) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(sixteen)));
  }
  static F load_floats(const float* from) { return _mm512_loadu_ps(from); }
  static void store_floats(float* to, F v) { _mm512_storeu_ps(to, v); }
  static F load_halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static F load_bytes(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static F as_floats(I v) { return _mm512_castsi512_ps(v); }
  static F to_floats(I v) { return _mm512_cvtepi32_ps(v); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F times(F a, F b) { return _mm512_mul_ps(a, b); }
  static F minus(F a, F b) { return _mm512_sub_ps(a, b); }
  static F floats_or(F a, F b) { return _mm512_or_ps(a, b); }
  static I bits_and(I a, I b) { return _mm512_and_si512(a, b); }
  static I shift_left_16(I v) { return _mm512_slli_epi32(v, 16); }
  static I shift_right_4(I v) { return _mm512_srli_epi16(v, 4); }
  static I shuffle(I v, I by) { return _mm512_shuffle_epi8(v, by); }
  static I low_pairs(I a, I b) { return _mm512_unpacklo_epi8(a, b); }
  static I high_pairs(I a, I b) { return _mm512_unpackhi_epi8(a, b); }
};

// As `Wide256`.
struct Wide512 : V512 {
  static constexpr bool kWide = true;
  template <int R, Half kHalf>
  static void add_rows(F (&acc)[R][2], const F (&w)[2], const uint32_t* x) {
    static_assert(kHalf == Half::kWhole, "wide rows have one number in a dword");
    for (int r = 0; r < R; ++r) {
      const F row = _mm512_set1_ps(reinterpret_cast<const float*>(x)[r]);
      for (int v = 0; v < 2; ++v) __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc[r][v]) : "v"(w[v]), "v"(row));
    }
    __asm__ volatile("" ::: "memory");
  }
};
#endif

}  // namespace
}  // namespace dw
