#include "adapters.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "boundary.h"
#include "compiler.h"
#include "linear_weights.h"

namespace dw {
namespace {

struct Up {
  const Linear* layer;
  int64_t first, start;
};

struct Site {
  const Linear* down = nullptr;
  std::vector<Up> ups;
};

}  // namespace

struct Adapters {
  DType rows;
  std::vector<std::pair<int64_t, int64_t>> sizes;
  std::map<int64_t, std::vector<Site>> known;
};

Adapters* adapters_create(int64_t sites, const int64_t* sizes, DType rows) {
  require(sites >= 0 && (rows == F32 || rows == BF16), "sites of float32 or bfloat16");
  auto made = std::make_unique<Adapters>();
  made->rows = rows;
  for (int64_t i = 0; i < sites; i++) made->sizes.emplace_back(sizes[2 * i], sizes[2 * i + 1]);
  return made.release();
}

void adapters_free(Adapters* adapters) { delete adapters; }

void adapters_put(Adapters* adapters, int64_t number, const Linear* const* downs, const int64_t* counts, const Linear* const* ups,
                  const int64_t* firsts, const int64_t* starts) {
  require(number > 0 && adapters->known.count(number) == 0, "a number that no other adapter has");
  std::vector<Site> sites(adapters->sizes.size());
  for (size_t i = 0; i < sites.size(); i++) {
    Site& site = sites[i];
    const auto [inputs, outputs] = adapters->sizes[i];
    site.down = downs[i];
    if (site.down == nullptr) continue;
    require(site.down->inputs == inputs && site.down->input == adapters->rows, "a first product of the layer's rows");
    for (int64_t k = 0; k < counts[i]; k++, ups++, firsts++, starts++) {
      const Linear& up = **ups;
      require(up.input == adapters->rows && *firsts >= 0 && *firsts + up.inputs <= site.down->outputs, "a second product of the first");
      require(*starts >= 0 && *starts + up.outputs <= outputs, "a second product within the layer's outputs");
      site.ups.push_back({&up, *firsts, *starts});
    }
  }
  adapters->known.emplace(number, std::move(sites));
}

void adapters_drop(Adapters* adapters, int64_t number) { adapters->known.erase(number); }

namespace {

// Rows side by side of one adapter. Its first product stands in `low`, from element `low` on.
struct Run {
  const Site* site;
  int64_t row, rows, low;
};

// What one task does of a run: some of its rows, or of its columns.
struct Piece {
  const Run* run;
  int64_t row, rows;  // within the run
  int part, parts;
};

struct Work {
  const AdaptCall* call;
  DType dtype;
  int64_t element;
  char* low;
  const Piece* pieces;

  char* product(const Piece& piece) const {
    return low + (piece.run->low + piece.row * piece.run->site->down->outputs) * element;
  }
};

// Example: one run of 40 rows on two threads is two pieces of 20 rows; one of 4 rows with many weights is two pieces of half the columns.
void multiply(const LinearCall& call, const Piece& piece) {
  if (piece.parts > 1)
    linear_run_part(&call, piece.part, piece.parts);
  else
    linear_run(nullptr, &call);
}

void go_down(void* arg, int task) {
  const Work& w = *(const Work*)arg;
  const Piece& piece = w.pieces[task];
  const Linear* down = piece.run->site->down;
  const char* x = (const char*)w.call->x + (piece.run->row + piece.row) * w.call->ldx * w.element;
  multiply({down, x, w.call->ldx, w.product(piece), down->outputs, w.dtype, piece.rows, EP_STORE}, piece);
}

void go_up(void* arg, int task) {
  const Work& w = *(const Work*)arg;
  const Piece& piece = w.pieces[task];
  char* out = (char*)w.call->out + (piece.run->row + piece.row) * w.call->ldo * w.element;
  for (const Up& up : piece.run->site->ups)
    multiply({up.layer, w.product(piece) + up.first * w.element, piece.run->site->down->outputs, out + up.start * w.element, w.call->ldo,
              w.dtype, piece.rows, EP_ADD},
             piece);
}

}  // namespace

void adapters_run(const Shares& shares, const AdaptCall& call) {
  if (call.numbers == nullptr) return;
  constexpr int64_t PART_BYTES = 32 << 10;  // weights that are worth a task
  constexpr int64_t PIECE_ROWS = 16;        // so are so many rows
  static thread_local std::vector<Run> runs;
  static thread_local std::vector<Piece> pieces;
  static thread_local std::vector<char> low;
  const Adapters& adapters = *call.adapters;
  runs.clear(), pieces.clear();
  int64_t elements = 0, last = 0;
  for (int64_t r = 0; r < call.requests; r++) {
    const int64_t number = call.numbers[r], row = call.query_start[r], rows = call.query_start[r + 1] - row;
    if (rows == 0) continue;  // its neighbours stand side by side
    const int64_t before = std::exchange(last, number);
    if (number == 0) continue;
    if (number == before && !runs.empty() && runs.back().row + runs.back().rows == row) {
      runs.back().rows += rows;
      elements += rows * runs.back().site->down->outputs;
      continue;
    }
    const auto found = adapters.known.find(number);
    require(found != adapters.known.end(), "an adapter that is there");
    const Site& site = found->second[(size_t)call.site];
    if (site.down == nullptr) {
      last = 0;  // there is no run that the next request with this adapter could join
      continue;
    }
    runs.push_back({&site, row, rows, elements});
    elements += rows * site.down->outputs;
  }
  if (runs.empty()) return;
  for (const Run& run : runs) {
    const int64_t wide = (shares.threads + (int64_t)runs.size() - 1) / (int64_t)runs.size();  // tasks per run
    if (run.rows >= PIECE_ROWS * wide) {
      for (int64_t k = 0; k < wide; k++) {
        const int64_t first = run.rows * k / wide;
        pieces.push_back({&run, first, run.rows * (k + 1) / wide - first, 0, 1});
      }
      continue;
    }
    int64_t bytes = linear_bytes(run.site->down);
    for (const Up& up : run.site->ups) bytes += linear_bytes(up.layer);
    const int parts = (int)std::clamp<int64_t>(bytes * run.rows / PART_BYTES, 1, wide);
    for (int part = 0; part < parts; part++) pieces.push_back({&run, 0, run.rows, part, parts});
  }
  const int64_t element = element_bytes(adapters.rows);
  if ((int64_t)low.size() < elements * element) low.resize((size_t)(elements * element));
  Work work{&call, adapters.rows, element, low.data(), pieces.data()};
  shares.run(shares.context, (int)pieces.size(), go_down, &work);
  if (call.ranks != nullptr) ranks_sum(call.ranks, adapters.rows, low.data(), elements);
  shares.run(shares.context, (int)pieces.size(), go_up, &work);
}

}  // namespace dw

DW_EXPORT dw::Adapters* dw_adapters_create(int64_t sites, const int64_t* sizes, int rows) {
  return dw::guarded([&] { return dw::adapters_create(sites, sizes, (dw::DType)rows); });
}

DW_EXPORT void dw_adapters_free(dw::Adapters* adapters) {
  dw::guarded([&] { dw::adapters_free(adapters); });
}

DW_EXPORT void dw_adapters_put(dw::Adapters* adapters, int64_t number, const dw::Linear* const* downs, const int64_t* counts,
                               const dw::Linear* const* ups, const int64_t* firsts, const int64_t* starts) {
  dw::guarded([&] { dw::adapters_put(adapters, number, downs, counts, ups, firsts, starts); });
}

DW_EXPORT void dw_adapters_drop(dw::Adapters* adapters, int64_t number) {
  dw::guarded([&] { dw::adapters_drop(adapters, number); });
}
