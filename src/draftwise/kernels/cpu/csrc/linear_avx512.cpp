// Linear kernels for AVX-512 with BF16 and VNNI.
#include <immintrin.h>

#include "linear_kernels.h"

namespace dw {
namespace {

constexpr int64_t kAhead = 32;  // units (128 bytes each, per panel) that are prefetched ahead

inline void prefetch_unit(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(p + 64), _MM_HINT_T0);
}

template <bool kBf16>
inline __m512 step(__m512 acc, __m512i w, __m512i x) {
  if (kBf16) return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), acc);
}

// R rows times P panels: 2 * P * R accumulators stay in registers.
template <bool kBf16, int R, int P>
void tile(const Tile& t) {
  __m512 acc[R][2 * P];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v)
      acc[r][v] = t.load ? _mm512_loadu_ps(t.sums + (r * P * 2 + v) * 16) : _mm512_setzero_ps();
  const uint8_t* w = t.w;
  const uint32_t* x = t.x;
  const int64_t stride = t.panel_stride;
  // two stretches: prefetch from this panel, then from what comes next
  int64_t left = t.units, here = left > kAhead ? left - kAhead : 0;
  const uint8_t* ahead = t.w + kAhead * kUnitBytes;
  for (int stretch = 0; stretch < 2; ++stretch) {
    int64_t count = stretch == 0 ? here : left - here;
    if (stretch == 1) ahead = t.next_w != nullptr ? t.next_w + (left > kAhead ? 0 : kAhead - left) * kUnitBytes : t.w;
    for (int64_t u = 0; u < count; ++u) {
      __m512i weights[2 * P];
      for (int p = 0; p < P; ++p) {
        weights[2 * p] = _mm512_loadu_si512(w + p * stride);
        weights[2 * p + 1] = _mm512_loadu_si512(w + p * stride + 64);
        prefetch_unit(ahead + p * stride);
      }
      for (int r = 0; r < R; ++r) {
        __m512i row = _mm512_set1_epi32(int(x[r]));
        for (int v = 0; v < 2 * P; ++v) acc[r][v] = step<kBf16>(acc[r][v], weights[v], row);
      }
      w += kUnitBytes;
      ahead += kUnitBytes;
      x += R;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * P; ++v) _mm512_storeu_ps(t.sums + (r * P * 2 + v) * 16, acc[r][v]);
}

template <bool kBf16>
void tile_kernel(const Tile& t) {
  using Fn = void (*)(const Tile&);
  static constexpr Fn one[] = {nullptr,           tile<kBf16, 1, 1>, tile<kBf16, 2, 1>,  tile<kBf16, 3, 1>,  tile<kBf16, 4, 1>,
                               tile<kBf16, 5, 1>, tile<kBf16, 6, 1>, tile<kBf16, 7, 1>,  tile<kBf16, 8, 1>,  tile<kBf16, 9, 1>,
                               tile<kBf16, 10, 1>, tile<kBf16, 11, 1>, tile<kBf16, 12, 1>};
  static constexpr Fn two[] = {nullptr,           tile<kBf16, 1, 2>, tile<kBf16, 2, 2>, tile<kBf16, 3, 2>,
                               tile<kBf16, 4, 2>, tile<kBf16, 5, 2>, tile<kBf16, 6, 2>};
  (t.panels == 2 ? two : one)[t.rows](t);
}

// ------------------------------------------------------------------------------------------------- the way out

// e^x for x <= 0: 2^n * p(f), x = (n + f) ln 2 with f in [-1/2, 1/2]; about one unit in the last place.
inline __m512 exp_negative(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(f, f), p, _mm512_add_ps(f, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, n);
}

// x / (1 + e^-x), with e of a negative number in both branches so that nothing overflows.
inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  __m512 e = exp_negative(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));  // e^-|x|
  __m512 d = _mm512_add_ps(one, e);
  __mmask16 negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
  __m512 top = _mm512_mask_mul_ps(x, negative, x, e);
  return _mm512_div_ps(top, d);
}

// vcvtneps2bf16 flushes denormals, so the rounding is done by hand: to nearest, ties to even; NaN stays NaN.
inline __m256i to_bf16(__m512 v) {
  __m512i bits = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(rounded);
}

inline __m512 from_bf16(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

inline __m512 rounded(__m512 v, DType dtype) { return dtype == F32 ? v : from_bf16(to_bf16(v)); }

inline void store(void* out, int64_t at, DType dtype, int count, __m512 v) {
  __mmask16 mask = __mmask16((1u << count) - 1);
  if (dtype == F32)
    _mm512_mask_storeu_ps(static_cast<float*>(out) + at, mask, v);
  else
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(out) + at, mask, to_bf16(v));
}

inline __m512 load(const void* out, int64_t at, DType dtype, int count) {
  __mmask16 mask = __mmask16((1u << count) - 1);
  if (dtype == F32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(out) + at);
  return from_bf16(_mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(out) + at));
}

void finish(const Finish& f) {
  for (int r = 0; r < f.rows; ++r) {
    const float* sums = f.sums + r * f.sums_stride;
    __m512 y[2] = {_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + 16)};
    if (f.bias != nullptr)
      for (int half = 0; half < 2; ++half) y[half] = _mm512_add_ps(y[half], _mm512_loadu_ps(f.bias + half * 16));
    if (f.epilogue == EP_SILU_MUL) {
      __m512 gate = rounded(silu(rounded(y[0], f.dtype)), f.dtype);
      store(f.out, r * f.ldo + f.column[0], f.dtype, f.count[0], _mm512_mul_ps(gate, rounded(y[1], f.dtype)));
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      if (f.count[half] == 0) continue;
      int64_t at = r * f.ldo + f.column[half];
      __m512 value = y[half];
      if (f.epilogue == EP_ADD)
        value = _mm512_add_ps(load(f.out, at, f.dtype, f.count[half]), rounded(value, f.dtype));
      store(f.out, at, f.dtype, f.count[half], value);
    }
  }
}

}  // namespace

extern const LinearKernels linear_avx512;
const LinearKernels linear_avx512 = {tile_kernel<false>, tile_kernel<true>, finish, 12, 6};

}  // namespace dw
