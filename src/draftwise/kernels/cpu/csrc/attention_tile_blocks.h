// What attention on tiles (attention_tiles.h) is made of: keys, values and weights as tiles want them, and the products of one block.
#pragma once

#include "attention_work.h"
#include "tiles.h"

namespace dw {
namespace {

constexpr int CHUNK = 32;                // dimensions or positions
constexpr int CHUNKS = PARTITION / CHUNK;
constexpr int BLOCK = 2 * kTileRows;     // vectors, keys or dimensions in two tiles
constexpr int PAIRS_OF_TILE = kTileRows * 16;  // dwords
// Floats from vector to vector in the scores of a block. A cache line more than they take: rows that are whole pages apart get into each
// other's way in the cache.
constexpr int SCORE_STRIDE = PARTITION + 16;

// 32 numbers, x[0] and x[1], as two bfloat16 each, whose sum has their first 16 bits: the upper half of a number, and what it leaves,
// rounded. Dword n of `high` and `low` has number n in its lower half and number 16 + n in its upper one: a pair of positions.
DW_INLINE void split(const vf* x, uint32_t* high, uint32_t* low) {
  const uint32_t upper = 0xffff0000u;
  vu first[2], rest[2];
  for (int i = 0; i < 2; i++) {
    first[i] = (vu)x[i] & upper;
    rest[i] = (vu)(x[i] - (vf)first[i]) + 0x8000u;
  }
  const vu highs = first[0] >> 16 | first[1], lows = rest[0] >> 16 | (rest[1] & upper);
  memcpy(high, &highs, sizeof highs);
  memcpy(low, &lows, sizeof lows);
}

// Pairs of positions: dword n is dimension n of `a` in the lower half, of `b` in the upper one; two vectors of 16 dimensions.
DW_INLINE void interleave(const bf16* a, const bf16* b, uint32_t* first, uint32_t* second) {
#if defined(__AVX512BW__)
  const vu lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vu lower = lanes | (lanes + 32) << 16;  // of the 64 halves of both, those that make the first vector
  const __m512i x = (__m512i)load_pairs(a), y = (__m512i)load_pairs(b);
  const __m512i one = _mm512_permutex2var_epi16(x, (__m512i)lower, y);
  const __m512i two = _mm512_permutex2var_epi16(x, (__m512i)(lower + 0x00100010u), y);
  memcpy(first, &one, sizeof one);
  memcpy(second, &two, sizeof two);
#else
  for (int half = 0; half < 2; half++) {
    vu pairs = (vu)load(a + half * LANES) >> 16 | (vu)load(b + half * LANES);
    memcpy(half == 0 ? first : second, &pairs, sizeof pairs);
  }
#endif
}

// Dimensions d .. d + 31 of a row, zeros behind its end.
DW_INLINE vu chunk_of(const bf16* row, int d, int dim) {
  if (d + CHUNK <= dim) return load_pairs(row + d);
  bf16 part[CHUNK] = {};
  memcpy(part, row + d, sizeof(bf16) * (size_t)(dim - d));
  return load_pairs(part);
}

DW_INLINE void store_tile(uint32_t* to, const vf* rows) {
  for (int i = 0; i < LANES; i++) memcpy(to + i * LANES, &rows[i], sizeof rows[i]);
}

// ------------------------------------------------------------------------------------------------- keys and values

using TileWork = Work<bf16, bf16>;

// Where a tile of keys is read from: the cache itself if it can be, else a copy [16][columns].
void key_rows(const TileWork& w, const int32_t* at, int count, int columns, bf16* copy, const void** rows, int64_t* bytes) {
  bool as_they_stand = count == LANES && w.dim == columns;
  for (int i = 1; as_they_stand && i < count; i++) as_they_stand = at[i] == at[0] + i;
  *rows = as_they_stand ? w.keys + at[0] * w.stride : copy;
  *bytes = (as_they_stand ? w.stride : (int64_t)columns) * (int64_t)sizeof(bf16);
  if (as_they_stand) return;
  for (int i = 0; i < LANES; i++) {
    const bf16* key = w.keys + at[i < count ? i : count - 1] * w.stride;
    for (int d = 0; d < columns; d += CHUNK) {
      vu part = chunk_of(key, d, w.dim);
      memcpy(copy + i * columns + d, &part, sizeof part);
    }
  }
}

// to: dimensions d .. d + 31 of the slots of chunks [begin, end), in pairs of positions.
void pack_values(const TileWork& w, const int32_t* from, int d, int begin, int end, uint32_t* to) {
  const bool whole = d + CHUNK <= w.dim;
  const bf16 zeros[CHUNK] = {};
  bf16 parts[2][CHUNK] = {};
  for (int n = begin * LANES; n < end * LANES; n++) {
    const int first = n / LANES * CHUNK + n % LANES;  // n: pairs of the partition
    const bf16* pair[2];
    for (int i = 0; i < 2; i++) {
      const int32_t slot = from[first + i * LANES];
      pair[i] = slot < 0 ? zeros : w.values + slot * w.stride + d;
      if (whole || slot < 0) continue;
      memcpy(parts[i], pair[i], sizeof(bf16) * (size_t)(w.dim - d));
      pair[i] = parts[i];
    }
    uint32_t* at = to + n / LANES * 2 * PAIRS_OF_TILE + n % LANES * LANES;
    interleave(pair[0], pair[1], at, at + PAIRS_OF_TILE);
  }
}

// Whether the values at positions [begin, end) are numbers.
bool finite(const TileWork& w, int begin, int end) {
  vi bad = splat_i(0);
  for (int j = begin; j < end; j++)
    for (int d = 0; d < w.dim; d += LANES) {
      const int n = w.dim - d < LANES ? w.dim - d : LANES;
      const vu bits = (vu)load_n(w.values + w.at.slots[j] * w.stride + d, n);
      bad |= (vi)((bits & 0x7f800000u) == 0x7f800000u);
    }
  return !any(bad);
}

// ----------------------------------------------- the four tiles of sums: upper and lower ones, left and right ones; stride in floats

template <bool Lower, bool Right>
DW_INLINE void zero_block() {
  tile_zero<C0>();
  if (Right) tile_zero<C1>();
  if (Lower) tile_zero<C2>();
  if (Lower && Right) tile_zero<C3>();
}
template <bool Lower, bool Right>
DW_INLINE void load_block(const float* from, int64_t stride) {
  tile_load<C0>(from, stride * 4);
  if (Right) tile_load<C1>(from + LANES, stride * 4);
  if (Lower) tile_load<C2>(from + kTileRows * stride, stride * 4);
  if (Lower && Right) tile_load<C3>(from + kTileRows * stride + LANES, stride * 4);
}
template <bool Lower, bool Right>
DW_INLINE void store_block(float* to, int64_t stride) {
  tile_store<C0>(to, stride * 4);
  if (Right) tile_store<C1>(to + LANES, stride * 4);
  if (Lower) tile_store<C2>(to + kTileRows * stride, stride * 4);
  if (Lower && Right) tile_store<C3>(to + kTileRows * stride + LANES, stride * 4);
}

// Scores of 32 vectors (A, [chunks][2] tiles) with 32 keys (B: a tile of each chunk, `next` dwords apart; the other 16 keys follow it).
template <bool Lower, bool Right>
DW_INLINE void score_tiles(const uint32_t* vectors, const uint32_t* keys, int64_t next, int chunks, float* to) {
  zero_block<Lower, Right>();
  for (int c = 0; c < chunks; c++, vectors += 2 * PAIRS_OF_TILE, keys += next) {
    tile_load<B0>(keys, kTileBytes);
    tile_load<A0>(vectors, kTileBytes);
    tile_dot_bf16<C0, A0, B0>();
    if (Right) {
      tile_load<B1>(keys + PAIRS_OF_TILE, kTileBytes);
      tile_dot_bf16<C1, A0, B1>();
    }
    if (Lower) {
      tile_load<A1>(vectors + PAIRS_OF_TILE, kTileBytes);
      tile_dot_bf16<C2, A1, B0>();
      if (Right) tile_dot_bf16<C3, A1, B1>();
    }
  }
  store_block<Lower, Right>(to, SCORE_STRIDE);
}

// The sums of 32 vectors += a chunk of their weights (high, low) times the values of its positions (two tiles).
template <bool Lower, bool Right>
DW_INLINE void add_chunk(const bf16* weights, const uint32_t* values) {
  constexpr int64_t STRIDE = SCORE_STRIDE * 4;
  tile_load<B0>(values, kTileBytes);
  if (Right) tile_load<B1>(values + PAIRS_OF_TILE, kTileBytes);
  for (int half = 0; half < 2; half++, weights += CHUNK) {
    tile_load<A0>(weights, STRIDE);
    tile_dot_bf16<C0, A0, B0>();
    if (Right) tile_dot_bf16<C1, A0, B1>();
    if (Lower) {
      tile_load<A1>((const char*)weights + kTileRows * STRIDE, STRIDE);
      tile_dot_bf16<C2, A1, B0>();
      if (Right) tile_dot_bf16<C3, A1, B1>();
    }
  }
}

// Calls f.run<Lower, Right>().
template <class F>
DW_INLINE void by_shape(bool lower, bool right, const F& f) {
  if (lower)
    right ? f.template run<true, true>() : f.template run<true, false>();
  else
    right ? f.template run<false, true>() : f.template run<false, false>();
}

// What the unit has to do for two blocks, a step at a time: between its steps vectors compute what does not wait for it.
struct TileTask {
  // Sums of one block: chunks [chunk, last) of dimensions d .. d + 31, then those of the next 32.
  float* sums = nullptr;
  const float* weights = nullptr;
  int count = 0, d = 0, chunk = 0, first = 0, last = 0;
  // Then scores of the block after it: keys [key, end).
  float* scores = nullptr;
  const uint32_t* vectors = nullptr;
  int next_count = 0, key = 0, end = 0;

  int steps(int dim) const {
    const int slices = (dim - d + BLOCK - 1) / BLOCK;
    return (last > first && slices > 0 ? slices * (last - first) - (chunk - first) : 0) + (end > key ? (end - key + BLOCK - 1) / BLOCK : 0);
  }
};

}  // namespace
}  // namespace dw
