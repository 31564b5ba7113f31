// Linear kernels in plain C++, in loops that compilers vectorise over the 32 outputs of a panel.
#include <cmath>
#include <cstring>

#include "linear_kernels.h"

namespace dw {
namespace {

#if defined(__FMA__) || defined(__aarch64__)
inline float madd(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float madd(float a, float b, float c) { return a * b + c; }  // contraction is off: two roundings, always
#endif

inline float as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One row times one panel at a time: the lanes' order over k is that of every other shape.
template <bool kBf16>
void tile_kernel(const Tile& t) {
  for (int p = 0; p < t.panels; ++p) {
    const uint8_t* panel = t.w + p * t.panel_stride;
    for (int r = 0; r < t.rows; ++r) {
      float acc[kPanel];
      float* sums = t.sums + int64_t(r) * kPanel * t.panels + p * kPanel;
      for (int j = 0; j < kPanel; ++j) acc[j] = t.load ? sums[j] : 0.0f;
      for (int64_t u = 0; u < t.units; ++u) {
        uint32_t x = t.x[u * t.rows + r];
        uint32_t w[kPanel];
        std::memcpy(w, panel + u * kUnitBytes, kUnitBytes);
        if (kBf16) {
          float x0 = as_float(x << 16), x1 = as_float(x & 0xffff0000u);
          for (int j = 0; j < kPanel; ++j) {
            acc[j] = madd(x0, as_float(w[j] << 16), acc[j]);
            acc[j] = madd(x1, as_float(w[j] & 0xffff0000u), acc[j]);
          }
        } else {
          float x0 = as_float(x);
          for (int j = 0; j < kPanel; ++j) acc[j] = madd(x0, as_float(w[j]), acc[j]);
        }
      }
      for (int j = 0; j < kPanel; ++j) sums[j] = acc[j];
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

}  // namespace

void linear_finish_portable(const Finish& f) {
  for (int r = 0; r < f.rows; ++r) {
    float y[kPanel];
    const float* sums = f.sums + r * f.sums_stride;
    for (int j = 0; j < kPanel; ++j) y[j] = f.bias == nullptr ? sums[j] : sums[j] + f.bias[j];
    if (f.epilogue == EP_SILU_MUL) {
      for (int j = 0; j < f.count[0]; ++j) {
        float gate = rounded(y[j], f.dtype), up = rounded(y[j + 16], f.dtype);
        float silu = rounded(gate / (1.0f + std::exp(-gate)), f.dtype);
        store_out(f.out, r * f.ldo + f.column[0] + j, f.dtype, silu * up);
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

extern const LinearKernels linear_portable;
const LinearKernels linear_portable = {tile_kernel<false>, tile_kernel<true>, linear_finish_portable, 8, 0};

}  // namespace dw
