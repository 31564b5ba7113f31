// The probes of one level of ARM; DW_PROBE_TABLE names them. What they may use, the compiler's flags say.
#pragma once

#include <arm_neon.h>

#include "compiler.h"
#include "probe.h"

namespace dw {
namespace {

uint64_t read(const uint8_t* from, int64_t bytes) {
  uint64x2_t sum[4] = {};
  for (int64_t i = 0; i < bytes; i += 64) {
    DW_UNROLLED
    for (int j = 0; j < 4; ++j) sum[j] = vaddq_u64(sum[j], vreinterpretq_u64_u8(vld1q_u8(from + i + j * 16)));
    __builtin_prefetch(from + i + 4096);
  }
  return vaddvq_u64(vaddq_u64(vaddq_u64(sum[0], sum[1]), vaddq_u64(sum[2], sum[3])));
}

constexpr int kChains = 16;

inline __attribute__((always_inline)) float32x4_t step_floats(float32x4_t acc, uint8x16_t a, uint8x16_t b) {
  return vfmaq_f32(acc, vreinterpretq_f32_u8(a), vreinterpretq_f32_u8(b));
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr int kPairProducts = 8;  // of an instruction
inline __attribute__((always_inline)) float32x4_t step_pairs(float32x4_t acc, uint8x16_t a, uint8x16_t b) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_u8(a), vreinterpretq_bf16_u8(b));
}
#else
constexpr int kPairProducts = 4;  // widened
inline __attribute__((always_inline)) float32x4_t step_pairs(float32x4_t acc, uint8x16_t a, uint8x16_t b) { return step_floats(acc, a, b); }
#endif
inline __attribute__((always_inline)) float32x4_t step_bytes(float32x4_t acc, uint8x16_t a, uint8x16_t b) {
  const int32x4_t sums = vreinterpretq_s32_f32(acc);
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return vreinterpretq_f32_s32(vusmmlaq_s32(sums, a, vreinterpretq_s8_u8(b)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vreinterpretq_f32_s32(vdotq_s32(sums, vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)));
#else
  (void)b;  // the chain's own sums are a factor, else the product is one for all chains
  const int8x16_t x = vreinterpretq_s8_u8(a), y = vreinterpretq_s8_f32(acc);
  const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
  return vreinterpretq_f32_s32(vpadalq_s16(sums, pairs));
#endif
}
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kByteProducts = 32;
#else
constexpr int kByteProducts = 16;
#endif

template <int kKind>
inline __attribute__((always_inline)) float32x4_t step(float32x4_t acc, uint8x16_t a, uint8x16_t b) {
  return kKind == 0 ? step_floats(acc, a, b) : kKind == 1 ? step_pairs(acc, a, b) : step_bytes(acc, a, b);
}

template <int kKind>
int64_t arithmetic(int64_t rounds) {
  constexpr int kProducts = kKind == 0 ? 4 : kKind == 1 ? kPairProducts : kByteProducts;
  float32x4_t acc[kChains];
  DW_UNROLLED
  for (int j = 0; j < kChains; ++j) {
    acc[j] = vdupq_n_f32(0);
    __asm__("" : "+w"(acc[j]));  // else all chains are known to be one
  }
  uint8x16_t a = vreinterpretq_u8_u32(vdupq_n_u32(0x3f803f80)), b = vreinterpretq_u8_u32(vdupq_n_u32(0x3f003f00));
  for (int64_t i = 0; i < rounds; ++i) {
    DW_UNROLLED
    for (int j = 0; j < kChains; ++j) acc[j] = step<kKind>(acc[j], a, b);
    __asm__ volatile("" : "+w"(a), "+w"(b));  // not to be moved out of the loop
  }
  float32x4_t sum = acc[0];
  DW_UNROLLED
  for (int j = 1; j < kChains; ++j) sum = vaddq_f32(sum, acc[j]);
  volatile float keep = vaddvq_f32(sum);
  (void)keep;
  return rounds * kChains * kProducts * 2;
}

}  // namespace

extern const ProbeKernels DW_PROBE_TABLE;
const ProbeKernels DW_PROBE_TABLE = {read, arithmetic<0>, arithmetic<1>, arithmetic<2>};

}  // namespace dw
