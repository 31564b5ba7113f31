// Linear kernels on tiles (tiles.h): up to 32 rows times a panel of 32 outputs in one go. A chunk is 16 dwords of k.
//
// Weights are read as they are packed for everybody: 16 units of a panel are the rows of two tiles, with a stride of 128 bytes. Rows
// lie one after the other, as they are (`Tile::x_stride`). Formats that are not multiplied as they are stored are widened chunk by chunk
// into a buffer in the first-level cache. What is missing to a whole chunk, at the end of a panel or group, is zero in the weights.
//
// Same bits: a sum takes chunks in order, and what an instruction does to a row does not depend on how many rows there are. Chunks
// begin at the beginning of the panel, or of the group: blocks of k have to be whole chunks (`chunk_units`).
//
// The file that includes this gives, as `Expand`, how units are widened:
//   static void bytes(const uint8_t* unit, uint8_t* steps);          W_I4_DYN: 2 steps of bytes
//   template <Format F> static void pairs(const uint8_t*, uint8_t*, const Nibbles*);
//                                                                    W_I8: 2 steps, W_I4: 4 steps of pairs of bfloat16
#pragma once

#include "linear_kernels.h"
#include "tiles.h"
#include "vec.h"

namespace dw {
namespace {

constexpr int kChunkSteps = 16;
constexpr int64_t kAheadBytes = 16 << 10;  // of a panel that are prefetched

// A chunk of weights in L1.
struct Chunk {
  alignas(64) uint8_t steps[kChunkSteps][kUnitBytes];
};

inline void prefetch_after(const Tile& t, int64_t at, int64_t bytes) {
  for (int64_t i = at + kAheadBytes; i < at + kAheadBytes + bytes; i += 64) {
    const uint8_t* line = i < t.bytes ? t.w + i : t.next_w != nullptr ? t.next_w + (i - t.bytes) : nullptr;
    if (line != nullptr) __builtin_prefetch(line, 0, 2);
  }
}

template <bool kBytes, int C, int A, int B>
inline void dot() {
  if (kBytes)
    tile_dot_bytes<C, A, B>();
  else
    tile_dot_bf16<C, A, B>();
}

// One chunk: rows at `x` times weights at `w`.
template <bool kBytes>
inline void add_chunk(const Tile& t, int upper, const uint8_t* x, const uint8_t* w) {
  tile_load<B0>(w, kUnitBytes);
  tile_load<B1>(w + kTileBytes, kUnitBytes);
  tile_load<A0>(x, t.x_stride);
  dot<kBytes, C0, A0, B0>();
  dot<kBytes, C1, A0, B1>();
  if (t.rows > upper) {
    tile_load<A1>(x + upper * t.x_stride, t.x_stride);
    dot<kBytes, C2, A1, B0>();
    dot<kBytes, C3, A1, B1>();
  }
}

// Sums in memory are [rows][32].
inline void load_sums(const Tile& t, int upper, const float* sums) {
  constexpr int64_t stride = kPanel * 4;
  tile_load<C0>(sums, stride);
  tile_load<C1>(sums + 16, stride);
  if (t.rows <= upper) return;
  tile_load<C2>(sums + upper * kPanel, stride);
  tile_load<C3>(sums + upper * kPanel + 16, stride);
}
inline void zero_sums(const Tile& t, int upper) {
  tile_zero<C0>();
  tile_zero<C1>();
  if (t.rows <= upper) return;
  tile_zero<C2>();
  tile_zero<C3>();
}
inline void store_sums(const Tile& t, int upper, float* sums) {
  constexpr int64_t stride = kPanel * 4;
  tile_store<C0>(sums, stride);
  tile_store<C1>(sums + 16, stride);
  if (t.rows <= upper) return;
  tile_store<C2>(sums + upper * kPanel, stride);
  tile_store<C3>(sums + upper * kPanel + 16, stride);
}

// The chunk of `count` units at `units`: as it is, or put together in `chunk`.
template <Format F, class Expand>
inline const uint8_t* chunk_of(const Tile& t, const uint8_t* units, int64_t count, Chunk& chunk) {
  constexpr int steps = F == W_I8 || F == W_I4_DYN ? 2 : F == W_I4 ? 4 : 1;
  if (steps == 1 && count == kChunkSteps) return units;
  for (int64_t u = 0; u < count; ++u) {
    uint8_t* to = chunk.steps[u * steps];
    const uint8_t* unit = units + u * kUnitBytes;
    if constexpr (F == W_I4_DYN)
      Expand::bytes(unit, to);
    else if constexpr (steps == 1)
      memcpy(to, unit, kUnitBytes);
    else
      Expand::template pairs<F>(unit, to, t.nibbles);
  }
  if (count * steps < kChunkSteps)
    memset(chunk.steps[count * steps], 0, size_t(kChunkSteps - count * steps) * kUnitBytes);
  return chunk.steps[0];
}

// Weights of a panel that are widened chunk by chunk, some chunks before they are multiplied: a tile cannot be loaded from
// what a store has not yet written to the cache. `group_units`, `header`: of each group; without groups, all units and 0.
template <Format F, class Expand>
class Widened {
 public:
  Widened(const Tile& t, int64_t group_units, int64_t header)
      : t_(t), group_units_(group_units), header_(header), at_(t.w + header), left_(group_units), end_(t.w + t.bytes) {
    for (int c = 0; c < kAhead; ++c) widen();
  }
  // The next chunk.
  const uint8_t* take() {
    widen();
    return chunks_[taken_++ % kChunks].steps[0];
  }

 private:
  static constexpr int kSteps = F == W_I8 || F == W_I4_DYN ? 2 : 4;
  static constexpr int64_t kUnits = kChunkSteps / kSteps;
  static constexpr int kAhead = 2, kChunks = 4;  // kAhead < kChunks
  void widen() {
    if (at_ >= end_) return;
    const int64_t count = left_ < kUnits ? left_ : kUnits;
    chunk_of<F, Expand>(t_, at_, count, chunks_[made_++ % kChunks]);
    at_ += count * kUnitBytes;
    left_ -= count;
    if (left_ == 0) {
      at_ += header_;
      left_ = group_units_;
    }
  }
  const Tile& t_;
  const int64_t group_units_, header_;
  const uint8_t* at_;
  int64_t left_;
  const uint8_t* const end_;
  unsigned made_ = 0, taken_ = 0;
  Chunk chunks_[kChunks];
};

// W_BF16, W_I8, W_I8_DYN.
template <Format F, class Expand>
void tiles_plain(const Tile& t) {
  constexpr bool kBytes = F == W_I8_DYN;
  constexpr int kUnits = F == W_I8 ? kChunkSteps / 2 : kChunkSteps;
  const int upper = upper_rows(t.rows);
  shape_tiles(t.rows);
  if (!t.load && kBytes) {
    // Weights are stored plus 128: 128 times the sum of the row comes off, which is what x_sums hold.
    const auto* x_sums = static_cast<const int32_t*>(t.x_sums);
    for (int r = 0; r < t.rows; ++r)
      for (int j = 0; j < kPanel; ++j) memcpy(t.sums + r * kPanel + j, &x_sums[r], 4);
  }
  if (t.load || kBytes)
    load_sums(t, upper, t.sums);
  else
    zero_sums(t, upper);
  const auto* x = reinterpret_cast<const uint8_t*>(t.x);
  const auto each = [&](auto&& weights) {
    for (int64_t u = 0; u < t.units; u += kUnits) {
      const int64_t count = t.units - u < kUnits ? t.units - u : kUnits;
      prefetch_after(t, u * kUnitBytes, count * kUnitBytes);
      add_chunk<kBytes>(t, upper, x, weights(u, count));
      x += kTileBytes;
    }
  };
  if constexpr (F == W_I8) {
    Widened<F, Expand> widened(t, t.units, 0);
    each([&](int64_t, int64_t) { return widened.take(); });
  } else {
    Chunk last;  // a short one is put together
    each([&](int64_t u, int64_t count) { return chunk_of<F, Expand>(t, t.w + u * kUnitBytes, count, last); });
  }
  store_sums(t, upper, t.sums);
}

// The sum of group g, whose header is at `at`, is scaled and added to the total, as on every other level.
template <bool kBytes>
inline void add_group(const Tile& t, int64_t g, const uint8_t* at, const float* group) {
  vf scale[2], shift[2] = {splat(0.0f), splat(0.0f)};
  for (int v = 0; v < 2; ++v) {
    scale[v] = load(reinterpret_cast<const f16*>(at) + v * 16);
    if (t.zeros) shift[v] = (splat(0.0f) - scale[v]) * load(reinterpret_cast<const int8_t*>(at) + kHeader + v * 16);
  }
  for (int r = 0; r < t.rows; ++r) {
    const int32_t offset = kBytes ? static_cast<const int32_t*>(t.x_sums)[g * t.rows + r] : 0;
    const float x_sum = kBytes ? float(offset) * -0.125f : static_cast<const float*>(t.x_sums)[g * t.rows + r];
    for (int v = 0; v < 2; ++v) {
      float* to = t.sums + r * kPanel + v * 16;
      vf value = load(group + r * kPanel + v * 16);
      if (kBytes) value = __builtin_convertvector((vi)value + splat_i(offset), vf);
      vf total = fma(value, scale[v], g == 0 && !t.load ? splat(0.0f) : load(to));
      if (t.zeros) total = fma(shift[v], splat(x_sum), total);
      store(to, total);
    }
  }
}

// W_I4, W_I4_DYN.
template <Format F, class Expand>
void tiles_grouped(const Tile& t) {
  constexpr bool kBytes = F == W_I4_DYN;
  constexpr int kSteps = kBytes ? 2 : 4;
  constexpr int kUnits = kChunkSteps / kSteps;
  const int upper = upper_rows(t.rows);
  shape_tiles(t.rows);
  const int64_t groups = t.units / t.group_units, header = t.zeros ? 2 * kHeader : kHeader;
  const int64_t bytes = header + t.group_units * kUnitBytes;
  Widened<F, Expand> weights(t, t.group_units, header);
  alignas(64) float sums[2 * kTileRows * kPanel];
  for (int64_t g = 0; g < groups; ++g) {
    prefetch_after(t, g * bytes, bytes);
    zero_sums(t, upper);
    const auto* x = reinterpret_cast<const uint8_t*>(t.x) + g * t.group_units * kSteps * 4;
    for (int64_t u = 0; u < t.group_units; u += kUnits, x += kTileBytes) add_chunk<kBytes>(t, upper, x, weights.take());
    store_sums(t, upper, sums);
    add_group<kBytes>(t, g, t.w + g * bytes, sums);
  }
}

}  // namespace
}  // namespace dw
