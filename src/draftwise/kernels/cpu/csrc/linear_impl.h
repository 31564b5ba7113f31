// Linear kernels in plain C++, in loops over the 32 outputs of a panel that compilers vectorise. Included by the files of the
// instruction sets that use them, so that each has its own copy made with its own flags.
#pragma once

#include <string.h>

#include "linear_kernels.h"
#include "linear_sum.h"

namespace dw {
namespace {

#if defined(__FMA__) || defined(__aarch64__)
inline float madd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float madd(float a, float b, float c) { return a * b + c; }  // contraction is off: two roundings, always
#endif

inline float as_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint32_t as_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

inline uint16_t to_bf16(float f) {
  uint32_t bits = as_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t h) {  // finite only
  uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest < 0x400) return as_float(sign | as_bits(float(rest) * 0x1p-24f));
  return as_float(sign | ((rest << 13) + (112u << 23)));
}

inline float number_of(const Nibbles& nibbles, int code) {
  return as_float(uint32_t(nibbles.high[code]) << 24 | uint32_t(nibbles.low[code]) << 16);
}

// The k of one unit of a panel, [kpu][32]; integer formats as their values. `nibbles`: of the formats of four bits.
template <Format F>
inline void decode(const uint8_t* unit, float (*w)[kPanel], const Nibbles* nibbles = nullptr) {
  for (int j = 0; j < kPanel; ++j) {
    uint32_t dword;
    memcpy(&dword, unit + j * 4, 4);
    if (F == W_F32) w[0][j] = as_float(dword);
    if (F == W_BF16) w[0][j] = as_float(dword << 16), w[1][j] = as_float(dword & 0xffff0000u);
  }
  if (F == W_I8 || F == W_I4)
    for (int j = 0; j < kPanel; ++j) {
      const uint8_t* base = unit + j / 4 * 16 + j % 4 * 2;  // see the layout in linear_kernels.h
      for (int i = 0; i < 4; ++i) {
        uint8_t b = base[i / 2 * 8 + i % 2];
        if (F == W_I8) {
          w[i][j] = float((b & 0x80) != 0 ? -(b & 0x7f) : b & 0x7f);
        } else {
          w[i][j] = number_of(*nibbles, b & 15);
          w[4 + i][j] = number_of(*nibbles, b >> 4);
        }
      }
    }
}

template <Format F>
inline void decode_integers(const uint8_t* unit, int32_t (*w)[kPanel], const Nibbles* nibbles = nullptr) {
  for (int j = 0; j < kPanel; ++j)
    for (int i = 0; i < 4; ++i) {
      uint8_t b = unit[j * 4 + i];
      if (F == W_I8_DYN) {
        w[i][j] = int32_t(b) - 128;
      } else {
        w[i][j] = int32_t(nibbles->integers[b & 15]) - nibbles->offset;
        w[4 + i][j] = int32_t(nibbles->integers[b >> 4]) - nibbles->offset;
      }
    }
}

// Adds the product of unit w and the row's steps at x (stride R dwords) to acc.
template <Format F>
inline void add_unit(float* acc, const float (*w)[kPanel], const uint32_t* x, int rows) {
  constexpr int kpu = F == W_F32 ? 1 : F == W_BF16 ? 2 : F == W_I8 ? 4 : 8;
  for (int k = 0; k < kpu; ++k) {
    uint32_t dword = F == W_F32 ? x[0] : x[int64_t(k / 2) * rows];
    float value = F == W_F32 ? as_float(dword) : as_float(k % 2 == 0 ? dword << 16 : dword & 0xffff0000u);
    for (int j = 0; j < kPanel; ++j) acc[j] = madd(value, w[k][j], acc[j]);
  }
}

template <Format F>
inline void add_unit_integers(int32_t* acc, const int32_t (*w)[kPanel], const uint32_t* x, int rows) {
  constexpr int kpu = F == W_I8_DYN ? 4 : 8;
  for (int k = 0; k < kpu; ++k) {
    int32_t value = int8_t(x[int64_t(k / 4) * rows] >> (k % 4 * 8));
    for (int j = 0; j < kPanel; ++j) acc[j] += value * w[k][j];
  }
}

template <Format F>
void tile_plain(const Tile& t) {
  constexpr bool kIntegers = F == W_I8_DYN;
  constexpr int steps = F == W_I8 ? 2 : 1;
  for (int p = 0; p < t.panels; ++p) {
    const uint8_t* panel = t.w + p * t.panel_stride;
    float acc[kMaxTileRows][kPanel];
    int32_t iacc[kMaxTileRows][kPanel];
    for (int r = 0; r < t.rows; ++r) {
      const float* sums = t.sums + int64_t(r) * kPanel * t.panels + p * kPanel;
      for (int j = 0; j < kPanel; ++j) {
        acc[r][j] = t.load ? sums[j] : 0.0f;
        iacc[r][j] = t.load ? int32_t(as_bits(sums[j])) : 0;
      }
    }
    for (int64_t u = 0; u < t.units; ++u) {
      const uint32_t* x = t.x + u * steps * t.rows;
      if (kIntegers) {
        int32_t w[8][kPanel];
        decode_integers<W_I8_DYN>(panel + u * kUnitBytes, w);
        for (int r = 0; r < t.rows; ++r) add_unit_integers<W_I8_DYN>(iacc[r], w, x + r, t.rows);
      } else {
        float w[8][kPanel];
        decode<F>(panel + u * kUnitBytes, w);
        for (int r = 0; r < t.rows; ++r) add_unit<F>(acc[r], w, x + r, t.rows);
      }
    }
    for (int r = 0; r < t.rows; ++r)
      memcpy(t.sums + int64_t(r) * kPanel * t.panels + p * kPanel,
             kIntegers ? static_cast<const void*>(iacc[r]) : acc[r], kPanel * 4);
  }
}

template <Format F>
void tile_grouped(const Tile& t) {
  constexpr bool kIntegers = F == W_I4_DYN;
  constexpr int steps = kIntegers ? 2 : 4;
  const int64_t groups = t.units / t.group_units;
  for (int p = 0; p < t.panels; ++p) {
    const uint8_t* at = t.w + p * t.panel_stride;
    const uint32_t* x = t.x;
    for (int64_t g = 0; g < groups; ++g) {
      float scale[kPanel], shift[kPanel];
      for (int j = 0; j < kPanel; ++j) {
        uint16_t half;
        memcpy(&half, at + j * 2, 2);
        scale[j] = from_f16(half);
        shift[j] = t.zeros ? -scale[j] * float(int8_t(at[kHeader + j])) : 0.0f;
      }
      at += t.zeros ? 2 * kHeader : kHeader;
      float acc[kMaxTileRows][kPanel] = {};
      int32_t iacc[kMaxTileRows][kPanel] = {};
      for (int u = 0; u < t.group_units; ++u) {
        if (kIntegers) {
          int32_t w[8][kPanel];
          decode_integers<W_I4_DYN>(at, w, t.nibbles);
          for (int r = 0; r < t.rows; ++r) add_unit_integers<W_I4_DYN>(iacc[r], w, x + r, t.rows);
        } else {
          float w[8][kPanel];
          decode<W_I4>(at, w, t.nibbles);
          for (int r = 0; r < t.rows; ++r) add_unit<W_I4>(acc[r], w, x + r, t.rows);
        }
        at += kUnitBytes;
        x += steps * t.rows;
      }
      for (int r = 0; r < t.rows; ++r) {
        float* sums = t.sums + int64_t(r) * kPanel * t.panels + p * kPanel;
        bool start = g == 0 && !t.load;
        float x_sum = kIntegers ? float(static_cast<const int32_t*>(t.x_sums)[g * t.rows + r]) * -0.125f
                                : static_cast<const float*>(t.x_sums)[g * t.rows + r];
        for (int j = 0; j < kPanel; ++j) {
          float total = madd(kIntegers ? float(iacc[r][j]) : acc[r][j], scale[j], start ? 0.0f : sums[j]);
          sums[j] = t.zeros ? madd(shift[j], x_sum, total) : total;
        }
      }
    }
  }
}

inline float load_out(const void* out, int64_t i, DType dtype) {
  if (dtype == F32) return static_cast<const float*>(out)[i];
  return as_float(uint32_t(static_cast<const uint16_t*>(out)[i]) << 16);
}

inline void store_out(void* out, int64_t i, DType dtype, float value) {
  if (dtype == F32)
    static_cast<float*>(out)[i] = value;
  else
    static_cast<uint16_t*>(out)[i] = to_bf16(value);
}

inline float rounded(float value, DType dtype) {
  return dtype == F32 ? value : as_float(uint32_t(to_bf16(value)) << 16);
}

// e^x for x <= 0: 2^n * p(f), x = (n + f) ln 2 with f in [-1/2, 1/2]. Not the library's, which may differ by machine.
inline float exp_negative(float x) {
  if (x < -87.0f) return 0.0f;
  float n = x * 1.44269504088896341f;
  n = float(int32_t(n - 0.5f));
  float f = x - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = f * f * p + (f + 1.0f);
  return p * as_float(uint32_t(int32_t(n) + 127) << 23);
}

// x / (1 + e^-x), with e of a negative number on both sides so that nothing overflows.
inline float silu(float x) {
  if (!(x == x)) return x;
  float e = exp_negative(x < 0 ? x : -x);
  return (x < 0 ? x * e : x) / (1.0f + e);
}

void finish_plain(const Finish& f) {
  for (int r = 0; r < f.rows; ++r) {
    float y[kPanel];
    const float* sums = f.sums + r * f.sums_stride;
    for (int j = 0; j < kPanel; ++j) {
      float value = f.integers ? float(int32_t(as_bits(sums[j]))) : sums[j];
      if (f.scale != nullptr) value = value * f.scale[j];
      if (f.row_scale != nullptr) value = value * f.row_scale[r];
      y[j] = f.bias == nullptr ? value : value + f.bias[j];
    }
    if (f.epilogue == EP_SILU_MUL) {
      for (int j = 0; j < f.count[0]; ++j) {
        float gate = rounded(silu(rounded(y[j], f.dtype)), f.dtype), up = rounded(y[j + 16], f.dtype);
        store_out(f.out, r * f.ldo + f.column[0] + j, f.dtype, gate * up);
      }
      continue;
    }
    for (int half = 0; half < 2; ++half) {
      int64_t base = r * f.ldo + f.column[half];
      for (int j = 0; j < f.count[half]; ++j) {
        float value = y[half * 16 + j];
        if (f.epilogue == EP_ADD) value = load_out(f.out, base + j, f.dtype) + rounded(value, f.dtype);
        store_out(f.out, base + j, f.dtype, value);
      }
    }
  }
}

float quantize_plain(const void* x, DType dtype, int64_t count, int8_t* q) {
  uint32_t largest = 0;  // of the bits without sign: ordered as the magnitudes, with infinity and NaN above all
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = as_bits(load_out(x, i, dtype)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float top = as_float(largest), inverse = 127.0f / top;
  if (largest >= 0x7f800000 || !(inverse < 0x1p127f)) {  // not finite; or nothing but zeros and the smallest numbers
    memset(q, 0, size_t(count));
    return largest >= 0x7f800000 ? as_float(0x7fc00000) : 0.0f;
  }
  for (int64_t i = 0; i < count; ++i) {
    float scaled = load_out(x, i, dtype) * inverse;
    q[i] = int8_t(int32_t((scaled + 12582912.0f) - 12582912.0f));  // 1.5 * 2^23: rounds to the nearest integer, ties to even
  }
  return top / 127.0f;
}

}  // namespace
}  // namespace dw
