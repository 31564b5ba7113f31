// Packed weights. Internal to the linear family; the layout is in linear_kernels.h.
#pragma once

#include "linear_kernels.h"

namespace dw {

struct Linear {
  Format format;
  DType input;       // of the rows
  bool paired;       // gate | up: panels hold 16 gates and their 16 ups
  bool zeros;        // groups have zero points
  const Nibbles* nibbles;  // what codes of W_I4 and W_I4_DYN stand for
  int64_t outputs;   // N
  int64_t inputs;    // K
  int64_t units;     // of a panel; padded with zeros to whole units and groups
  int64_t panels;
  int group_units;   // units of a group; not grouped: all
  uint8_t* weights;  // [panels][panel_bytes]
  float* scale;      // [panels * 32] or null
  float* bias;       // [panels * 32] or null

  int64_t groups() const { return units / group_units; }
  int64_t header() const { return !is_grouped(format) ? 0 : zeros ? 2 * kHeader : kHeader; }
  int64_t panel_bytes() const { return units * kUnitBytes + groups() * header(); }
  int64_t offset(int64_t unit) const { return unit * kUnitBytes + unit / group_units * header(); }
  int integers_offset() const { return format == W_I8_DYN ? 128 : format == W_I4_DYN ? nibbles->offset : 0; }  // of what is multiplied
  int64_t steps() const { return units * steps_per_unit(format); }
};

inline int64_t element_bytes(DType dtype) { return dtype == F32 ? 4 : dtype == I8 ? 1 : 2; }

// Which row of the weight stands in lane j of panel p; -1 for padding. Paired, N = 80, panel 1: lanes 0..15 are gates
// 16..31, lanes 16..31 are ups 16..31, rows 56..71.
inline int64_t source_row(const Linear& w, int64_t p, int j) {
  if (!w.paired) {
    int64_t n = p * kPanel + j;
    return n < w.outputs ? n : -1;
  }
  int64_t half = w.outputs / 2, n = p * 16 + j % 16;
  if (n >= half) return -1;
  return j < 16 ? n : half + n;
}

}  // namespace dw
