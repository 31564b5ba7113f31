#include "attention_plan.h"

#include <algorithm>
#include <vector>

#include "attention_blocks.h"
#include "attention_rows.h"
#include "boundary.h"
#include "memory.h"

namespace dw {
namespace {

constexpr int64_t TASK_PRODUCTS = 1 << 16;  // less than this per task does not pay for the handover
constexpr int64_t KEY_COST = 4;             // of reading a key and its value, in query vectors that are multiplied with them
constexpr int FEWEST_VECTORS = 32;          // of a tile, if kernels take so many
constexpr int TILES_PER_THREAD = 8;         // if tiles take more
constexpr double UNEVEN = 1.1;              // greatest to mean work of threads up to which no item is cut
constexpr double NEAR = 0.1;                // of a task: borders that are nearer to the end of an item move there

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// Room for so many; kernels may look at a vector more.
float* floats_in(Scratch& memory, int64_t count) {
  return static_cast<float*>(memory.reserve(size_t(count) * sizeof(float) + 64));
}

// What one item of a tile takes: `keys` from `low` on, each `per_key`.
struct TileWork {
  int64_t low, keys, per_key;
  int64_t total() const { return keys * per_key; }
};

// What a thread plans with.
struct Memory {
  std::vector<QueryTile> tiles;
  std::vector<TileWork> work;
  std::vector<AttentionPiece> pieces;
  std::vector<int32_t> task_ends;
  std::vector<CutItem> cuts;
  std::vector<int64_t> loads;
  Scratch partials;
};

// What rows [first, first + count) see, at most: keys [low, high].
struct Reach {
  int low, high;
};
Reach reach_of(const RequestRows& rows, int first, int count) {
  const int last = first + count - 1;
  if (!rows.tree) return Reach{rows.first_visible(rows.position(first)), rows.last_visible(last)};
  Reach reach{INT32_MAX, 0};
  for (int i = first; i <= last; i++) {
    reach.low = std::min(reach.low, rows.first_visible(rows.position(i)));
    reach.high = std::max(reach.high, rows.position(i));
  }
  return reach;
}

struct Cutter {
  AttentionRun& run;
  Memory& memory;
  const int heads;
  const double target;  // work of a task

  // Calls emit(item, begin, end) for every piece, and close() behind the last one of every task.
  template <class Emit, class Close>
  void walk(bool cut, const Emit& emit, const Close& close) const {
    double at = 0, border = target;  // on the line of work: where the item begins, where the task ends
    const double near = NEAR * target;
    for (int i = 0; i < run.num_tiles * heads; i++) {
      const QueryTile& tile = run.tiles[i / heads];
      const TileWork& work = memory.work[size_t(i / heads)];
      const double cost = double(work.total());
      int begin = tile.begin;
      for (; cut && border < at + cost - near; border += target) {
        const int partition = int((double(work.low) + (border - at) / double(work.per_key)) / PARTITION + 0.5);
        if (border > at + near && partition > begin && partition < tile.end) {
          emit(i, begin, partition);
          begin = partition;
        }
        close();
      }
      emit(i, begin, tile.end);
      at += cost;
      const double reach = cut ? near : cost / 2;
      if (border <= at + reach) {
        close();
        while (border <= at + reach) border += target;
      }
    }
    close();
  }

  // Work of the busiest thread over that of the mean, without cutting an item: tasks go to who is done first.
  double unevenness(int threads) const {
    memory.loads.assign(size_t(threads), 0);
    int64_t task = 0, total = 0;
    walk(
        false, [&](int item, int, int) { task += memory.work[size_t(item / heads)].total(); },
        [&] {
          *std::min_element(memory.loads.begin(), memory.loads.end()) += task;
          total += task;
          task = 0;
        });
    return double(*std::max_element(memory.loads.begin(), memory.loads.end())) * threads / double(total);
  }

  void cut(bool items) const {
    memory.pieces.clear();
    memory.task_ends.clear();
    walk(
        items,
        [&](int item, int begin, int end) { memory.pieces.push_back(AttentionPiece{item, begin, end, -1}); },
        [&] {
          const auto done = int32_t(memory.pieces.size());
          if (memory.task_ends.empty() ? done > 0 : done > memory.task_ends.back()) memory.task_ends.push_back(done);
        });
  }
};

// Where the pieces of cut items leave their states.
void place_partials(AttentionRun& run, Memory& memory) {
  const int heads = run.call->num_kv_heads, group = run.call->num_heads / heads;
  auto& pieces = memory.pieces;
  memory.cuts.clear();
  for (size_t first = 0, end; first < pieces.size(); first = end) {
    end = first + 1;
    while (end < pieces.size() && pieces[end].item == pieces[first].item) end++;
    if (end == first + 1) continue;
    memory.cuts.push_back(CutItem{int32_t(first), int32_t(end - first)});
    const QueryTile& tile = run.tiles[pieces[first].item / heads];
    for (size_t i = first; i < end; i++) {
      BlockStack blocks(pieces[i].begin == tile.begin);
      blocks.push_all(pieces[i].begin, pieces[i].end);
      pieces[i].partial = run.partial_floats;
      run.partial_floats += padded(int64_t(blocks.depth) * tile.count * group * (padded(run.call->head_dim) + 2));
    }
  }
}

AttentionItem item_of(const AttentionRun& run, int index) {
  static thread_local Scratch scratch;
  AttentionItem item{};
  item.call = run.call;
  item.batch = run.batch;
  item.tile = run.tiles[index / run.call->num_kv_heads];
  item.head = index % run.call->num_kv_heads;
  item.begin = item.tile.begin;
  item.end = item.tile.end;
  const int group = run.call->num_heads / run.call->num_kv_heads;
  item.scratch = floats_in(scratch, run.kernels->scratch_floats(run.call, run.tile_rows * group, run.most_partitions));
  return item;
}

void run_task(const AttentionRun& run, int task) {
  for (int i = task == 0 ? 0 : run.task_ends[task - 1]; i < run.task_ends[task]; i++) {
    const AttentionPiece& piece = run.pieces[i];
    AttentionItem item = item_of(run, piece.item);
    item.begin = piece.begin;
    item.end = piece.end;
    if (piece.partial >= 0) item.partials = run.partials + piece.partial;
    const int next = piece.item / run.call->num_kv_heads + 1;
    if (next < run.num_tiles && run.tiles[next].request != item.tile.request) item.next = run.tiles + next;
    run.kernels->run(&item);
  }
}

void merge_task(const AttentionRun& run, int task) {
  const CutItem& cut = run.cuts[task / run.merge_ways];
  AttentionMerge merge{item_of(run, run.pieces[cut.first_piece].item), run.pieces + cut.first_piece, cut.pieces,
                       run.partials, 0, 0};
  const int vectors = merge.item.tile.count * (run.call->num_heads / run.call->num_kv_heads);
  const int way = task % run.merge_ways;
  merge.first = vectors * way / run.merge_ways;
  merge.last = vectors * (way + 1) / run.merge_ways;
  if (merge.first < merge.last) run.kernels->merge(&merge);
}

// Query vectors of a tile: as many as the kernels take, if tiles and their partitions are enough to keep all threads busy.
// Example: 512 rows of 32 heads see two partitions: 32768 vectors, and 16 tiles of 512 for each of two threads; 106 rows of 8 heads that see one
// partition are in tiles of 32 on 16 threads; 8 rows of 32 heads behind 16384 tokens are one tile for each head, cut at partitions.
int tile_vectors(const AttentionKernels& kernels, const AttentionCall& call, const BatchView& batch, int threads) {
  int most = kernels.vectors;
  if (most <= FEWEST_VECTORS) return most;
  int64_t vectors = 0;  // once for each partition that they see
  for (int r = 0; r < batch.requests; r++) {
    const RequestRows rows(batch, r, call.window, call.whole != 0);
    if (rows.rows() == 0) continue;
    const Reach reach = reach_of(rows, 0, rows.rows());
    vectors += int64_t(rows.rows()) * call.num_heads * (reach.high / PARTITION + 1 - reach.low / PARTITION);
  }
  while (most > FEWEST_VECTORS && vectors < int64_t(most) * threads * TILES_PER_THREAD) most /= 2;
  return most;
}

}  // namespace

AttentionRun attention_plan(DType dtype, const AttentionCall* call, const BatchView* batch, int threads, int per_thread,
                            int64_t serial) {
  static thread_local Memory memory;
  AttentionRun run{};
  run.call = call;
  run.batch = batch;
  run.kernels = &attention_kernels(dtype, call->kv_dtype);
  const int heads = call->num_kv_heads, group = call->num_heads / heads;
  run.tile_rows = std::max(1, tile_vectors(*run.kernels, *call, *batch, threads) / group);
  memory.tiles.clear();
  memory.work.clear();
  int64_t total = 0;
  for (int r = 0; r < batch->requests; r++) {
    const RequestRows rows(*batch, r, call->window, call->whole != 0);
    for (int first = 0; first < rows.rows(); first += run.tile_rows) {
      const int count = std::min(run.tile_rows, rows.rows() - first);
      const Reach reach = reach_of(rows, first, count);
      const QueryTile tile{r, first, count, reach.low / PARTITION, reach.high / PARTITION + 1};
      // all rows of a tree are scored, whether they lie on a path or not
      const int64_t keys = reach.high + 1 - reach.low + (rows.tree ? rows.own_keys : 0);
      memory.tiles.push_back(tile);
      memory.work.push_back(TileWork{reach.low, keys, count * group + KEY_COST});
      total += memory.work.back().total() * heads;
      run.most_partitions = std::max(run.most_partitions, tile.end - tile.begin);
    }
  }
  run.tiles = memory.tiles.data();
  run.num_tiles = int(memory.tiles.size());
  const int64_t products = total * call->head_dim;
  if (products < serial) threads = 1;
  run.one_thread = threads == 1;
  if (run.num_tiles == 0) return run;

  const int64_t wanted = std::max<int64_t>(threads, std::min<int64_t>(products / TASK_PRODUCTS, threads * per_thread));
  const Cutter cutter{run, memory, heads, double(total) / double(threads == 1 ? 1 : wanted)};
  cutter.cut(threads > 1 && cutter.unevenness(threads) > UNEVEN);
  place_partials(run, memory);
  run.pieces = memory.pieces.data();
  run.num_pieces = int(memory.pieces.size());
  run.task_ends = memory.task_ends.data();
  run.cuts = memory.cuts.data();
  run.tasks[0] = int(memory.task_ends.size());
  if (!memory.cuts.empty()) {
    const int cuts = int(memory.cuts.size());
    run.partials = floats_in(memory.partials, run.partial_floats);
    run.merge_ways = std::min(run.tile_rows * group, (threads + cuts - 1) / cuts);
    run.tasks[1] = cuts * run.merge_ways;
  }
  return run;
}

void attention_task(const AttentionRun* run, int phase, int task) {
  if (phase == 0)
    run_task(*run, task);
  else
    merge_task(*run, task);
}

}  // namespace dw

// The pieces of a call, as 8 numbers each: task, request, first row, rows, key/value head, partitions [begin, end), and whether
// the item was cut. Returns how many there are; writes those that `capacity` holds. `partial_bytes`: memory for states of pieces.
DW_EXPORT int64_t dw_attention_plan(int dtype, const dw::AttentionCall* call, const dw::BatchView* batch, int threads,
                                    int per_thread, int32_t* out, int64_t capacity, int64_t* partial_bytes) {
  return dw::guarded([&] {
    const dw::AttentionRun run = dw::attention_plan((dw::DType)dtype, call, batch, threads, per_thread, 0);
    int task = 0;
    for (int i = 0; i < run.num_pieces && i < capacity; i++) {
      while (run.task_ends[task] <= i) task++;
      const dw::AttentionPiece& piece = run.pieces[i];
      const dw::QueryTile& tile = run.tiles[piece.item / call->num_kv_heads];
      const int32_t row[8] = {task, tile.request, tile.first, tile.count, piece.item % call->num_kv_heads,
                              piece.begin, piece.end, piece.partial >= 0};
      std::copy(row, row + 8, out + 8 * i);
    }
    *partial_bytes = run.partial_floats * (int64_t)sizeof(float);
    return int64_t(run.num_pieces);
  });
}
