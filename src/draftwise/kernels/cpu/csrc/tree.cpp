#include "tree.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "boundary.h"
#include "noise.h"
#include "ops.h"
#include "program.h"
#include "sample.h"

namespace dw {

void best_tokens(const float* logits, const float* noise, float scale, float noise_scale, int64_t vocab, int k,
                 std::vector<float>& scratch, std::vector<Candidate>& out) {
  constexpr int64_t BLOCK = 64;
  scratch.resize((size_t)(noise != nullptr ? 2 * vocab : vocab));
  const float* x = logits;
  if (noise != nullptr) {
    float* sum = scratch.data() + vocab;
    for (int64_t i = 0; i < vocab; i++) sum[i] = scale * logits[i] + noise_scale * noise[i];
    x = sum;
    scale = 1.0f;
  }
  out.clear();
  const size_t wanted = (size_t)(k < vocab ? k : vocab);
  float least = -std::numeric_limits<float>::infinity();
  for (int64_t start = 0; start < vocab; start += BLOCK) {
    const int64_t end = start + BLOCK < vocab ? start + BLOCK : vocab;
    if (end - start == BLOCK) {  // most blocks hold nothing large
      float high[16];
      for (int j = 0; j < 16; j++) high[j] = x[start + j];
      for (int64_t i = start + 16; i < end; i += 16)
        for (int j = 0; j < 16; j++) high[j] = x[i + j] > high[j] ? x[i + j] : high[j];
      bool any = false;
      for (int j = 0; j < 16; j++) any |= high[j] > least;
      if (!any) continue;
    }
    for (int64_t i = start; i < end; i++) {
      if (!(x[i] > least)) continue;
      if (out.size() == wanted) out.pop_back();
      size_t at = out.size();
      while (at > 0 && x[i] > out[at - 1].score) at--;
      out.insert(out.begin() + (std::ptrdiff_t)at, Candidate{(int32_t)i, x[i]});
      if (out.size() == wanted) least = out.back().score;
    }
  }
  if (out.empty()) return;
  softmax(x, scale, scratch.data(), vocab);
  const float total = scale * out[0].score - std::log(scratch[(size_t)out[0].token]);
  if (!(std::fabs(total) < std::numeric_limits<float>::infinity())) return out.clear();  // logits that are no numbers
  // rounding may leave a log-probability above 0; scores must not rise along a path
  for (Candidate& c : out) c.score = std::min(scale * c.score - total, 0.0f);
}

TreeDraft::TreeDraft(const TreeWish* wish, int64_t vocab, const int64_t* target_ids)
    : wish_(wish), vocab_(vocab), target_ids_(target_ids), open_{-1} {
  for (int i = 0; i < wish->shape_nodes; i++) {
    const int parent = wish->shape_parents[i];
    nodes_.push_back(Node{-1, parent, parent < 0 ? 1 : depth(parent) + 1});
  }
}

int32_t TreeDraft::target(int32_t token) const {
  return target_ids_ != nullptr ? (int32_t)target_ids_[token] : token;
}

int TreeDraft::children_wanted(int node) const {
  if (!is_static()) return wish_->top_k;
  int wanted = 0;
  for (int i = node + 1; i < wish_->shape_nodes; i++)
    if (parent(i) == node) wanted = std::max(wanted, wish_->shape_ranks[i] + 1);
  return wanted;
}

void TreeDraft::take(int index, const float* logits, std::vector<float>& scratch, std::vector<float>& noise) {
  const int node = open_[(size_t)index];
  const bool noisy = wish_->noise_scale != 0.0f;
  if (index == 0) {
    level_++;
    level_first_ = (int)nodes_.size();
    if (noisy) {
      // Level 1 stands right behind the context: its tokens are drawn at position `context`.
      const uint64_t key = row_key(wish_->seed, wish_->sample_index, SHARED_NOISE, wish_->context + level_ - 1, -1, 0);
      noise.resize((size_t)vocab_);
      sample_kernels().gumbel(key, target_ids_, noise.data(), vocab_);
    }
  }
  best_tokens(logits, noisy ? noise.data() : nullptr, wish_->scale, wish_->noise_scale, vocab_, children_wanted(node), scratch, best_);
  if (is_static())
    take_static(node, best_);
  else
    take_dynamic(node, best_);
}

void TreeDraft::take_static(int node, const std::vector<Candidate>& best) {
  for (int i = node + 1; i < wish_->shape_nodes; i++)
    if (parent(i) == node && (size_t)wish_->shape_ranks[i] < best.size())
      nodes_[(size_t)i].token = target(best[(size_t)wish_->shape_ranks[i]].token);
}

void TreeDraft::take_dynamic(int node, const std::vector<Candidate>& best) {
  const float above = node < 0 ? 0.0f : nodes_[(size_t)node].score;
  for (const Candidate& c : best) {
    Node child{target(c.token), node, level_};
    child.score = above + c.score;
    nodes_.push_back(child);
  }
}

void TreeDraft::feed(int node) {
  Node& n = nodes_[(size_t)node];
  n.number = fed_++;
  n.ancestors = ancestors(n.parent) | (uint64_t)1 << n.number;
  open_.push_back(node);
}

// Earlier ones first among equals: parents come before their children. Scores are numbers (`best_tokens`).
void TreeDraft::sort_best_first(std::vector<int>& order) const {
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const float x = nodes_[(size_t)a].score, y = nodes_[(size_t)b].score;
    return x != y ? x > y : a < b;
  });
}

bool TreeDraft::next_level() {
  const std::vector<int> before = open_;
  open_.clear();
  if (before.empty()) return false;
  if (is_static()) {
    for (int above : before)
      for (int i = above + 1; i < wish_->shape_nodes; i++)
        if (parent(i) == above && token(i) >= 0 && children_wanted(i) > 0) feed(i);
    return !open_.empty();
  }
  if (level_ == wish_->depth) return false;
  // A node that `nodes` others beat is not expanded: what is below it scores no better, so it cannot enter the tree.
  float least = -std::numeric_limits<float>::infinity();
  if (nodes_.size() >= (size_t)wish_->nodes) {
    std::vector<float> scores;
    for (const Node& n : nodes_) scores.push_back(n.score);
    std::nth_element(scores.begin(), scores.begin() + (wish_->nodes - 1), scores.end(), std::greater<float>());
    least = scores[(size_t)(wish_->nodes - 1)];
  }
  std::vector<int> order((size_t)((int)nodes_.size() - level_first_));
  std::iota(order.begin(), order.end(), level_first_);
  sort_best_first(order);
  if (order.size() > (size_t)wish_->top_k) order.resize((size_t)wish_->top_k);
  for (int node : order)
    if (nodes_[(size_t)node].score > least && fed_ < MAX_TREE_ROWS) feed(node);
  return !open_.empty();
}

int TreeDraft::finish(int32_t* tokens, int32_t* parents) const {
  std::vector<int> order(nodes_.size());
  std::iota(order.begin(), order.end(), 0);
  if (is_static()) {
    order.erase(std::remove_if(order.begin(), order.end(), [&](int i) { return token(i) < 0; }), order.end());
  } else {
    sort_best_first(order);
    if (order.size() > (size_t)wish_->nodes) order.resize((size_t)wish_->nodes);
  }
  std::vector<int32_t> place(nodes_.size(), -1);
  for (size_t i = 0; i < order.size(); i++) {
    place[(size_t)order[i]] = (int32_t)i;
    tokens[i] = token(order[i]);
    const int above = parent(order[i]);
    parents[i] = above < 0 ? -1 : place[(size_t)above];
  }
  return (int)order.size();
}

namespace {

// Rows of one level of all requests that have one, as the input of a pass.
struct LevelRows {
  std::vector<int64_t> ids, positions, slots;
  std::vector<uint64_t> ancestors;
  std::vector<int32_t> starts, contexts, tree_starts, first_keys, tables;
  std::vector<uint8_t> is_tree;
  std::vector<char> features;

  void clear() {
    for (auto* v : {&ids, &positions, &slots}) v->clear();
    for (auto* v : {&starts, &contexts, &tree_starts, &first_keys, &tables}) v->clear();
    ancestors.clear();
    is_tree.clear();
    features.clear();
    starts.push_back(0);
  }
};

}  // namespace
}  // namespace dw

static int64_t blocks_of(int64_t keys, int64_t block_size) { return (keys + block_size - 1) / block_size; }

// External buffers 0, 1, 2 are token ids, positions and slots.
constexpr size_t IDS = 0, POSITIONS = 1, SLOTS = 2;

void dw::draft_trees(const Program* program, Pool* pool, const PassInput* first, const TreeOutput* out) {
  const dw::BatchView& view = first->batch;
  const int requests = view.requests;
  dw::PassInput pass = *first;
  std::vector<void*> externals(first->externals, first->externals + dw::num_externals(program));
  const float* logits = (const float*)externals.back();
  const bool features = out->feature_in >= 0;
  const size_t bytes = features ? (size_t)out->feature_bytes : 0;
  const size_t places = 1 + dw::MAX_TREE_ROWS;  // of the features of a request's root and fed nodes
  std::vector<char> store(features ? (size_t)requests * places * bytes : 0);
  std::vector<float> scratch, noise;
  std::vector<dw::TreeDraft> drafts;
  for (int r = 0; r < requests; r++) drafts.emplace_back(&out->wishes[r], out->vocab, out->target_ids);
  dw::LevelRows rows;
  std::vector<int> going((size_t)requests);
  std::iota(going.begin(), going.end(), 0);
  for (bool root = true; !going.empty(); root = false) {
    const bool narrow = dw::run_pass(program, pool, &pass);
    int64_t row = 0;
    for (int r : going) {
      dw::TreeDraft& draft = drafts[(size_t)r];
      for (size_t i = 0; i < draft.open().size(); i++, row++) {
        draft.take((int)i, logits + row * out->vocab, scratch, noise);
        if (features) {
          const int64_t from = root && pass.head_index != nullptr && !narrow ? pass.head_index[row] : row;
          const size_t to = (size_t)r * places + (size_t)(1 + draft.number(draft.open()[i]));
          memcpy(store.data() + to * bytes, (const char*)externals[(size_t)out->feature_out] + (size_t)from * bytes,
                 bytes);
        }
      }
    }
    rows.clear();
    std::vector<int> next;
    int64_t blocks = 0;
    for (int r : going) {
      dw::TreeDraft& draft = drafts[(size_t)r];
      const int start = draft.fed();
      if (!draft.next_level()) continue;
      next.push_back(r);
      const int32_t* table = view.block_tables + (int64_t)r * view.table_stride;
      const int64_t context = out->wishes[r].context;
      for (int node : draft.open()) {
        const int64_t key = context + draft.number(node);
        rows.ids.push_back(draft.token(node));
        rows.positions.push_back(context - 1 + draft.depth(node) - out->key_offset);
        rows.slots.push_back((int64_t)table[key / view.block_size] * view.block_size + key % view.block_size);
        rows.ancestors.push_back(draft.ancestors(node));
        if (features) {
          const size_t from = (size_t)r * places + (size_t)(1 + draft.number(draft.parent(node)));
          rows.features.insert(rows.features.end(), store.begin() + (std::ptrdiff_t)(from * bytes),
                               store.begin() + (std::ptrdiff_t)((from + 1) * bytes));
        }
      }
      rows.starts.push_back((int32_t)rows.ids.size());
      rows.contexts.push_back((int32_t)context);
      rows.tree_starts.push_back(start);
      rows.first_keys.push_back(view.first_key != nullptr ? view.first_key[r] : 0);
      rows.is_tree.push_back(1);
      blocks = std::max(blocks, blocks_of(out->wishes[r].context + draft.fed(), view.block_size));
    }
    going = next;
    // The first pass's tables may be rows of something larger: each request's own blocks, side by side.
    rows.tables.assign((size_t)blocks * going.size(), 0);
    for (size_t i = 0; i < going.size(); i++) {
      const int r = going[i];
      const int32_t* table = view.block_tables + (int64_t)r * view.table_stride;
      const int64_t own = blocks_of(out->wishes[r].context + drafts[(size_t)r].fed(), view.block_size);
      std::copy(table, table + own, rows.tables.begin() + (std::ptrdiff_t)(i * (size_t)blocks));
    }
    if ((int64_t)rows.ids.size() > out->room) break;  // the caller's mistake; the trees end here
    externals[IDS] = rows.ids.data();
    externals[POSITIONS] = rows.positions.data();
    externals[SLOTS] = rows.slots.data();
    if (features) externals[(size_t)out->feature_in] = rows.features.data();
    pass.externals = externals.data();
    pass.rows = pass.head_rows = (int64_t)rows.ids.size();
    pass.head_index = nullptr;
    pass.batch.query_start = rows.starts.data();
    pass.batch.context_len = rows.contexts.data();
    pass.batch.is_tree = rows.is_tree.data();
    pass.batch.block_tables = rows.tables.data();
    pass.batch.table_stride = blocks;
    pass.batch.ancestors = rows.ancestors.data();
    pass.batch.first_key = view.first_key != nullptr ? rows.first_keys.data() : nullptr;
    pass.batch.tree_start = rows.tree_starts.data();
    pass.batch.requests = (int32_t)going.size();
  }
  for (int r = 0; r < requests; r++) {
    const size_t place = (size_t)r * dw::MAX_TREE_ROWS;
    out->counts[r] = drafts[(size_t)r].finish(out->tokens + place, out->parents + place);
  }
}

DW_EXPORT void dw_program_trees(dw::Program* program, dw::Pool* pool, const dw::PassInput* first,
                                const dw::TreeOutput* out) {
  dw::guarded([&] { draft_trees(program, pool, first, out); });
}
