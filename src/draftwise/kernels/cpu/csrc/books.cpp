// What a step did to many requests, written into the scheduler's books. Scheduler._commit_row is the reference of this.
#include "books.h"

#include <algorithm>

#include "boundary.h"
#include "isa.h"

// `books`, `tables` [requests]: where those of each lie. `columns` [8, requests]: known tokens computed; drafts verified; those
// accepted; depth of what was verified; number of the method that drafted it; drafts that wait now; tokens of the step; whether
// somebody has to look in any case. `tokens`: of all, one request's behind the other's, `total` of them.
// `answers` [requests]: 0: written; 1: written, and its blocks are due; -1: nothing was written, since something about it is out
// of the ordinary: it may end here, or is watched, or the numbers do not fit together.
// Example: 10 tokens known, 9 computed; a step computed the tenth, verified 4 drafts and accepted two of them: 13 known, 12
// computed.
DW_EXPORT void dw_take_in(int64_t requests, dw::RequestBook* const* books, dw::TableBook* const* tables, const int32_t* columns,
                          const int32_t* tokens, int64_t total, double now, int32_t* answers) {
  dw::guarded([&] {
    const int32_t *num_new = columns, *drafted = num_new + requests, *accepted = drafted + requests, *depth = accepted + requests,
                  *method = depth + requests, *proposed = method + requests, *sizes = proposed + requests, *look = sizes + requests;
    int64_t at = 0;
    for (int64_t r = 0; r < requests; r++) {
      const int64_t size = sizes[r];
      dw::require(0 <= size && size <= total - at, "as many tokens as the requests have");
      const int32_t* own = tokens + at;
      at += size;
      answers[r] = -1;
      dw::RequestBook& book = *books[r];
      dw::TableBook& table = *tables[r];
      const int64_t computed = (int64_t)num_new[r] + accepted[r], end = book.num_tokens + size;
      if (!size || look[r] || book.watched || end >= book.max_total) continue;
      if (drafted[r] && method[r] != book.method) continue;
      if (num_new[r] < 0 || accepted[r] < 0 || accepted[r] > depth[r] || depth[r] > 64) continue;
      if (computed > table.reserved || table.committed + computed > end) continue;
      if (std::find_first_of(own, own + size, book.stops, book.stops + book.num_stops) != own + size) continue;
      std::copy(own, own + size, book.tokens + book.num_tokens);
      book.num_tokens = end;
      book.num_computed += computed;
      book.num_proposed = proposed[r];
      book.last_token_time = now;
      table.committed += computed;
      table.reserved -= computed;
      if (drafted[r]) {
        book.own_steps++;
        book.num_drafts++;
        book.num_drafted += drafted[r];
        book.num_accepted += accepted[r];
        book.deepest = std::max<int64_t>(book.deepest, depth[r]);
        for (int32_t i = 0; i < accepted[r]; i++) book.accepted_at[i]++;
      } else {
        book.plain_steps++;
      }
      answers[r] = table.committed >= table.due;
    }
    dw::require(at == total, "as many tokens as the requests have");
  });
}
