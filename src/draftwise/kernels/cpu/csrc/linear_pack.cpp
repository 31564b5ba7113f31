// Packing of weights into the layout of linear_kernels.h, at load.
#include <cmath>
#include <cstring>
#include <memory>

#include "boundary.h"
#include "isa.h"
#include "linear_weights.h"
#include "memory.h"

namespace dw {
namespace {

// Padding is code 8 everywhere: zero among the integers and in NF4, minus zero in E2M1.
constexpr Nibbles kIntegers = {
    {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80, 0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0},
    {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf, 0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, 8, true};
constexpr Nibbles kE2m1 = {
    {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0},
    {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}, 12, false};
// Levels of the normal distribution (QLoRA), each rounded to bfloat16, codes 7 and 8 exchanged. `Numbers` in linear.h ends before it.
constexpr auto NUMBERS_NF4 = Numbers(2);
constexpr Nibbles kNf4 = {
    {0x80, 0x32, 0x06, 0xca, 0x92, 0x3d, 0xba, 0xa3, 0x00, 0x25, 0x7c, 0xad, 0xe2, 0x10, 0x39, 0x80},
    {0xbf, 0xbf, 0xbf, 0xbe, 0xbe, 0xbe, 0xbd, 0x3d, 0x00, 0x3e, 0x3e, 0x3e, 0x3e, 0x3f, 0x3f, 0x3f},
    {}, 0, false};

struct PackJob {
  Linear* w;
  const uint8_t* source;   // rows of the format's numbers: as they are, or one byte each (int8; int4: 0..15)
  int64_t row_bytes;
  const float* scales;     // [N] or [N, groups], or null
  const uint8_t* zeros;    // [N, groups], or null
  float factor;            // what group scales are multiplied with before they become float16
};

uint16_t to_f16(float f) {  // 0 <= |f| < 65504, to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude < 0x38800000) {  // below 2^-14: in units of 2^-24
    float small;
    std::memcpy(&small, &magnitude, 4);
    return uint16_t(sign | uint32_t(std::nearbyint(small * 0x1p24f)));
  }
  uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return uint16_t(sign | ((rounded - (112u << 23)) >> 13));
}

// Where byte i (0..3) of output j of a unit stands, for the formats that are widened by interleaving.
int interleaved(int j, int i) { return j / 4 * 16 + i / 2 * 8 + j % 4 * 2 + i % 2; }

void pack_bytes(const PackJob& job, uint8_t* panel, int j, const uint8_t* row) {
  const Linear& w = *job.w;
  int kpu = k_per_unit(w.format);
  for (int64_t u = 0; u < w.units; ++u) {
    uint8_t* unit = panel + w.offset(u) + w.header();
    for (int i = 0; i < 4; ++i) {
      // padding is the number zero
      int64_t k = u * kpu + i;
      auto at = [&](int64_t k, uint8_t zero) { return row != nullptr && k < w.inputs ? row[k] : zero; };
      switch (w.format) {
        case W_I8_DYN:
          unit[j * 4 + i] = uint8_t(at(k, 0) + 128);
          break;
        case W_I8: {
          int value = int8_t(at(k, 0));
          unit[interleaved(j, i)] = uint8_t(value < 0 ? 0x80 | (-value & 0x7f) : value);
          break;
        }
        case W_I4_DYN:
          unit[j * 4 + i] = uint8_t(at(k, 8) | at(k + 4, 8) << 4);
          break;
        default:
          unit[interleaved(j, i)] = uint8_t(at(k, 8) | at(k + 4, 8) << 4);
      }
    }
  }
}

void pack_headers(const PackJob& job, uint8_t* panel, int j, int64_t n) {
  const Linear& w = *job.w;
  for (int64_t g = 0; g < w.groups(); ++g) {
    uint8_t* header = panel + w.offset(g * w.group_units);
    uint16_t scale = n < 0 ? 0 : to_f16(job.scales[n * w.groups() + g] * job.factor);
    std::memcpy(header + j * 2, &scale, 2);
    if (w.zeros) header[kHeader + j] = uint8_t(n < 0 ? 0 : int(job.zeros[n * w.groups() + g]) - 8);
  }
}

void pack_words(const PackJob& job, uint8_t* panel, int j, const uint8_t* row) {
  const Linear& w = *job.w;
  int64_t bytes = row == nullptr ? 0 : w.inputs * (4 / k_per_unit(w.format)), whole = bytes / 4;
  for (int64_t u = 0; u < whole; ++u) std::memcpy(panel + u * kUnitBytes + j * 4, row + u * 4, 4);
  for (int64_t u = whole; u < w.units; ++u) {
    uint32_t last = 0;
    if (u == whole && bytes > whole * 4) std::memcpy(&last, row + whole * 4, size_t(bytes - whole * 4));
    std::memcpy(panel + u * kUnitBytes + j * 4, &last, 4);
  }
}

void pack_panel(void* raw, int p, int) {
  const PackJob& job = *static_cast<PackJob*>(raw);
  const Linear& w = *job.w;
  uint8_t* panel = w.weights + int64_t(p) * w.panel_bytes();
  for (int j = 0; j < kPanel; ++j) {
    int64_t n = source_row(w, p, j);
    const uint8_t* row = n < 0 ? nullptr : job.source + n * job.row_bytes;
    if (w.format == W_F32 || w.format == W_BF16)
      pack_words(job, panel, j, row);
    else
      pack_bytes(job, panel, j, row);
    if (is_grouped(w.format)) pack_headers(job, panel, j, n);
  }
}

float* spread(const Linear& w, const float* values, float padding) {
  auto* to = static_cast<float*>(big_alloc(size_t(w.panels * kPanel) * 4));
  for (int64_t p = 0; p < w.panels; ++p)
    for (int j = 0; j < kPanel; ++j) {
      int64_t n = source_row(w, p, j);
      to[p * kPanel + j] = n < 0 ? padding : values[n];
    }
  return to;
}

struct Free {
  void operator()(Linear* w) const { linear_free(w); }
};
using Owned = std::unique_ptr<Linear, Free>;

Owned make(Format format, DType input, const float* bias, int64_t outputs, int64_t inputs, int group, bool zeros,
             bool paired) {
  require(format >= 0 && format < kFormats, "format");
  require(outputs >= 1 && inputs >= 1 && !(paired && outputs % 2 != 0), "shape");
  int kpu = k_per_unit(format);
  require(!is_grouped(format) || (group >= kpu && group % kpu == 0), "group");
  require(format != W_I8_DYN || inputs <= 65536, "inputs");  // 127 * 255 * K has to fit 31 bits
  Owned w(new Linear{});
  w->format = format;
  w->input = input;
  w->paired = paired;
  w->zeros = zeros;
  w->nibbles = &kIntegers;
  w->outputs = outputs;
  w->inputs = inputs;
  w->units = (inputs + kpu - 1) / kpu;
  w->group_units = int(w->units);
  if (is_grouped(format)) {
    w->group_units = group / kpu;
    w->units = (w->units + w->group_units - 1) / w->group_units * w->group_units;
  }
  w->panels = paired ? (outputs / 2 + 15) / 16 : (outputs + kPanel - 1) / kPanel;
  w->weights = static_cast<uint8_t*>(big_alloc(size_t(w->panels * w->panel_bytes())));
  if (bias != nullptr) w->bias = spread(*w, bias, 0.0f);
  return w;
}

}  // namespace

Linear* linear_pack(Pool* pool, Format format, const void* weight, int64_t ldw, const float* bias, int64_t outputs,
                    int64_t inputs, bool paired) {
  require(format == W_F32 || format == W_BF16, "format");
  DType input = format == W_F32 ? F32 : BF16;
  Owned w = make(format, input, bias, outputs, inputs, 0, false, paired);
  PackJob job{w.get(), static_cast<const uint8_t*>(weight), ldw * element_bytes(input), nullptr, nullptr, 1.0f};
  parallel_for(pool, int(w->panels), pack_panel, &job);
  return w.release();
}

Linear* linear_pack_quantized(Pool* pool, Format format, DType input, const uint8_t* q, const float* scales,
                              const uint8_t* zeros, int group, const float* bias, int64_t outputs, int64_t inputs,
                              bool paired, Numbers numbers) {
  bool weight_only = format == W_I8 || format == W_I4;
  require(weight_only || is_dynamic(format), "format");
  require(input == BF16 || (input == F32 && !weight_only), "input");
  Owned w = make(format, input, bias, outputs, inputs, group, zeros != nullptr, paired);
  const bool known = (numbers == NUMBERS_E2M1 && is_grouped(format)) || (numbers == NUMBERS_NF4 && format == W_I4);
  require(numbers == NUMBERS_INTEGERS || (known && zeros == nullptr), "numbers");
  if (numbers == NUMBERS_E2M1) w->nibbles = &kE2m1;
  if (numbers == NUMBERS_NF4) w->nibbles = &kNf4;
  PackJob job{w.get(), q, inputs, scales, zeros, 1.0f};
  if (is_grouped(format)) {
    // a power of two that brings the largest scale to [2^9, 2^10), so that float16 loses nothing but digits
    float largest = 0.0f;
    for (int64_t i = 0; i < outputs * w->groups(); ++i) largest = std::fmax(largest, std::fabs(scales[i]));
    int exponent = 0;
    if (largest > 0.0f) std::frexp(largest, &exponent);
    job.factor = std::ldexp(1.0f, 10 - exponent);
    w->scale = static_cast<float*>(big_alloc(size_t(w->panels * kPanel) * 4));
    const float unit = is_dynamic(format) ? w->nibbles->unit() : 1.0f;
    for (int64_t i = 0; i < w->panels * kPanel; ++i) w->scale[i] = std::ldexp(unit, exponent - 10);
  } else {
    w->scale = spread(*w, scales, 0.0f);
  }
  parallel_for(pool, int(w->panels), pack_panel, &job);
  return w.release();
}

void linear_free(Linear* w) {
  if (w == nullptr) return;
  big_free(w->weights);
  big_free(w->scale);
  big_free(w->bias);
  delete w;
}

int64_t linear_outputs(const Linear* w) { return w->outputs; }
int64_t linear_inputs(const Linear* w) { return w->inputs; }
DType linear_input_dtype(const Linear* w) { return w->input; }
Pool* pool_for(Pool* pool, const Linear* w, int64_t rows) {
  constexpr int64_t SHARED_WORK = 4 << 20;  // rows times bytes of weights from which a second thread brings more than it costs
  return rows * linear_bytes(w) < SHARED_WORK ? nullptr : pool;
}

int64_t linear_bytes(const Linear* w) {
  return w->panels * (w->panel_bytes() + (w->bias == nullptr ? 0 : kPanel * 4) + (w->scale == nullptr ? 0 : kPanel * 4));
}

}  // namespace dw

using dw::guarded;
using dw::Linear;

DW_EXPORT Linear* dw_linear_pack(dw::Pool* pool, int format, const void* weight, int64_t ldw, const float* bias,
                                 int64_t outputs, int64_t inputs, int paired) {
  return guarded([&] {
    return dw::linear_pack(pool, dw::Format(format), weight, ldw, bias, outputs, inputs, paired != 0);
  });
}
DW_EXPORT Linear* dw_linear_pack_quantized(dw::Pool* pool, int format, int input, const uint8_t* q, const float* scales,
                                           const uint8_t* zeros, int group, const float* bias, int64_t outputs,
                                           int64_t inputs, int paired, int numbers) {
  return guarded([&] {
    return dw::linear_pack_quantized(pool, dw::Format(format), dw::DType(input), q, scales, zeros, group, bias, outputs,
                                     inputs, paired != 0, dw::Numbers(numbers));
  });
}
DW_EXPORT void dw_linear_free(Linear* w) {
  guarded([&] { dw::linear_free(w); });
}
DW_EXPORT void dw_memory_release() {
  guarded([] { dw::big_release(); });
}
DW_EXPORT int64_t dw_linear_bytes(const Linear* w) {
  return guarded([&] { return dw::linear_bytes(w); });
}
DW_EXPORT const void* dw_linear_data(const Linear* w) {
  return guarded([&] { return static_cast<const void*>(w->weights); });
}
