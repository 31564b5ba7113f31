// Loops of 512-bit vectors. Where there are no products of bfloat16, float32 does its arithmetic.
#pragma once

#include <immintrin.h>

#include "probe.h"

namespace dw {
namespace {

uint64_t read(const uint8_t* from, int64_t bytes) {
  __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int64_t i = 0; i < bytes; i += 256)
    for (int j = 0; j < 4; ++j) {
      sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(from + i + j * 64));
      _mm_prefetch(reinterpret_cast<const char*>(from + i + j * 64 + 4096), _MM_HINT_T0);
    }
  return uint64_t(_mm512_reduce_add_epi64(
      _mm512_add_epi64(_mm512_add_epi64(sum[0], sum[1]), _mm512_add_epi64(sum[2], sum[3]))));
}

constexpr int kChains = 16;

template <int kKind>
int64_t arithmetic(int64_t rounds) {
  __m512 acc[kChains];
  __m512i a = _mm512_set1_epi32(0x3f803f80), b = _mm512_set1_epi32(0x3f003f00);
  for (int j = 0; j < kChains; ++j) acc[j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < kChains; ++j) {
      if (kKind == 0) acc[j] = _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc[j]);
#if defined(__AVX512BF16__)
      if (kKind == 1) acc[j] = _mm512_dpbf16_ps(acc[j], (__m512bh)a, (__m512bh)b);
#endif
      if (kKind == 2) acc[j] = _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(acc[j]), a, b));
    }
    __asm__ volatile("" : "+v"(a), "+v"(b));  // not to be moved out of the loop
  }
  __m512 sum = acc[0];
  for (int j = 1; j < kChains; ++j) sum = _mm512_add_ps(sum, acc[j]);
  volatile float keep = _mm512_reduce_add_ps(sum);
  (void)keep;
  return rounds * kChains * (kKind == 0 ? 32 : kKind == 1 ? 64 : 128);
}

}  // namespace

}  // namespace dw
