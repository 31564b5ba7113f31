// Groups of int4 on tiles: the sums of a group leave the unit, are scaled, and are added to the totals. Part of linear_tiles.h.
#pragma once

#include <type_traits>

#include "linear_tile_chunks.h"
#include "linear_tile_sums.h"

namespace dw {
namespace {

// Groups whose sums are waiting to be scaled and added to the totals, as on every other level.
struct Waiting {
  int count = 0;                    // 0 to kTogether
  bool first = false;               // the totals begin with them
  const uint8_t* header = nullptr;  // of the first one
  int64_t bytes = 0;                // from a header to the next
  const float* sums = nullptr;      // [groups][32][32]
  const void* x_sums = nullptr;     // [groups][rows]
  float unit = 1.0f;                // integers: what 1 of the sums stands for
};
constexpr int kTogether = 2;
constexpr int kGroupSums = 2 * kTileRows * kPanel;

// Adds rows [begin, end) of kCount groups to the totals.
template <bool kIntegers, bool kZeros, int kCount>
DW_INLINE void add_rows(const Waiting& w, float* totals, int rows, int begin, int end) {
  vf scale[kCount][2], shift[kCount][2];
  for (int g = 0; g < kCount; ++g)
    for (int v = 0; v < 2; ++v) {
      const uint8_t* at = w.header + g * w.bytes;
      scale[g][v] = load(reinterpret_cast<const f16*>(at) + v * 16);
      if (kZeros)
        shift[g][v] = (splat(0.0f) - scale[g][v]) * load(reinterpret_cast<const int8_t*>(at) + kHeader + v * 16);
      if (kIntegers) scale[g][v] = scale[g][v] * w.unit;  // a power of two: exact
    }
  const float* sums = w.sums;
  const void* x_sums = w.x_sums;
  const auto each = [&](auto first) {
    for (int r = begin; r < end; ++r) {
      float x_sum[kCount] = {};
      for (int g = 0; kZeros && g < kCount; ++g)
        x_sum[g] = kIntegers ? float(static_cast<const int32_t*>(x_sums)[g * rows + r]) * -0.125f
                             : static_cast<const float*>(x_sums)[g * rows + r];
      for (int v = 0; v < 2; ++v) {
        float* to = totals + r * kPanel + v * 16;
        vf total = first ? splat(0.0f) : load(to);
        for (int g = 0; g < kCount; ++g) {
          vf value = load(sums + g * kGroupSums + r * kPanel + v * 16);
          if (kIntegers) value = __builtin_convertvector((vi)value, vf);
          total = fma(value, scale[g][v], total);
          if (kZeros) total = fma(shift[g][v], splat(x_sum[g]), total);
        }
        store(to, total);
      }
    }
  };
  if (w.first)
    each(std::true_type{});
  else
    each(std::false_type{});
}
template <bool kIntegers>
DW_INLINE void add_waiting(const Waiting& w, bool zeros, float* totals, int rows, int begin, int end) {
  if (w.count == 2)
    zeros ? add_rows<kIntegers, true, 2>(w, totals, rows, begin, end)
          : add_rows<kIntegers, false, 2>(w, totals, rows, begin, end);
  else if (w.count == 1)
    zeros ? add_rows<kIntegers, true, 1>(w, totals, rows, begin, end)
          : add_rows<kIntegers, false, 1>(w, totals, rows, begin, end);
}

// Storing a tile takes as long as multiplying it, and waits for that. So the two halves of a panel take turns: while one is multiplied,
// the other one is stored, and vectors add the sums of the two groups before to the totals, a third of the rows at a time:
//
//   group 2       left times   | store right of 1 | right times          | store left of 2  | add rows of 0 and 1
//   group 3       left times   | store right of 2 | add, right times     | store left of 3  | add the rest of 0 and 1
template <Format F, bool kTwo, class Chunks>
void multiply_groups(const Tile& t, Chunks& weights) {
  constexpr Product kProduct = product_of(F);
  constexpr bool kIntegers = kProduct == Product::kSigned;
  constexpr int64_t kUnits = kChunkDwords / steps_per_unit(F);
  static_assert(kTogether == 2, "groups take turns");
  const int rows = t.rows, upper = upper_rows(rows), thirds[4] = {0, rows / 3, rows * 2 / 3, rows};
  shape_tiles(rows);
  const int64_t header = t.zeros ? 2 * kHeader : kHeader, bytes = header + t.group_units * kUnitBytes;
  const int64_t groups = t.units / t.group_units, x_step = rows * kTileBytes;
  const int64_t chunks = (t.group_units + kUnits - 1) / kUnits;
  const auto* x = reinterpret_cast<const uint8_t*>(t.x);
  const bool zeros = t.zeros;
  float* const totals = t.sums;
  Fetch fetch(t);
  alignas(64) float sums[2][kTogether * kGroupSums];
  const auto sums_of = [&](int64_t g) { return sums[g / 2 % 2] + g % 2 * kGroupSums; };
  const auto from = [&](int64_t g, int count) {
    return Waiting{count, g == 0 && !t.load, t.w + g * bytes, bytes, sums_of(g), static_cast<const uint8_t*>(t.x_sums) + g * rows * 4,
                   t.nibbles->plain ? 0.0625f : 1.0f};
  };
  const auto add = [&](const Waiting& w, int part, int last) {
    add_waiting<kIntegers>(w, zeros, totals, rows, thirds[part], thirds[last]);
  };
  Waiting pair;
  for (int64_t g = 0; g < groups; ++g) {
    const bool second = g % 2 != 0;
    fetch.with(bytes);
    for (int64_t c = 0; c < chunks; ++c, x += x_step) {
      const uint8_t* w = weights.next();
      tile_load<A0>(x, kTileBytes);
      tile_load<B0>(w, kUnitBytes);
      if (kTwo) tile_load<A1>(x + upper * kTileBytes, kTileBytes);
      if (c == 0) zero_half<kTwo, C0, C2>();
      dot<kProduct, C0, A0, B0>();
      if (kTwo) dot<kProduct, C2, A1, B0>();
      tile_load<B1>(w + kTileBytes, kUnitBytes);
      if (c == 0) {
        if (g > 0) store_half<kTwo, C1, C3>(upper, sums_of(g - 1) + 16);
        if (second) add(pair, 1, 2);
        zero_half<kTwo, C1, C3>();
      }
      dot<kProduct, C1, A0, B1>();
      if (kTwo) dot<kProduct, C3, A1, B1>();
    }
    store_half<kTwo, C0, C2>(upper, sums_of(g));
    if (second) {
      add(pair, 2, 3);
    } else if (g > 0) {
      pair = from(g - 2, 2);
      add(pair, 0, 1);
    }
  }
  store_half<kTwo, C1, C3>(upper, sums_of(groups - 1) + 16);
  if (groups % 2 == 0) {
    add(from(groups - 2, 2), 0, 3);
  } else {
    add(pair, 1, 3);
    add(from(groups - 1, 1), 0, 3);
  }
}

}  // namespace
}  // namespace dw
