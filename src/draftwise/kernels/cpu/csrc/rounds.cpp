#include "rounds.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "boundary.h"
#include "draws.h"
#include "isa.h"
#include "join.h"

namespace dw {
namespace {

enum Column { DRAFTED_COLUMN = 0, ACCEPTED_COLUMN = 1, WAITING_COLUMN = 4, COLUMNS = 8 };

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Memory of a round, kept from call to call.
struct Memory {
  std::vector<int32_t> asked, own, parts, starts, contexts, tables, first_rows, numbers, given, methods, found;
  std::vector<uint8_t> is_tree, outcomes, idle;  // idle: of each request, whether nothing is drafted for it
  std::vector<uint64_t> ancestors, q_at;
  std::vector<VerifyDraw> draws;
  std::vector<int64_t> rows, moves, read, columns;
  std::vector<int64_t> looked, spans;  // spans: nanoseconds of each round
  std::vector<int32_t> drafts, sizes, found_sizes, filled, most, own_budgets;
  std::vector<RowBook*> found_books;
  int64_t width;  // of what is looked up
  std::vector<void*> externals;
  std::vector<const void*> joined;
  std::vector<char> picked;
  // Of guesses: whose they are, how deep they go; what is drawn, of which parents.
  std::vector<RowBook*> guessed;
  std::vector<int32_t> depths, drawn, above;
  std::vector<ChainKey> keys;
  std::vector<int64_t> tokens;
  std::vector<float> logits, scratch;
  std::vector<Candidate> candidates;
  int64_t facts[8], committed[3];
};

// Nodes that each request wants to have verified in round `round`. As `Drafter.cut` and `roster.record` of adapt/.
void want(const Rounds& ask, int64_t round, Memory& m) {
  int32_t* wanted = m.asked.data() + ask.requests;
  if (round == 0) {
    std::copy(ask.wanted, ask.wanted + ask.requests, wanted);
    if (ask.cuts != nullptr) m.outcomes.assign(ask.outcomes, ask.outcomes + ask.requests);
    return;
  }
  const int32_t *drafted = ask.numbers + ((round - 1) * COLUMNS + DRAFTED_COLUMN) * ask.requests,
                *accepted = ask.numbers + ((round - 1) * COLUMNS + ACCEPTED_COLUMN) * ask.requests;
  for (int64_t r = 0; r < ask.requests; r++) {
    const int64_t waiting = ask.books[r]->waiting;
    require(0 <= waiting && waiting <= MOST_DRAFTS, "nodes that wait");
    wanted[r] = (int32_t)waiting;
    if (ask.cuts == nullptr) continue;
    uint8_t& outcome = m.outcomes[(size_t)r];
    if (drafted[r]) outcome = accepted[r] == 0 ? NOTHING : accepted[r] < drafted[r] ? SOME : ALL;
    require(outcome < OUTCOMES, "an outcome");
    wanted[r] = std::min<int32_t>(wanted[r], ask.cuts[(r * OUTCOMES + outcome) * (MOST_DRAFTS + 1) + waiting]);
    if (waiting && !wanted[r]) outcome = UNKNOWN;
  }
}

// The rows of a round, and what verification has to know; false: it cannot be put together here.
bool lay_out(const Rounds& ask, int64_t round, Memory& m) {
  const size_t count = (size_t)ask.requests;
  m.asked.assign(2 * count, 1);
  m.own.resize(count), m.parts.resize(count);
  want(ask, round, m);
  if (!step_size(ask.requests, ask.books, ask.block_size, m.asked.data(), m.own.data(), m.parts.data(), m.facts)) return false;
  const int64_t total = m.facts[0], width = m.facts[1], nodes = m.facts[5];
  if (m.facts[4] != ask.requests || nodes > ask.most_nodes || total > ask.room) return false;
  if (ask.features != nullptr && total > ask.feature_room) return false;
  m.rows.resize(3 * (size_t)total);
  m.starts.resize(count + 1), m.contexts.resize(count), m.first_rows.resize(count), m.is_tree.resize(count);
  m.tables.resize(count * (size_t)width);
  if (m.facts[2]) m.ancestors.resize((size_t)total);
  m.draws.resize(count), m.numbers.resize(5 * count), m.given.resize(3 * (size_t)nodes), m.q_at.resize(count), m.methods.resize(count);
  const StepRows to{m.rows.data(),  m.starts.data(), m.contexts.data(), m.tables.data(), m.is_tree.data(),
                    m.facts[2] ? m.ancestors.data() : nullptr, m.first_rows.data(), nullptr, m.draws.data(),
                    m.numbers.data(), m.given.data(), m.q_at.data(), m.methods.data()};
  step_rows(ask.requests, ask.books, ask.block_size, m.asked.data(), m.own.data(), m.parts.data(), m.facts, to);
  return true;
}

void forward(const Rounds& ask, Pool* pool, Memory& m) {
  const int64_t total = m.facts[0];
  m.externals.assign(ask.pass->externals, ask.pass->externals + num_externals(ask.program));
  for (size_t i = 0; i < 3; i++) m.externals[i] = m.rows.data() + i * (size_t)total;
  PassInput pass = *ask.pass;
  pass.externals = m.externals.data();
  pass.rows = pass.head_rows = total;
  pass.head_index = nullptr;
  pass.batch = BatchView{m.starts.data(), m.contexts.data(), m.is_tree.data(), m.tables.data(),
                         m.facts[2] ? m.ancestors.data() : nullptr, nullptr, nullptr, m.facts[1], (int32_t)ask.requests,
                         (int32_t)ask.block_size};
  run_pass(ask.program, pool, &pass);
}

// Decides, and writes the answers of the round down. Whether no request has ended.
bool decide(Rounds& ask, Pool* pool, int64_t round, Memory& m) {
  const size_t count = (size_t)ask.requests, nodes = (size_t)m.facts[5];
  m.found.resize(2 * count + nodes), m.moves.resize(2 * nodes);
  verify_columns(pool, ask.logits, ask.vocab, ask.requests, m.draws.data(), m.numbers.data(), m.facts[3] ? m.q_at.data() : nullptr,
                 (int64_t)nodes, m.given.data(), m.found.data());
  int64_t* read = nullptr;
  const int64_t room = ask.requests + (int64_t)nodes;
  if (ask.features != nullptr) m.read.resize(3 * (size_t)room), read = m.read.data();
  int32_t* numbers = ask.numbers + round * COLUMNS * ask.requests;
  const int64_t moved = step_taken(ask.requests, ask.requests, ask.books, nullptr, ask.block_size, m.own.data(), m.methods.data(),
                                   (int64_t)nodes, m.given.data(), m.found.data(), numbers, ask.going,
                                   ask.tokens + round * (ask.requests + ask.most_nodes), m.moves.data(), m.asked.data(),
                                   m.starts.data(), read, room, ask.counts, m.committed);
  for (int64_t i = 0; i < ask.num_pools && moved; i++) move_slots(ask.pools[i], moved, m.moves.data(), m.moves.data() + nodes);
  std::copy(m.given.begin(), m.given.end(), ask.nodes + round * 3 * ask.most_nodes);
  std::copy(m.found.begin() + 2 * (ptrdiff_t)count, m.found.end(), ask.paths + round * ask.most_nodes);
  const int32_t* sizes = numbers + 5 * ask.requests;
  int32_t tokens = 0;
  for (size_t r = 0; r < count; r++) tokens += sizes[r];
  ask.sizes[2 * round] = (int32_t)nodes, ask.sizes[2 * round + 1] = tokens;
  return std::find(ask.going, ask.going + count, 0) == ask.going + count;
}

// The half of `features` that a round writes.
char* features_of(const Rounds& ask, int64_t round) { return ask.features + ((ask.first_half + round) % 2) * ask.feature_room * ask.feature_bytes; }

// The features of the rows that became final.
void read_features(Rounds& ask, Pool* pool, Memory& m) {
  const int64_t rows = ask.feature_rows = m.committed[0], room = (int64_t)m.read.size() / 3;
  const size_t bytes = (size_t)ask.source_bytes;
  char* features = features_of(ask, ask.done);
  if (ask.join == nullptr) {
    for (int64_t i = 0; i < rows; i++)
      memcpy(features + i * ask.feature_bytes, (const char*)ask.sources[0] + m.read[(size_t)i] * ask.source_bytes, bytes);
  } else {
    m.picked.resize((size_t)(rows * ask.num_sources) * bytes);
    m.joined.clear();
    char* to = m.picked.data();
    for (int64_t k = 0; k < ask.num_sources; k++) {
      m.joined.push_back(to);
      for (int64_t i = 0; i < rows; i++, to += bytes)
        memcpy(to, (const char*)ask.sources[k] + m.read[(size_t)i] * ask.source_bytes, bytes);
    }
    join_layers(pool, ask.join, m.joined.data(), ask.num_sources, ask.join_width, rows, nullptr, 0.0f, features);
  }
  for (int64_t i = 0; i < m.committed[2] && ask.kept != nullptr; i++) {
    const int64_t block = m.read[(size_t)(2 * room + i)];
    require(0 <= block && block < ask.num_kept && ask.feature_bytes <= ask.kept_bytes, "blocks that keep features");
    memcpy(ask.kept + block * ask.kept_bytes, features + m.read[(size_t)(room + i)] * ask.feature_bytes, (size_t)ask.feature_bytes);
  }
}

// What was looked up of the requests that are asked, `m.looked`: `m.drafts`, and of all requests `m.sizes`. Who is not asked has no turn,
// either: its new tokens are no part yet of what others look up. With a drafter besides, short matches are no drafts.
void look_up(const Rounds& ask, Pool* pool, Memory& m) {
  m.looked.clear();
  m.width = 0;
  for (int64_t r = 0; r < ask.requests; r++) {
    if (m.idle[(size_t)r] || ask.budgets[r] < 1) continue;
    m.looked.push_back(r);
    m.width = std::max<int64_t>(m.width, std::min<int64_t>(ask.budgets[r], MOST_DRAFTS));
  }
  const size_t count = m.looked.size();
  const bool suffixes = ask.look_up == SUFFIXES;
  m.columns.resize(count * (suffixes ? 8 : 5));
  for (size_t i = 0; i < count; i++) {
    const int64_t r = m.looked[i];
    const RowBook& book = *ask.books[r];
    const int64_t at = (int64_t)(uintptr_t)book.tokens, known = book.num_tokens, deepest = book.max_total - known - 1;
    const int64_t budget = std::min<int64_t>(ask.budgets[r], MOST_DRAFTS);
    if (suffixes) {
      const int64_t own[] = {ask.indexes[r], ask.outputs[r], at, known, book.num_prompt, budget, deepest, 0};
      for (size_t k = 0; k < 8; k++) m.columns[k * count + i] = own[k];
    } else {
      const int64_t own[] = {ask.indexes[r], at, known, known, std::min(budget, deepest)};
      for (size_t k = 0; k < 5; k++) m.columns[k * count + i] = own[k];
    }
  }
  m.sizes.assign((size_t)ask.requests, 0);
  if (count == 0) return;
  m.drafts.assign(count * (2 + 2 * (size_t)m.width), 0);
  const int32_t *sizes = m.drafts.data(), *matches = sizes + (suffixes ? count : 0);
  if (suffixes)
    suffix_steps(pool, (int64_t)count, ask.global, ask.limits, m.columns.data(), m.width, m.drafts.data());
  else
    ngram_step((int64_t)count, m.columns.data(), m.width, m.drafts.data());
  for (size_t i = 0; i < count; i++) {
    const bool trusted = ask.drafter == NO_PASSES || matches[i] >= ask.shortest;
    if (trusted && matches[i]) m.sizes[(size_t)m.looked[i]] = suffixes ? sizes[i] : (int32_t)m.columns[4 * count + i];
  }
}

// Writes what was looked up into the books; with a drafter besides, of those of whom something was.
bool place_found(const Rounds& ask, Memory& m) {
  const size_t count = m.looked.size(), width = (size_t)m.width;
  if (count == 0) return true;
  int32_t* tokens = m.drafts.data() + (ask.look_up == SUFFIXES ? 2 : 1) * count;
  m.found_books.clear(), m.found_sizes.clear(), m.most.clear();
  for (size_t i = 0; i < count; i++) {
    const int64_t r = m.looked[i];
    const int32_t size = m.sizes[(size_t)r];
    if (size == 0 && ask.drafter != NO_PASSES) continue;
    const size_t to = m.found_books.size();
    if (to < i) std::copy(tokens + i * width, tokens + (i + 1) * width, tokens + to * width);
    m.found_sizes.push_back(size);
    m.found_books.push_back(ask.books[r]);
    m.most.push_back(ask.budgets[r]);
  }
  m.filled.assign(m.most.size(), -1);
  const PlacedDrafts drafts{m.width, tokens, nullptr, m.found_sizes.data(), m.most.data(), m.filled.data(), false, ask.vocab, nullptr,
                            ask.method};
  return place_drafts((int64_t)m.most.size(), m.found_books.data(), ask.block_size, drafts) < 0;
}

// Drafts of Medusa's heads. As `MedusaProposer.draft_columns`.
bool guess(const Rounds& ask, Pool* pool, Memory& m, const int32_t* budgets) {
  const Guesses& own = *ask.guesses;
  const size_t bytes = (size_t)ask.feature_bytes;
  const char* rows = features_of(ask, ask.done);
  m.guessed.clear(), m.most.clear(), m.depths.clear(), m.picked.clear(), m.keys.clear();
  int64_t end = 0;
  for (int64_t r = 0; r < ask.requests; r++) {
    end += ask.counts[r];
    if (budgets[r] == 0) continue;
    RowBook& book = *ask.books[r];
    // draft d, from 1, stands at position num_tokens - 1 + d
    int64_t depth = std::min({book.max_total - book.num_tokens - 1, own.max_len - book.num_tokens, own.layers->heads});
    if (own.tree == nullptr) depth = std::min<int64_t>(depth, budgets[r]);
    if (depth < 1 || ask.counts[r] < 1) return false;
    m.guessed.push_back(&book), m.most.push_back(budgets[r]), m.depths.push_back((int32_t)depth);
    m.picked.insert(m.picked.end(), rows + (size_t)(end - 1) * bytes, rows + (size_t)end * bytes);
    const VerifyDraw& draw = book.draws;
    m.keys.push_back({draw.seed, draw.sample_index, (int32_t)book.num_tokens, 0, draw.scale, draw.log_min_p, draw.top_k, draw.top_p});
  }
  const int64_t count = (int64_t)m.guessed.size(), vocab = medusa_vocab(*own.layers);
  if (count == 0) return true;
  const int64_t depth = *std::max_element(m.depths.begin(), m.depths.end());
  m.logits.resize((size_t)(depth * count * vocab));
  medusa_logits(pool, *own.layers, m.picked.data(), count, depth, m.logits.data());
  m.filled.assign((size_t)count, -1);
  if (own.tree == nullptr) {
    m.tokens.resize((size_t)(count * depth));
    draw_chains(pool, m.logits.data(), depth, count, vocab, m.keys.data(), (int32_t)own.stream, own.target_ids, m.tokens.data(), own.q);
    m.drawn.assign(m.tokens.begin(), m.tokens.end());
    const PlacedDrafts drafts{depth, m.drawn.data(), nullptr, m.depths.data(), m.most.data(), m.filled.data(), false, ask.vocab, own.q, own.method};
    return place_drafts(count, m.guessed.data(), ask.block_size, drafts) < 0;
  }
  for (int64_t i = 0; i < count; i++)
    if (m.depths[(size_t)i] != depth || m.most[(size_t)i] != m.most[0]) return false;  // trees of one shape
  int32_t parents[MOST_DRAFTS], ranks[MOST_DRAFTS], levels[MOST_DRAFTS];
  const int32_t nodes = cut_shape(own.tree, own.nodes, std::min<int64_t>(m.most[0], MOST_DRAFTS), depth, parents, ranks);
  const int best = nodes ? *std::max_element(ranks, ranks + nodes) + 1 : 0;
  m.drawn.resize((size_t)(count * nodes)), m.above.resize(m.drawn.size());
  for (int64_t i = 0; i < count; i++) {
    for (int64_t level = 0; level < depth; level++) {
      best_tokens(m.logits.data() + (level * count + i) * vocab, nullptr, 1.0f, 0.0f, vocab, best, m.scratch, m.candidates);
      for (int32_t k = 0; k < nodes; k++) {
        levels[k] = parents[k] < 0 ? 0 : levels[parents[k]] + 1;
        if (levels[k] != level) continue;
        if ((size_t)ranks[k] >= m.candidates.size()) return false;
        const int32_t token = m.candidates[(size_t)ranks[k]].token;
        m.drawn[(size_t)(i * nodes + k)] = own.target_ids != nullptr ? (int32_t)own.target_ids[token] : token;
        m.above[(size_t)(i * nodes + k)] = parents[k];
      }
    }
    m.depths[(size_t)i] = nodes;
  }
  const PlacedDrafts drafts{nodes, m.drawn.data(), m.above.data(), m.depths.data(), m.most.data(), m.filled.data(), false, ask.vocab, nullptr,
                            own.method};
  return place_drafts(count, m.guessed.data(), ask.block_size, drafts) < 0;
}

bool run_drafter(Rounds& ask, Pool* pool, Memory& m) {
  const int32_t* budgets = ask.drafter == GUESSES ? ask.guesses->budgets : ask.ask->budgets;
  m.own_budgets.assign(budgets, budgets + ask.requests);
  bool nobody = ask.features == nullptr;  // a head reads anyway, while its features are there
  for (size_t r = 0; r < m.own_budgets.size(); r++) {
    if (m.idle[r] || (ask.look_up != NO_LOOK_UP && m.sizes[r])) m.own_budgets[r] = 0;  // what was found needs no drafts
    nobody &= m.own_budgets[r] == 0;
  }
  if (nobody) return true;
  budgets = m.own_budgets.data();
  if (ask.drafter == GUESSES) return guess(ask, pool, m, budgets);
  BookDrafts books = *ask.ask;
  books.budgets = budgets;
  PassInput pass = *ask.draft_pass;
  m.externals.assign(pass.externals, pass.externals + num_externals(ask.drafting));
  pass.externals = m.externals.data();
  if (ask.features != nullptr) {
    const int32_t read = ask.drafter == TREES ? ask.trees->feature_in : ask.chains->feature_in;
    require(0 <= read && (size_t)read < m.externals.size(), "a drafter that reads features");
    m.externals[(size_t)read] = features_of(ask, ask.done);
    books.feature_rows = ask.feature_rows;
  }
  if (ask.drafter == TREES) return book_trees(ask.drafting, pool, pass, *ask.trees, books) == DRAFTED;
  if (book_chains(ask.drafting, pool, pass, *ask.chains, books) != DRAFTED) return false;
  if (ask.target_ids == nullptr || ask.told == nullptr) return true;
  for (int64_t row = 0; row < books.requests * books.most; row++)
    for (int64_t i = 0; i < ask.draft_vocab; i++)
      ask.told[row * ask.vocab + ask.target_ids[i]] = ask.drawn[row * ask.draft_vocab + i];
  return true;
}

// Whether drafts wait now; if not, Python asks for them, and learns why.
bool draft(Rounds& ask, Pool* pool, Memory& m) {
  if (ask.drafter == NO_PASSES && ask.look_up == NO_LOOK_UP) return true;
  if (ask.drafter == ELSEWHERE) return false;
  m.idle.assign((size_t)ask.requests, 0);
  for (int64_t r = 0; r < ask.requests; r++) {
    const RowBook& book = *ask.books[r];
    if (book.drafting_failed) return false;
    const bool ends = !ask.going[r] || book.max_total - book.num_tokens < 2;
    if (ends && ask.features != nullptr) return false;  // a head that is told of what it does not draft for
    m.idle[(size_t)r] = ends || (ask.once != nullptr && ask.once[r] && ask.done > 0);
  }
  try {
    if (ask.look_up != NO_LOOK_UP) look_up(ask, pool, m);
    return (ask.drafter == NO_PASSES || run_drafter(ask, pool, m)) && (ask.look_up == NO_LOOK_UP || place_found(ask, m));
  } catch (...) {
    return false;
  }
}

void run_all(Rounds& ask, Pool* pool, Memory& m) {
  const int64_t begun = now();
  ask.done = 0, ask.drafted = 0, ask.feature_rows = 0;
  ask.forward_ns = ask.verify_ns = ask.draft_ns = ask.steady_ns = 0;
  m.spans.clear();
  if (ask.ask != nullptr && ask.features != nullptr)  // a drafter that was not told of some tokens goes on behind a gap, which Python makes
    for (int64_t r = 0; r < ask.requests; r++)
      if (ask.ask->seen[r] != ask.books[r]->num_computed) return;
  for (int64_t start = begun; ask.done < ask.rounds;) {
    if (!lay_out(ask, ask.done, m)) return;
    const int64_t laid = now();
    forward(ask, pool, m);
    const int64_t passed = now();
    const bool all = decide(ask, pool, ask.done, m);
    const int64_t decided = now();
    if (ask.features != nullptr) read_features(ask, pool, m);
    int32_t* numbers = ask.numbers + ask.done * COLUMNS * ask.requests;
    ask.drafted = draft(ask, pool, m);
    for (int64_t r = 0; r < ask.requests; r++) numbers[WAITING_COLUMN * ask.requests + r] = (int32_t)ask.books[r]->waiting;
    ask.done++;
    const int64_t end = now();
    m.spans.push_back(end - start);
    ask.forward_ns += passed - laid, ask.verify_ns += decided - passed, ask.draft_ns += end - decided;
    if (!all || !ask.drafted || end - begun + (end - start) > ask.most_ns || __atomic_load_n(ask.hurry, __ATOMIC_RELAXED)) return;
    start = end;
  }
}

void run(Rounds& ask, Pool* pool) {
  static thread_local Memory m;
  run_all(ask, pool, m);
  if (m.spans.empty()) return;
  const auto later = m.spans.begin() + (ptrdiff_t)m.spans.size() / 2, middle = later + (m.spans.end() - later) / 2;
  std::nth_element(later, middle, m.spans.end());
  ask.steady_ns = *middle;
}

}  // namespace
}  // namespace dw

DW_EXPORT void dw_rounds(dw::Pool* pool, dw::Rounds* ask) {
  dw::guarded([&] { dw::run(*ask, pool); });
}
