// Loops of 256-bit vectors. There are no products of bfloat16: float32 does its arithmetic.
#pragma once

#include <immintrin.h>

#include "probe.h"

namespace dw {
namespace {

uint64_t read(const uint8_t* from, int64_t bytes) {
  __m256i sum[8];
  for (int j = 0; j < 8; ++j) sum[j] = _mm256_setzero_si256();
  for (int64_t i = 0; i < bytes; i += 256)
    for (int j = 0; j < 8; ++j) {
      sum[j] = _mm256_add_epi64(sum[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + j * 32)));
      if (j % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(from + i + j * 32 + 4096), _MM_HINT_T0);
    }
  for (int j = 1; j < 8; ++j) sum[0] = _mm256_add_epi64(sum[0], sum[j]);
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sum[0]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

constexpr int kChains = 12;

// Kind 0: float32; 2: bytes, summed in 16 bits where no instruction sums them in 32.
template <int kKind>
int64_t arithmetic(int64_t rounds) {
  __m256i acc[kChains];
  __m256i a = _mm256_set1_epi32(0x3f803f80), b = _mm256_set1_epi32(0x3f003f00);
  for (int j = 0; j < kChains; ++j) acc[j] = _mm256_setzero_si256();
  for (int64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < kChains; ++j) {
      if (kKind == 0)
        acc[j] = _mm256_castps_si256(
            _mm256_fmadd_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), _mm256_castsi256_ps(acc[j])));
#if defined(__AVXVNNI__)
      if (kKind == 2) acc[j] = _mm256_dpbusd_avx_epi32(acc[j], a, b);
#else
      if (kKind == 2) acc[j] = _mm256_add_epi16(acc[j], _mm256_maddubs_epi16(a, b));
#endif
      __asm__ volatile("" : "+x"(a), "+x"(b));  // each product is one of its own
    }
  }
  for (int j = 1; j < kChains; ++j) acc[0] = _mm256_add_epi32(acc[0], acc[j]);
  volatile int32_t keep = _mm256_extract_epi32(acc[0], 0);
  (void)keep;
  return rounds * kChains * (kKind == 0 ? 16 : 64);
}

}  // namespace
}  // namespace dw
