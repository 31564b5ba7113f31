// What an instruction set provides for linear layers, and the layout of packed weights. Internal to the linear family.
//
// Outputs are cut into panels of 32; a panel holds K in units, and a unit is 128 bytes: 32 outputs times one dword.
// With kpu k in a unit, panel p, unit u, output j and k = u * kpu + i:
//   W_F32     kpu 1
//   W_BF16    kpu 2, the dword is the pair (k, k + 1)
//   W_I8_DYN  kpu 4, byte i is w + 128
//   W_I8      kpu 4, a byte is sign and magnitude (so that 7 bits index a table of bfloat16). Of 16 bytes (4 outputs), bytes
//             0..7 hold k 0 and 1 of each output, bytes 8..15 k 2 and 3: widened, that makes pairs in the right lanes.
//   W_I4_DYN  kpu 8, byte i holds k i in its low and k 4 + i in its high half, 0..15: codes of `Nibbles`
//   W_I4      kpu 8, low halves as W_I8 for k 0..3, high halves for k 4..7, 0..15: codes of `Nibbles`
// Example, W_BF16: w[n = 37, k = 6] is panel 1, unit 3, lane j = 5, the lower half of the dword.
// The int4 formats cut K into groups, and each group of a panel starts with a header: 32 scales (float16), and, where
// zero points differ from 8, a second 64 bytes with 32 of zero point - 8 (int8) and padding.
//
// Rows are packed to match: a tile of R rows is [step][R] dwords, one step per pair (bfloat16) or four (int8) of k, so that a
// kernel reads both in one stream each, broadcasts a dword of a row and multiplies it into 16 lanes. Kernels on tiles (`in_chunks`) read
// [chunk][R][16] dwords; the last chunk of a row, or of a group, is padded with zeros. Kernels that widen pairs of bfloat16 may ask for
// rows that are widened once, when they are packed (`wide_from`): [step][2][R] float32, the even numbers of the pairs before the odd ones.
#pragma once

#include <cstdint>

#include "linear.h"

namespace dw {

constexpr int kPanel = 32;       // outputs of a panel
constexpr int kUnitBytes = 128;  // bytes of a unit of a panel
constexpr int kHeader = 64;      // bytes of a group's scales, and of its zero points
constexpr int kMaxTileRows = 12;
constexpr int kFormats = 6;

inline int k_per_unit(Format f) { return f == W_F32 ? 1 : f == W_BF16 ? 2 : f == W_I8 || f == W_I8_DYN ? 4 : 8; }
constexpr int steps_per_unit(Format f) { return f == W_I8 || f == W_I4_DYN ? 2 : f == W_I4 ? 4 : 1; }
inline bool is_dynamic(Format f) { return f == W_I8_DYN || f == W_I4_DYN; }
inline bool is_grouped(Format f) { return f == W_I4 || f == W_I4_DYN; }

// What the 16 codes of W_I4 stand for, in bfloat16 cut into the lower and the upper byte; and of W_I4_DYN, the integers that are
// multiplied with bytes of rows, plus `offset`, which is 0 where there are none. Example: code 11 of E2M1 is -1.5: 0xbfc0 in bfloat16,
// and as an integer twice that plus 12, which is 9.
struct Nibbles {
  alignas(16) uint8_t low[16];
  alignas(16) uint8_t high[16];
  alignas(16) uint8_t integers[16];
  int offset;
  bool plain;  // codes are the integers

  float unit() const { return plain ? 1.0f : 0.5f; }  // what the integer 1 stands for
};

// One tile: `rows` (1..kMaxTileRows) times one or two panels over `units` units (whole groups of them).
struct Tile {
  const uint32_t* x;      // [units * steps][rows] dwords; wide: [units * steps][2][rows]; in chunks: [chunks][rows][16]
  const uint8_t* w;       // first panel, at the first unit (or header)
  int64_t panel_stride;   // bytes from a panel to the next
  int64_t units;
  int64_t bytes;          // of one panel over these units
  const uint8_t* next_w;  // what will be read after these weights, by this tile and all the others, or null
  // What is prefetched. `shares` 0: these weights, some way ahead, and towards the end `next_w`. Else they have been prefetched,
  // and while this tile runs, the `share`-th of as many parts of what begins at `next_w` and has `bytes` bytes.
  int share, shares;
  float* sums;            // [rows][32 * panels]: float32, or int32 for W_I8_DYN
  bool load;              // go on from `sums` rather than from zero
  int rows;
  int panels;             // 1 or 2
  int group_units;        // units of a group
  bool zeros;             // groups have zero points
  const Nibbles* nibbles;
  // Sums of the rows' values: W_I4 float32 [groups][rows]; times minus the weights' offset: W_I4_DYN int32
  // [groups][rows], W_I8_DYN int32 [rows].
  const void* x_sums;
  // In chunks, if several tiles read the same weights in a format that is widened: where the chunks of these weights are kept, and
  // whether this tile has to put them there. Or null.
  uint8_t* widened;
  bool widen;
};

// Sums of one tile on their way out; the 32 columns of a panel go to two places of 16.
struct Finish {
  const float* sums;  // [rows][sums_stride], as in Tile
  int64_t sums_stride;
  bool integers;           // the sums are int32
  const float* scale;      // [32] of this panel, or null: y = (sum * scale) * row_scale + bias
  const float* row_scale;  // [rows], or null
  const float* bias;       // [32] of this panel, or null
  void* out;               // row 0, column 0
  int64_t ldo;
  DType dtype;
  int rows;
  int64_t column[2];  // where the halves go; EP_SILU_MUL: column[0] only
  int count[2];       // how many of the 16 are real
  Epilogue epilogue;
};

struct LinearKernels {
  void (*tile[kFormats])(const Tile&);
  void (*finish)(const Finish&);
  // Quantises a row of F32 or BF16 to int8: q = rint(x * 127 / max |x|), half to even; returns max |x| / 127, NaN if not finite.
  float (*quantize)(const void* x, DType dtype, int64_t count, int8_t* q);
  int32_t (*sum)(const int8_t* q, int64_t count);
  int tile_rows[kFormats];  // rows of a full tile
  int pair_rows[kFormats];  // tiles of at most so many rows take two panels at a time
  bool in_chunks[kFormats];
  void (*release)();  // called when a thread is done for now; or null
  int wide_from[kFormats];  // tiles of so many rows and more have wide rows; 0: none. Rows are bfloat16
  // Tiles of so many rows and more read a panel several times, a part of the outputs each time, and prefetch the next panel meanwhile,
  // even a tile that is alone; 0: none.
  int again_from[kFormats];
};

constexpr int kChunkDwords = 16;  // of a row
constexpr int kChunkBytes = kChunkDwords * kUnitBytes;  // of a panel: 16 steps

inline bool reaches(int from, int64_t rows) { return from != 0 && rows >= from; }
inline bool has_wide_rows(const LinearKernels& kernels, Format f, int64_t rows) { return reaches(kernels.wide_from[f], rows); }

// Which number of a row's dword: the float32, or the lower or upper bfloat16.
enum class Half { kWhole, kEven, kOdd };

extern const LinearKernels linear_portable;
#if DW_HAVE_AVX2
extern const LinearKernels linear_avx2;
#endif
#if DW_HAVE_AVXVNNI
extern const LinearKernels linear_avxvnni;
#endif
#if DW_HAVE_AVX512VNNI
extern const LinearKernels linear_avx512vnni;
#endif
#if DW_HAVE_AVX512
extern const LinearKernels linear_avx512;
#endif
#if DW_HAVE_AMX
extern const LinearKernels linear_amx;
#endif
#if DW_HAVE_NEON
extern const LinearKernels linear_neon;
#endif
#if DW_HAVE_DOTPROD
extern const LinearKernels linear_dotprod;
#endif
#if DW_HAVE_I8MM
extern const LinearKernels linear_i8mm;
#endif
#if DW_HAVE_EMULATED
extern const LinearKernels linear_emulated;
#endif

const LinearKernels& linear_kernels();  // of isa_current()

}  // namespace dw
