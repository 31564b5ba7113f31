// Bytes and halves of bytes widened to pairs of bfloat16 through tables, with the instructions of AVX-512 VBMI.
#pragma once

#include <immintrin.h>

#include "linear_kernels.h"

namespace dw {
namespace {

// bfloat16 of 0..127, cut into the lower and the upper byte.
struct ByteTables {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};

constexpr uint16_t bf16_of(int value) {
  if (value == 0) return 0;
  int magnitude = value < 0 ? -value : value, exponent = 0;
  while ((magnitude >> (exponent + 1)) != 0) ++exponent;
  int mantissa = (magnitude << 7 >> exponent) & 0x7f;
  return uint16_t((value < 0 ? 0x8000 : 0) | ((127 + exponent) << 7) | mantissa);
}

constexpr ByteTables make_tables() {
  ByteTables t{};
  for (int i = 0; i < 128; ++i) t.low[i] = uint8_t(bf16_of(i) & 0xff), t.high[i] = uint8_t(bf16_of(i) >> 8);
  return t;
}

constexpr ByteTables kTables = make_tables();

// 64 bytes of W_I8, sign and magnitude: the pairs k 0, 1 and k 2, 3 of 16 outputs.
inline void widen_bytes(__m512i w, __m512i& first, __m512i& second) {
  const __m512i low[2] = {_mm512_load_si512(kTables.low), _mm512_load_si512(kTables.low + 64)};
  const __m512i high[2] = {_mm512_load_si512(kTables.high), _mm512_load_si512(kTables.high + 64)};
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  __m512i lows = _mm512_permutex2var_epi8(low[0], w, low[1]);
  __m512i highs = _mm512_permutex2var_epi8(high[0], w, high[1]);
  highs = _mm512_ternarylogic_epi32(highs, w, sign, 0xf8);  // highs | (w & sign)
  first = _mm512_unpacklo_epi8(lows, highs);
  second = _mm512_unpackhi_epi8(lows, highs);
}

// `Nibbles` in registers, for every 16 bytes.
struct NibbleTables {
  __m512i low, high;
  explicit NibbleTables(const Nibbles& n)
      : low(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(n.low)))),
        high(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(n.high)))) {}
};

// The low (`half` 0) or high halves of 64 bytes of W_I4: their pairs k 0, 1 and k 2, 3 of 16 outputs.
inline void widen_nibbles(const NibbleTables& tables, __m512i w, int half, __m512i& first, __m512i& second) {
  __m512i q = _mm512_and_si512(half == 0 ? w : _mm512_srli_epi16(w, 4), _mm512_set1_epi8(15));
  __m512i lows = _mm512_shuffle_epi8(tables.low, q), highs = _mm512_shuffle_epi8(tables.high, q);
  first = _mm512_unpacklo_epi8(lows, highs);
  second = _mm512_unpackhi_epi8(lows, highs);
}

}  // namespace
}  // namespace dw
