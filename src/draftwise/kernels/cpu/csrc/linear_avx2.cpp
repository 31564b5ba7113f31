// Linear kernels for AVX2 with FMA. bfloat16 is widened in registers: of a pair of k, first the even one, then the odd one.
#include <immintrin.h>

#include "linear_impl.h"

namespace dw {
namespace {

inline __m256 low_bf16(__m256i w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)); }
inline __m256 high_bf16(__m256i w) {
  return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(int(0xffff0000u))));
}

// R rows times half a panel (two vectors of 8 outputs): 2 * R accumulators of 16 registers.
template <bool kBf16, int R>
void half_panel(const Tile& t, int panel, int half) {
  const uint8_t* w = t.w + panel * t.panel_stride + half * 64;
  const uint32_t* x = t.x;
  float* sums = t.sums + panel * kPanel + half * 16;
  const int64_t stride = int64_t(kPanel) * t.panels;
  __m256 acc[R][2];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) acc[r][v] = t.load ? _mm256_loadu_ps(sums + r * stride + v * 8) : _mm256_setzero_ps();
  for (int64_t u = 0; u < t.units; ++u) {
    __m256i bits[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)),
                       _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32))};
    _mm_prefetch(reinterpret_cast<const char*>(w + 2048), _MM_HINT_T0);
    if (kBf16) {
      __m256 even[2] = {low_bf16(bits[0]), low_bf16(bits[1])};
      for (int r = 0; r < R; ++r) {
        __m256 row = _mm256_castsi256_ps(_mm256_set1_epi32(int(x[r] << 16)));
        for (int v = 0; v < 2; ++v) acc[r][v] = _mm256_fmadd_ps(even[v], row, acc[r][v]);
      }
      __m256 odd[2] = {high_bf16(bits[0]), high_bf16(bits[1])};
      for (int r = 0; r < R; ++r) {
        __m256 row = _mm256_castsi256_ps(_mm256_set1_epi32(int(x[r] & 0xffff0000u)));
        for (int v = 0; v < 2; ++v) acc[r][v] = _mm256_fmadd_ps(odd[v], row, acc[r][v]);
      }
    } else {
      for (int r = 0; r < R; ++r) {
        __m256 row = _mm256_castsi256_ps(_mm256_set1_epi32(int(x[r])));
        for (int v = 0; v < 2; ++v) acc[r][v] = _mm256_fmadd_ps(_mm256_castsi256_ps(bits[v]), row, acc[r][v]);
      }
    }
    w += kUnitBytes;
    x += R;
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) _mm256_storeu_ps(sums + r * stride + v * 8, acc[r][v]);
}

template <bool kBf16>
void tile_kernel(const Tile& t) {
  using Fn = void (*)(const Tile&, int, int);
  static constexpr Fn table[] = {nullptr,
                                 half_panel<kBf16, 1>,
                                 half_panel<kBf16, 2>,
                                 half_panel<kBf16, 3>,
                                 half_panel<kBf16, 4>,
                                 half_panel<kBf16, 5>,
                                 half_panel<kBf16, 6>};
  for (int p = 0; p < t.panels; ++p)
    for (int half = 0; half < 2; ++half) table[t.rows](t, p, half);
}

}  // namespace

extern const LinearKernels linear_avx2;
const LinearKernels linear_avx2 = {{tile_kernel<false>, tile_kernel<true>, tile_plain<W_I8>, tile_plain<W_I8_DYN>,
                                    tile_grouped<W_I4>, tile_grouped<W_I4_DYN>},
                                   finish_plain,
                                   quantize_plain,
                                   {6, 6, 8, 8, 8, 8},
                                   {}};

}  // namespace dw
