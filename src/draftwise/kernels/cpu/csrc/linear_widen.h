// Linear kernels whose products are fused float32 ones, for vectors of 8 or 16 lanes: everything is widened to float32 in registers.
// Included by the instruction sets that have no products of bfloat16, or want them for some formats only, with a struct `V` of
// their vectors (linear_vectors.h, linear_lanes.h):
//   F, I          vectors of floats and of bits         kBytes  bytes of a vector
//   kPairs        whether pairs of bfloat16 are multiplied as they are: `add_pairs`
//   kWide         whether rows are packed wide: their numbers are float32 already
//   add_rows      acc[r][v] += w[v] * a number of row r, one of each dword at x (`Half`); kWide: kWhole alone
// and the few operations on them that are used below.
//
// An output is one lane that adds up over k in sequence, of a pair of k first the even one.
#pragma once

#include "compiler.h"
#include "linear_kernels.h"
#include "linear_twice.h"

namespace dw {
namespace {

// Asks memory for weights, in a loop over the units of a tile, for the `part`-th of kParts readers of a panel. One line of each unit is the
// reader's own, some way ahead. The other one is what Tile::share says. Who reads alone asks for the rest of the unit: the first reader of a
// panel fetches it for the others, into the second-level cache. Who shares asks for its share of the next panel, a little with each unit.
// Example: 256 units, the second of two tiles, the first of two readers: from the middle of the next panel on, half a line with each unit.
//
// Who alone reads a panel that nobody shares goes on from its end to what comes next: of many rows, k is cut into short pieces, and
// each would begin with a wait. Into the second-level cache alone a large model would come 4 % faster; but a small one, which is in a
// cache already, would run at 0.92 of its speed.
template <int kParts>
struct Fetch {
  static constexpr int kAhead = kParts == 1 ? 8192 : 2048;
  const uint8_t *other, *edge;  // from `edge` on, what is fetched is `far` further
  int64_t step, far = 0;

  DW_ALWAYS Fetch(const Tile& t, const uint8_t* w, int part)
      : other(w + kAhead + 64), edge(w + t.bytes - kAhead), step(t.bytes / t.units) {
    if (t.shares == 0) {
      if (kParts == 1 && t.next_w != nullptr) far = t.next_w - (t.w + t.bytes);
      return;
    }
    const int64_t pieces = int64_t(t.shares) * kParts, piece = int64_t(t.share) * kParts + part;
    other = t.next_w + t.bytes * piece / pieces;
    step = (t.bytes + t.units * pieces - 1) / (t.units * pieces);
  }
  DW_ALWAYS void next(const uint8_t* w) {
    const int64_t jump = w < edge ? 0 : far;
    __builtin_prefetch(w + kAhead + jump);
    // Each line once: what is asked of the second-level cache again costs time there. No branch: with one, GCC copies all sums.
    const uint8_t* at = (reinterpret_cast<uintptr_t>(other) & 63) < uintptr_t(step) ? other + jump : w;
    __builtin_prefetch(at, 0, kParts == 1 ? 3 : 2);
    other += step;
  }
};

// Where byte k (0..3) of each of four outputs stands in 16 bytes of W_I8, twice: in the low byte of a dword and in its high one.
alignas(16) constexpr uint8_t kByteOf[4][16] = {
    {0, 0x80, 0x80, 0, 2, 0x80, 0x80, 2, 4, 0x80, 0x80, 4, 6, 0x80, 0x80, 6},
    {1, 0x80, 0x80, 1, 3, 0x80, 0x80, 3, 5, 0x80, 0x80, 5, 7, 0x80, 0x80, 7},
    {8, 0x80, 0x80, 8, 10, 0x80, 0x80, 10, 12, 0x80, 0x80, 12, 14, 0x80, 0x80, 14},
    {9, 0x80, 0x80, 9, 11, 0x80, 0x80, 11, 13, 0x80, 0x80, 13, 15, 0x80, 0x80, 15}};

template <class V>
inline typename V::F even_of(typename V::I pairs) {
  return V::as_floats(V::shift_left_16(pairs));
}
template <class V>
inline typename V::F odd_of(typename V::I pairs) {
  return V::as_floats(V::bits_and(pairs, V::set(int(0xffff0000u))));
}

// Dwords of each row in a step.
template <class V>
constexpr int kStep = V::kWide ? 2 : 1;

// Weights times the even or the odd number of each row's pair at x.
template <class V, int R, Half kHalf>
inline void add_half(typename V::F (&acc)[R][2], const typename V::F (&w)[2], const uint32_t* x) {
  if constexpr (V::kWide)
    V::template add_rows<R, Half::kWhole>(acc, w, kHalf == Half::kEven ? x : x + R);
  else
    V::template add_rows<R, kHalf>(acc, w, x);
}

// Pairs of bfloat16 weights times a pair of each row. `pairs(v)` gives the v-th vector; it is asked again for the odd numbers, so that
// nobody has to keep pairs in registers that sums need.
template <class V, int R, class Pairs>
DW_ALWAYS void add_pairs(typename V::F (&acc)[R][2], const Pairs& pairs, const uint32_t* x) {
  if constexpr (V::kPairs) {
    const typename V::I both[2] = {pairs(0), pairs(1)};
    V::template add_pairs<R>(acc, both, x);
  } else {
    const typename V::F even[2] = {even_of<V>(pairs(0)), even_of<V>(pairs(1))};
    add_half<V, R, Half::kEven>(acc, even, x);
    const typename V::F odd[2] = {odd_of<V>(pairs(0)), odd_of<V>(pairs(1))};
    add_half<V, R, Half::kOdd>(acc, odd, x);
  }
}

// R rows times two vectors of outputs, the `part`-th two of a panel.
template <class V, int R, Format F>
void span(const Tile& t, int panel, int part) {
  const uint8_t* w = t.w + panel * t.panel_stride + part * 2 * V::kBytes;
  const uint32_t* x = t.x;
  float* sums = t.sums + panel * kPanel + part * (V::kBytes / 2);
  const int64_t stride = int64_t(kPanel) * t.panels;
  typename V::F acc[R][2];
  DW_UNROLLED
  for (int r = 0; r < R; ++r)
    DW_UNROLLED
    for (int v = 0; v < 2; ++v)
      acc[r][v] = t.load ? V::load_floats(sums + r * stride + v * (V::kBytes / 4)) : V::zero();
  Fetch<kUnitBytes / (2 * V::kBytes)> fetch(t, w, part);
  for (int64_t u = 0; u < t.units; ++u) {
    fetch.next(w);
    if (F == W_BF16) {
      add_pairs<V, R>(acc, [w](int v) __attribute__((always_inline)) { return V::load(w + v * V::kBytes); }, x);
      x += kStep<V> * R;
    } else if (F == W_F32) {
      const typename V::F wide[2] = {V::as_floats(V::load(w)), V::as_floats(V::load(w + V::kBytes))};
      V::template add_rows<R, Half::kWhole>(acc, wide, x);
      x += R;
    } else {
      const typename V::I bits[2] = {V::load(w), V::load(w + V::kBytes)};
      DW_UNROLLED
      for (int k = 0; k < 4; ++k) {
        typename V::F wide[2];
        DW_UNROLLED
        for (int v = 0; v < 2; ++v) {
          typename V::I both = V::shuffle(bits[v], V::repeat(kByteOf[k]));  // sign and magnitude, at both ends of a dword
          typename V::F magnitude = V::to_floats(V::bits_and(both, V::set(0x7f)));
          wide[v] = V::floats_or(magnitude, V::as_floats(V::bits_and(both, V::set(int(0x80000000u)))));
        }
        if (k % 2 == 0)
          add_half<V, R, Half::kEven>(acc, wide, x + k / 2 * kStep<V> * R);
        else
          add_half<V, R, Half::kOdd>(acc, wide, x + k / 2 * kStep<V> * R);
      }
      x += 2 * kStep<V> * R;
    }
    w += kUnitBytes;
  }
  DW_UNROLLED
  for (int r = 0; r < R; ++r)
    DW_UNROLLED
    for (int v = 0; v < 2; ++v) V::store_floats(sums + r * stride + v * (V::kBytes / 4), acc[r][v]);
}

// Ends a group of the `part`-th two vectors of a panel: total += scale * group (+ shift * sum of the row's values), shift = -scale *
// zero point. `header` is the panel's.
template <class V, int R>
inline void end_span_group(const Tile& t, float* sums, const uint8_t* header, int part,
                           const typename V::F (&group)[R][2], const float (&x_sums)[R], bool start) {
  constexpr int kLanes = V::kBytes / 4;
  const int64_t stride = int64_t(kPanel) * t.panels;
  DW_UNROLLED
  for (int v = 0; v < 2; ++v) {
    const int first = (2 * part + v) * kLanes;
    typename V::F scale = V::load_halves(header + 2 * first), shift = V::zero();
    if (t.zeros) shift = V::times(V::minus(V::zero(), scale), V::load_bytes(header + kHeader + first));
    DW_UNROLLED
    for (int r = 0; r < R; ++r) {
      float* to = sums + r * stride + v * kLanes;
      typename V::F total = V::fma(group[r][v], scale, start ? V::zero() : V::load_floats(to));
      if (t.zeros) total = V::fma(shift, V::as_floats(V::set_float(x_sums[r])), total);
      V::store_floats(to, total);
    }
  }
}

template <class V, int R>
void span_i4(const Tile& t, int panel, int part) {
  constexpr int kLanes = V::kBytes / 4;
  const uint8_t* at = t.w + panel * t.panel_stride;
  float* sums = t.sums + panel * kPanel + part * 2 * kLanes;
  const uint32_t* x = t.x;
  const auto* x_sums = static_cast<const float*>(t.x_sums);
  const int header = t.zeros ? 2 * kHeader : kHeader;
  const int64_t groups = t.units / t.group_units;
  const typename V::I low = V::repeat(t.nibbles->low), high = V::repeat(t.nibbles->high), mask = V::set(0x0f0f0f0f);
  Fetch<kUnitBytes / (2 * V::kBytes)> fetch(t, at + header + part * 2 * V::kBytes, part);
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* w = at + header + part * 2 * V::kBytes;
    typename V::F acc[R][2];
    DW_UNROLLED
    for (int r = 0; r < R; ++r)
      DW_UNROLLED
      for (int v = 0; v < 2; ++v) acc[r][v] = V::zero();
    for (int u = 0; u < t.group_units; ++u) {
      fetch.next(w);
      DW_UNROLLED
      for (int half = 0; half < 2; ++half) {
        typename V::I first[2], second[2];
        DW_UNROLLED
        for (int v = 0; v < 2; ++v) {
          typename V::I bits = V::load(w + v * V::kBytes);
          typename V::I q = V::bits_and(half == 0 ? bits : V::shift_right_4(bits), mask);
          typename V::I lows = V::shuffle(low, q), highs = V::shuffle(high, q);
          first[v] = V::low_pairs(lows, highs);
          second[v] = V::high_pairs(lows, highs);
        }
        add_pairs<V, R>(acc, [&](int v) __attribute__((always_inline)) { return first[v]; }, x);
        add_pairs<V, R>(acc, [&](int v) __attribute__((always_inline)) { return second[v]; }, x + kStep<V> * R);
        x += 2 * kStep<V> * R;
      }
      w += kUnitBytes;
    }
    float x_sum[R];
    DW_UNROLLED
    for (int r = 0; r < R; ++r) x_sum[r] = x_sums[r];
    end_span_group<V, R>(t, sums, at, part, acc, x_sum, g == 0 && !t.load);
    x_sums += R;
    at += header + t.group_units * kUnitBytes;
  }
}

// Calls span(1..kRows rows) for all parts of all panels of a tile.
template <class V, void (*const* kTable)(const Tile&, int, int)>
void all_spans(const Tile& t) {
  for (int p = 0; p < t.panels; ++p)
    for (int part = 0; part < kUnitBytes / (2 * V::kBytes); ++part) kTable[t.rows](t, p, part);
}

}  // namespace
}  // namespace dw
