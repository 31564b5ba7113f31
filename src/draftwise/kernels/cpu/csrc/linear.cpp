// The product, panel by panel, and its split among threads. How it is cut is in linear_cut.h, packing in linear_pack.cpp (weights) and
// linear_rows.h, the arithmetic in linear_*.cpp by instruction set.
#include "linear.h"

#include <algorithm>
#include <atomic>

#include "boundary.h"
#include "isa.h"
#include "linear_cut.h"
#include "linear_part.h"

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
thread_local Scratch t_rows, t_shared_rows, t_sums, t_widened;
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

// A task: panels [first, last) times all rows, on the calling thread.
class Panels {
 public:
  Panels(const Pass& pass, int task)
      : pass_(pass), w_(*pass.call->weights), kernels_(*pass.kernels), packed_(packed_rows(pass)),
        cut_(cut_for(w_, kernels_, pass.call->rows, pass.tiles)), first_(w_.panels * task / pass.tasks),
        last_(w_.panels * (task + 1) / pass.tasks), after_(pass.after) {
    const int64_t rows = pass.call->rows, tile_rows = pass.tiles.tallest();
    const int64_t kept = std::min(cut_.panels, last_ - first_) * std::min(cut_.tiles * tile_rows, rows);
    sums_ = static_cast<float*>(t_sums.reserve(size_t(kept * kPanel) * 4));
    if (kernels_.in_chunks[w_.format] && cut_.tiles > 1 && steps_per_unit(w_.format) > 1)
      widened_ = static_cast<uint8_t*>(t_widened.reserve(size_t(w_.groups() * group_chunks(w_)) * kChunkBytes));
    // Threads mostly take turns. Another one's task in its place costs a little bandwidth.
    if (pass.threads > 0 && task + pass.threads < pass.tasks)
      after_ = w_.weights + w_.panels * (task + pass.threads) / pass.tasks * w_.panel_bytes();
    sharing_ = pass.tiles.count > 1 || reaches(kernels_.again_from[w_.format], tile_rows);
    cold_ = t_prefetched != at(first_, 0);
    t_prefetched = sharing_ ? after_ : nullptr;
  }
  void run() {
    for (int tile = 0; tile < pass_.tiles.count; tile += cut_.tiles)
      run_tiles(tile, std::min(tile + cut_.tiles, pass_.tiles.count));
  }

 private:
  const uint8_t* at(int64_t panel, int64_t unit) const { return w_.weights + panel * w_.panel_bytes() + w_.offset(unit); }

  // Tiles [from, to) of rows.
  void run_tiles(int from, int to) {
    for (int64_t g = first_; g < last_; g += cut_.panels) {
      const int64_t end = std::min(g + cut_.panels, last_);
      for (int64_t u = 0; u < w_.units; u += cut_.units) {
        const int64_t units = std::min(cut_.units, w_.units - u);
        const bool done = u + units == w_.units;
        for (int64_t p = g; p < end; p += cut_.step) {
          const int64_t panels = std::min(cut_.step, end - p);
          Tile t;
          t.w = at(p, u);
          t.panel_stride = w_.panel_bytes();
          t.units = units;
          t.bytes = w_.offset(u + units) - w_.offset(u);
          t.load = u > 0;
          t.panels = int(panels);
          t.group_units = w_.group_units;
          t.zeros = w_.zeros;
          t.nibbles = w_.nibbles;
          t.widened = widened_;
          t.next_w = p + panels < end             ? at(p + panels, u)
                     : !done                      ? at(g, u + units)
                     : end < last_                ? at(end, 0)
                     : to < pass_.tiles.count     ? at(first_, 0)
                                                  : after_;
          run_panel(t, p, u, from, to, done, sums_ + (p - g) * rows_between(from, to) * kPanel);
        }
      }
    }
  }

  int64_t rows_between(int from, int to) const { return pass_.tiles.begin(to) - pass_.tiles.begin(from); }

  // Tiles of rows times one or two panels over a part of k that begins at unit u.
  void run_panel(Tile& t, int64_t panel, int64_t u, int from, int to, bool done, float* sums) {
    const bool in_chunks = kernels_.in_chunks[w_.format];
    const int64_t row_dwords = row_steps(kernels_, w_), steps = steps_per_unit(w_.format);
    // Memory is to be busy all the time, although the first tile alone reads these weights from there: all tiles share the
    // prefetching of the next ones. Where nobody has prefetched these, the first tile does.
    const int begin = from + cold_;
    cold_ = false;
    for (int tile = from; tile < to; ++tile) {
      const bool shared = sharing_ && tile >= begin && t.next_w != nullptr;
      t.share = tile - begin;
      t.shares = shared ? to - begin : 0;
      t.widen = tile == from;
      const int64_t row = pass_.tiles.begin(tile);
      const int rows = int(rows_between(tile, tile + 1));
      t.rows = rows;
      t.x = packed_.steps + row * row_dwords;
      t.x += in_chunks ? chunk_at(w_, u) * rows * kChunkDwords
                       : u * steps * rows * (has_wide_rows(kernels_, w_.format, rows) ? 2 : 1);
      t.x_sums = packed_.sums + row * w_.groups() + (is_grouped(w_.format) ? u / w_.group_units * rows : 0);
      // The sums of one tile lie together, [rows][32 * panels].
      t.sums = sums + rows_between(from, tile) * t.panels * kPanel;
      kernels_.tile[w_.format](t);
      for (int i = 0; done && i < t.panels; ++i)
        finish_panel(pass_, panel + i, row, rows, t.sums + i * kPanel, kPanel * t.panels, packed_);
    }
  }

  const Pass& pass_;
  const Linear& w_;
  const LinearKernels& kernels_;
  const PackedRows packed_;
  const Cut cut_;
  const int64_t first_, last_;
  const uint8_t* after_;  // what this thread reads behind the task
  float* sums_;
  uint8_t* widened_ = nullptr;
  bool sharing_, cold_;
};

void run_panels(void* raw, int task, int) {
  const Pass& pass = *static_cast<Pass*>(raw);
  const int64_t panels = pass.call->weights->panels;
  if (panels * task / pass.tasks == panels * (task + 1) / pass.tasks) return;
  Panels(pass, task).run();
  if (pass.kernels->release != nullptr) pass.kernels->release();
}

constexpr int64_t kSharedRows = 16;  // from so many rows on they are packed once for all threads

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
  if (kernels.in_chunks[w.format] && w.steps() % kChunkDwords != 0) return false;
  return call->rows == 1 && reinterpret_cast<uintptr_t>(call->x) % 4 == 0 &&
         w.inputs == w.units * k_per_unit(w.format) && !is_dynamic(w.format) && !is_grouped(w.format);
}

// Rows of a long prompt that are computed together: every panel reads all of them, so that they had better stay in a cache.
static int64_t rows_together(const LinearKernels& kernels, const Linear& w, int64_t rows) {
  constexpr int64_t BYTES = 4 << 20, FEWEST = 256;  // packed; fewer would read the weights too often
  const int64_t bytes = int64_t(PackedRows::bytes(kernels, w, rows));
  return bytes <= 2 * BYTES ? rows : std::max(FEWEST, rows * BYTES / bytes);
}

void linear_run(Pool* pool, const LinearCall* call) {
  const Linear& w = *call->weights;
  if (call->rows <= 0) return;
  const LinearKernels& kernels = linear_kernels();
  const int64_t together = rows_together(kernels, w, call->rows);
  if (together < call->rows) {
    for (int64_t first = 0; first < call->rows; first += together) {
      LinearCall part = *call;
      part.rows = std::min(together, call->rows - first);
      part.x = static_cast<const uint8_t*>(call->x) + first * call->ldx * element_bytes(w.input);
      part.out = static_cast<uint8_t*>(call->out) + first * call->ldo * element_bytes(call->io_out);
      linear_run(pool, &part);
    }
    return;
  }
  const int64_t tasks = tasks_of(w, kernels, call->rows, pool_threads(pool));
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

// The numbers at[0 .. count - 1] of a dtype.
static void to_floats(const uint8_t* at, DType dtype, int count, float* out) {
  if (dtype == F32) {
    memcpy(out, at, sizeof(float) * size_t(count));
    return;
  }
  for (int i = 0; i < count; i++) {
    uint16_t half;
    memcpy(&half, at + 2 * i, sizeof half);
    const uint32_t bits = uint32_t(half) << 16;  // a bfloat16 is the upper half of a float32
    memcpy(out + i, &bits, sizeof bits);
  }
}

void linear_silu_mul(Pool* pool, DType dtype, const void* gate_up, void* out, int64_t rows, int64_t width) {
  struct Context {
    DType dtype;
    const uint8_t* gate_up;
    uint8_t* out;
    int64_t width;
  } context{dtype, (const uint8_t*)gate_up, (uint8_t*)out, width};
  parallel_for(
      rows < kSharedRows ? nullptr : pool, (int)rows,
      [](void* arg, int row, int) {
        const Context& c = *(const Context*)arg;
        const int64_t element = element_bytes(c.dtype);
        const uint8_t* from = c.gate_up + row * 2 * c.width * element;
        float sums[kPanel];
        Finish f{};
        f.sums = sums, f.sums_stride = kPanel, f.out = c.out + row * c.width * element, f.ldo = c.width;
        f.dtype = c.dtype, f.rows = 1, f.epilogue = EP_SILU_MUL;
        for (int64_t at = 0; at < c.width; at += 16) {
          f.column[0] = at, f.count[0] = int(std::min<int64_t>(16, c.width - at));
          memset(sums, 0, sizeof sums);
          for (int half = 0; half < 2; half++) to_floats(from + (half * c.width + at) * element, c.dtype, f.count[0], sums + 16 * half);
          linear_kernels().finish(f);
        }
      },
      &context);
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
