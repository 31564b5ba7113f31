// The arithmetic of attention on tiles (tiles.h), as attention_impl.h wants it: bfloat16 rows over a bfloat16 cache. A chunk is 32
// dimensions for scores and 32 positions for values: what one instruction sums.
//
// Scores: A is 16 keys as they stand in the cache, B the query vectors as columns, 16 pairs of dimensions times 16 vectors. Keys need no
// packing where 16 of them lie in consecutive slots, and query vectors are packed once for all keys.
//
//   A  key 0   d0 d1 | d2 d3 | ... | d30 d31      B  d0 d1    of vector 0, of vector 1, ... of vector 15
//      key 1                                         d2 d3
//      ...                                           ...                       C[key][vector] += A B
//
// Values: A is the weights of 16 vectors for 32 positions, B the values of pairs of positions, 16 dimensions. A weight is the sum of two
// bfloat16 (high, low), which keep 16 of its bits; each chunk is multiplied with the high ones, then with the low ones.
//
// Same bits: what an instruction does to one number of C depends on its row of A and its column of B alone, so neither the number of
// vectors nor their place in a tile matters, and one row takes the way of 500. Chunks of positions begin at the beginning of the
// partition, so that a key's chunk follows from its position. A position that a vector does not see has the weight 0, and the value 0 where
// no vector of the tile sees it; 0 times a number changes no sum but the sign of a zero, which is dropped on the way out. Where a
// vector does not see a value that is not finite (0 times that is NaN), and for the keys of a tree's own rows, which are others at the same
// position from row to row, rows are done one by one, each with the values that it sees.
#pragma once

#include "attention_impl.h"
#include "tiles.h"

namespace dw {
namespace {

constexpr int CHUNK = 32;                // dimensions or positions
constexpr int CHUNKS = PARTITION / CHUNK;
constexpr int BLOCK = 2 * kTileRows;     // vectors, keys or dimensions in two tiles
constexpr int PAIRS_OF_TILE = kTileRows * 16;  // dwords

// Two bfloat16 whose sum has the first 16 bits of a number.
DW_INLINE void split(vf x, bf16* high, bf16* low) {
#if defined(__AVX512BF16__)
  __m256i first = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  memcpy(high, &first, sizeof first);
  __m256i rest = (__m256i)_mm512_cvtneps_pbh((__m512)(x - load(high)));
  memcpy(low, &rest, sizeof rest);
#else
  store(high, x);
  store(low, x - load(high));
#endif
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

struct TileSteps {
  using Row = bf16;
  using Cache = bf16;
  // Of a tile of rows: keys and values are packed once for so many. Scores and weights take 256 KB of the second-level cache.
  static constexpr int VECTORS = 4 * BLOCK;
  static constexpr bool EVEN_ODD = false;

  int columns;       // dimensions in whole chunks
  int vectors;       // in whole blocks
  uint32_t* q;       // [vectors / 16][columns / 32][16 pairs of dimensions][16 vectors]
  bf16* keys;        // [32][columns], those that cannot be read as they stand
  float* scores;     // [32 keys][32 vectors]
  bf16 *high, *low;  // [vectors + 32][PARTITION] weights; rows behind the last vector are multiplied and not looked at
  uint32_t* values;  // [CHUNKS][2][16 pairs of positions][16 dimensions]
  float* sums;       // [vectors + 32][columns]
  float* row_sums;   // the same of a row that is done alone
  int32_t* slots;    // [PARTITION] of the values to multiply with; -1: zero

  TileSteps(Arena& arena, int M, int dim)
      : columns((dim + CHUNK - 1) / CHUNK * CHUNK), vectors((M + BLOCK - 1) / BLOCK * BLOCK) {
    const int64_t rows = vectors + BLOCK;
    q = arena.take<uint32_t>((int64_t)vectors * columns / 2);
    keys = arena.take<bf16>((int64_t)BLOCK * columns);
    scores = arena.take<float>(BLOCK * BLOCK);
    high = arena.take<bf16>(rows * PARTITION);
    low = arena.take<bf16>(rows * PARTITION);
    values = arena.take<uint32_t>(CHUNKS * 2 * PAIRS_OF_TILE);
    sums = arena.take<float>(rows * columns);
    row_sums = arena.take<float>(rows * columns);
    slots = arena.take<int32_t>(PARTITION);
  }

  using Item = Work<bf16, bf16>;

  void begin(const Item& w) {
    shape_tiles(2 * kTileRows);
    for (int v = 0; v < vectors; v += kTileRows)
      for (int d = 0; d < columns; d += CHUNK) {
        vf rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = v + i < w.M ? (vf)chunk_of(w.query(v + i), d, w.dim) : splat(0.0f);
        transpose(rows);
        uint32_t* to = query_tile(v, d);
        for (int i = 0; i < LANES; i++) memcpy(to + i * LANES, &rows[i], sizeof rows[i]);
      }
  }
  void end() { release_tiles(); }

  // to[m][0 .. count): the keys in these slots.
  void score(Item& w, const int32_t* at, int count, float* to, int stride) {
    for (int start = 0; start < count; start += BLOCK) {
      const int n = count - start < BLOCK ? count - start : BLOCK;
      const void* rows[2];
      int64_t bytes[2];
      for (int t = 0; t < (n + LANES - 1) / LANES; t++) {
        const int first = start + t * LANES, left = count - first;
        w.fetch_soon(at, first, count);
        key_rows(w, at + first, left < LANES ? left : LANES, keys + t * LANES * columns, &rows[t], &bytes[t]);
      }
      for (int v = 0; v < w.M; v += BLOCK) {
        if (n > LANES)
          score_block<true>(w, v, rows, bytes, to + start, stride);
        else
          score_block<false>(w, v, rows, bytes, to + start, stride);
      }
    }
  }

  // acc[M][padded] = values weighed by the exponentials in w.at.scores.
  void weigh(Item& w, float* acc) {
    int first = PARTITION, last = 0;             // seen by somebody: [first, last)
    int from = 0, to = PARTITION;                // seen by all
    for (int m = 0; m < w.M; m++) {
      const int lo = w.at.lo[m], hi = w.at.hi[m];
      if (lo < hi && lo < first) first = lo;
      if (hi > last) last = hi;
      if (lo > from) from = lo;
      if (hi < to) to = hi;
    }
    if (first >= last) {
      memset(acc, 0, sizeof(float) * (size_t)w.M * (size_t)w.padded);
      return;
    }
    const int begin = first / CHUNK, end = (last + CHUNK - 1) / CHUNK;
    split_weights(w, begin * CHUNK, end * CHUNK);
    int shared = w.rows.tree && last > w.plain ? w.plain / CHUNK : end;  // chunks [begin, shared) are the same keys for all
    if (shared < begin) shared = begin;
    const int common = last < w.plain ? last : w.plain;
    if (!finite(w, first, from < common ? from : common) || !finite(w, to > first ? to : first, common)) shared = begin;
    if (shared > begin) {
      for (int j = begin * CHUNK; j < shared * CHUNK; j++) slots[j] = j >= first && j < last ? w.at.slots[j] : -1;
      multiply(w, 0, w.M, begin, shared, nullptr, sums);
    }
    if (shared < end)
      for (int row = 0; row < w.item.tile.count; row++) weigh_row(w, row, begin, shared, end);
    for (int m = 0; m < w.M; m++)
      for (int d = 0; d < w.padded; d += LANES) store(acc + m * w.padded + d, load(sums + m * columns + d) + 0.0f);
  }

 private:
  uint32_t* query_tile(int vector, int d) const {
    return q + (int64_t)(vector / kTileRows * (columns / CHUNK) + d / CHUNK) * PAIRS_OF_TILE;
  }

  // Dimensions d .. d + 31 of a row, zeros behind its end.
  static DW_INLINE vu chunk_of(const bf16* row, int d, int dim) {
    if (d + CHUNK <= dim) return load_pairs(row + d);
    bf16 part[CHUNK] = {};
    memcpy(part, row + d, sizeof(bf16) * (size_t)(dim - d));
    return load_pairs(part);
  }

  // Where a tile of keys is read from: the cache itself if it can be, else a copy.
  void key_rows(const Item& w, const int32_t* at, int count, bf16* copy, const void** rows, int64_t* bytes) const {
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

  // 16 keys, or 32 (Two), with vectors v .. v + 31.
  template <bool Two>
  void score_block(const Item& w, int v, const void* const* rows, const int64_t* bytes, float* to, int stride) const {
    const bool wide = v + kTileRows < w.M;
    tile_zero<C0>();
    tile_zero<C1>();
    if (Two) {
      tile_zero<C2>();
      tile_zero<C3>();
    }
    for (int d = 0; d < columns; d += CHUNK) {
      tile_load<A0>((const bf16*)rows[0] + d, bytes[0]);
      tile_load<B0>(query_tile(v, d), kTileBytes);
      tile_dot_bf16<C0, A0, B0>();
      if (Two) {
        tile_load<A1>((const bf16*)rows[1] + d, bytes[1]);
        tile_dot_bf16<C2, A1, B0>();
      }
      if (!wide) continue;
      tile_load<B1>(query_tile(v + kTileRows, d), kTileBytes);
      tile_dot_bf16<C1, A0, B1>();
      if (Two) tile_dot_bf16<C3, A1, B1>();
    }
    store_block<Two>(scores, BLOCK, true, wide);
    for (int key = 0; key < (Two ? BLOCK : LANES); key += LANES)
      for (int i = v; i < w.M && i < v + BLOCK; i += LANES) {
        vf lines[LANES];
        for (int j = 0; j < LANES; j++) lines[j] = load(scores + (key + j) * BLOCK + i - v);
        transpose(lines);
        for (int j = 0; j < LANES && i + j < w.M; j++) store(to + (int64_t)(i + j) * stride + key, lines[j]);
      }
  }

  // The four tiles of sums: upper or all rows, left or all columns; stride in floats.
  template <bool Lower>
  static DW_INLINE void store_block(float* to, int64_t stride, bool left, bool right) {
    if (left) tile_store<C0>(to, stride * 4);
    if (right) tile_store<C1>(to + LANES, stride * 4);
    if (Lower) {
      if (left) tile_store<C2>(to + kTileRows * stride, stride * 4);
      if (right) tile_store<C3>(to + kTileRows * stride + LANES, stride * 4);
    }
  }

  // Exponentials of positions [begin, end) -> two bfloat16 each; 0 where a vector does not see.
  void split_weights(const Item& w, int begin, int end) const {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int m = 0; m < w.M; m++)
      for (int j = begin; j < end; j += LANES) {
        const vi at = lanes + j;
        const vi seen = (at >= w.at.lo[m]) & (at < w.at.hi[m]);
        split(seen ? load(w.at.scores + m * PARTITION + j) : splat(0.0f), high + m * PARTITION + j,
              low + m * PARTITION + j);
      }
  }

  // Whether the values at positions [begin, end) are numbers.
  static bool finite(const Item& w, int begin, int end) {
    vi bad = splat_i(0);
    for (int j = begin; j < end; j++)
      for (int d = 0; d < w.dim; d += LANES) {
        const int n = w.dim - d < LANES ? w.dim - d : LANES;
        const vu bits = (vu)load_n(w.values + w.at.slots[j] * w.stride + d, n);
        bad |= (vi)((bits & 0x7f800000u) == 0x7f800000u);
      }
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= bad[i];
    return any == 0;
  }

  // Chunks [shared, end) of one row of the tile, on top of what all have in common.
  void weigh_row(const Item& w, int row, int begin, int shared, int end) {
    const int m = row * w.group, own_base = w.rows.context - w.base;
    const int32_t* path = w.at.path_slots + row * MAX_TREE_ROWS;
    for (int j = shared * CHUNK; j < end * CHUNK; j++) {
      const bool seen = j >= w.at.lo[m] && j < w.at.hi[m];
      slots[j] = !seen ? -1 : j < w.plain ? w.at.slots[j] : path[j - own_base];
    }
    multiply(w, m, w.group, shared, end, shared > begin ? sums + (int64_t)m * columns : nullptr, row_sums);
    memcpy(sums + (int64_t)m * columns, row_sums, sizeof(float) * (size_t)w.group * (size_t)columns);
  }

  // to[0 .. count][columns] = from (or zero) + the weights of vectors m .. times the values in `slots`, chunks [begin, end).
  void multiply(const Item& w, int m, int count, int begin, int end, const float* from, float* to) const {
    for (int d = 0; d < w.dim; d += BLOCK) {
      pack_values(w, d, begin, end);
      const bool right = w.dim - d > LANES;
      for (int v = 0; v < count; v += BLOCK) {
        const int64_t at = (int64_t)v * columns + d;
        const float* start = from != nullptr ? from + at : nullptr;
        if (count - v > kTileRows)
          multiply_block<true>(m + v, begin, end, right, start, to + at);
        else
          multiply_block<false>(m + v, begin, end, right, start, to + at);
      }
    }
  }

  template <bool Lower>
  void multiply_block(int m, int begin, int end, bool right, const float* from, float* to) const {
    if (from != nullptr) {
      const int64_t bytes = (int64_t)columns * 4;
      tile_load<C0>(from, bytes);
      tile_load<C1>(from + LANES, bytes);
      if (Lower) {
        tile_load<C2>(from + (int64_t)kTileRows * columns, bytes);
        tile_load<C3>(from + (int64_t)kTileRows * columns + LANES, bytes);
      }
    } else {
      tile_zero<C0>();
      tile_zero<C1>();
      if (Lower) {
        tile_zero<C2>();
        tile_zero<C3>();
      }
    }
    for (int c = begin; c < end; c++) {
      const uint32_t* v = values + c * 2 * PAIRS_OF_TILE;
      tile_load<B0>(v, kTileBytes);
      if (right) tile_load<B1>(v + PAIRS_OF_TILE, kTileBytes);
      for (int half = 0; half < 2; half++) {
        const bf16* p = (half == 0 ? high : low) + (int64_t)m * PARTITION + c * CHUNK;
        tile_load<A0>(p, PARTITION * 2);
        tile_dot_bf16<C0, A0, B0>();
        if (right) tile_dot_bf16<C1, A0, B1>();
        if (Lower) {
          tile_load<A1>(p + kTileRows * PARTITION, PARTITION * 2);
          tile_dot_bf16<C2, A1, B0>();
          if (right) tile_dot_bf16<C3, A1, B1>();
        }
      }
    }
    store_block<Lower>(to, columns, true, right);
  }

  // values: dimensions d .. d + 31 of the slots of chunks [begin, end), in pairs of positions.
  void pack_values(const Item& w, int d, int begin, int end) const {
    const bool whole = d + CHUNK <= w.dim;
    const bf16 zeros[CHUNK] = {};
    bf16 parts[2][CHUNK] = {};
    for (int j = begin * CHUNK; j < end * CHUNK; j += 2) {
      const bf16* pair[2];
      for (int i = 0; i < 2; i++) {
        pair[i] = slots[j + i] < 0 ? zeros : w.values + slots[j + i] * w.stride + d;
        if (whole || slots[j + i] < 0) continue;
        memcpy(parts[i], pair[i], sizeof(bf16) * (size_t)(w.dim - d));
        pair[i] = parts[i];
      }
      uint32_t* to = values + j / CHUNK * 2 * PAIRS_OF_TILE + j % CHUNK / 2 * LANES;
      interleave(pair[0], pair[1], to, to + PAIRS_OF_TILE);
    }
  }
};

}  // namespace
}  // namespace dw
