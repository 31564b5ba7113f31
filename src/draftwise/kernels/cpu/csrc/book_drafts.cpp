#include "book_drafts.h"

#include <algorithm>
#include <vector>

#include "block.h"
#include "boundary.h"
#include "isa.h"
#include "tree.h"

namespace dw {
namespace {

// Those of the requests that are drafted for, and the rows that the drafter has not read of them. Kept from call to call.
struct BookRows {
  std::vector<RowBook*> books;
  // Of each: which one it was of those asked for, its drafts, how many it may have, tokens stored afterwards.
  std::vector<int32_t> numbers, lengths, budgets, filled;
  std::vector<int64_t> ids, positions, slots, known;  // known: the key of the first draft
  std::vector<int32_t> starts, contexts, first_keys;
  std::vector<uint8_t> no_tree;
  std::vector<ChainKey> keys;
  std::vector<int64_t> tokens;
  std::vector<int32_t> drafts, parents, sizes, shapes;
  std::vector<TreeWish> wishes;
  int64_t width = 0, steps = 0;  // blocks of the longest table, drafts of the longest chain

  void clear() {
    books.clear();
    for (auto* v : {&numbers, &lengths, &budgets, &filled, &contexts, &first_keys}) v->clear();
    for (auto* v : {&ids, &positions, &slots, &known}) v->clear();
    starts.assign(1, 0);
    width = 1, steps = 0;
  }
};

// How many drafts in a row a request may have; not positive: none. As `chains.longest_chain`.
int64_t longest_chain(const RowBook& book, const BookDrafts& ask, int64_t budget) {
  if (book.drafting_failed) return 0;
  const int64_t known = book.num_tokens, room = book.num_blocks * ask.block_size;
  return std::min({budget, MOST_DRAFTS, book.max_total - known - 1, ask.max_len - known + 1, room - known + 1, ask.most});
}

// Whether the requests can be drafted for; then `rows` are theirs. `offset`: of keys from positions.
// Example: 12 known tokens, of which the drafter has 10: rows of tokens 10 and 11. A request that may have no draft has no rows.
// `reads_on`: but if its budget is 0 and the drafter reads features, it has those of its features.
bool take(const BookDrafts& ask, int64_t offset, BookRows& rows, bool reads_on = false) {
  rows.clear();
  const bool reads = ask.counts != nullptr;
  int64_t features = 0;
  for (int64_t r = 0; r < ask.requests; r++) {
    RowBook& book = *ask.books[r];
    if (book.kind < 1 || book.kind != ask.books[0]->kind) return false;
    const bool none = ask.budgets[r] == 0 && reads && reads_on;
    const int64_t longest = longest_chain(book, ask, none ? 1 : ask.budgets[r]), length = none ? 0 : longest, known = book.num_tokens;
    if (longest < 1 && reads) return false;  // its features would wait
    if (longest < 1) continue;
    require(0 < known && known <= book.capacity && known <= book.num_blocks * ask.block_size, "known tokens, and blocks for them");
    int64_t first = known - 1;
    if (reads) {
      first = (int64_t)ask.seen[r] + 1;
      if (first < 1 || ask.counts[r] < 1 || first + ask.counts[r] != known) return false;
      features += ask.counts[r];
      rows.first_keys.push_back(ask.first_keys[r]);
    } else if (!ask.shares) {
      if (book.fill == nullptr || book.fill->tokens < 0) return false;
      first = std::min(book.fill->tokens, first);
    }
    if ((int64_t)rows.ids.size() + known - first > ask.most_rows) return false;
    int64_t block = first / ask.block_size, place = first % ask.block_size;
    for (int64_t key = first; key < known; key++) {
      rows.ids.push_back(book.tokens[key]);
      rows.positions.push_back(key - offset);
      rows.slots.push_back((int64_t)book.blocks[block] * ask.block_size + place);
      if (++place == ask.block_size) place = 0, block++;
    }
    rows.numbers.push_back((int32_t)r);
    rows.books.push_back(&book);
    rows.lengths.push_back((int32_t)length);
    rows.budgets.push_back(ask.budgets[r]);
    rows.filled.push_back(ask.shares ? -1 : reads && ask.gaps[r] >= 0 ? ask.gaps[r] : (int32_t)known);
    rows.known.push_back(known);
    rows.contexts.push_back((int32_t)first);
    rows.starts.push_back((int32_t)rows.ids.size());
    rows.width = std::max(rows.width, book.num_blocks);
    rows.steps = std::max(rows.steps, length);
  }
  if (reads && features != ask.feature_rows) return false;
  rows.no_tree.assign(rows.books.size(), 0);
  return true;
}

// Requests begin .. end - 1 of those in `rows`, as a pass of their own.
struct Part {
  size_t begin, end;
  std::vector<int32_t> starts, tables;
  std::vector<int64_t> last_rows;
  std::vector<void*> externals;
  PassInput pass;

  // `given`: the caller's pass; `scratch`: block tables go on in scratch blocks.
  void make(const BookDrafts& ask, BookRows& rows, const PassInput& given, size_t buffers, const ChainOutput* chains,
            const TreeOutput* trees, bool scratch) {
    const size_t count = end - begin, first = (size_t)rows.starts[begin];
    const int64_t own = scratch ? ask.scratch_each : 0, width = rows.width + own;
    starts.clear();
    last_rows.clear();
    for (size_t i = begin; i <= end; i++) starts.push_back(rows.starts[i] - (int32_t)first);
    for (size_t i = begin; i < end; i++) last_rows.push_back(rows.starts[i + 1] - (int64_t)first - 1);
    tables.assign(count * (size_t)width, 0);
    for (size_t i = 0; i < count; i++) {
      const RowBook& book = *rows.books[begin + i];
      int32_t* table = tables.data() + i * (size_t)width;
      std::copy(book.blocks, book.blocks + book.num_blocks, table);
      for (int64_t k = 0; k < own; k++) table[book.num_blocks + k] = (int32_t)(ask.scratch + (int64_t)i * own + k);
    }
    externals.assign(given.externals, given.externals + buffers);
    externals[0] = rows.ids.data() + first;
    externals[1] = rows.positions.data() + first;
    externals[2] = rows.slots.data() + first;
    const int32_t read = chains != nullptr ? chains->feature_in : trees->feature_in;
    const int64_t bytes = chains != nullptr ? chains->feature_bytes : trees->feature_bytes;
    if (read >= 0) externals[(size_t)read] = (char*)externals[(size_t)read] + (int64_t)first * bytes;
    pass = given;
    pass.externals = externals.data();
    pass.rows = starts[count];
    pass.head_rows = (int64_t)count;
    pass.head_index = pass.rows == pass.head_rows ? nullptr : last_rows.data();
    pass.head_only = 1;
    const bool cut = std::any_of(rows.first_keys.begin(), rows.first_keys.end(), [](int32_t key) { return key > 0; });
    pass.batch = BatchView{starts.data(), rows.contexts.data() + begin, rows.no_tree.data(), tables.data(), nullptr,
                           cut ? rows.first_keys.data() + begin : nullptr, nullptr, width, (int32_t)count, (int32_t)ask.block_size};
  }
};

// What the drafter has read of its features, after its passes.
void note_read(const BookDrafts& ask) {
  int32_t end = 0;
  for (int64_t r = 0; r < ask.requests; r++) {
    end += ask.counts[r];
    ask.seen[r] += ask.counts[r];
    ask.last[r] = end - 1;
  }
}

// Whose passes draft: those of one program, or a block drafter's, which stores features with `program` and drafts with `block`.
struct Passes {
  Pool* pool;
  const Program* program;
  const PassInput* given;
  const Program* block = nullptr;
  const PassInput* own = nullptr;
  const BlockPlan* plan = nullptr;

  void chains(Part& part, const ChainOutput& out) const {
    if (block == nullptr) return draft_chains(program, pool, &part.pass, &out);
    part.pass.head_rows = part.pass.head_only = 0;
    block_chains(program, block, pool, &part.pass, own, plan, &out);
  }

  void trees(Part& part, const TreeOutput& out) const {
    if (block == nullptr) return draft_trees(program, pool, &part.pass, &out);
    part.pass.head_rows = part.pass.head_only = 0;
    block_trees(program, block, pool, &part.pass, own, plan, &out);
  }
};

// Whether there is room; else what has to be.
bool has_room(BookDrafts& ask, int64_t rows, int64_t head_rows) {
  ask.rows = rows, ask.head_rows = head_rows;
  return rows <= ask.room && head_rows <= ask.head_room;
}

int64_t chains(const Passes& passes, const ChainOutput& wanted, BookDrafts& ask) {
  static thread_local BookRows rows;
  static thread_local Part part;
  if (!take(ask, wanted.key_offset, rows, passes.block == nullptr)) return NOT_SO;
  const size_t requests = rows.books.size();
  if (requests == 0) return DRAFTED;
  if (!has_room(ask, (int64_t)rows.ids.size(), (int64_t)requests)) return NO_ROOM;
  part.begin = 0, part.end = requests;
  part.make(ask, rows, *passes.given, num_externals(passes.program), &wanted, nullptr, false);
  rows.keys.clear();
  if (wanted.stream != NO_NOISE) {
    for (size_t i = 0; i < requests; i++) {
      const VerifyDraw& draw = rows.books[i]->draws;
      rows.keys.push_back({draw.seed, draw.sample_index, (int32_t)rows.known[i], 0, draw.scale, draw.log_min_p, draw.top_k, draw.top_p});
    }
  }
  rows.tokens.resize(requests * (size_t)rows.steps);
  ChainOutput out = wanted;
  out.steps = rows.steps;
  out.tokens = rows.tokens.data();
  out.positions = rows.known.data();
  out.keys = rows.keys.data();
  out.lengths = rows.lengths.data();
  passes.chains(part, out);
  rows.drafts.assign(rows.tokens.size(), 0);
  for (size_t i = 0; i < requests; i++)
    for (size_t k = i * (size_t)rows.steps; k < i * (size_t)rows.steps + (size_t)rows.lengths[i]; k++)
      rows.drafts[k] = (int32_t)rows.tokens[k];
  const PlacedDrafts drafts{rows.steps, rows.drafts.data(), nullptr, rows.lengths.data(), rows.budgets.data(), rows.filled.data(),
                            ask.counts == nullptr, ask.vocab, ask.q, ask.method};
  if (place_drafts((int64_t)requests, rows.books.data(), ask.block_size, drafts) >= 0) return NOT_SO;
  if (ask.counts != nullptr) note_read(ask);
  return DRAFTED;
}

// What each of the requests in `rows` wants; whether some tree needs more room than its request has in its own blocks.
bool wish(const BookDrafts& ask, BookRows& rows) {
  const size_t requests = rows.books.size();
  bool scratch = ask.tree == nullptr;
  rows.wishes.clear();
  rows.shapes.resize(requests * 2 * (size_t)MOST_DRAFTS);
  for (size_t i = 0; i < requests; i++) {
    const RowBook& book = *rows.books[i];
    TreeWish own{nullptr, nullptr, 0, rows.known[i], 0, 0, 0, 0, 0, book.draws.scale, 0.0f};
    if (ask.noise != nullptr) {
      own.seed = book.draws.seed, own.sample_index = book.draws.sample_index;
      own.scale = 1.0f, own.noise_scale = ask.noise[rows.numbers[i]];
    }
    const int64_t budget = std::min<int64_t>(rows.budgets[i], MOST_DRAFTS);
    if (ask.tree == nullptr) {
      own.top_k = (int32_t)ask.top_k;
      own.depth = (int32_t)std::min<int64_t>(rows.lengths[i], ask.depth);
      own.nodes = (int32_t)budget;
    } else {
      int32_t *parents = rows.shapes.data() + i * 2 * (size_t)MOST_DRAFTS, *ranks = parents + MOST_DRAFTS;
      own.shape_nodes = cut_shape(ask.tree, ask.nodes, budget, rows.lengths[i], parents, ranks);
      own.shape_parents = parents, own.shape_ranks = ranks;
      scratch |= rows.known[i] + own.shape_nodes > book.num_blocks * ask.block_size;
    }
    rows.wishes.push_back(own);
  }
  return scratch;
}

int64_t trees(const Passes& passes, const TreeOutput& wanted, BookDrafts& ask) {
  static thread_local BookRows rows;
  static thread_local Part part;
  require(ask.tree == nullptr || (0 < ask.nodes && ask.nodes <= MOST_DRAFTS), "nodes of a tree");
  require(ask.tree != nullptr || (0 < ask.top_k && ask.top_k * (ask.depth - 1) <= MAX_TREE_ROWS), "levels of a tree");
  if (!take(ask, wanted.key_offset, rows)) return NOT_SO;
  const size_t requests = rows.books.size();
  if (requests == 0) return DRAFTED;
  const bool scratch = wish(ask, rows) && passes.block == nullptr;  // a block has its own
  require(!scratch || (ask.together > 0 && ask.scratch_each * ask.block_size >= MAX_TREE_ROWS), "scratch blocks");
  const size_t together = scratch ? (size_t)ask.together : requests;
  int64_t most = 0, most_nodes = 0;
  for (size_t begin = 0; begin < requests; begin += together) {
    const size_t end = std::min(begin + together, requests);
    int64_t nodes = 0;
    for (size_t i = begin; i < end; i++) nodes += std::max<int64_t>(ask.tree == nullptr ? ask.top_k : rows.wishes[i].shape_nodes, 1);
    most = std::max<int64_t>({most, rows.starts[end] - rows.starts[begin], nodes});
    most_nodes = std::max(most_nodes, nodes);
  }
  if (!has_room(ask, most, most_nodes)) return NO_ROOM;
  rows.drafts.resize(requests * (size_t)MAX_TREE_ROWS);
  rows.parents.resize(rows.drafts.size());
  rows.sizes.assign(requests, 0);
  for (size_t begin = 0; begin < requests; begin += together) {
    part.begin = begin, part.end = std::min(begin + together, requests);
    part.make(ask, rows, *passes.given, num_externals(passes.program), nullptr, &wanted, scratch);
    TreeOutput out = wanted;
    out.wishes = rows.wishes.data() + begin;
    out.tokens = rows.drafts.data() + begin * (size_t)MAX_TREE_ROWS;
    out.parents = rows.parents.data() + begin * (size_t)MAX_TREE_ROWS;
    out.counts = rows.sizes.data() + begin;
    out.room = most_nodes;
    passes.trees(part, out);
  }
  const PlacedDrafts drafts{MAX_TREE_ROWS, rows.drafts.data(), rows.parents.data(), rows.sizes.data(), rows.budgets.data(),
                            rows.filled.data(), false, ask.vocab, nullptr, ask.method};
  if (place_drafts((int64_t)requests, rows.books.data(), ask.block_size, drafts) >= 0) return NOT_SO;
  if (ask.counts != nullptr) note_read(ask);
  return DRAFTED;
}

}  // namespace

int32_t cut_shape(const int32_t* tree, int64_t size, int64_t nodes, int64_t depth, int32_t* parents, int32_t* ranks) {
  int32_t depths[MOST_DRAFTS], places[MOST_DRAFTS], kept = 0;
  for (int64_t i = 0; i < std::min(nodes, size); i++) {
    const int32_t above = tree[i];
    require(-1 <= above && above < i, "parents before their children");
    depths[i] = above < 0 ? 1 : depths[above] + 1;
    if (depths[i] > depth) continue;
    parents[kept] = above < 0 ? -1 : places[above];
    ranks[kept] = tree[size + i];
    places[i] = kept++;
  }
  return kept;
}

int64_t book_chains(const Program* program, Pool* pool, const PassInput& pass, const ChainOutput& out, BookDrafts& ask) {
  return chains({pool, program, &pass}, out, ask);
}

int64_t book_trees(const Program* program, Pool* pool, const PassInput& pass, const TreeOutput& out, BookDrafts& ask) {
  return trees({pool, program, &pass}, out, ask);
}

}  // namespace dw

// Chains for requests, as `dw_program_chains` drafts them: their rows are packed here, and what is drafted is written into their books.
// Of `pass` the arena, the results and the features count, of `out` what all chains have in common. Answers a `BookAnswer`; unless
// that is DRAFTED, the books are as they were.
DW_EXPORT int64_t dw_book_chains(dw::Program* program, dw::Pool* pool, const dw::PassInput* pass, const dw::ChainOutput* out,
                                 dw::BookDrafts* ask) {
  return dw::guarded([&] { return dw::book_chains(program, pool, *pass, *out, *ask); });
}

// The same for trees, as `dw_program_trees` drafts them.
DW_EXPORT int64_t dw_book_trees(dw::Program* program, dw::Pool* pool, const dw::PassInput* pass, const dw::TreeOutput* out,
                                dw::BookDrafts* ask) {
  return dw::guarded([&] { return dw::book_trees(program, pool, *pass, *out, *ask); });
}

// The same of block drafters, as `dw_block_chains` and `dw_block_trees` draft: `pass` is one of `store`, `own` and `plan` as there.
DW_EXPORT int64_t dw_book_block_chains(dw::Program* store, dw::Pool* pool, const dw::PassInput* pass, const dw::ChainOutput* out,
                                       dw::BookDrafts* ask, dw::Program* block, const dw::PassInput* own, const dw::BlockPlan* plan) {
  return dw::guarded([&] { return dw::chains({pool, store, pass, block, own, plan}, *out, *ask); });
}

DW_EXPORT int64_t dw_book_block_trees(dw::Program* store, dw::Pool* pool, const dw::PassInput* pass, const dw::TreeOutput* out,
                                      dw::BookDrafts* ask, dw::Program* block, const dw::PassInput* own, const dw::BlockPlan* plan) {
  return dw::guarded([&] { return dw::trees({pool, store, pass, block, own, plan}, *out, *ask); });
}
