// Linear kernels for rows quantised to int8, on vectors of 256 bits: with AVX-VNNI, or with what AVX2 has.
//
// AVX2 multiplies bytes without sign by bytes with sign and adds pairs into 16 bits, where too large a sum is cut. What is multiplied
// is chosen so that none can be:
//   int8   |w| <= 128 times x with the sign of w: a pair is at most 2 * 128 * 127 = 32,512
//   int4   0..15 times x: a pair is at most 3,810, so that eight of them fit before they are added to 32 bits
//   E2M1   0..24 times x: a pair is at most 6,096, so that four of them do
// The sums are integers: exact, whatever the order, and so the same as on every other instruction set.
#pragma once

#include <immintrin.h>

#include "linear_widen.h"

// Accumulators are registers only if loops over them are gone before the compiler looks at the array: GCC kept int8's in memory.
#define DW_UNROLL _Pragma("GCC unroll 16")

namespace dw {
namespace {

#if defined(__AVXVNNI__)
constexpr bool kVnni = true;
inline __m256i dot_unsigned(__m256i acc, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(acc, w, x); }
#else
constexpr bool kVnni = false;
inline __m256i dot_unsigned(__m256i acc, __m256i, __m256i) { return acc; }  // never called
#endif

inline __m256i load_bits(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256i widen_pairs(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// R rows times N vectors of 8 outputs, the `part`-th two or four of a panel. Sums and weights are those of `Tile`.
template <int R, int N = 2>
void bytes_i8(const Tile& t, int panel, int part) {
  const uint8_t* w = t.w + panel * t.panel_stride + part * 32 * N;
  const uint32_t* x = t.x;
  float* sums = t.sums + panel * kPanel + part * 8 * N;
  const int64_t stride = int64_t(kPanel) * t.panels;
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  __m256i acc[R][N];
  DW_UNROLL for (int r = 0; r < R; ++r)
    DW_UNROLL for (int v = 0; v < N; ++v)
      // With VNNI the stored w + 128 are multiplied: what is too much stands in x_sums.
      acc[r][v] = t.load ? load_bits(sums + r * stride + v * 8) : _mm256_set1_epi32(kVnni ? x_sums[r] : 0);
  Fetch<4 / N> fetch(t, w, part);
  for (int64_t u = 0; u < t.units; ++u) {
    __m256i stored[N];
    DW_UNROLL for (int v = 0; v < N; ++v) stored[v] = load_bits(w + v * 32);
    fetch.next(w);
    if (kVnni) {
      DW_UNROLL for (int r = 0; r < R; ++r) {
        __m256i row = _mm256_set1_epi32(int(x[r]));
        DW_UNROLL for (int v = 0; v < N; ++v) acc[r][v] = dot_unsigned(acc[r][v], stored[v], row);
      }
    } else {
      __m256i sign[N], size[N];
      DW_UNROLL for (int v = 0; v < N; ++v) {
        sign[v] = _mm256_xor_si256(stored[v], _mm256_set1_epi8(char(0x80)));
        size[v] = _mm256_abs_epi8(sign[v]);
      }
      DW_UNROLL for (int r = 0; r < R; ++r) {
        __m256i row = _mm256_set1_epi32(int(x[r]));
        DW_UNROLL for (int v = 0; v < N; ++v) {
          __m256i pairs = _mm256_maddubs_epi16(size[v], _mm256_sign_epi8(row, sign[v]));
          acc[r][v] = _mm256_add_epi32(acc[r][v], widen_pairs(pairs));
        }
      }
    }
    w += kUnitBytes;
    x += R;
  }
  DW_UNROLL for (int r = 0; r < R; ++r)
    DW_UNROLL for (int v = 0; v < N; ++v)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * stride + v * 8), acc[r][v]);
}

// Units whose pairs fit 16 bits: there are two in a unit. kLookUp: codes are not the integers that are multiplied, a table has these.
constexpr int units_at_once(bool look_up) { return kVnni ? 1 << 20 : look_up ? 2 : 4; }

// kOnce: all units of a group are. Then what x_sums hold fits 16 bits, too, and the lower pairs of every output begin with it. Example,
// E2M1, a group of 16, of which 8 numbers add to the lower pairs: these are 0..24 times x, and 12 times the sum of all 16 comes off.
// With a, b the sums of what is above and below zero in the 8, and c those of the others, a + b and c at most 8 * 127: no more than
// 24 a - 12 (a - b - c) = 12 (a + b + c), which is 24,384. int4 in groups of 32: 15 a - 8 (a - b - c) is 32,512 at most.
template <int R, int N, bool kLookUp, bool kOnce>
void bytes_i4_of(const Tile& t, int panel, int part) {
  constexpr int kUnits = units_at_once(kLookUp);
  const uint8_t* at = t.w + panel * t.panel_stride;
  float* sums = t.sums + panel * kPanel + part * 8 * N;
  const uint32_t* x = t.x;
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  const int header = t.zeros ? 2 * kHeader : kHeader;
  const int64_t groups = t.units / t.group_units;
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(t.nibbles->integers)));
  const auto integers = [&](__m256i codes) { return kLookUp ? _mm256_shuffle_epi8(table, codes) : codes; };
  Fetch<4 / N> fetch(t, at + header + part * 32 * N, part);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* w = at + header + part * 32 * N;
    __m256i acc[R][N];
    // of -8..7, 0..15 are multiplied: eight times the sum of the row comes off, which is what x_sums hold
    if (!kOnce)
      DW_UNROLL for (int r = 0; r < R; ++r)
        DW_UNROLL for (int v = 0; v < N; ++v) acc[r][v] = _mm256_set1_epi32(x_sums[r]);
    for (int left = t.group_units; left > 0; left -= kUnits) {
      __m256i pairs[R][N];
      DW_UNROLL for (int r = 0; r < R; ++r) {
        const __m256i none = _mm256_setzero_si256();
        const __m256i start = kOnce ? _mm256_blend_epi16(none, _mm256_set1_epi32(x_sums[r]), 0x55) : none;
        DW_UNROLL for (int v = 0; v < N; ++v) pairs[r][v] = start;
      }
      for (int u = left < kUnits ? left : kUnits; u > 0; --u) {
        fetch.next(w);
        __m256i low[N], high[N];
        DW_UNROLL for (int v = 0; v < N; ++v) {
          __m256i bits = load_bits(w + v * 32);
          low[v] = integers(_mm256_and_si256(bits, mask));
          high[v] = integers(_mm256_and_si256(_mm256_srli_epi16(bits, 4), mask));
        }
        DW_UNROLL for (int r = 0; r < R; ++r) {
          __m256i row = _mm256_set1_epi32(int(x[r])), next = _mm256_set1_epi32(int(x[R + r]));
          DW_UNROLL for (int v = 0; v < N; ++v) {
            if (kVnni) {
              acc[r][v] = dot_unsigned(dot_unsigned(acc[r][v], low[v], row), high[v], next);
            } else {
              pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(low[v], row));
              pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(high[v], next));
            }
          }
        }
        w += kUnitBytes;
        x += 2 * R;
      }
      if (!kVnni)
        DW_UNROLL for (int r = 0; r < R; ++r)
          DW_UNROLL for (int v = 0; v < N; ++v) {
            const __m256i wide = widen_pairs(pairs[r][v]);
            acc[r][v] = kOnce ? wide : _mm256_add_epi32(acc[r][v], wide);
          }
    }
    float x_sum[R];
    DW_UNROLL for (int r = 0; r < R; ++r) x_sum[r] = float(x_sums[r]) * -0.125f;
    DW_UNROLL for (int two = 0; two < N / 2; ++two) {
      __m256 values[R][2];
      DW_UNROLL for (int r = 0; r < R; ++r)
        DW_UNROLL for (int v = 0; v < 2; ++v) values[r][v] = _mm256_cvtepi32_ps(acc[r][2 * two + v]);
      end_span_group<V256, R>(t, sums + two * 16, at, part * N / 2 + two, values, x_sum, g == 0 && !t.load);
    }
    x_sums += R;
    at += header + t.group_units * kUnitBytes;
  }
}

template <int R, int N = 2>
void bytes_i4(const Tile& t, int panel, int part) {
  const bool look_up = !t.nibbles->plain;
  if (!kVnni && t.group_units <= units_at_once(look_up))
    look_up ? bytes_i4_of<R, N, true, !kVnni>(t, panel, part) : bytes_i4_of<R, N, false, !kVnni>(t, panel, part);
  else
    look_up ? bytes_i4_of<R, N, true, false>(t, panel, part) : bytes_i4_of<R, N, false, false>(t, panel, part);
}

}  // namespace
}  // namespace dw
