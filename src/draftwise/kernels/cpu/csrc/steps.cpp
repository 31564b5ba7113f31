// A step: its rows, and of the requests of which nothing but their draws has to be known what verification has to be told, and what is
// taken in of its answer. runner/batch.py, verify/native.py and runner/apart.py are the references of these.
#include "steps.h"

#include <algorithm>

#include "boundary.h"
#include "isa.h"

namespace {

using dw::RowBook;

// The first `tokens` tokens of the request are stored for its drafter now: blocks that became full are marked.
// Example: blocks of 16, 30 tokens before, 40 now: block 1 is full.
void fill_to(RowBook& book, int64_t tokens, int64_t block_size) {
  const int64_t before = book.fill->tokens / block_size, after = tokens / block_size;
  book.fill->tokens = tokens;
  if (book.marks)
    for (int64_t i = before; i < after; i++) book.marks[book.blocks[i]] = 1;
}

int64_t slot_of(const RowBook& book, int64_t key, int64_t block_size) {
  return book.blocks[key / block_size] * block_size + key % block_size;
}

}  // namespace

// How large the step is. `asked` [2, requests]: known tokens to compute, and nodes to verify, at most; `own` [requests]: nodes of
// each that wait for it; `parts` [requests]: a `Part`. `facts` [8]: rows of all, blocks of the request that has most, whether some
// proposal is no chain, whether some that is decided in columns has a q, requests that are decided in columns, their nodes, rows with
// logits, whether somebody has all its tokens. 0: the step cannot be put together so.
// Example: a request whose 10 tokens are computed but the last, with two drafts, and the first 8 tokens of a prompt of 20: 11 rows, 3
// of them with logits.
bool dw::step_size(int64_t requests, RowBook* const* books, int64_t block_size, const int32_t* asked, int32_t* own, int32_t* parts,
                   int64_t* facts) {
  const int32_t *fresh = asked, *wanted = fresh + requests;
  int64_t rows = 0, width = 1, trees = 0, sampled = 0, decided = 0, nodes = 0, logits = 0;
  std::fill(facts, facts + 8, 0);
  for (int64_t r = 0; r < requests; r++) {
    const RowBook& book = *books[r];
    const int64_t n = std::min<int64_t>(wanted[r], book.waiting), known = book.num_computed + fresh[r];
    if (book.num_tokens >= book.max_total) {
      facts[7] = 1;
      return false;
    }
    if (fresh[r] < 1 || book.num_computed < 0 || known > book.num_tokens || n < 0 || n > dw::MOST_DRAFTS) return false;
    if (n && fresh[r] != 1) return false;
    if (known + n > book.num_blocks * block_size) return false;
    if (known < book.num_tokens) {
      if (n) return false;
      parts[r] = dw::CHUNK;
    } else {
      const bool apart = book.rule < 0 || (n && !book.placed) || book.num_tokens + n + 1 > book.capacity;
      parts[r] = apart ? dw::APART : dw::IN_COLUMNS;
      logits += n + 1;
      if (!apart) {
        decided++;
        nodes += n;
        if (n && book.q) sampled = 1;
      }
    }
    own[r] = (int32_t)n;
    rows += fresh[r] + n;
    width = std::max(width, book.num_blocks);
    for (int64_t i = 0; i < n && !trees; i++) trees = book.parents[i] != i - 1;
  }
  const int64_t found[] = {rows, width, trees, sampled, decided, nodes, logits, 0};
  std::copy(found, found + 8, facts);
  return true;
}

DW_EXPORT int dw_step_size(int64_t requests, RowBook* const* books, int64_t block_size, const int32_t* asked, int32_t* own,
                           int32_t* parts, int64_t* facts) {
  return dw::guarded([&] { return (int)dw::step_size(requests, books, block_size, asked, own, parts, facts); });
}

// The rows: of each request the tokens it computes, then its nodes. As `dw_pack_rows` and `dw_place_trees` write them: `rows` [3, T],
// `starts` [requests + 1], `contexts` [requests], `tables` [requests, width], `is_tree` [requests], `ancestors` [T] or null.
// `first_rows` [requests]: first one with logits, counted among these, unless it is a chunk; `with_logits` [L]: which rows have them,
// or null. Of the D requests that are decided in columns, with N nodes, as `dw_verify` reads them: `draws` [D], `numbers` [5, D],
// `given` [3, N], `q_at` [D]. `methods` [D].
// Example: root 4 at key 9 with drafts 8 and 5: rows 4 8 5, positions 9 10 11; base 10, two nodes.
void dw::step_rows(int64_t requests, RowBook* const* books, int64_t block_size, const int32_t* fresh, const int32_t* own,
                   const int32_t* parts, const int64_t* facts, const StepRows& to) {
  const auto [rows, starts, contexts, tables, is_tree, ancestors, first_rows, with_logits, draws, numbers, given, q_at, methods] = to;
  const int64_t total = facts[0], width = facts[1], decided = facts[4], nodes = facts[5], logits = facts[6];
  int64_t *positions = rows + total, *slots = positions + total, t = 0, d = 0, l = 0, at = 0;
  int32_t *base = numbers, *first_row = base + decided, *count = first_row + decided, *rule = count + decided,
          *draw = rule + decided, *parents = given + nodes, *q_rows = parents + nodes;
  for (int64_t r = 0; r < requests; r++) {
    const RowBook& book = *books[r];
    const int64_t n = own[r], root = book.num_computed + fresh[r] - 1;
    dw::require(fresh[r] > 0 && 0 <= n && n <= dw::MOST_DRAFTS && t + fresh[r] + n <= total, "as many rows as there is room for");
    dw::require(book.num_computed >= 0 && root < book.num_tokens, "known tokens");
    dw::require(book.num_blocks <= width && root + n < book.num_blocks * block_size, "a block for each row");
    int32_t* table = tables + r * width;
    std::copy(book.blocks, book.blocks + book.num_blocks, table);
    std::fill(table + book.num_blocks, table + width, 0);
    starts[r] = (int32_t)t;
    contexts[r] = (int32_t)book.num_computed;
    for (int64_t key = book.num_computed; key <= root; key++, t++) {
      rows[t] = book.tokens[key];
      positions[t] = key;
      slots[t] = slot_of(book, key, block_size);
      if (ancestors) ancestors[t] = 0;  // not read
    }
    const int64_t first = t - 1;  // the root's row
    bool tree = false;
    for (int64_t i = 0; i < n; i++) tree |= book.parents[i] != i - 1;
    is_tree[r] = tree;
    if (tree) ancestors[first] = 1;
    for (int64_t i = 1; i <= n; i++, t++) {
      rows[t] = book.drafts[i - 1];
      slots[t] = slot_of(book, root + i, block_size);
      if (!tree) {
        positions[t] = root + i;
        if (ancestors) ancestors[t] = 0;
      } else {
        const int64_t above = (int64_t)book.parents[i - 1] + 1;
        dw::require(0 <= above && above < i, "parents before their children");
        positions[t] = positions[first + above] + 1;
        ancestors[t] = ancestors[first + above] | (uint64_t)1 << i;
      }
    }
    if (parts[r] == dw::CHUNK) continue;
    dw::require(l + n + 1 <= logits, "as many rows with logits as there is room for");
    first_rows[r] = (int32_t)l;
    if (with_logits)
      for (int64_t i = 0; i <= n; i++) with_logits[l + i] = (int32_t)(first + i);
    if (parts[r] == dw::IN_COLUMNS) {
      dw::require(d < decided && at + n <= nodes, "as many nodes as there is room for");
      base[d] = (int32_t)book.num_tokens;
      first_row[d] = (int32_t)l;
      count[d] = (int32_t)n;
      rule[d] = (int32_t)book.rule;
      draw[d] = n && book.q ? (int32_t)book.draw : 0;
      q_at[d] = n ? (uint64_t)(uintptr_t)book.q : 0;
      methods[d] = (int32_t)book.method;
      draws[d] = book.draws;
      std::copy(book.drafts, book.drafts + n, given + at);
      std::copy(book.parents, book.parents + n, parents + at);
      std::copy(book.q_rows, book.q_rows + n, q_rows + at);
      at += n;
      d++;
    }
    l += n + 1;
  }
  starts[requests] = (int32_t)total;
  dw::require(t == total && l == logits && d == decided && at == nodes, "as many rows as the requests have");
}

DW_EXPORT void dw_step_rows(int64_t requests, RowBook* const* books, int64_t block_size, const int32_t* fresh, const int32_t* own,
                            const int32_t* parts, const int64_t* facts, int64_t* rows, int32_t* starts, int32_t* contexts,
                            int32_t* tables, uint8_t* is_tree, uint64_t* ancestors, int32_t* first_rows, int32_t* with_logits,
                            dw::VerifyDraw* draws, int32_t* numbers, int32_t* given, uint64_t* q_at, int32_t* methods) {
  dw::guarded([&] {
    const dw::StepRows to{rows,      starts,      contexts, tables,  is_tree, ancestors, first_rows,
                          with_logits, draws, numbers,  given,   q_at,    methods};
    dw::step_rows(requests, books, block_size, fresh, own, parts, facts, to);
  });
}

// Take in what `dw_verify` found, of D requests that are decided in columns in a step of `requests`. `at` [D]: which ones these are,
// or null: all, in their order. `columns` [8, requests]: what `dw_take_in` of books.cpp reads of each, but drafts that wait: tokens of
// the step 0, and to be looked at, if there was no distribution; then nothing of the request has changed but that its drafts are
// gone. `goes_on` [D]: whether none of the tokens ends the request. `tokens` [D + nodes]: of all, side by side. `moves` [2, nodes]:
// slots of keys that have to be moved, from and to; how many is returned.
// `fresh` [requests], `starts` [requests]: known tokens computed, and first row, of each. `read` [3, room], or null: the rows whose
// tokens are final now, of all, side by side; which of these are the last of their blocks; these blocks. `counts` [D]: rows of each;
// `facts` [3]: how many rows, the most of a request, how many blocks.
// Example: 10 known, nodes 1 and 3 kept of a tree and token 7 behind them: 13 known, 12 computed, keys 10 and 12 go to 10 and 11. The
// request's rows begin at 5: rows 5, 7 and 9 are read, of tokens 9, 10 and 11. Of blocks of 4 tokens 11 is the last one, in row 2 of these.
int64_t dw::step_taken(int64_t requests, int64_t decided, RowBook* const* books, const int32_t* at_of, int64_t block_size,
                       const int32_t* own, const int32_t* methods, int64_t nodes, const int32_t* given, const int32_t* found,
                       int32_t* columns, int32_t* goes_on, int32_t* tokens, int64_t* moves, const int32_t* fresh, const int32_t* starts,
                       int64_t* read, int64_t room, int32_t* counts, int64_t* facts) {
  const int32_t *kept = found, *last = found + decided, *paths = last + decided, *parents_of = given + nodes;
  int32_t *drafted = columns, *accepted = drafted + requests, *depths = accepted + requests, *method = depths + requests,
          *sizes = method + 2 * requests, *firsts = sizes + requests, *look = firsts + requests;
  int64_t at = 0, written = 0, moved = 0, rows = 0, most = 0, ends = 0;
  for (int64_t d = 0; d < decided; d++) {
    const int64_t r = at_of ? at_of[d] : d;
    dw::require(0 <= r && r < requests, "a request of the step");
    RowBook& book = *books[d];
    const int64_t n = own[d], length = kept[d], base = book.num_tokens;
    const int32_t *drafts = given + at, *parents = parents_of + at, *path = paths + at;
    at += n;
    dw::require(at <= nodes && 0 <= length && length <= n, "a path in the tree");
    dw::require(base + length + 1 <= book.capacity, "room for the tokens");
    book.waiting = 0;
    drafted[r] = (int32_t)n;
    method[r] = n ? methods[d] : 0;
    sizes[r] = accepted[r] = depths[r] = goes_on[d] = 0;
    firsts[r] = (int32_t)written;
    look[r] = 1;
    if (read) counts[d] = 0;
    if (last[d] < 0) continue;
    look[r] = 0;
    int32_t depth[dw::MOST_DRAFTS], deepest = 0;
    for (int64_t i = 0; i < n; i++) {
      dw::require(-1 <= parents[i] && parents[i] < i, "parents before their children");
      depth[i] = parents[i] < 0 ? 1 : depth[parents[i]] + 1;
      deepest = std::max(deepest, depth[i]);
    }
    depths[r] = deepest;
    int32_t* answer = tokens + written;
    for (int64_t k = 0; k < length; k++) {
      const int64_t node = path[k];
      dw::require(k <= node && node < n, "a path in the tree");
      answer[k] = drafts[node];
      if (node != k) {
        moves[moved] = slot_of(book, base + node, block_size);
        moves[nodes + moved++] = slot_of(book, base + k, block_size);
      }
    }
    answer[length] = last[d];
    if (read) {
      const int64_t count = fresh[r] + length, first = base - fresh[r];
      dw::require(rows + count <= room && 0 <= first && base + length <= book.num_blocks * block_size, "room for the rows");
      for (int64_t i = 0; i < fresh[r]; i++) read[rows + i] = starts[r] + i;
      for (int64_t k = 0; k < length; k++) read[rows + fresh[r] + k] = starts[r] + fresh[r] + path[k];
      for (int64_t i = block_size - 1 - first % block_size; i < count; i += block_size) {
        read[room + ends] = rows + i;
        read[2 * room + ends++] = book.blocks[(first + i) / block_size];
      }
      counts[d] = (int32_t)count;
      rows += count;
      most = std::max(most, count);
    }
    if (book.fill) {
      if (book.fill->drafts && book.fill->tokens == base) fill_to(book, base + std::min(length, book.fill->drafts), block_size);
      book.fill->drafts = 0;
    }
    std::copy(answer, answer + length + 1, book.tokens + base);
    book.num_tokens = base + length + 1;
    book.num_computed = base + length;
    sizes[r] = (int32_t)length + 1;
    accepted[r] = (int32_t)length;
    goes_on[d] = std::find_first_of(answer, answer + length + 1, book.stops, book.stops + book.num_stops) == answer + length + 1;
    written += length + 1;
  }
  if (read) facts[0] = rows, facts[1] = most, facts[2] = ends;
  return moved;
}

DW_EXPORT int64_t dw_step_taken(int64_t requests, int64_t decided, RowBook* const* books, const int32_t* at_of, int64_t block_size,
                                const int32_t* own, const int32_t* methods, int64_t nodes, const int32_t* given, const int32_t* found,
                                int32_t* columns, int32_t* goes_on, int32_t* tokens, int64_t* moves, const int32_t* fresh,
                                const int32_t* starts, int64_t* read, int64_t room, int32_t* counts, int64_t* facts) {
  return dw::guarded([&] {
    return dw::step_taken(requests, decided, books, at_of, block_size, own, methods, nodes, given, found, columns, goes_on, tokens, moves,
                          fresh, starts, read, room, counts, facts);
  });
}

// Nodes that wait for the next step, `waiting` [requests].
DW_EXPORT void dw_step_waiting(int64_t requests, RowBook* const* books, int32_t* waiting) {
  dw::guarded([&] {
    for (int64_t r = 0; r < requests; r++) waiting[r] = (int32_t)books[r]->waiting;
  });
}

// Write down what was drafted. `columns` [6, requests]: nodes; how they were drawn; number of the method; whether native code may
// verify them; leading tokens that the drafter has stored, -1: as before; drafts stored behind them. `given` [3, nodes]: tokens,
// parents, rows of q. `q_at` [requests] or null. Answers -1, or the first request about which a number cannot be: those before it
// were written.
DW_EXPORT int64_t dw_place_drafts(int64_t requests, RowBook* const* books, int64_t block_size, const int32_t* columns,
                                  int64_t nodes, const int32_t* given, const uint64_t* q_at) {
  return dw::guarded([&]() -> int64_t {
    const int32_t *sizes = columns, *draw = sizes + requests, *method = draw + requests, *placed = method + requests,
                  *tokens = placed + requests, *stored = tokens + requests;
    int64_t at = 0;
    for (int64_t r = 0; r < requests; r++) {
      RowBook& book = *books[r];
      const int64_t n = sizes[r];
      dw::require(0 <= n && n <= dw::MOST_DRAFTS && at + n <= nodes, "as many nodes as there are");
      const int32_t *own = given + at, *parents = own + nodes, *q_rows = parents + nodes;
      at += n;
      if (tokens[r] >= 0) {
        bool chain = true;
        for (int64_t i = 0; i < n; i++) chain &= parents[i] == i - 1;
        if (!book.fill || tokens[r] > book.num_tokens || book.num_tokens > book.num_blocks * block_size) return r;
        if (stored[r] < 0 || stored[r] > (chain ? n : 0)) return r;
        if (tokens[r] / block_size > book.fill->tokens / block_size) fill_to(book, tokens[r], block_size);
        book.fill->tokens = tokens[r];
        book.fill->drafts = stored[r];
      }
      book.waiting = n;
      book.placed = placed[r];
      book.draw = draw[r];
      book.method = method[r];
      book.q = q_at ? (const float*)(uintptr_t)q_at[r] : nullptr;
      std::copy(own, own + n, book.drafts);
      std::copy(parents, parents + n, book.parents);
      std::copy(q_rows, q_rows + n, book.q_rows);
    }
    return -1;
  });
}

// What drafters want to know, side by side: `columns` [5, requests] kind, known tokens, of these the prompt's, deepest node, where tokens
// lie. Kinds: a chain or tree that is drawn like those of one number; 0: something else; -1: nothing, since its drafter failed, or no
// token may follow its drafts.
DW_EXPORT void dw_draft_columns(int64_t requests, RowBook* const* books, int64_t* columns) {
  dw::guarded([&] {
    for (int64_t r = 0; r < requests; r++) {
      const RowBook& book = *books[r];
      const bool ends = book.drafting_failed || book.max_total - book.num_tokens < 2;
      const int64_t found[] = {ends ? -1 : book.kind, book.num_tokens, book.num_prompt, book.max_total - book.num_tokens - 1,
                               (int64_t)(uintptr_t)book.tokens};
      for (int64_t i = 0; i < 5; i++) columns[i * requests + r] = found[i];
    }
  });
}

int64_t dw::place_drafts(int64_t requests, RowBook* const* books, int64_t block_size, const PlacedDrafts& drafts) {
  const int64_t width = drafts.width;
  const int32_t *tokens = drafts.tokens, *parents = drafts.parents, *filled = drafts.filled;
  for (int64_t r = 0; r < requests; r++) {
    const RowBook& book = *books[r];
    const int64_t n = drafts.sizes[r], deepest = book.max_total - book.num_tokens - 1;
    if (n < 0 || n > std::min<int64_t>({width, drafts.most[r], MOST_DRAFTS})) return r;
    int32_t depth[MOST_DRAFTS];
    for (int64_t i = 0; i < n; i++) {
      if (tokens[r * width + i] < 0 || tokens[r * width + i] >= drafts.vocab) return r;
      const int64_t above = parents ? parents[r * width + i] : i - 1;
      if (above < -1 || above >= i) return r;
      depth[i] = above < 0 ? 1 : depth[above] + 1;
      if (depth[i] > deepest) return r;
    }
    if (filled[r] >= 0 && (!book.fill || filled[r] > book.num_tokens || book.num_tokens > book.num_blocks * block_size)) return r;
  }
  for (int64_t r = 0; r < requests; r++) {
    RowBook& book = *books[r];
    const int64_t n = drafts.sizes[r];
    if (filled[r] >= 0) {
      fill_to(book, filled[r], block_size);
      book.fill->drafts = drafts.keeps ? std::max<int64_t>(n - 1, 0) : 0;
    }
    book.waiting = n;
    book.placed = 2;
    book.draw = drafts.q ? dw::INDEPENDENT : dw::FIXED;
    book.method = drafts.method;
    book.q = drafts.q;
    for (int64_t i = 0; i < n; i++) {
      book.drafts[i] = tokens[r * width + i];
      book.parents[i] = parents ? parents[r * width + i] : (int32_t)i - 1;
      book.q_rows[i] = (int32_t)(r * width + i);
    }
  }
  return -1;
}

// `place_drafts` of what Python has. `columns` [3, requests]: tokens of each; the most it may have; tokens that the drafter has stored.
DW_EXPORT int64_t dw_place_chains(int64_t requests, RowBook* const* books, int64_t block_size, int64_t width, const int32_t* tokens,
                                  const int32_t* parents, const int32_t* columns, int64_t vocab, const float* q, int64_t method) {
  return dw::guarded([&]() -> int64_t {
    const dw::PlacedDrafts drafts{width, tokens, parents, columns, columns + requests, columns + 2 * requests, false, vocab, q, method};
    return dw::place_drafts(requests, books, block_size, drafts);
  });
}

// Copy slots of a storage, [layers, slots, ...], in their order: what is written by one move may be read by the next. Slots and layers
// are so many bytes apart.
void dw::move_slots(const SlotPool& pool, int64_t moves, const int64_t* from, const int64_t* to) {
  for (int64_t i = 0; i < moves; i++)
    require(0 <= from[i] && from[i] < pool.slots && 0 <= to[i] && to[i] < pool.slots, "slots of the storage");
  uint8_t* at = pool.at;
  for (int64_t layer = 0; layer < pool.layers; layer++, at += pool.layer_bytes)
    for (int64_t i = 0; i < moves; i++)
      if (from[i] != to[i])
        std::copy(at + from[i] * pool.slot_bytes, at + (from[i] + 1) * pool.slot_bytes, at + to[i] * pool.slot_bytes);
}

DW_EXPORT void dw_move_slots(uint8_t* pool, int64_t layers, int64_t layer_bytes, int64_t slots, int64_t slot_bytes, int64_t moves,
                             const int64_t* from, const int64_t* to) {
  dw::guarded([&] { dw::move_slots({pool, layers, layer_bytes, slots, slot_bytes}, moves, from, to); });
}

// Copy rows of `bytes`: number from[i] of `source` becomes number to[i] of `target`; there are so many of each, so many bytes apart.
DW_EXPORT void dw_copy_rows(uint8_t* target, int64_t target_rows, int64_t target_bytes, const uint8_t* source, int64_t source_rows,
                            int64_t source_bytes, int64_t bytes, int64_t count, const int64_t* from, const int64_t* to) {
  dw::guarded([&] {
    for (int64_t i = 0; i < count; i++)
      dw::require(0 <= from[i] && from[i] < source_rows && 0 <= to[i] && to[i] < target_rows, "rows that are there");
    for (int64_t i = 0; i < count; i++) {
      const uint8_t* row = source + from[i] * source_bytes;
      std::copy(row, row + bytes, target + to[i] * target_bytes);
    }
  });
}
