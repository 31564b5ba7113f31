// What an instruction set provides for linear layers, and the layout of packed weights. Internal to the linear family.
//
// Outputs are cut into panels of 32; a panel holds K in units, and a unit is 128 bytes: 32 outputs times one dword
//   W_F32: 1 k of 4 bytes   W_BF16: 2 k of 2 bytes   W_I8_DYN: 4 k of 1 byte
// so panel p, unit u, output j, and k = u * kpu + i stands at byte (p * units + u) * 128 + j * 4 + i * (4 / kpu).
// Example, W_BF16: w[n = 37, k = 6] is panel 1, unit 3, j = 5, i = 0.
// Rows are packed the same way: a tile of R rows is [units][R] dwords, so that a kernel reads both in one stream each,
// broadcasts a dword of a row and multiplies it into 32 lanes.
#pragma once

#include <cstdint>

#include "linear.h"

namespace dw {

constexpr int kPanel = 32;           // outputs of a panel
constexpr int kUnitBytes = 128;      // bytes of a unit of a panel
constexpr int kMaxTileRows = 12;

// One tile: `rows` (1..kMaxTileRows) times one or two panels over `units` units.
struct Tile {
  const uint32_t* x;      // [units][rows] dwords
  const uint8_t* w;       // first panel, at the first unit
  int64_t panel_stride;   // bytes from a panel to the next
  int64_t units;
  const uint8_t* next_w;  // what will be read after this (prefetched towards the end), or null
  float* sums;            // [rows][32 * panels], float32 or int32 by format
  bool load;              // go on from `sums` rather than from zero
  int rows;
  int panels;             // 1 or 2
};

// Sums of one tile on their way out; the 32 columns of a panel go to two places of 16.
struct Finish {
  const float* sums;  // [rows][sums_stride]
  int64_t sums_stride;
  const float* bias;   // [32] of this panel, or null
  void* out;           // row 0, column 0
  int64_t ldo;
  DType dtype;
  int rows;
  int64_t column[2];   // where the halves go; EP_SILU_MUL: column[0] only
  int count[2];        // how many of the 16 are real
  Epilogue epilogue;
};

struct LinearKernels {
  void (*f32)(const Tile&);
  void (*bf16)(const Tile&);
  void (*finish)(const Finish&);
  int tile_rows;   // rows of a full tile
  int pair_rows;   // tiles of at most so many rows take two panels at a time
};

extern const LinearKernels linear_portable;
void linear_finish_portable(const Finish&);
#if DW_HAVE_AVX2
extern const LinearKernels linear_avx2;
#endif
#if DW_HAVE_AVX512
extern const LinearKernels linear_avx512;
#endif

const LinearKernels& linear_kernels();  // of isa_current()

}  // namespace dw
