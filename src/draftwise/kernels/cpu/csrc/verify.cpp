#include "verify.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "boundary.h"
#include "noise.h"
#include "sample.h"

namespace dw {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();

// A distribution: exp((x - top) * scale) over x >= floor, divided by `total`.
struct Row {
  const float* x;
  float top, floor;
  double total;
};

class Verifier {
 public:
  Verifier(const VerifyBatch& batch) : batch_(batch), kernels_(sample_kernels()), n_(batch.vocab) {
    sums_.resize((size_t)num_blocks(n_));
  }

  void run(int64_t request, int64_t first_node) {
    wish_ = &batch_.wishes[request];
    tokens_ = batch_.tokens + first_node;
    parents_ = batch_.parents + first_node;
    q_rows_ = batch_.q_rows + first_node;
    path_ = batch_.paths + first_node;
    kept_ = 0;
    int64_t last;
    switch (wish_->rule) {
      case COUPLED:
        last = follow([&](int node) {
          Row row = find_floor(node);
          const uint64_t key = row_key(wish_->seed, wish_->sample_index, SHARED_NOISE, wish_->base + kept_, -1, 0);
          return kernels_.argmax_gumbel(row.x, wish_->scale, row.floor, key, nullptr, n_);
        });
        break;
      case REJECTION:
        last = is_chain() ? rejection_chain() : rejection_tree();
        break;
      case BLOCK:
        last = is_chain() ? block_chain() : rejection_tree();
        break;
      default:
        last = follow([&](int node) { return kernels_.argmax(logits(node), n_); });
    }
    batch_.kept[request] = kept_;
    batch_.last[request] = (int32_t)last;
  }

 private:
  // ------------------------------------------------------------------------------------------------ small pieces

  const float* logits(int node) const { return batch_.logits + ((int64_t)wish_->first_row + 1 + node) * n_; }
  const float* q_of(int node) const { return wish_->q + (int64_t)q_rows_[node] * n_; }
  bool sampled() const { return wish_->draw != FIXED && wish_->q != nullptr; }
  bool is_chain() const {
    for (int i = 0; i < wish_->nodes; i++)
      if (parents_[i] != i - 1) return false;
    return true;
  }
  void accept(int node) { path_[kept_++] = node; }

  // The uniform that judges a node: its token would stand `depth` behind the root.
  double accept_uniform(int node, int depth) const {
    return uniform_of(row_key(wish_->seed, wish_->sample_index, ACCEPT_NOISE, (int64_t)wish_->base - 1 + depth, node,
                              wish_->base));
  }
  // The one that draws the token after it.
  double recover_uniform(int node, int depth) const {
    return uniform_of(
        row_key(wish_->seed, wish_->sample_index, RECOVER_NOISE, (int64_t)wish_->base + depth, node, wish_->base));
  }

  // The rows' own token at each node, as long as a child has it.
  template <class Wanted>
  int64_t follow(const Wanted& wanted) {
    int64_t token = wanted(-1);
    for (int i = 0, node = -1; i < wish_->nodes; i++) {
      if (parents_[i] != node || tokens_[i] != token) continue;
      accept(i);
      token = wanted(node = i);
    }
    return token;
  }

  // ----------------------------------------------------------------------------------------------- distributions

  // Excluded by min_p, top_k and top_p is what lies below the floor.
  Row find_floor(int node) {
    const Shape shape{wish_->top_p, wish_->scale, wish_->log_min_p, wish_->top_k};
    Row row{logits(node), 0.0f, NONE, 0.0};
    if (wish_->rule == COUPLED && !shape.cuts()) return row;
    row.top = kernels_.max(row.x, n_);
    row.floor = floor_.find(row.x, row.top, shape, n_);
    return row;
  }

  // The row's distribution; running totals stay in sums_, and weights in `out` if that is not null.
  Row distribution(int node, float* out) {
    Row row = find_floor(node);
    if (wish_->rule == COUPLED) return row;
    row.total = kernels_.weights(row.x, row.top, wish_->scale, row.floor, out, sums_.data(), n_);
    return row;
  }

  double p_of(const Row& row, int token) const {
    float x = row.x[token], w;
    if (x < row.floor) return 0.0;
    double one;
    kernels_.weights(&x, row.top, wish_->scale, NONE, &w, &one, 1);
    return (double)w / row.total;
  }

  // A token from the row as it stands, whose totals are in sums_.
  int64_t draw(const Row& row, double u) {
    const int64_t blocks = num_blocks(n_);
    if (!(row.total > 0.0)) return -1;
    const double target = std::min(u, BELOW_ONE) * row.total;
    const int64_t block = block_of(sums_.data(), blocks, target), start = block * SUM_BLOCK;
    const int64_t count = std::min(SUM_BLOCK, n_ - start);
    float part[SUM_BLOCK];
    double one;
    kernels_.weights(row.x + start, row.top, wish_->scale, row.floor, part, &one, count);
    const int64_t token = within(part, count, block > 0 ? sums_[(size_t)block - 1] : 0.0, target);
    return token < 0 ? -1 : start + token;
  }

  int64_t draw_at(int node) {
    Row row = distribution(node, nullptr);
    return draw(row, recover_uniform(node, kept_));
  }

  // A token from max(scale p - q, 0), or from p without `excluded` where there is no q; from p if nothing is left.
  int64_t draw_residual(int node, float scale, const float* q, int excluded) {
    weights_.resize((size_t)n_);
    Row row = distribution(node, weights_.data());
    if (!(row.total > 0.0)) return -1;
    const double u = recover_uniform(node, kept_);
    if (q != nullptr) {
      kernels_.residual(weights_.data(), scale / (float)row.total, q, 1.0f, weights_.data(), sums_.data(), n_);
    } else {
      take_out(excluded);
    }
    const int64_t token = pick(weights_.data(), sums_.data(), n_, u);
    return token >= 0 ? token : draw_at(node);
  }

  // weights_ without one token, and their totals.
  void take_out(int token) {
    weights_[(size_t)token] = 0.0f;
    kernels_.residual(weights_.data(), 1.0f, weights_.data(), 0.0f, nullptr, sums_.data(), n_);
  }

  // ------------------------------------------------------------------------------------------------------- rules

  int64_t rejection_chain() {
    for (int i = 0; i < wish_->nodes; i++) {
      const double p = p_of(distribution(i - 1, nullptr), tokens_[i]), u = accept_uniform(i, i + 1);
      const double q = sampled() ? (double)q_of(i)[tokens_[i]] : 1.0;
      if (!(u * q < p))  // u < p / q, without dividing by a q that rounded to 0
        return draw_residual(i - 1, 1.0f, sampled() ? q_of(i) : nullptr, tokens_[i]);
      accept(i);
    }
    return draw_at(wish_->nodes - 1);
  }

  int64_t block_chain() {
    const int n = wish_->nodes;
    rows_.clear();
    prefix_.assign(1, 1.0);
    p_.clear();
    for (int i = 0; i < n; i++) {
      Row row = distribution(i - 1, nullptr);
      if (!(row.total > 0.0)) return -1;
      rows_.push_back(row);
      const double p = p_of(row, tokens_[i]), q = sampled() ? (double)q_of(i)[tokens_[i]] : 1.0;
      p_.push_back(p);
      // q = 0 cannot have been drawn but by rounding; the ratio is then infinite unless p is 0, too
      const double ratio = q > 0.0 ? p / q : (p > 0.0 ? 1e300 : 0.0);
      prefix_.push_back(std::min(1.0, prefix_.back() * ratio));
    }
    weights_.resize((size_t)n_);
    int kept = n;
    for (; kept > 0; kept--) {  // each uniform has its own key, so the order of looking does not matter
      double h = prefix_[(size_t)kept];
      if (kept < n) {
        const double scale = h;
        double z = scale * (1.0 - p_[(size_t)kept]);  // a one-hot q takes away all of the next token
        if (sampled()) {
          const Row& row = rows_[(size_t)kept];
          kernels_.weights(row.x, row.top, wish_->scale, row.floor, weights_.data(), sums_.data(), n_);
          z = kernels_.residual(weights_.data(), (float)(scale / row.total), q_of(kept), 1.0f, nullptr, sums_.data(),
                                n_);
        }
        const double rest = z + 1.0 - scale;
        h = rest > 0.0 ? z / rest : 1.0;  // p == q from here on: nothing to correct
      }
      if (accept_uniform(kept - 1, kept) < h) break;
    }
    for (int i = 0; i < kept; i++) accept(i);
    if (kept == n) return draw_at(n - 1);
    return draw_residual(kept - 1, (float)prefix_[(size_t)kept], sampled() ? q_of(kept) : nullptr, tokens_[kept]);
  }

  // Multi-round rejection: a rejected child leaves the residual as the next one's p; drawn without replacement, q loses
  // the child, too. Fixed children are point masses: p loses them.
  int64_t rejection_tree() {
    int node = -1;
    for (;;) {
      weights_.resize((size_t)n_);
      Row row = distribution(node, weights_.data());
      if (!(row.total > 0.0)) return -1;
      double total = row.total, q_total = 1.0;
      const float* q = nullptr;
      int accepted = -1;
      for (int child = node + 1; child < wish_->nodes && accepted < 0; child++) {
        if (parents_[child] != node) continue;
        const int token = tokens_[child];
        if (sampled() && q == nullptr) q = q_of(child);
        const double p_x = (double)weights_[(size_t)token] / total;
        const double q_x = q != nullptr ? (double)q[token] / q_total : 1.0;
        if (accept_uniform(child, kept_ + 1) * q_x < p_x) {
          accepted = child;
          break;
        }
        rest_.resize((size_t)n_);
        double left;
        if (q == nullptr) {
          rest_ = weights_;
          rest_[(size_t)token] = 0.0f;
          left = kernels_.residual(rest_.data(), 1.0f, rest_.data(), 0.0f, nullptr, sums_.data(), n_);
        } else {
          left = kernels_.residual(weights_.data(), (float)(1.0 / total), q, (float)(1.0 / q_total), rest_.data(),
                                   sums_.data(), n_);
          if (wish_->draw == WITHOUT_REPLACEMENT) q = without(q, token, node, child, &q_total);
        }
        // else rejection had probability 0 up to rounding: go on with p as it was
        if (left > 0.0) {
          weights_.swap(rest_);
          total = left;
        }
      }
      if (accepted < 0) {
        // running totals of what is left, again: the last residual may not have been taken
        kernels_.residual(weights_.data(), 1.0f, weights_.data(), 0.0f, nullptr, sums_.data(), n_);
        const int64_t token = pick(weights_.data(), sums_.data(), n_, recover_uniform(node, kept_));
        return token >= 0 ? token : draw_at(node);
      }
      accept(accepted);
      node = accepted;
    }
  }

  // q without a token, renormalised by `total`; if nothing is left, the rest were drawn uniformly from the untried.
  const float* without(const float* q, int token, int node, int tried, double* total) {
    if (q != q_left_.data()) q_left_.assign(q, q + n_);
    q_left_[(size_t)token] = 0.0f;
    *total = kernels_.residual(q_left_.data(), 1.0f, q_left_.data(), 0.0f, nullptr, sums_.data(), n_);
    if (*total <= 0.0) {
      std::fill(q_left_.begin(), q_left_.end(), 1.0f);
      for (int child = node + 1; child <= tried; child++)
        if (parents_[child] == node) q_left_[(size_t)tokens_[child]] = 0.0f;
      *total = kernels_.residual(q_left_.data(), 1.0f, q_left_.data(), 0.0f, nullptr, sums_.data(), n_);
    }
    return q_left_.data();
  }

  const VerifyBatch& batch_;
  const SampleKernels& kernels_;
  const int64_t n_;
  const VerifyRequest* wish_ = nullptr;
  const int32_t *tokens_ = nullptr, *parents_ = nullptr, *q_rows_ = nullptr;
  int32_t* path_ = nullptr;
  int32_t kept_ = 0;
  Floor floor_;
  std::vector<double> sums_, prefix_, p_;
  std::vector<float> weights_, rest_, q_left_;
  std::vector<Row> rows_;
};

}  // namespace

// Picoseconds of one thread from which a second one brings more than waking it costs.
constexpr int64_t SHARED_WORK = 200 * 1000 * 1000;

// What a token of a row takes, as measured with AVX-512.
static int64_t picoseconds(const VerifyRequest& wish) {
  if (wish.rule == GREEDY) return 200;
  const int64_t cut = wish.top_p < 1.0 ? 3000 : wish.top_k > 0 ? 500 : 0;
  return (wish.rule == COUPLED ? 1800 : 800) + cut;
}

void verify(Pool* pool, const VerifyBatch* batch) {
  if (batch->requests == 0) return;  // a piece would have no length
  int64_t work = 0;
  std::vector<int64_t> first_nodes((size_t)batch->requests);
  for (int64_t r = 0, node = 0; r < batch->requests; r++) {
    first_nodes[(size_t)r] = node;
    node += batch->wishes[r].nodes;
    work += (1 + batch->wishes[r].nodes) * batch->vocab * picoseconds(batch->wishes[r]);
  }
  struct Context {
    const VerifyBatch* batch;
    const int64_t* first_nodes;
    int64_t piece;
  } context{batch, first_nodes.data(), batch->requests};
  const bool shared = batch->requests > 1 && work >= SHARED_WORK;
  // Pieces of some requests: enough to even out that some walks are longer.
  if (shared) context.piece = std::max<int64_t>(1, batch->requests / (4 * pool_threads(pool)));
  parallel_for(
      shared ? pool : nullptr, (int)((batch->requests + context.piece - 1) / context.piece),
      [](void* arg, int task, int) {
        const Context& c = *(const Context*)arg;
        Verifier verifier(*c.batch);
        const int64_t begin = task * c.piece, end = std::min(begin + c.piece, c.batch->requests);
        for (int64_t r = begin; r < end; r++) verifier.run(r, c.first_nodes[r]);
      },
      &context);
}

}  // namespace dw

// The requests in columns: `draws` [requests]; `columns` [5, requests]: committed tokens, first row, nodes, rule, draw;
// `q_at` [requests]: addresses of q, or null if nobody has one. `nodes`: of all requests together; `given` [3, nodes]:
// tokens, parents, rows of q; `found`: kept [requests], last [requests], paths [nodes].
void dw::verify_columns(Pool* pool, const float* logits, int64_t vocab, int64_t requests, const VerifyDraw* draws,
                        const int32_t* columns, const uint64_t* q_at, int64_t nodes, const int32_t* given, int32_t* found) {
  std::vector<VerifyRequest> wishes((size_t)requests);
  const int32_t *base = columns, *first_row = base + requests, *own = first_row + requests, *rule = own + requests,
                *draw = rule + requests;
  int64_t sum = 0;
  for (int64_t r = 0; r < requests; r++) {
    const VerifyDraw& d = draws[r];
    wishes[(size_t)r] = {d.seed,  d.top_p,      d.scale, d.log_min_p, d.top_k, d.sample_index,
                         base[r], first_row[r], own[r],  rule[r],     draw[r], 0,
                         q_at ? (const float*)(uintptr_t)q_at[r] : nullptr};
    sum += own[r];
  }
  require(sum == nodes, "as many nodes as the requests have");
  const VerifyBatch batch{logits,        vocab,         requests, wishes.data(),    given,
                          given + nodes, given + 2 * nodes, found, found + requests, found + 2 * requests};
  verify(pool, &batch);
}

DW_EXPORT void dw_verify(dw::Pool* pool, const float* logits, int64_t vocab, int64_t requests, const dw::VerifyDraw* draws,
                         const int32_t* columns, const uint64_t* q_at, int64_t nodes, const int32_t* given,
                         int32_t* found) {
  dw::guarded([&] { dw::verify_columns(pool, logits, vocab, requests, draws, columns, q_at, nodes, given, found); });
}
