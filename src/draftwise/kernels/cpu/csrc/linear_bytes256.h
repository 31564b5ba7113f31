// Linear kernels for rows quantised to int8, on vectors of 256 bits: with AVX-VNNI, or with what AVX2 has.
//
// AVX2 multiplies bytes without sign by bytes with sign and adds pairs into 16 bits, where too large a sum is cut. What is multiplied
// is chosen so that none can be:
//   int8   |w| <= 128 times x with the sign of w: a pair is at most 2 * 128 * 127 = 32,512
//   int4   0..15 times x: a pair is at most 3,810, so that eight of them fit before they are added to 32 bits
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

template <int R, int N = 2>
void bytes_i4(const Tile& t, int panel, int part) {
  constexpr int kUnits = kVnni ? 1 << 20 : 4;  // whose pairs fit 16 bits: two products of 3,810 each
  const uint8_t* at = t.w + panel * t.panel_stride;
  float* sums = t.sums + panel * kPanel + part * 8 * N;
  const uint32_t* x = t.x;
  const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
  const int header = t.zeros ? 2 * kHeader : kHeader;
  const int64_t groups = t.units / t.group_units;
  const __m256i mask = _mm256_set1_epi8(15);
  Fetch<4 / N> fetch(t, at + header + part * 32 * N, part);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* w = at + header + part * 32 * N;
    __m256i acc[R][N];
    // 0..15 stands for -8..7: eight times the sum of the row comes off, which is what x_sums hold
    DW_UNROLL for (int r = 0; r < R; ++r)
      DW_UNROLL for (int v = 0; v < N; ++v) acc[r][v] = _mm256_set1_epi32(x_sums[r]);
    for (int left = t.group_units; left > 0; left -= kUnits) {
      __m256i pairs[R][N];
      DW_UNROLL for (int r = 0; r < R; ++r)
        DW_UNROLL for (int v = 0; v < N; ++v) pairs[r][v] = _mm256_setzero_si256();
      for (int u = left < kUnits ? left : kUnits; u > 0; --u) {
        fetch.next(w);
        __m256i low[N], high[N];
        DW_UNROLL for (int v = 0; v < N; ++v) {
          __m256i bits = load_bits(w + v * 32);
          low[v] = _mm256_and_si256(bits, mask);
          high[v] = _mm256_and_si256(_mm256_srli_epi16(bits, 4), mask);
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
          DW_UNROLL for (int v = 0; v < N; ++v) acc[r][v] = _mm256_add_epi32(acc[r][v], widen_pairs(pairs[r][v]));
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

}  // namespace
}  // namespace dw
