// Linear kernels on tiles (tiles.h): up to 32 rows times a panel of 32 outputs in one go. A chunk is 16 dwords of k.
//
// Weights are read as they are packed for everybody: 16 units of a panel are the rows of two tiles, with a stride of 128 bytes. Rows
// are packed in chunks (linear_kernels.h). Formats that are not multiplied as they are stored are widened chunk by chunk into a buffer in
// the first-level cache, or, if several tiles read them, all before the first one.
//
// Same bits: a sum takes chunks in order, and what an instruction does to a row does not depend on how many rows there are. Chunks
// begin at the beginning of the panel, or of the group: blocks of k have to be whole chunks.
//
// The file that includes this gives, as `Expand`, how units are widened:
//   static void bytes(const uint8_t*, uint8_t*, const Nibbles&);     W_I4_DYN: 2 steps of bytes, the integers with their sign; of plain
//                                                                    codes 16 times as large
//   template <Format F> static void pairs(const uint8_t*, uint8_t*, const Nibbles*);
//                                                                    W_I8: 2 steps, W_I4: 4 steps of pairs of bfloat16
#pragma once

#include "linear_tile_groups.h"

namespace dw {
namespace {

template <Format F, bool kTwo, class Chunks>
void multiply(const Tile& t, Chunks& weights) {
  constexpr Product kProduct = product_of(F);
  constexpr int64_t kUnits = kChunkDwords / steps_per_unit(F);
  const int upper = upper_rows(t.rows);
  shape_tiles(t.rows);
  if (!t.load && kProduct == Product::kBytes) {
    // Weights are stored plus 128: 128 times the sum of the row comes off, which is what x_sums hold.
    const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
    for (int r = 0; r < t.rows; ++r)
      for (int v = 0; v < 2; ++v) store(t.sums + r * kPanel + v * 16, (vf)splat_i(x_sums[r]));
  }
  if (t.load || kProduct == Product::kBytes)
    load_sums<kTwo>(upper, t.sums);
  else
    zero_sums<kTwo>();
  const auto* x = reinterpret_cast<const uint8_t*>(t.x);
  const int64_t x_step = t.rows * kTileBytes, chunks = (t.units + kUnits - 1) / kUnits;
  Fetch fetch(t);
  for (int64_t c = 0; c < chunks; ++c, x += x_step) {
    fetch.with(kUnits * kUnitBytes);
    add_chunk<kProduct, kTwo>(upper, x, weights.next());
  }
  store_sums<kTwo>(upper, t.sums);
}

// W_BF16, W_I8, W_I8_DYN.
template <Format F, class Chunks>
DW_INLINE void run_plain(const Tile& t, Chunks&& weights) {
  if (t.rows > kTileRows)
    multiply<F, true>(t, weights);
  else
    multiply<F, false>(t, weights);
}
template <Format F, class Expand>
void tiles_plain(const Tile& t) {
  if constexpr (steps_per_unit(F) == 1)
    run_plain<F>(t, Stored<F, Expand>(t));
  else if (t.widened != nullptr)
    run_plain<F>(t, Shared<F, Expand>(t, t.units, 0));
  else
    run_plain<F>(t, Widened<F, Expand>(t, t.units, 0));
}

// W_I4, W_I4_DYN.
template <Format F, class Chunks>
DW_INLINE void run_grouped(const Tile& t, Chunks&& weights) {
  if (t.rows > kTileRows)
    multiply_groups<F, true>(t, weights);
  else
    multiply_groups<F, false>(t, weights);
}
template <Format F, class Expand>
void tiles_grouped(const Tile& t) {
  const int64_t header = t.zeros ? 2 * kHeader : kHeader;
  if (t.widened != nullptr)
    run_grouped<F>(t, Shared<F, Expand>(t, t.group_units, header));
  else
    run_grouped<F>(t, Widened<F, Expand>(t, t.group_units, header));
}

}  // namespace
}  // namespace dw
