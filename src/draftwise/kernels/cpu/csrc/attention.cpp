#include "attention.h"

#include <cstdlib>
#include <new>

#include "boundary.h"

namespace dw {
namespace {

constexpr int TILE_VECTORS = 16;       // query vectors (rows x heads of a group) of a tile: their scratch stays in cache
constexpr int64_t SERIAL = 1 << 16;    // products of a pass below which one thread does it alone
constexpr int64_t MAX_PARTIALS = 1 << 22;  // floats

const AttentionKernels& kernels(DType dtype, int kv_dtype) {
  int i = dtype == BF16 ? 1 : 0;
  switch (isa_of_vectors()) {
#if DW_HAVE_AVX512
    case ISA_AVX512: return attention_kernels_avx512[i][kv_dtype];
#endif
#if DW_HAVE_AVX512VNNI
    case ISA_AVX512VNNI: return attention_kernels_avx512vnni[i][kv_dtype];
#endif
#if DW_HAVE_AVX2
    case ISA_AVX2: return attention_kernels_avx2[i][kv_dtype];
#endif
    default: return attention_kernels_portable[i][kv_dtype];
  }
}

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// Memory of one thread that grows and is kept.
struct Buffer {
  float* data = nullptr;
  int64_t size = 0;
  float* at_least(int64_t floats) {
    if (floats > size) {
      free(data);
      size = 0;
      const int64_t wanted = padded(floats + floats / 2);
      data = (float*)aligned_alloc(64, (size_t)wanted * sizeof(float));
      if (data == nullptr) throw std::bad_alloc();
      size = wanted;
    }
    return data;
  }
  ~Buffer() { free(data); }
};

float* scratch(int64_t floats) {
  static thread_local Buffer buffer;
  return buffer.at_least(floats);
}

// Partitions of a tile: up to the one of its last row (a tree's rows stand no further than a chain of as many).
int num_partitions(const AttentionRun& run, const Tile& tile) {
  const BatchView& batch = *run.batch;
  int before = batch.tree_start != nullptr ? batch.tree_start[tile.request] : 0;
  int keys = batch.context_len[tile.request] + before + tile.first + tile.count;
  return (keys + PARTITION - 1) / PARTITION;
}

AttentionItem item_of(const AttentionRun& run, int index) {
  const Tile& tile = run.tiles[index / run.call->num_kv_heads];
  AttentionItem item{};
  item.call = run.call;
  item.batch = run.batch;
  item.tile = tile;
  item.head = index % run.call->num_kv_heads;
  item.begin = 0;
  item.end = num_partitions(run, tile);
  item.scratch = scratch(attention_scratch_floats(run.call, run.tile_rows));
  const int next = index / run.call->num_kv_heads + 1;
  item.next_request = next < run.num_tiles && run.tiles[next].request != tile.request ? run.tiles[next].request : -1;
  if (run.partials != nullptr) item.partials = run.partials + index * run.partial_stride;
  return item;
}

void run_piece(const AttentionRun& run, int task) {
  AttentionItem item = item_of(run, task / run.splits);
  if (run.splits > 1) {
    // piece s of P partitions: [s P / S, (s + 1) P / S)
    int64_t parts = item.end, s = task % run.splits;
    item.begin = (int32_t)(s * parts / run.splits);
    item.end = (int32_t)((s + 1) * parts / run.splits);
    if (item.begin == item.end) return;
    int vectors = item.tile.count * (run.call->num_heads / run.call->num_kv_heads);
    item.partials += (int64_t)item.begin * vectors * (padded(run.call->head_dim) + 2);
  }
  run.kernels->run(&item);
}

void merge_pieces(const AttentionRun& run, int task) {
  AttentionItem item = item_of(run, task);
  run.kernels->merge(&item);
}

}  // namespace

int64_t attention_scratch_floats(const AttentionCall* call, int tile_rows) {
  int64_t dim = padded(call->head_dim), m = (int64_t)tile_rows * (call->num_heads / call->num_kv_heads);
  return 3 * m * dim + 64 * dim + m * PARTITION + m * MAX_TREE_ROWS + 2 * padded(m) + 2 * PARTITION + MAX_TREE_ROWS;
}

int64_t attention_partial_floats(const AttentionCall* call, int tile_rows) {
  return (int64_t)tile_rows * (call->num_heads / call->num_kv_heads) * (padded(call->head_dim) + 2);
}

AttentionRun attention_plan(DType dtype, const AttentionCall* call, const BatchView* batch, int threads,
                            int64_t serial) {
  int group = call->num_heads / call->num_kv_heads;
  int tile_rows = TILE_VECTORS / group;
  if (tile_rows < 1) tile_rows = 1;
  AttentionRun run{call, batch, &kernels(dtype, call->kv_dtype), nullptr, 0, tile_rows, 1, 0, nullptr, {0, 0}, false};

  static thread_local Buffer tile_buffer, partial_buffer;
  int64_t num_tiles = 0, work = 0;
  int most_parts = 0;
  for (int r = 0; r < batch->requests; r++) {
    int rows = batch->query_start[r + 1] - batch->query_start[r];
    num_tiles += (rows + tile_rows - 1) / tile_rows;
    int64_t keys = batch->context_len[r] + batch->own_keys(r);
    int parts = (int)((keys + PARTITION - 1) / PARTITION);
    if (call->window > 0 && keys > call->window + rows) keys = call->window + rows;
    work += keys * (rows + 2) * call->num_heads * call->head_dim;
    if (parts > most_parts) most_parts = parts;
  }
  Tile* tiles = (Tile*)tile_buffer.at_least(num_tiles * (int64_t)(sizeof(Tile) / sizeof(float)));
  int64_t t = 0;
  for (int r = 0; r < batch->requests; r++) {
    int rows = batch->query_start[r + 1] - batch->query_start[r];
    for (int first = 0; first < rows; first += tile_rows)
      tiles[t++] = Tile{r, first, rows - first < tile_rows ? rows - first : tile_rows};
  }
  run.tiles = tiles;
  run.num_tiles = (int)num_tiles;
  int items = (int)num_tiles * call->num_kv_heads;
  if (work < serial) threads = 1;
  // Cut along the keys only where requests and heads do not keep every thread busy.
  if (threads > 1 && most_parts > 1 && items < 4 * threads && items % threads != 0) {
    run.splits = (4 * threads + items - 1) / items;
    if (run.splits > most_parts) run.splits = most_parts;
    run.partial_stride = most_parts * attention_partial_floats(call, tile_rows);
    if (items * run.partial_stride > MAX_PARTIALS) run.splits = 1;
  }
  run.tasks[0] = items * run.splits;
  if (run.splits > 1) {
    run.partials = partial_buffer.at_least(items * run.partial_stride);
    run.tasks[1] = items;
  }
  if (threads == 1) run.one_thread = true;
  return run;
}

void attention_task(const AttentionRun* run, int phase, int task) {
  if (phase == 0) {
    run_piece(*run, task);
  } else {
    merge_pieces(*run, task);
  }
}

void attention(Pool* pool, DType dtype, const AttentionCall* call, const BatchView* batch) {
  AttentionRun run = attention_plan(dtype, call, batch, pool_threads(pool), SERIAL);
  Pool* workers = run.one_thread ? nullptr : pool;
  parallel_for(workers, run.tasks[0], [](void* arg, int task, int) { run_piece(*(AttentionRun*)arg, task); }, &run);
  parallel_for(workers, run.tasks[1], [](void* arg, int task, int) { merge_pieces(*(AttentionRun*)arg, task); }, &run);
}

}  // namespace dw

DW_EXPORT void dw_attention(dw::Pool* pool, int dtype, const dw::AttentionCall* call, const dw::BatchView* batch) {
  dw::guarded([&] { dw::attention(pool, (dw::DType)dtype, call, batch); });
}
