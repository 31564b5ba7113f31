// How a product is cut in rows, panels and k, so that what is used again is still in a cache.
#pragma once

#include <algorithm>

#include "linear_rows.h"

namespace dw {
namespace {

struct Cut {
  int64_t units;   // of k at a time
  int64_t panels;  // that take turns at each part of k: so many partial sums are kept
  int tiles;       // of rows at a time
  int64_t step;    // panels of a tile
};

// Kernels that hold outputs in the lanes of vectors: a tile's rows come from the first-level cache, weights are read once.
constexpr int64_t kRowBlockBytes = 20 << 10;  // of a tile's rows
constexpr int64_t kSumBytes = 160 << 10;      // of partial sums, in the second-level cache

Cut cut_for_lanes(const Linear& w, const LinearKernels& kernels, int64_t rows, const Tiles& tiles, int64_t tile_rows) {
  const int64_t step = tile_rows <= kernels.pair_rows[w.format] ? 2 : 1;
  const int64_t row_bytes = tile_rows * w.steps() * (has_wide_rows(kernels, w.format, tile_rows) ? 8 : 4);
  int64_t units = w.units;
  if (row_bytes > kRowBlockBytes + kRowBlockBytes / 2) {
    const int64_t blocks = (row_bytes + kRowBlockBytes - 1) / kRowBlockBytes;
    const int64_t whole = is_grouped(w.format) ? w.group_units : 1;
    units = ((w.units + blocks - 1) / blocks + whole - 1) / whole * whole;
  }
  const int64_t panels = units < w.units ? std::max(step, kSumBytes / (rows * kPanel * 4) / step * step) : step;
  return Cut{units, panels, tiles.count, step};
}

// Kernels on tiles: sums stay in the unit over a part of k, and both factors may come from the second-level cache. One tile of rows has all
// of k at once. Several read a panel's part of k one after the other, as many as fit the cache beside it; for the next ones weights are
// read again. Example: 512 rows of 2048 bfloat16 (64 chunks) are two times eight tiles of 32 rows, 128 KB each, and k is not cut; of
// 5632 (176 chunks), k is cut in three of 59 chunks, and 16 panels take turns: 256 * 16 sums of 128 bytes.
constexpr int64_t kCutChunks = 64;           // of k
constexpr int64_t kCutRowBytes = 1 << 20;    // of rows
constexpr int64_t kCutSumBytes = 512 << 10;  // of partial sums

Cut cut_for_tiles(const Linear& w, const Tiles& tiles, int64_t tile_rows) {
  if (tiles.count == 1) return Cut{w.units, 1, 1, 1};
  const int64_t steps = steps_per_unit(w.format);
  const int64_t whole = is_grouped(w.format) ? w.group_units : kChunkDwords / steps;
  const int64_t blocks = (w.groups() * group_chunks(w) + kCutChunks - 1) / kCutChunks;
  const int64_t units = std::min(((w.units + blocks - 1) / blocks + whole - 1) / whole * whole, w.units);
  const int64_t most = std::clamp<int64_t>(kCutRowBytes / (tile_rows * units * steps * 4), 1, tiles.count);
  const int64_t parts = (tiles.count + most - 1) / most, together = (tiles.count + parts - 1) / parts;
  const int64_t panels = units < w.units ? std::max<int64_t>(1, kCutSumBytes / (together * tile_rows * kPanel * 4)) : 1;
  return Cut{units, panels, int(together), 1};
}

Cut cut_for(const Linear& w, const LinearKernels& kernels, int64_t rows, const Tiles& tiles) {
  const int64_t tile_rows = tiles.tallest();
  return kernels.in_chunks[w.format] ? cut_for_tiles(w, tiles, tile_rows)
                                     : cut_for_lanes(w, kernels, rows, tiles, tile_rows);
}

// Into how many tasks a product is cut: more than there are threads, so that one that was interrupted does not hold up the rest, but
// of so even sizes that nobody waits at the end: panels are not cut.
// Example: 8 panels, 2 threads, weights for 7 tasks. Seven would be six of one panel and one of two, and with the last one a thread
// has 5 panels, the other 3. Six are no better: 2 * 3 = 6 at worst. Four tasks of two panels are 4 and 4.
constexpr int64_t kTaskBytes = 48 << 10;  // of weights; less than this per task does not pay for the handover
constexpr int64_t kManyRows = 65;         // in tiles: more than two
constexpr int64_t kManyPanels = 16;       // of a task then, which reads all rows from far away

int64_t tasks_of(const Linear& w, const LinearKernels& kernels, int64_t rows, int64_t threads) {
  const int64_t bytes = w.panels * w.panel_bytes();
  int64_t most = std::min<int64_t>(bytes / kTaskBytes, threads * 8);
  if (most < threads) most = rows * bytes >= 4 * kTaskBytes ? threads : most;
  most = std::clamp<int64_t>(most, 1, w.panels);
  if (most < threads) return most;
  if (kernels.in_chunks[w.format] && rows >= kManyRows) most = std::max(threads, std::min(most, w.panels / kManyPanels));
  const auto longest = [&](int64_t tasks) { return (w.panels + tasks - 1) / tasks * (tasks / threads); };  // panels of a thread
  int64_t best = threads;
  for (int64_t tasks = most / threads * threads; tasks > threads; tasks -= threads) {
    if (longest(tasks) * threads * 10 <= w.panels * 11) return tasks;
    if (longest(tasks) < longest(best)) best = tasks;
  }
  return best;
}

}  // namespace
}  // namespace dw
