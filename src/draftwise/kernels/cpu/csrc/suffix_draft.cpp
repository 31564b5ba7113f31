// What is drafted from a suffix tree, and the functions that Python calls.
#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "boundary.h"
#include "isa.h"
#include "look_ups.h"
#include "suffix.h"

namespace dw {
namespace {

bool better(double score, int32_t match_len, const SuffixDraft& than) {
  return score > than.score || (score == than.score && match_len > than.match_len);
}

void put(SuffixDraft* out, int32_t token, int32_t parent, double prob) {
  out->tokens[out->size] = token;
  out->parents[out->size++] = parent;
  out->score += prob;
}

}  // namespace

void SuffixTree::draft(int64_t s, const int32_t* context, uint64_t n, const SuffixLimits& limits, int32_t source,
                       SuffixDraft* best) {
  const uint32_t longest = uint32_t(std::min<uint64_t>(n, depth_ - 1));
  matches_.clear();  // [i]: where the last i + 1 tokens end
  bool more = true;  // whether a longer match may have a continuation
  if (s >= 0 && seqs_[size_t(s)].open) {
    const std::vector<uint32_t>& loci = seqs_[size_t(s)].loci;
    for (uint32_t length = 1; more && length <= longest && length <= loci.size(); ++length) {
      uint32_t node = loci[loci.size() - length];
      more = nodes_[node].log != 0;
      if (more) matches_.push_back(Locus{node, nodes_[node].length});
    }
  }
  while (more && matches_.size() < longest) {
    uint64_t length = matches_.size() + 1;
    Locus at{};
    more = walk(context + (n - length), length, &at) &&
           (at.offset < nodes_[at.node].length || nodes_[at.node].log != 0);
    if (more) matches_.push_back(at);
  }
  // Longest first. No node has a probability over 1, so a score is at most the number of nodes allowed, and shorter
  // matches allow fewer. A shorter match that occurred as often as a longer one occurred where the longer one did, and goes
  // on in the same way, unless the longer one is cut at the tree's depth.
  uint32_t same = 0;  // occurrences of the newest match that was walked and is not cut; 0: there is none
  for (int32_t length = int32_t(matches_.size()); length > 0; --length) {
    double allowed = length * limits.factor + limits.offset + 1e-6;
    int32_t most = int32_t(std::min<double>(allowed, std::min(limits.budget, kMaxDraft)));
    if (most <= 0 || !better(most, length, *best)) break;
    Locus from = matches_[size_t(length) - 1];
    const uint32_t count = nodes_[from.node].count;
    if (count == same) continue;
    same = uint32_t(length + most) <= depth_ ? count : 0;
    SuffixDraft found;
    if (limits.shape == 0) {
      chain(from, most, limits, &found);
    } else if (limits.shape == 1) {
      best_first(from, most, limits, &found);
    } else {
      shaped(from, most, limits, &found);
    }
    if (found.size && better(found.score, length, *best)) {
      found.match_len = length;
      found.source = source;
      *best = found;
    }
  }
}

// To the most frequent child of the node in which `at` ends; of equal ones to that which occurred last.
bool SuffixTree::likeliest(Locus* at, double* prob, double min_prob) const {
  const Node& node = nodes_[at->node];
  if (node.log == 0) return false;
  const uint32_t *kids = children(node), *end = kids + num_children(node);
  uint32_t chosen = *kids;
  const uint32_t count = nodes_[chosen].count;
  double p = *prob * (double(count) / double(node.count));
  if (p < min_prob) return false;
  while (++kids < end && nodes_[*kids].count == count) {
    if (newer(nodes_[*kids].start, nodes_[chosen].start)) chosen = *kids;
  }
  *prob = p;
  *at = Locus{chosen, 0};
  return true;
}

// ranked_ becomes the children of a node that are likely enough, the first `most` at least: by count, then the one that
// occurred last.
void SuffixTree::ranked(uint32_t n, double prob, double min_prob, uint32_t most) {
  ranked_.clear();
  const Node& node = nodes_[n];
  const uint32_t *kids = children(node), *end = kids + num_children(node);
  for (; kids < end; ++kids) {
    uint32_t count = nodes_[*kids].count;
    if (prob * (double(count) / double(node.count)) < min_prob) break;
    if (ranked_.size() >= most && count < nodes_[ranked_.back()].count) break;
    ranked_.push_back(*kids);
  }
  std::sort(ranked_.begin(), ranked_.end(), [this](uint32_t a, uint32_t b) {
    const Node &x = nodes_[a], &y = nodes_[b];
    return x.count != y.count ? x.count > y.count : newer(x.start, y.start);
  });
}

void SuffixTree::chain(Locus at, int32_t most, const SuffixLimits& limits, SuffixDraft* out) {
  most = std::min(most, limits.max_depth);
  double prob = 1;
  uint32_t place = at.offset < nodes_[at.node].length ? after(nodes_[at.node].start, at.offset) : 0;
  while (out->size < most) {
    if (at.offset == nodes_[at.node].length) {
      if (!likeliest(&at, &prob, limits.min_prob)) break;
      place = nodes_[at.node].start;
    }
    put(out, token_at(place), out->size - 1, prob);
    if (++at.offset < nodes_[at.node].length) place = after(place, 1);
  }
}

// Queue what may follow `at`, which is node `parent` of the draft at this depth.
void SuffixTree::expand(Locus at, double prob, int32_t parent, int32_t depth, const SuffixLimits& limits,
                        uint32_t most) {
  if (depth >= limits.max_depth) return;
  auto push = [&](double p, Locus to) {
    queue_.push_back(Candidate{p, queued_++, to, parent, depth + 1});
    std::push_heap(queue_.begin(), queue_.end(), Candidate::after);
  };
  if (at.offset < nodes_[at.node].length) {
    push(prob, Locus{at.node, at.offset + 1});
    return;
  }
  ranked(at.node, prob, limits.min_prob, most);
  const double total = nodes_[at.node].count;
  for (size_t i = 0; i < ranked_.size() && i < most; ++i) {
    push(prob * (double(nodes_[ranked_[i]].count) / total), Locus{ranked_[i], 1});
  }
}

void SuffixTree::best_first(Locus from, int32_t most, const SuffixLimits& limits, SuffixDraft* out) {
  queue_.clear();
  queued_ = 0;
  expand(from, 1, -1, 0, limits, uint32_t(most));
  while (out->size < most && !queue_.empty()) {
    Candidate next = queue_.front();
    std::pop_heap(queue_.begin(), queue_.end(), Candidate::after);
    queue_.pop_back();
    put(out, token_at(after(nodes_[next.at.node].start, next.at.offset - 1)), next.parent, next.prob);
    expand(next.at, next.prob, out->size - 1, next.depth, limits, uint32_t(most));
  }
}

// The given tree, without nodes that have no counterpart (and what is below them).
// Example: parents -1, -1, 0, ranks 0, 1, 0 where only one token was ever seen: nodes 0 and 2 remain, as 0 and 1.
void SuffixTree::shaped(Locus from, int32_t most, const SuffixLimits& limits, SuffixDraft* out) {
  struct Placed {
    Locus at;
    double prob;
    int32_t index, depth;  // index < 0: not there
  } placed[kMaxDraft];
  for (int32_t i = 0; i < limits.tree_size && out->size < most; ++i) {
    const Placed above = limits.parents[i] < 0 ? Placed{from, 1, 0, 0} : placed[limits.parents[i]];
    Placed& here = placed[i];
    here.index = -1;
    if (above.index < 0 || above.depth >= limits.max_depth) continue;
    const uint32_t rank = uint32_t(limits.ranks[i]);
    here.prob = above.prob;
    if (above.at.offset < nodes_[above.at.node].length) {
      if (rank > 0) continue;
      here.at = Locus{above.at.node, above.at.offset + 1};
    } else {
      ranked(above.at.node, above.prob, limits.min_prob, rank + 1);
      if (rank >= ranked_.size()) continue;
      here.at = Locus{ranked_[rank], 1};
      here.prob *= double(nodes_[ranked_[rank]].count) / double(nodes_[above.at.node].count);
    }
    here.depth = above.depth + 1;
    here.index = out->size;
    put(out, token_at(after(nodes_[here.at.node].start, here.at.offset - 1)),
        limits.parents[i] < 0 ? -1 : above.index, here.prob);
  }
}

}  // namespace dw

// ------------------------------------------------------------------------------------------------------- C

using dw::guarded;
using dw::SuffixTree;

namespace {

// A tree whose memory ran out in the middle of a change is no tree any more: whoever asks it later is refused.
struct Guarded {
  explicit Guarded(uint32_t depth) : tree(depth) {}
  SuffixTree tree;
  bool broken = false;
};

SuffixTree* tree_of(void* tree) {
  auto* guarded = static_cast<Guarded*>(tree);
  if (guarded->broken) throw std::bad_alloc();
  return &guarded->tree;
}

template <class Body>
auto change(void* tree, const Body& body) {
  SuffixTree* inner = tree_of(tree);
  try {
    return body(*inner);
  } catch (...) {
    static_cast<Guarded*>(tree)->broken = true;
    throw;
  }
}

void append(void* tree, uint32_t seq, const int32_t* tokens, int64_t n) {
  change(tree, [&](SuffixTree& t) { t.append(seq, tokens, uint64_t(n)); });
}

int64_t settle(void* tree, int64_t most) {
  return change(tree, [&](SuffixTree& t) { return int64_t(t.settle(uint64_t(most))); });
}

int32_t draft(void* local, int64_t local_seq, void* global, int64_t global_seq, const int32_t* tokens, int64_t n,
              const dw::SuffixLimits& limits, dw::SuffixDraft* out) {
  out->score = 0;
  out->match_len = out->source = out->size = 0;
  if (local) tree_of(local)->draft(local_seq, tokens, uint64_t(n), limits, 1, out);
  if (global) tree_of(global)->draft(global_seq, tokens, uint64_t(n), limits, 2, out);
  return out->size;
}

// The two halves of a step. The first answers with the tokens that it took in.
int64_t local_step(void* local, const int32_t* tokens, int64_t n, const dw::SuffixLimits& limits, dw::SuffixDraft* out) {
  const int64_t known = int64_t(tree_of(local)->length(0));
  if (n > known) append(local, 0, tokens + known, n - known);
  draft(local, 0, nullptr, -1, tokens, n, limits, out);
  return std::max<int64_t>(n - known, 0);
}

int32_t global_step(void* global, int64_t global_seq, const int32_t* tokens, int64_t n, int64_t num_prompt, int64_t fresh,
                    const dw::SuffixLimits& limits, dw::SuffixDraft* out) {
  if (!global) return out->size;
  if (global_seq >= 0) {
    const int64_t first = num_prompt + int64_t(tree_of(global)->length(uint32_t(global_seq)));
    if (n > first) append(global, uint32_t(global_seq), tokens + first, n - first);
  }
  settle(global, 16 + 4 * fresh);
  tree_of(global)->draft(global_seq, tokens, uint64_t(n), limits, 2, out);
  return out->size;
}

// Take in what is new of a request's tokens [n]: `local` holds a prefix of all of them in its sequence 0, `global` (may be
// null) a prefix of the output in sequence `global_seq`, where removals go on at four times the pace. Then draft.
int32_t step(void* local, void* global, int64_t global_seq, const int32_t* tokens, int64_t n, int64_t num_prompt,
             const dw::SuffixLimits& limits, dw::SuffixDraft* out) {
  const int64_t fresh = local_step(local, tokens, n, limits, out);
  return global_step(global, global_seq, tokens, n, num_prompt, fresh, limits, out);
}

}  // namespace

DW_EXPORT void* dw_suffix_new(uint32_t depth) {
  return guarded([&] { return static_cast<void*>(new Guarded(depth)); });
}
DW_EXPORT void dw_suffix_free(void* tree) {
  guarded([&] { delete static_cast<Guarded*>(tree); });
}
DW_EXPORT uint32_t dw_suffix_begin(void* tree) {
  return guarded([&] { return change(tree, [](SuffixTree& t) { return t.begin(); }); });
}
DW_EXPORT void dw_suffix_append(void* tree, uint32_t seq, const int32_t* tokens, int64_t n) {
  guarded([&] { append(tree, seq, tokens, n); });
}
DW_EXPORT void dw_suffix_close(void* tree, uint32_t seq) {
  guarded([&] { change(tree, [&](SuffixTree& t) { t.close(seq); }); });
}
DW_EXPORT int dw_suffix_remove(void* tree, uint32_t seq) {
  return guarded([&] { return change(tree, [&](SuffixTree& t) { return int(t.remove(seq)); }); });
}
DW_EXPORT int64_t dw_suffix_settle(void* tree, int64_t most) {
  return guarded([&] { return settle(tree, most); });
}
DW_EXPORT int64_t dw_suffix_count(void* tree, const int32_t* tokens, int64_t n) {
  return guarded([&] { return int64_t(tree_of(tree)->count(tokens, uint64_t(n))); });
}
DW_EXPORT int64_t dw_suffix_length(void* tree, uint32_t seq) {
  return guarded([&] { return int64_t(tree_of(tree)->length(seq)); });
}
DW_EXPORT int64_t dw_suffix_agree(void* tree, uint32_t seq, const int32_t* tokens, int64_t n) {
  return guarded([&] { return int64_t(tree_of(tree)->agree(seq, tokens, uint64_t(n))); });
}
DW_EXPORT int64_t dw_suffix_num_tokens(void* tree) {
  return guarded([&] { return int64_t(tree_of(tree)->num_tokens()); });
}
DW_EXPORT int64_t dw_suffix_num_nodes(void* tree) {
  return guarded([&] { return int64_t(tree_of(tree)->num_nodes()); });
}
DW_EXPORT int64_t dw_suffix_bytes(void* tree) {
  return guarded([&] { return int64_t(tree_of(tree)->bytes()); });
}
DW_EXPORT int dw_suffix_check(void* tree) {
  return guarded([&] { return tree_of(tree)->check(); });
}

// The best continuation of tokens [n]: of `local` (source 1), whose sequence `local_seq` they are, and of `global` (source
// 2; may be null), whose sequence `global_seq` (>= 0) their last tokens are. Returns the number of nodes.
DW_EXPORT int32_t dw_suffix_draft(void* local, int64_t local_seq, void* global, int64_t global_seq, const int32_t* tokens,
                                  int64_t n, const dw::SuffixLimits* limits, dw::SuffixDraft* out) {
  return guarded([&] { return draft(local, local_seq, global, global_seq, tokens, n, *limits, out); });
}

// See `step`.
DW_EXPORT int32_t dw_suffix_step(void* local, void* global, int64_t global_seq, const int32_t* tokens, int64_t n,
                                 int64_t num_prompt, const dw::SuffixLimits* limits, dw::SuffixDraft* out) {
  return guarded([&] { return step(local, global, global_seq, tokens, n, num_prompt, *limits, out); });
}

// `dw_suffix_step` for R requests, one after the other. `columns` [8, R]: local tree; sequence in `global`; address of the
// tokens; how many; of the prompt; budget; greatest depth; shape, without trees of their own. `limits`: the rest. `found`:
// nodes of each draft [R]; length of its match [R]; tokens [R, width]; parents [R, width].
void dw::suffix_steps(Pool* pool, int64_t requests, void* global, const SuffixLimits* limits, const int64_t* columns, int64_t width,
                      int32_t* found) {
  struct Own {
    SuffixLimits limits;
    SuffixDraft draft;
    int64_t fresh;
  };
  static thread_local std::vector<Own> memory;
  memory.resize((size_t)requests);
  struct Context {
    const int64_t* columns;
    int64_t requests;
    Own* own;
    int64_t at(int64_t column, int64_t r) const { return columns[column * requests + r]; }
    const int32_t* tokens(int64_t r) const { return (const int32_t*)(uintptr_t)at(2, r); }
  } context{columns, requests, memory.data()};
  for (int64_t r = 0; r < requests; r++) {
    SuffixLimits& own = memory[(size_t)r].limits = *limits;
    own.budget = (int32_t)std::min(context.at(5, r), width);
    own.max_depth = (int32_t)context.at(6, r);
    own.shape = (int32_t)context.at(7, r);
    require(own.shape == 0 || own.shape == 1, "a shape without a tree");
  }
  // Behind a pass the caches have nothing of the trees. So many requests at a time are asked of the memory together.
  constexpr int64_t TOGETHER = 8;
  const int64_t groups = (requests + TOGETHER - 1) / TOGETHER;
  // Each request's own tree is nobody else's; the tree of all is changed by one after the other.
  constexpr int64_t SHARED_REQUESTS = 16;  // from which a second thread brings more than it costs
  parallel_for(
      requests < SHARED_REQUESTS ? nullptr : pool, (int)groups,
      [](void* arg, int group, int) {
        const Context& c = *(const Context*)arg;
        const int64_t first = group * TOGETHER, end = std::min(first + TOGETHER, c.requests);
        for (int stage = 0; stage < SuffixTree::kStages; stage++)
          for (int64_t r = first; r < end; r++) tree_of((void*)(uintptr_t)c.at(0, r))->fetch(0, c.tokens(r), (uint64_t)c.at(3, r), stage);
        for (int64_t r = first; r < end; r++) {
          Own& own = c.own[r];
          own.fresh = local_step((void*)(uintptr_t)c.at(0, r), c.tokens(r), c.at(3, r), own.limits, &own.draft);
        }
      },
      &context);
  for (int64_t r = 0; r < requests; r++) {
    if (global && r % TOGETHER == 0)
      for (int stage = 0; stage < SuffixTree::kStages; stage++)
        for (int64_t i = r; i < std::min(r + TOGETHER, requests); i++)
          if (context.at(1, i) >= 0)
            tree_of(global)->fetch((uint32_t)context.at(1, i), context.tokens(i) + context.at(4, i), (uint64_t)(context.at(3, i) - context.at(4, i)), stage);
    Own& own = memory[(size_t)r];
    SuffixDraft& out = own.draft;
    const int32_t size = global_step(global, context.at(1, r), context.tokens(r), context.at(3, r), context.at(4, r), own.fresh, own.limits, &out);
    found[r] = size;
    found[requests + r] = size ? out.match_len : 0;
    int32_t* tokens = found + 2 * requests + r * width;
    std::copy(out.tokens, out.tokens + size, tokens);
    std::copy(out.parents, out.parents + size, tokens + requests * width);
  }
}

DW_EXPORT void dw_suffix_steps(int64_t requests, void* global, const dw::SuffixLimits* limits, const int64_t* columns,
                               int64_t width, int32_t* found) {
  guarded([&] { dw::suffix_steps(nullptr, requests, global, limits, columns, width, found); });
}
