// Packing of weights, blocking of the product, and the split among threads. The arithmetic is in linear_*.cpp.
#include "linear.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "isa.h"
#include "linear_kernels.h"
#include "memory.h"

namespace dw {

struct Linear {
  Format format;
  DType input;
  bool paired;          // gate | up: panels hold 16 gates and their 16 ups
  int64_t outputs;      // N
  int64_t inputs;       // K
  int64_t units;        // of a panel, the last one padded with zeros
  int64_t panels;
  uint8_t* weights;     // [panels][units][32] dwords
  float* bias;          // [panels * 32] or null
  int64_t panel_bytes() const { return units * kUnitBytes; }
};

namespace {

int k_per_unit(Format format) { return format == W_F32 ? 1 : format == W_BF16 ? 2 : 4; }
int64_t element_bytes(DType dtype) { return dtype == F32 ? 4 : dtype == I8 ? 1 : 2; }

// Which row of the weight stands in lane j of panel p; -1 for padding. Paired, N = 80, panel 1: lanes 0..15 are gates
// 16..31, lanes 16..31 are ups 16..31, rows 56..71.
int64_t source_row(const Linear& w, int64_t p, int j) {
  if (!w.paired) {
    int64_t n = p * kPanel + j;
    return n < w.outputs ? n : -1;
  }
  int64_t half = w.outputs / 2, n = p * 16 + j % 16;
  if (n >= half) return -1;
  return j < 16 ? n : half + n;
}

// ------------------------------------------------------------------------------------------------ packing

struct PackJob {
  Linear* w;
  const uint8_t* source;
  int64_t row_bytes;
};

void pack_panel(void* raw, int p, int) {
  const PackJob& job = *static_cast<PackJob*>(raw);
  Linear& w = *job.w;
  uint8_t* panel = w.weights + int64_t(p) * w.panel_bytes();
  int64_t bytes = w.inputs * (4 / k_per_unit(w.format));  // of one source row
  for (int j = 0; j < kPanel; ++j) {
    int64_t n = source_row(w, p, j);
    if (n < 0) {
      for (int64_t u = 0; u < w.units; ++u) std::memset(panel + u * kUnitBytes + j * 4, 0, 4);
      continue;
    }
    const uint8_t* row = job.source + n * job.row_bytes;
    int64_t whole = bytes / 4;
    for (int64_t u = 0; u < whole; ++u) std::memcpy(panel + u * kUnitBytes + j * 4, row + u * 4, 4);
    if (whole < w.units) {
      uint32_t last = 0;
      std::memcpy(&last, row + whole * 4, size_t(bytes - whole * 4));
      std::memcpy(panel + whole * kUnitBytes + j * 4, &last, 4);
    }
  }
}

// --------------------------------------------------------------------------------------------------- rows

// Rows are cut into tiles of nearly equal height: 9 rows in tiles of at most 8 are 5 + 4.
struct Tiles {
  int count;
  int64_t rows;
  Tiles(int64_t rows, int limit) : count(int((rows + limit - 1) / limit)), rows(rows) {}
  int64_t begin(int tile) const { return rows * tile / count; }
};

void pack_tile(const LinearCall& c, int64_t units, int64_t begin, int64_t end, uint32_t* packed) {
  int64_t bytes = c.weights->inputs * element_bytes(c.weights->input);
  int64_t whole = bytes / 4, height = end - begin;
  for (int64_t r = 0; r < height; ++r) {
    const uint8_t* row = static_cast<const uint8_t*>(c.x) + (begin + r) * c.ldx * element_bytes(c.weights->input);
    for (int64_t u = 0; u < whole; ++u) std::memcpy(&packed[u * height + r], row + u * 4, 4);
    if (whole < units) {
      uint32_t last = 0;
      std::memcpy(&last, row + whole * 4, size_t(bytes - whole * 4));
      packed[whole * height + r] = last;
    }
  }
}

// A pass: one call, cut into tasks of consecutive panels.
struct Pass {
  const LinearCall* call;
  const LinearKernels* kernels;
  const uint32_t* packed;  // all rows' tiles, or null: each task packs for itself
  uint64_t id;
  int tasks;
  Tiles tiles;
};

std::atomic<uint64_t> g_pass{0};
thread_local Scratch t_rows, t_shared_rows, t_sums;
thread_local uint64_t t_rows_pass = 0;  // whose rows t_rows holds

const uint32_t* packed_rows(const Pass& pass) {
  const LinearCall& c = *pass.call;
  const Linear& w = *c.weights;
  if (pass.packed != nullptr) return pass.packed;
  auto* packed = static_cast<uint32_t*>(t_rows.reserve(size_t(c.rows * w.units) * 4));
  if (t_rows_pass == pass.id) return packed;
  for (int tile = 0; tile < pass.tiles.count; ++tile) {
    int64_t begin = pass.tiles.begin(tile);
    pack_tile(c, w.units, begin, pass.tiles.begin(tile + 1), packed + begin * w.units);
  }
  t_rows_pass = pass.id;
  return packed;
}

void pack_tile_task(void* raw, int tile, int) {
  const Pass& pass = *static_cast<Pass*>(raw);
  int64_t begin = pass.tiles.begin(tile), units = pass.call->weights->units;
  pack_tile(*pass.call, units, begin, pass.tiles.begin(tile + 1), const_cast<uint32_t*>(pass.packed) + begin * units);
}

void finish_panel(const Pass& pass, int64_t panel, int64_t row, int rows, const float* sums, int64_t sums_stride) {
  const LinearCall& c = *pass.call;
  const Linear& w = *c.weights;
  Finish f;
  f.sums = sums;
  f.sums_stride = sums_stride;
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
  const uint32_t* packed = packed_rows(pass);
  const Tiles& tiles = pass.tiles;
  int64_t tile_rows = (c.rows + tiles.count - 1) / tiles.count;
  int64_t step = tile_rows <= kernels.pair_rows ? 2 : 1;
  int64_t block = w.units;
  if (tile_rows * w.units * 4 > kRowBlockBytes + kRowBlockBytes / 2) {
    int64_t blocks = (tile_rows * w.units * 4 + kRowBlockBytes - 1) / kRowBlockBytes;
    block = (w.units + blocks - 1) / blocks;
  }
  int64_t group = step;
  if (block < w.units) group = std::max(step, kSumBytes / (c.rows * kPanel * 4) / step * step);
  auto* sums = static_cast<float*>(t_sums.reserve(size_t(std::min(group, last - first) * c.rows * kPanel) * 4));
  void (*kernel)(const Tile&) = w.format == W_F32 ? kernels.f32 : kernels.bf16;

  for (int64_t g = first; g < last; g += group) {
    int64_t group_end = std::min(g + group, last);
    for (int64_t u = 0; u < w.units; u += block) {
      int64_t units = std::min(block, w.units - u);
      bool done = u + units == w.units;
      for (int64_t p = g; p < group_end; p += step) {
        int64_t panels = std::min(step, group_end - p);
        Tile t;
        t.w = w.weights + p * w.panel_bytes() + u * kUnitBytes;
        t.panel_stride = w.panel_bytes();
        t.units = units;
        t.load = u > 0;
        t.panels = int(panels);
        t.next_w = nullptr;
        if (p + panels < group_end)
          t.next_w = w.weights + (p + panels) * w.panel_bytes() + u * kUnitBytes;
        else if (!done)
          t.next_w = w.weights + g * w.panel_bytes() + (u + units) * kUnitBytes;
        else if (group_end < last)
          t.next_w = w.weights + group_end * w.panel_bytes();
        for (int tile = 0; tile < tiles.count; ++tile) {
          int64_t row = tiles.begin(tile);
          int rows = int(tiles.begin(tile + 1) - row);
          t.rows = rows;
          t.x = packed + row * w.units + u * rows;
          // the sums of one tile lie together, [rows][32 * panels]
          t.sums = sums + (p - g) * c.rows * kPanel + row * kPanel * panels;
          kernel(t);
          if (done)
            for (int64_t i = 0; i < panels; ++i)
              finish_panel(pass, p + i, row, rows, t.sums + i * kPanel, kPanel * panels);
        }
      }
    }
  }
}

constexpr int64_t kTaskBytes = 48 << 10;  // of weights; less than this per task does not pay for the handover
constexpr int64_t kSharedRows = 16;       // from so many rows on they are packed once for all threads

}  // namespace

Linear* linear_pack(Pool* pool, Format format, const void* weight, int64_t ldw, const float* bias, int64_t outputs,
                    int64_t inputs, bool paired) {
  if ((format != W_F32 && format != W_BF16) || outputs < 1 || inputs < 1 || (paired && outputs % 2 != 0))
    return nullptr;
  auto* w = new (std::nothrow) Linear{};
  if (w == nullptr) return nullptr;
  w->format = format;
  w->input = format == W_F32 ? F32 : BF16;
  w->paired = paired;
  w->outputs = outputs;
  w->inputs = inputs;
  int kpu = k_per_unit(format);
  w->units = (inputs + kpu - 1) / kpu;
  w->panels = paired ? (outputs / 2 + 15) / 16 : (outputs + kPanel - 1) / kPanel;
  w->weights = static_cast<uint8_t*>(big_alloc(size_t(w->panels * w->panel_bytes())));
  if (bias != nullptr) w->bias = static_cast<float*>(big_alloc(size_t(w->panels * kPanel) * 4));
  if (w->weights == nullptr || (bias != nullptr && w->bias == nullptr)) {
    linear_free(w);
    return nullptr;
  }
  PackJob job{w, static_cast<const uint8_t*>(weight), ldw * element_bytes(w->input)};
  parallel_for(pool, int(w->panels), pack_panel, &job);
  if (bias != nullptr)
    for (int64_t p = 0; p < w->panels; ++p)
      for (int j = 0; j < kPanel; ++j) {
        int64_t n = source_row(*w, p, j);
        w->bias[p * kPanel + j] = n < 0 ? 0.0f : bias[n];
      }
  return w;
}

void linear_free(Linear* w) {
  if (w == nullptr) return;
  big_free(w->weights);
  big_free(w->bias);
  delete w;
}

int64_t linear_outputs(const Linear* w) { return w->outputs; }
int64_t linear_inputs(const Linear* w) { return w->inputs; }
DType linear_input_dtype(const Linear* w) { return w->input; }
int64_t linear_bytes(const Linear* w) { return w->panels * (w->panel_bytes() + (w->bias == nullptr ? 0 : kPanel * 4)); }

const LinearKernels& linear_kernels() {
  switch (isa_current()) {
#if DW_HAVE_AVX512
    case ISA_AVX512:
      return linear_avx512;
#endif
#if DW_HAVE_AVX2
    case ISA_AVX2:
      return linear_avx2;
#endif
    default:
      return linear_portable;
  }
}

void linear_run(Pool* pool, const LinearCall* call) {
  const Linear& w = *call->weights;
  if (call->rows <= 0) return;
  const LinearKernels& kernels = linear_kernels();
  int64_t bytes = w.panels * w.panel_bytes();
  // more tasks than threads, so that a thread that was interrupted does not hold up the rest
  int64_t tasks = std::min<int64_t>(bytes / kTaskBytes, pool_threads(pool) * 8);
  if (tasks < pool_threads(pool)) tasks = call->rows * bytes >= 4 * kTaskBytes ? pool_threads(pool) : tasks;
  tasks = std::clamp<int64_t>(tasks, 1, w.panels);
  Pass pass{call, &kernels, nullptr, g_pass.fetch_add(1, std::memory_order_relaxed) + 1, int(tasks),
            Tiles(call->rows, kernels.tile_rows)};
  bool aligned = reinterpret_cast<uintptr_t>(call->x) % 4 == 0;
  if (call->rows == 1 && aligned && w.inputs % k_per_unit(w.format) == 0) {
    pass.packed = static_cast<const uint32_t*>(call->x);  // one row is its own packing
  } else if (call->rows >= kSharedRows) {
    pass.packed = static_cast<uint32_t*>(t_shared_rows.reserve(size_t(call->rows * w.units) * 4));
    parallel_for(pool, pass.tiles.count, pack_tile_task, &pass);
  }
  parallel_for(pool, int(tasks), run_panels, &pass);
}

void linear_forward(Pool* pool, const Linear* w, const void* x, int64_t ldx, void* out, int64_t ldo, DType io_out,
                    int64_t rows) {
  LinearCall call{w, x, ldx, out, ldo, io_out, rows, EP_STORE};
  linear_run(pool, &call);
}

}  // namespace dw

using dw::Linear;

DW_EXPORT void* dw_linear_pack(void* pool, int format, const void* weight, int64_t ldw, const float* bias,
                               int64_t outputs, int64_t inputs, int paired) {
  return dw::linear_pack(static_cast<dw::Pool*>(pool), dw::Format(format), weight, ldw, bias, outputs, inputs,
                         paired != 0);
}
DW_EXPORT void dw_linear_free(void* w) { dw::linear_free(static_cast<Linear*>(w)); }
DW_EXPORT int64_t dw_linear_bytes(const void* w) { return dw::linear_bytes(static_cast<const Linear*>(w)); }
DW_EXPORT void dw_linear_run(void* pool, const void* weights, const void* x, int64_t ldx, void* out, int64_t ldo,
                             int io_out, int64_t rows, int epilogue) {
  dw::LinearCall call{static_cast<const Linear*>(weights), x, ldx, out, ldo, dw::DType(io_out), rows,
                      dw::Epilogue(epilogue)};
  dw::linear_run(static_cast<dw::Pool*>(pool), &call);
}
