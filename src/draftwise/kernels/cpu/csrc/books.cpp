// What a step did to many requests, written into the scheduler's books. Scheduler._commit_row is the reference of this.
#include "books.h"

#include <algorithm>

#include "boundary.h"
#include "isa.h"

namespace {

// Where the steps of a method are counted; null: there is no room for another.
int64_t* steps_of(dw::RequestBook& book, int64_t method) {
  for (int i = 0; i < 3; i++) {
    if (book.methods[i] == 0) book.methods[i] = method;
    if (book.methods[i] == method) return book.steps + i;
  }
  return nullptr;
}

}  // namespace

// What requests that run ask of a step before which no other is on its way. `missing` [requests]: known tokens to compute;
// `proposed` [requests]: drafts that wait, of those that miss one token. `facts` [3]: how many these are; tokens that they have
// computed; blocks that are to be handed out until all known tokens have room.
// Example: 33 tokens known, 32 computed, two blocks of 16: one is missing, in a third block.
DW_EXPORT void dw_plan_roots(int64_t requests, dw::RequestBook* const* books, dw::TableBook* const* tables, int64_t block_size,
                             int32_t* missing, int32_t* proposed, int64_t* facts) {
  dw::guarded([&] {
    int64_t decoding = 0, context = 0, lacking = 0;
    for (int64_t r = 0; r < requests; r++) {
      const dw::RequestBook& book = *books[r];
      const dw::TableBook& table = *tables[r];
      const int64_t left = book.num_tokens - book.num_computed;
      const int64_t blocks = (table.committed + left + block_size - 1) / block_size;
      missing[r] = (int32_t)left;
      proposed[r] = 0;
      lacking += std::max<int64_t>(blocks - table.num_blocks, 0);
      if (left != 1) continue;
      proposed[r] = (int32_t)book.num_proposed;
      decoding++;
      context += book.num_computed;
    }
    facts[0] = decoding, facts[1] = context, facts[2] = lacking;
    for (int64_t r = 0; r < requests && !lacking; r++) tables[r]->reserved = std::max<int64_t>(tables[r]->reserved, missing[r]);
  });
}

// Reserve `wanted` [requests] tokens past the committed ones, as KVManager.reserve does, of those that have blocks for them.
// `lacking` [requests]: the others, in their order; how many they are is returned.
DW_EXPORT int64_t dw_plan_room(int64_t requests, dw::TableBook* const* tables, int64_t block_size, const int32_t* wanted,
                               int32_t* lacking) {
  return dw::guarded([&] {
    int64_t count = 0;
    for (int64_t r = 0; r < requests; r++) {
      dw::TableBook& table = *tables[r];
      if (wanted[r] <= table.reserved) continue;
      if (table.committed + wanted[r] > table.num_blocks * block_size)
        lacking[count++] = (int32_t)r;
      else
        table.reserved = wanted[r];
    }
    return count;
  });
}

// `books`, `tables` [requests]: where those of each lie. `num_new` [requests]: known tokens computed. `columns` [8, requests]: drafts
// verified; those accepted; depth of what was verified; number of the method that drafted it; drafts that wait now; tokens of the
// step; where they begin in `tokens`, which has `total`; whether somebody has to look in any case.
// `answers` [requests]: 0: written; 1: written, and its blocks are due; -1: nothing was written, since something about it is out
// of the ordinary: it may end here, or is watched, or the numbers do not fit together.
// Example: 10 tokens known, 9 computed; a step computed the tenth, verified 4 drafts and accepted two of them: 13 known, 12
// computed.
DW_EXPORT void dw_take_in(int64_t requests, dw::RequestBook* const* books, dw::TableBook* const* tables, const int32_t* num_new,
                          const int32_t* columns, const int32_t* tokens, int64_t total, double now, int32_t* answers) {
  dw::guarded([&] {
    const int32_t *drafted = columns, *accepted = drafted + requests, *depth = accepted + requests, *method = depth + requests,
                  *proposed = method + requests, *sizes = proposed + requests, *firsts = sizes + requests, *look = firsts + requests;
    for (int64_t r = 0; r < requests; r++) {
      const int64_t size = sizes[r];
      dw::require(0 <= size && 0 <= firsts[r] && size <= total - firsts[r], "as many tokens as the requests have");
      const int32_t* own = tokens + firsts[r];
      answers[r] = -1;
      dw::RequestBook& book = *books[r];
      dw::TableBook& table = *tables[r];
      const int64_t computed = (int64_t)num_new[r] + accepted[r], end = book.num_tokens + size;
      if (!size || look[r] || book.watched || end >= book.max_total) continue;
      if (num_new[r] < 0 || accepted[r] < 0 || accepted[r] > depth[r] || depth[r] > 64) continue;
      if (computed > table.reserved || table.committed + computed > end) continue;
      if (std::find_first_of(own, own + size, book.stops, book.stops + book.num_stops) != own + size) continue;
      int64_t* steps = drafted[r] ? steps_of(book, method[r]) : &book.plain_steps;
      if (!steps) continue;
      std::copy(own, own + size, book.tokens + book.num_tokens);
      book.num_tokens = end;
      book.num_computed += computed;
      book.num_proposed = proposed[r];
      book.last_token_time = now;
      table.committed += computed;
      table.reserved -= computed;
      ++*steps;
      if (drafted[r]) {
        book.num_drafts++;
        book.num_drafted += drafted[r];
        book.num_accepted += accepted[r];
        book.deepest = std::max<int64_t>(book.deepest, depth[r]);
        for (int32_t i = 0; i < accepted[r]; i++) book.accepted_at[i]++;
      }
      answers[r] = table.committed >= table.due;
    }
  });
}
