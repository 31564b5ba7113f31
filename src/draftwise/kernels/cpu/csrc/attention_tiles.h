// The arithmetic of attention on tiles (tiles.h), as attention_impl.h wants it: bfloat16 rows over a bfloat16 cache. A chunk is 32
// dimensions for scores and 32 positions for values: what one instruction sums.
//
// Up to 32 query vectors are a block. Scores, weights and sums of a block follow one another while they are in the nearest caches. Where
// there are more blocks, keys and values of a partition are packed once for all.
//
// Scores: the query vectors are rows of one tile, the keys columns of the other one, or, in a single block, the other way round: keys then
// need no packing where 16 of them lie in consecutive slots, but scores have to be turned. Both give the same bits: a product does not
// depend on the order of its factors.
//
//   A  vector 0   d0 d1 | d2 d3 | ... | d30 d31      B  d0 d1    of key 0, of key 1, ... of key 15
//      vector 1                                         d2 d3
//      ...                                              ...                       C[vector][key] += A B
//
// Values: A is the weights of 16 vectors for 32 positions, B the values of pairs of positions (n and 16 + n), 16 dimensions. A weight is the
// sum of two bfloat16 (high, low), which keep 16 of its bits; each chunk is multiplied with the high ones, then with the low ones.
//
// Same bits: what an instruction does to one number of C depends on its row of A and its column of B alone, so neither the number of
// vectors nor their place in a tile matters, and one row takes the way of 500. Chunks of positions begin at the beginning of the
// partition, so that a key's chunk follows from its position. A position that a vector does not see has the weight 0, and the value 0 where
// no vector of the tile sees it; 0 times a number changes no sum but the sign of a zero, which is dropped on the way out. Where a
// vector does not see a value that is not finite (0 times that is NaN), and for the keys of a tree's own rows, which are others at the same
// position from row to row, rows are done one by one, each with the values that it sees.
#pragma once

#include "attention_impl.h"
#include "attention_tile_blocks.h"

namespace dw {
namespace {

struct TileSteps {
  using Row = bf16;
  using Cache = bf16;
  // Of a tile of rows: keys and values are read and packed once for so many.
  static constexpr int VECTORS = 16 * BLOCK;
  static constexpr bool EVEN_ODD = false;

  // What vectors [first, first + count) see in the partition at hand: chunks [begin, end).
  struct Block {
    int first, count, begin, end;
  };

  int columns;      // dimensions in whole chunks
  int step;         // vectors of a block: whole rows, if they fit
  bool many;        // more than one block
  uint32_t* q;      // many: [blocks][columns / 32][32 vectors][16 pairs of dimensions]; else [2][columns / 32][16 pairs][16 vectors]
  bf16* keys;       // many: [columns / 32][PARTITION / 16][16 pairs][16 keys]; else [32][columns], those that cannot be read as they stand
  float* turned;    // [32 keys][32 vectors], if there is one block
  float* scores;    // [3 blocks, or 1][32][SCORE_STRIDE]; then weights, [CHUNKS][high 32, low 32] in their place; 32 rows behind the
                    // last one may be multiplied, and are not looked at
  uint32_t* values;      // [columns / 32][CHUNKS][2][16 pairs of positions][16 dimensions]
  uint32_t* row_values;  // [CHUNKS][2][16][16] of a row that is done alone
  float* sums;           // [32][columns] of a block that does not fill its tiles
  float* row_sums;       // [32][columns] of a row that is done alone
  int32_t* slots;        // [PARTITION] of the values to multiply with; -1: zero
  int32_t* row_slots;    // the same of a row that is done alone

  // Of the partition at hand: chunks [begin_chunk, shared) have the same values for all vectors; dimensions before `packed` are in `values`.
  int begin_chunk = 0, shared = 0, packed = 0;

  TileSteps(Arena& arena, int M, int dim, int group)
      : columns((dim + CHUNK - 1) / CHUNK * CHUNK), step(group <= BLOCK ? BLOCK / group * group : BLOCK), many(M > BLOCK) {
    const int blocks = (M + step - 1) / step;
    q = arena.take<uint32_t>((int64_t)blocks * BLOCK * columns / 2);
    keys = arena.take<bf16>((int64_t)(many ? PARTITION : BLOCK) * columns);
    turned = arena.take<float>(many ? 0 : BLOCK * BLOCK);
    scores = arena.take<float>((many ? 4 : 2) * BLOCK * SCORE_STRIDE);
    values = arena.take<uint32_t>((int64_t)columns / CHUNK * CHUNKS * 2 * PAIRS_OF_TILE);
    row_values = arena.take<uint32_t>(CHUNKS * 2 * PAIRS_OF_TILE);
    sums = arena.take<float>((int64_t)BLOCK * columns);
    row_sums = arena.take<float>((int64_t)BLOCK * columns);
    slots = arena.take<int32_t>(PARTITION);
    row_slots = arena.take<int32_t>(PARTITION);
  }

  using Item = TileWork;

  void begin(const Item& w) {
    shape_tiles(2 * kTileRows);
    for (int block = 0; block * step < w.M; block++)
      for (int d = 0; d < columns; d += CHUNK)
        for (int v = 0; v < BLOCK; v += LANES) {
          vf rows[LANES];
          for (int i = 0; i < LANES; i++) {
            const int m = block * step + v + i;
            rows[i] = v + i < step && m < w.M ? (vf)chunk_of(w.query(m), d, w.dim) : splat(0.0f);
          }
          if (!many) transpose(rows);
          store_tile(many ? vectors_of(block) + (d / CHUNK * 2 + v / LANES) * PAIRS_OF_TILE : columns_of(v, d), rows);
        }
  }
  void end() { release_tiles(); }

  // w.at.own: scores of a tree's own keys.
  void score_own(Item& w) {
    const int count = w.rows.own_keys;
    if (!many) return score_turned(w, w.at.own_slots, count, w.at.own, MAX_TREE_ROWS);
    pack_keys(w, w.at.own_slots, 0, count);
    for (int block = 0; block * step < w.M; block++) {
      TileTask task;
      plan_scores(task, block, count_of(w, block), 0, count);
      finish(w, task);
      for (int i = 0; i < count_of(w, block); i++)
        memcpy(w.at.own + (block * step + i) * MAX_TREE_ROWS, scores_of(block) + i * SCORE_STRIDE, sizeof(float) * (size_t)count);
    }
  }

  // The state (attention_states.h) of the keys at positions `skip` and on of the partition at hand.
  //
  // While block b goes from scores to weights, the unit multiplies the weights of block b - 1 with values, and the vectors of block b + 1
  // with keys.
  void partition(Item& w, int skip, float* top, float* sum, float* acc) {
    find_shared(w);
    if (many && w.plain > skip) pack_keys(w, w.at.slots, skip, w.plain);
    if (!many && w.plain > skip) score_turned(w, w.at.slots + skip, w.plain - skip, scores + skip, SCORE_STRIDE);
    const auto plan_next = [&](TileTask& task, const Block& next) {
      if (!many || next.count <= 0) return;
      const int from = next.begin * CHUNK > skip ? next.begin * CHUNK : skip;
      plan_scores(task, next.first / step, next.count, from, next.end * CHUNK < w.plain ? next.end * CHUNK : w.plain);
    };
    Block block = block_of(w, 0), before{};
    TileTask task;
    plan_next(task, block);
    finish(w, task);
    for (int b = 0; b * step < w.M; b++) {
      const Block next = block_of(w, b + 1);
      task = TileTask{};
      if (b > 0) plan_sums(w, task, before, acc);
      plan_next(task, next);
      soften_block(w, block, task, top, sum);
      finish(w, task);
      if (b > 0) end_sums(w, before, acc);
      before = block;
      block = next;
    }
    task = TileTask{};
    plan_sums(w, task, before, acc);
    finish(w, task);
    end_sums(w, before, acc);
  }

 private:
  uint32_t* vectors_of(int block) const { return q + (int64_t)block * BLOCK / 2 * columns; }
  uint32_t* columns_of(int vector, int d) const { return q + (vector / LANES * (columns / CHUNK) + d / CHUNK) * PAIRS_OF_TILE; }
  uint32_t* key_tile(int d, int key) const {
    return (uint32_t*)keys + (int64_t)(d / CHUNK * (PARTITION / LANES) + key / LANES) * PAIRS_OF_TILE;
  }
  float* scores_of(int block) const { return scores + (many ? block % 3 : 0) * BLOCK * SCORE_STRIDE; }
  static const bf16* weights_at(const float* rows, int v, int chunk) {
    return (const bf16*)(rows + v * SCORE_STRIDE) + chunk * 2 * CHUNK;
  }
  uint32_t* values_at(int d) const { return values + (int64_t)(d / CHUNK) * CHUNKS * 2 * PAIRS_OF_TILE; }

  int count_of(const Item& w, int block) const { return w.M - block * step < step ? w.M - block * step : step; }
  Block block_of(const Item& w, int number) const {
    const int first = number * step, count = count_of(w, number);
    const Reach reach = reach_of(w, first, count);
    if (reach.first >= reach.last) return Block{first, count, 0, 0};
    return Block{first, count, reach.first / CHUNK, (reach.last + CHUNK - 1) / CHUNK};
  }
  // Positions that vectors [begin, begin + count) see: somebody [first, last), everybody [from, to).
  struct Reach {
    int first = PARTITION, last = 0, from = 0, to = PARTITION;
  };
  static Reach reach_of(const Item& w, int begin, int count) {
    Reach r;
    for (int m = begin; m < begin + count; m++) {
      const int lo = w.at.lo[m], hi = w.at.hi[m];
      if (lo < hi && lo < r.first) r.first = lo;
      if (hi > r.last) r.last = hi;
      if (lo > r.from) r.from = lo;
      if (hi < r.to) r.to = hi;
    }
    return r;
  }

  // Which values are multiplied with all vectors at once.
  void find_shared(const Item& w) {
    const auto [first, last, from, to] = reach_of(w, 0, w.M);
    begin_chunk = shared = packed = 0;
    if (first >= last) return;
    begin_chunk = first / CHUNK;
    shared = w.rows.tree && last > w.plain ? w.plain / CHUNK : (last + CHUNK - 1) / CHUNK;
    const int common = last < w.plain ? last : w.plain;
    if (!finite(w, first, from < common ? from : common) || !finite(w, to > first ? to : first, common)) shared = begin_chunk;
    if (shared < begin_chunk) shared = begin_chunk;
    for (int j = begin_chunk * CHUNK; j < shared * CHUNK; j++) slots[j] = j >= first && j < last ? w.at.slots[j] : -1;
  }

  // ------------------------------------------------------------------------------------------------------ the unit's work

  // Scores of a block with packed keys [from, to).
  void plan_scores(TileTask& task, int block, int count, int from, int to) const {
    task.scores = scores_of(block);
    task.vectors = vectors_of(block);
    task.next_count = count;
    task.key = from / LANES * LANES;
    task.end = to;
  }
  // Sums of a block over the values that all vectors share. Where they fill its tiles, they go to their place at once.
  void plan_sums(const Item& w, TileTask& task, const Block& block, float* acc) const {
    task.sums = in_place(w, block) ? acc + block.first * w.padded : sums;
    task.weights = scores_of(block.first / step);
    task.count = block.count;
    task.chunk = task.first = block.begin;
    task.last = block.end < shared ? block.end : shared;
  }
  bool in_place(const Item& w, const Block& block) const { return block.count == BLOCK && w.padded == columns; }

  void do_step(const Item& w, TileTask& task) {
    if (task.d < w.dim && task.first < task.last) {
      by_shape(task.count > kTileRows, w.dim - task.d > LANES, AddStep{*this, w, task});
    } else {
      by_shape(task.next_count > kTileRows, task.key + LANES < task.end, ScoreStep{*this, task});
    }
  }
  void finish(const Item& w, TileTask& task) {
    for (int left = task.steps(w.dim); left > 0; left--) do_step(w, task);
  }

  struct ScoreStep {
    const TileSteps& steps;
    TileTask& task;
    template <bool Lower, bool Right>
    DW_INLINE void run() const {
      score_tiles<Lower, Right>(task.vectors, steps.key_tile(0, task.key), PARTITION / LANES * PAIRS_OF_TILE, steps.columns / CHUNK,
                                task.scores + task.key);
      task.key += BLOCK;
    }
  };

  struct AddStep {
    TileSteps& steps;
    const Item& w;
    TileTask& task;
    template <bool Lower, bool Right>
    DW_INLINE void run() const {
      if (task.chunk == task.first) {
        zero_block<Lower, Right>();
        if (task.d >= steps.packed) {
          pack_values(w, steps.slots, task.d, steps.begin_chunk, steps.shared, steps.values_at(task.d));
          steps.packed = task.d + BLOCK;
        }
      }
      add_chunk<Lower, Right>(weights_at(task.weights, 0, task.chunk), steps.values_at(task.d) + task.chunk * 2 * PAIRS_OF_TILE);
      if (++task.chunk < task.last) return;
      store_block<Lower, Right>(task.sums + task.d, steps.columns);
      task.chunk = task.first;
      task.d += BLOCK;
    }
  };

  // What a block's sums lack when the values that all share are in: those of its rows alone. Then acc[M][padded] has them.
  void end_sums(const Item& w, const Block& block, float* acc) const {
    const bool direct = in_place(w, block), common = block.begin < (block.end < shared ? block.end : shared);
    acc += block.first * w.padded;
    float* to = direct ? acc : sums;
    const int from = block.begin > shared ? block.begin : shared;
    if (from < block.end) {
      const float* weights = scores_of(block.first / step);
      for (int m = 0, n; m < block.count; m += n) {
        const int left = w.group - (block.first + m) % w.group;
        n = left < block.count - m ? left : block.count - m;
        find_row_slots(w, block.first + m, from, block.end);
        for (int d = 0; d < w.dim; d += BLOCK) {
          pack_values(w, row_slots, d, from, block.end, row_values);
          const float* start = common ? to + (int64_t)m * columns + d : nullptr;
          by_shape(n > kTileRows, w.dim - d > LANES, RowSums{start, row_sums + d, columns, weights, m, from, block.end, row_values});
        }
        memcpy(to + (int64_t)m * columns, row_sums, sizeof(float) * (size_t)n * (size_t)columns);
      }
    } else if (!common) {
      memset(to, 0, sizeof(float) * (size_t)block.count * (size_t)columns);
    }
    if (direct) return;
    for (int m = 0; m < block.count; m++)
      for (int d = 0; d < w.padded; d += LANES) store(acc + m * w.padded + d, load(sums + m * columns + d));
  }

  struct RowSums {
    const float* from;
    float* to;
    int columns;
    const float* weights;
    int m, begin, end;
    const uint32_t* values;
    template <bool Lower, bool Right>
    DW_INLINE void run() const {
      if (from != nullptr)
        load_block<Lower, Right>(from, columns);
      else
        zero_block<Lower, Right>();
      for (int c = begin; c < end; c++) add_chunk<Lower, Right>(weights_at(weights, m, c), values + c * 2 * PAIRS_OF_TILE);
      store_block<Lower, Right>(to, columns);
    }
  };

  // Slots of the values that the row of vector m sees in chunks [begin, end).
  void find_row_slots(const Item& w, int m, int begin, int end) const {
    const int32_t* path = w.at.path_slots + m / w.group * MAX_TREE_ROWS;
    const int own_base = w.rows.context - w.base;
    for (int j = begin * CHUNK; j < end * CHUNK; j++) {
      const bool seen = j >= w.at.lo[m] && j < w.at.hi[m];
      row_slots[j] = !seen ? -1 : j < w.plain ? w.at.slots[j] : path[j - own_base];
    }
  }

  // ------------------------------------------------------------------------------------------------------ keys and values

  // Keys at positions [skip, end) of the partition, by position; at[j]: slot of position j. `skip` is whole tiles.
  void pack_keys(const Item& w, const int32_t* at, int skip, int end) const {
    for (int key = skip; key < end; key += LANES) {
      const int ahead = key + 2 * LANES;
      if (ahead < end) w.fetch(w.keys, at + ahead, end - ahead < LANES ? end - ahead : LANES);
      for (int d = 0; d < columns; d += CHUNK) {
        vf rows[LANES];
        for (int i = 0; i < LANES; i++)
          rows[i] = (vf)chunk_of(w.keys + at[key + i < end ? key + i : end - 1] * w.stride, d, w.dim);
        transpose(rows);
        store_tile(key_tile(d, key), rows);
      }
    }
  }

  // to[m][0 .. count) of the only block: the keys in these slots.
  void score_turned(Item& w, const int32_t* at, int count, float* to, int stride) const {
    for (int start = 0; start < count; start += BLOCK) {
      const int n = count - start < BLOCK ? count - start : BLOCK;
      const void* rows[2];
      int64_t bytes[2];
      for (int t = 0; t < (n + LANES - 1) / LANES; t++) {
        const int first = start + t * LANES, left = count - first;
        w.fetch_soon(at, first, count);
        key_rows(w, at + first, left < LANES ? left : LANES, columns, keys + t * LANES * columns, &rows[t], &bytes[t]);
      }
      if (n > LANES)
        turned_tiles<true>(w, rows, bytes, to + start, stride);
      else
        turned_tiles<false>(w, rows, bytes, to + start, stride);
    }
  }

  // 16 keys, or 32 (Two), with all vectors.
  template <bool Two>
  void turned_tiles(const Item& w, const void* const* rows, const int64_t* bytes, float* to, int stride) const {
    const bool wide = w.M > LANES;
    wide ? zero_block<Two, true>() : zero_block<Two, false>();
    for (int d = 0; d < columns; d += CHUNK) {
      tile_load<A0>((const bf16*)rows[0] + d, bytes[0]);
      tile_load<B0>(columns_of(0, d), kTileBytes);
      tile_dot_bf16<C0, A0, B0>();
      if (Two) {
        tile_load<A1>((const bf16*)rows[1] + d, bytes[1]);
        tile_dot_bf16<C2, A1, B0>();
      }
      if (!wide) continue;
      tile_load<B1>(columns_of(LANES, d), kTileBytes);
      tile_dot_bf16<C1, A0, B1>();
      if (Two) tile_dot_bf16<C3, A1, B1>();
    }
    wide ? store_block<Two, true>(turned, BLOCK) : store_block<Two, false>(turned, BLOCK);
    for (int key = 0; key < (Two ? BLOCK : LANES); key += LANES)
      for (int v = 0; v < w.M; v += LANES) {
        vf lines[LANES];
        for (int j = 0; j < LANES; j++) lines[j] = load(turned + (key + j) * BLOCK + v);
        transpose(lines);
        for (int j = 0; j < LANES && v + j < w.M; j++) store(to + (int64_t)(v + j) * stride + key, lines[j]);
      }
  }

  // ------------------------------------------------------------------------------------------------------ weights

  // Scores -> weights, `top` and `sum`, with steps of the unit's task in between.
  void soften_block(Item& w, const Block& block, TileTask& task, float* top, float* sum) {
    float* rows = scores_of(block.first / step);
    // All vectors' greatest scores first: what one waits for, another one fills.
    for (int i = 0; i < block.count; i++) {
      const int m = block.first + i;
      w.put_own(m, rows + i * SCORE_STRIDE);
      top[m] = greatest(rows + i * SCORE_STRIDE, Seen{w.at.lo[m], w.at.hi[m]}, w.call);
    }
    // What is read after the partition is fetched all along, or everything would wait for it at once.
    const int ahead = many ? (PARTITION + w.M - 1) / w.M : 0, steps = task.steps(w.dim);
    const float scale = scale_left(w.call);
    int done = 0;
    for (int i = 0; i < block.count; i++) {
      for (; done < steps * (i + 1) / block.count; done++) do_step(w, task);
      w.fetch_ahead(ahead);
      const int m = block.first + i;
      float* row = rows + i * SCORE_STRIDE;
      sum[m] = soften<2>(row, Seen{w.at.lo[m], w.at.hi[m]}, block.begin * CHUNK, block.end * CHUNK, scale, top[m],
                         [row](int j, const vf* weights) { split(weights, (uint32_t*)row + j, (uint32_t*)row + j + LANES); });
      top[m] *= scale;
    }
  }
};

}  // namespace
}  // namespace dw
