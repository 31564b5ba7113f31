// The blocking of the product and its split among threads. Packing is in linear_pack.cpp (weights) and linear_rows.h, the arithmetic in
// linear_*.cpp by instruction set.
#include "linear.h"

#include <algorithm>
#include <atomic>

#include "boundary.h"
#include "isa.h"
#include "linear_part.h"
#include "linear_rows.h"

namespace dw {
namespace {

// A pass: one call, cut into tasks of consecutive panels.
struct Pass {
  const LinearCall* call;
  const LinearKernels* kernels;
  void* packed;        // all rows, packed for all threads, or null: each thread packs for itself
  uint64_t id;
  int tasks;
  Tiles tiles;
  const uint8_t* after = nullptr;  // what is read when a task is done
  int threads = 0;                 // which take tasks one after the other; 0: each has its own
};

std::atomic<uint64_t> g_pass{0};
thread_local Scratch t_rows, t_shared_rows, t_sums;
thread_local uint64_t t_rows_pass = 0;  // whose rows t_rows holds
thread_local const uint8_t* t_prefetched = nullptr;  // weights that the last task's tiles have prefetched

PackedRows packed_rows(const Pass& pass) {
  const LinearCall& c = *pass.call;
  const Linear& w = *c.weights;
  const LinearKernels& kernels = *pass.kernels;
  if (pass.packed != nullptr) return PackedRows(pass.packed, kernels, w, c.rows);
  PackedRows packed(t_rows.reserve(PackedRows::bytes(kernels, w, c.rows)), kernels, w, c.rows);
  if (t_rows_pass == pass.id) return packed;
  for (int tile = 0; tile < pass.tiles.count; ++tile)
    pack_tile(c, *pass.kernels, pass.tiles.begin(tile), pass.tiles.begin(tile + 1), packed);
  t_rows_pass = pass.id;
  return packed;
}

void pack_tile_task(void* raw, int tile, int) {
  const Pass& pass = *static_cast<Pass*>(raw);
  PackedRows packed(pass.packed, *pass.kernels, *pass.call->weights, pass.call->rows);
  pack_tile(*pass.call, *pass.kernels, pass.tiles.begin(tile), pass.tiles.begin(tile + 1), packed);
}

void finish_panel(const Pass& pass, int64_t panel, int64_t row, int rows, const float* sums, int64_t sums_stride,
                  const PackedRows& packed) {
  const LinearCall& c = *pass.call;
  const Linear& w = *c.weights;
  Finish f;
  f.sums = sums;
  f.sums_stride = sums_stride;
  f.integers = w.format == W_I8_DYN;
  f.scale = w.scale == nullptr ? nullptr : w.scale + panel * kPanel;
  f.row_scale = is_dynamic(w.format) ? packed.scale + row : nullptr;
  f.bias = w.bias == nullptr ? nullptr : w.bias + panel * kPanel;
  f.out = static_cast<uint8_t*>(c.out) + row * c.ldo * element_bytes(c.io_out);
  f.ldo = c.ldo;
  f.dtype = c.io_out;
  f.rows = rows;
  f.epilogue = c.epilogue;
  int64_t half = w.outputs / 2, limit = w.paired ? half : w.outputs;
  int64_t first = w.paired ? panel * 16 : panel * kPanel;
  f.column[0] = first;
  f.column[1] = w.paired ? half + first : first + 16;
  f.count[0] = int(std::clamp<int64_t>(limit - first, 0, 16));
  f.count[1] = w.paired ? f.count[0] : int(std::clamp<int64_t>(limit - first - 16, 0, 16));
  pass.kernels->finish(f);
}

constexpr int64_t kRowBlockBytes = 20 << 10;   // of a tile's rows that should stay in the first-level cache
constexpr int64_t kSumBytes = 160 << 10;       // of partial sums that should stay in the second-level cache

void run_panels(void* raw, int task, int) {
  const Pass& pass = *static_cast<Pass*>(raw);
  const LinearCall& c = *pass.call;
  const Linear& w = *c.weights;
  const LinearKernels& kernels = *pass.kernels;
  int64_t first = w.panels * task / pass.tasks, last = w.panels * (task + 1) / pass.tasks;
  if (first == last) return;
  PackedRows packed = packed_rows(pass);
  const Tiles& tiles = pass.tiles;
  int64_t tile_rows = (c.rows + tiles.count - 1) / tiles.count;
  int64_t step = tile_rows <= kernels.pair_rows[w.format] ? 2 : 1;
  int64_t block = w.units, row_bytes = tile_rows * w.steps() * (has_wide_rows(kernels, w.format, tile_rows) ? 8 : 4);
  if (row_bytes > kRowBlockBytes + kRowBlockBytes / 2) {
    int64_t blocks = (row_bytes + kRowBlockBytes - 1) / kRowBlockBytes;
    block = (w.units + blocks - 1) / blocks;
    // Whole groups; of plain rows, whole chunks.
    int64_t whole = is_grouped(w.format)          ? w.group_units
                    : kernels.plain_rows[w.format] ? kChunkDwords / steps_per_unit(w.format)
                                                   : 1;
    block = (block + whole - 1) / whole * whole;
  }
  int64_t group = step;
  if (block < w.units) group = std::max(step, kSumBytes / (c.rows * kPanel * 4) / step * step);
  auto* sums = static_cast<float*>(t_sums.reserve(size_t(std::min(group, last - first) * c.rows * kPanel) * 4));
  void (*kernel)(const Tile&) = kernels.tile[w.format];
  const int64_t stride = w.panel_bytes(), steps = steps_per_unit(w.format), row_dwords = row_steps(kernels, w);
  const bool plain = kernels.plain_rows[w.format];
  // Threads mostly take turns. Another one's task in its place costs a little bandwidth.
  const uint8_t* after = pass.after;
  if (pass.threads > 0 && task + pass.threads < pass.tasks)
    after = w.weights + w.panels * (task + pass.threads) / pass.tasks * stride;
  const bool sharing = tiles.count > 1 || reaches(kernels.again_from[w.format], tile_rows);
  bool cold = t_prefetched != w.weights + first * stride;
  t_prefetched = sharing ? after : nullptr;

  for (int64_t g = first; g < last; g += group) {
    int64_t group_end = std::min(g + group, last);
    for (int64_t u = 0; u < w.units; u += block) {
      int64_t units = std::min(block, w.units - u);
      bool done = u + units == w.units;
      for (int64_t p = g; p < group_end; p += step) {
        int64_t panels = std::min(step, group_end - p);
        Tile t;
        t.w = w.weights + p * stride + w.offset(u);
        t.panel_stride = stride;
        t.units = units;
        t.bytes = w.offset(u + units) - w.offset(u);
        t.load = u > 0;
        t.panels = int(panels);
        t.group_units = w.group_units;
        t.zeros = w.zeros;
        t.nibbles = w.nibbles;
        t.next_w = nullptr;
        if (p + panels < group_end)
          t.next_w = w.weights + (p + panels) * stride + w.offset(u);
        else if (!done)
          t.next_w = w.weights + g * stride + w.offset(u + units);
        else if (group_end < last)
          t.next_w = w.weights + group_end * stride;
        else
          t.next_w = after;
        // Memory is to be busy all the time, although the first tile alone reads these weights from there: all tiles share the
        // prefetching of the next ones. Where nobody has prefetched these, the first tile does.
        const int begin = cold ? 1 : 0;
        cold = false;
        for (int tile = 0; tile < tiles.count; ++tile) {
          const bool shared = sharing && tile >= begin && t.next_w != nullptr;
          t.share = tile - begin;
          t.shares = shared ? tiles.count - begin : 0;
          int64_t row = tiles.begin(tile);
          int rows = int(tiles.begin(tile + 1) - row);
          t.rows = rows;
          const int64_t step_dwords = plain ? 1 : has_wide_rows(kernels, w.format, rows) ? 2 * rows : rows;
          t.x = packed.steps + row * row_dwords + u * steps * step_dwords;
          t.x_stride = row_dwords * 4;
          t.x_sums = packed.sums + row * w.groups() + (is_grouped(w.format) ? u / w.group_units * rows : 0);
          // the sums of one tile lie together, [rows][32 * panels]
          t.sums = sums + (p - g) * c.rows * kPanel + row * kPanel * panels;
          kernel(t);
          if (done)
            for (int64_t i = 0; i < panels; ++i)
              finish_panel(pass, p + i, row, rows, t.sums + i * kPanel, kPanel * panels, packed);
        }
      }
    }
  }
  if (kernels.release != nullptr) kernels.release();
}

constexpr int64_t kTaskBytes = 48 << 10;  // of weights; less than this per task does not pay for the handover
constexpr int64_t kSharedRows = 16;       // from so many rows on they are packed once for all threads

}  // namespace

const LinearKernels& linear_kernels() {
  switch (isa_current()) {
#if DW_HAVE_EMULATED
    case ISA_EMULATED:
      return linear_emulated;
#endif
#if DW_HAVE_NEON
    case ISA_NEON:
      return linear_neon;
#endif
#if DW_HAVE_DOTPROD
    case ISA_DOTPROD:
      return linear_dotprod;
#endif
#if DW_HAVE_I8MM
    case ISA_I8MM:
      return linear_i8mm;
#endif
#if DW_HAVE_AMX
    case ISA_AMX:
      return linear_amx;
#endif
#if DW_HAVE_AVX512
    case ISA_AVX512:
      return linear_avx512;
#endif
#if DW_HAVE_AVX512VNNI
    case ISA_AVX512VNNI:
      return linear_avx512vnni;
#endif
#if DW_HAVE_AVXVNNI
    case ISA_AVXVNNI:
      return linear_avxvnni;
#endif
#if DW_HAVE_AVX2
    case ISA_AVX2:
      return linear_avx2;
#endif
    default:
      return linear_portable;
  }
}

// One row is its own packing, unless it must be padded or quantised.
static bool one_row_as_it_is(const LinearKernels& kernels, const LinearCall* call) {
  const Linear& w = *call->weights;
  if (kernels.plain_rows[w.format] && w.steps() % kChunkDwords != 0) return false;
  return call->rows == 1 && reinterpret_cast<uintptr_t>(call->x) % 4 == 0 &&
         w.inputs == w.units * k_per_unit(w.format) && !is_dynamic(w.format) && !is_grouped(w.format);
}

// Into how many tasks a product is cut: more than there are threads, so that one that was interrupted does not hold up the rest, but
// of so even sizes that nobody waits at the end: panels are not cut.
// Example: 8 panels, 2 threads, weights for 7 tasks. Seven would be six of one panel and one of two, and with the last one a thread
// has 5 panels, the other 3. Six are no better: 2 * 3 = 6 at worst. Four tasks of two panels are 4 and 4.
static int64_t tasks_of(const Linear& w, int64_t rows, int64_t threads) {
  const int64_t bytes = w.panels * w.panel_bytes();
  int64_t most = std::min<int64_t>(bytes / kTaskBytes, threads * 8);
  if (most < threads) most = rows * bytes >= 4 * kTaskBytes ? threads : most;
  most = std::clamp<int64_t>(most, 1, w.panels);
  if (most < threads) return most;
  const auto longest = [&](int64_t tasks) { return (w.panels + tasks - 1) / tasks * (tasks / threads); };  // panels of a thread
  int64_t best = threads;
  for (int64_t tasks = most / threads * threads; tasks > threads; tasks -= threads) {
    if (longest(tasks) * threads * 10 <= w.panels * 11) return tasks;
    if (longest(tasks) < longest(best)) best = tasks;
  }
  return best;
}

void linear_run(Pool* pool, const LinearCall* call) {
  const Linear& w = *call->weights;
  if (call->rows <= 0) return;
  const LinearKernels& kernels = linear_kernels();
  const int64_t tasks = tasks_of(w, call->rows, pool_threads(pool));
  Pass pass{call, &kernels, nullptr, g_pass.fetch_add(1, std::memory_order_relaxed) + 1, int(tasks),
            Tiles(call->rows, kernels.tile_rows[w.format]), nullptr, pool_threads(pool)};
  if (one_row_as_it_is(kernels, call)) {
    pass.packed = const_cast<void*>(call->x);
  } else if (call->rows >= kSharedRows) {
    pass.packed = t_shared_rows.reserve(PackedRows::bytes(kernels, w, call->rows));
    parallel_for(pool, pass.tiles.count, pack_tile_task, &pass);
  }
  parallel_for(pool, int(tasks), run_panels, &pass);
}

void linear_run_part(const LinearCall* call, int part, int parts) { linear_run_part_before(call, part, parts, nullptr); }

const uint8_t* linear_part(const Linear* w, int part, int parts) {
  return w->weights + w->panels * part / parts * w->panel_bytes();
}

void linear_run_part_before(const LinearCall* call, int part, int parts, const uint8_t* after) {
  if (call->rows <= 0) return;
  const LinearKernels& kernels = linear_kernels();
  Pass pass{call, &kernels, nullptr, g_pass.fetch_add(1, std::memory_order_relaxed) + 1, parts,
            Tiles(call->rows, kernels.tile_rows[call->weights->format]), after};
  if (one_row_as_it_is(kernels, call)) pass.packed = const_cast<void*>(call->x);
  run_panels(&pass, part, 0);
}

void linear_forward(Pool* pool, const Linear* w, const void* x, int64_t ldx, void* out, int64_t ldo, DType io_out,
                    int64_t rows) {
  LinearCall call{w, x, ldx, out, ldo, io_out, rows, EP_STORE};
  linear_run(pool, &call);
}

}  // namespace dw

using dw::Linear;

DW_EXPORT void dw_linear_run(void* pool, const void* weights, const void* x, int64_t ldx, void* out, int64_t ldo,
                             int io_out, int64_t rows, int epilogue) {
  dw::LinearCall call{static_cast<const Linear*>(weights), x, ldx, out, ldo, dw::DType(io_out), rows,
                      dw::Epilogue(epilogue)};
  dw::guarded([&] { dw::linear_run(static_cast<dw::Pool*>(pool), &call); });
}
