// The sizes of the structures that Python mirrors with ctypes and struct, for a test of the mirrors.
#include <cstddef>

#include "attention.h"
#include "block.h"
#include "book_drafts.h"
#include "books.h"
#include "boundary.h"
#include "experts.h"
#include "isa.h"
#include "ops.h"
#include "program.h"
#include "rounds.h"
#include "sample.h"
#include "steps.h"
#include "suffix.h"
#include "tree.h"
#include "verify.h"

namespace {
struct Layout {
  const char* name;
  int64_t bytes;
};
// Where a field of a shared record begins, and how long it is.
struct Field {
  const char* name;
  int64_t offset, bytes;
};
#define DW_FIELD(record, field) {#record "." #field, (int64_t)offsetof(dw::record, field), (int64_t)sizeof(dw::record::field)}
// Records that Python and native code both write, or of many fields alike, in the order of these.
const Field fields[] = {
    DW_FIELD(RequestBook, num_tokens), DW_FIELD(RequestBook, num_computed), DW_FIELD(RequestBook, num_proposed),
    DW_FIELD(RequestBook, max_total), DW_FIELD(RequestBook, tokens), DW_FIELD(RequestBook, stops),
    DW_FIELD(RequestBook, num_stops), DW_FIELD(RequestBook, watched), DW_FIELD(RequestBook, last_token_time),
    DW_FIELD(RequestBook, plain_steps), DW_FIELD(RequestBook, methods), DW_FIELD(RequestBook, steps),
    DW_FIELD(RequestBook, num_drafts), DW_FIELD(RequestBook, num_drafted), DW_FIELD(RequestBook, num_accepted),
    DW_FIELD(RequestBook, deepest), DW_FIELD(RequestBook, accepted_at),
    DW_FIELD(TableBook, committed), DW_FIELD(TableBook, reserved), DW_FIELD(TableBook, due),
    DW_FIELD(TableBook, num_blocks),
    DW_FIELD(FillBook, tokens), DW_FIELD(FillBook, drafts),
    DW_FIELD(RowBook, num_tokens), DW_FIELD(RowBook, num_computed), DW_FIELD(RowBook, max_total), DW_FIELD(RowBook, capacity),
    DW_FIELD(RowBook, tokens), DW_FIELD(RowBook, num_blocks), DW_FIELD(RowBook, blocks), DW_FIELD(RowBook, stops),
    DW_FIELD(RowBook, num_stops), DW_FIELD(RowBook, rule), DW_FIELD(RowBook, waiting), DW_FIELD(RowBook, placed),
    DW_FIELD(RowBook, draw), DW_FIELD(RowBook, q), DW_FIELD(RowBook, method), DW_FIELD(RowBook, fill), DW_FIELD(RowBook, marks),
    DW_FIELD(RowBook, num_prompt), DW_FIELD(RowBook, kind), DW_FIELD(RowBook, drafting_failed), DW_FIELD(RowBook, draws),
    DW_FIELD(RowBook, drafts), DW_FIELD(RowBook, parents), DW_FIELD(RowBook, q_rows),
    DW_FIELD(BookDrafts, requests), DW_FIELD(BookDrafts, books), DW_FIELD(BookDrafts, budgets),
    DW_FIELD(BookDrafts, block_size), DW_FIELD(BookDrafts, max_len), DW_FIELD(BookDrafts, most),
    DW_FIELD(BookDrafts, most_rows), DW_FIELD(BookDrafts, room), DW_FIELD(BookDrafts, head_room),
    DW_FIELD(BookDrafts, vocab), DW_FIELD(BookDrafts, method), DW_FIELD(BookDrafts, shares), DW_FIELD(BookDrafts, q),
    DW_FIELD(BookDrafts, feature_rows), DW_FIELD(BookDrafts, counts), DW_FIELD(BookDrafts, seen),
    DW_FIELD(BookDrafts, last), DW_FIELD(BookDrafts, gaps), DW_FIELD(BookDrafts, first_keys),
    DW_FIELD(BookDrafts, tree), DW_FIELD(BookDrafts, nodes), DW_FIELD(BookDrafts, top_k), DW_FIELD(BookDrafts, depth),
    DW_FIELD(BookDrafts, noise), DW_FIELD(BookDrafts, scratch), DW_FIELD(BookDrafts, scratch_each),
    DW_FIELD(BookDrafts, together), DW_FIELD(BookDrafts, rows), DW_FIELD(BookDrafts, head_rows),
    DW_FIELD(Rounds, requests), DW_FIELD(Rounds, books), DW_FIELD(Rounds, block_size), DW_FIELD(Rounds, rounds),
    DW_FIELD(Rounds, most_ns), DW_FIELD(Rounds, hurry), DW_FIELD(Rounds, most_nodes), DW_FIELD(Rounds, wanted), DW_FIELD(Rounds, cuts), DW_FIELD(Rounds, outcomes),
    DW_FIELD(Rounds, program), DW_FIELD(Rounds, pass), DW_FIELD(Rounds, room), DW_FIELD(Rounds, logits),
    DW_FIELD(Rounds, vocab), DW_FIELD(Rounds, pools), DW_FIELD(Rounds, num_pools), DW_FIELD(Rounds, look_up),
    DW_FIELD(Rounds, drafter),
    DW_FIELD(Rounds, budgets), DW_FIELD(Rounds, once), DW_FIELD(Rounds, method), DW_FIELD(Rounds, shortest), DW_FIELD(Rounds, indexes), DW_FIELD(Rounds, global),
    DW_FIELD(Rounds, outputs), DW_FIELD(Rounds, limits), DW_FIELD(Rounds, drafting), DW_FIELD(Rounds, draft_pass),
    DW_FIELD(Rounds, chains), DW_FIELD(Rounds, trees), DW_FIELD(Rounds, guesses), DW_FIELD(Rounds, ask), DW_FIELD(Rounds, target_ids),
    DW_FIELD(Rounds, draft_vocab), DW_FIELD(Rounds, drawn), DW_FIELD(Rounds, told), DW_FIELD(Rounds, sources),
    DW_FIELD(Rounds, num_sources), DW_FIELD(Rounds, source_bytes), DW_FIELD(Rounds, join), DW_FIELD(Rounds, join_width),
    DW_FIELD(Rounds, features), DW_FIELD(Rounds, first_half), DW_FIELD(Rounds, feature_bytes), DW_FIELD(Rounds, feature_room), DW_FIELD(Rounds, counts), DW_FIELD(Rounds, kept),
    DW_FIELD(Rounds, kept_bytes), DW_FIELD(Rounds, num_kept), DW_FIELD(Rounds, numbers), DW_FIELD(Rounds, tokens),
    DW_FIELD(Rounds, nodes), DW_FIELD(Rounds, paths), DW_FIELD(Rounds, sizes), DW_FIELD(Rounds, going), DW_FIELD(Rounds, done),
    DW_FIELD(Rounds, drafted), DW_FIELD(Rounds, feature_rows), DW_FIELD(Rounds, forward_ns), DW_FIELD(Rounds, verify_ns),
    DW_FIELD(Rounds, draft_ns), DW_FIELD(Rounds, steady_ns),
    DW_FIELD(Guesses, layers), DW_FIELD(Guesses, budgets), DW_FIELD(Guesses, max_len), DW_FIELD(Guesses, stream), DW_FIELD(Guesses, target_ids),
    DW_FIELD(Guesses, q), DW_FIELD(Guesses, tree), DW_FIELD(Guesses, nodes), DW_FIELD(Guesses, method),
    DW_FIELD(MedusaLayers, first), DW_FIELD(MedusaLayers, later), DW_FIELD(MedusaLayers, outputs), DW_FIELD(MedusaLayers, heads),
    DW_FIELD(MedusaLayers, layers), DW_FIELD(MedusaLayers, num_outputs),
};
#undef DW_FIELD
const Layout layouts[] = {
    {"AttentionCall", sizeof(dw::AttentionCall)}, {"BatchView", sizeof(dw::BatchView)},
    {"BlockPlan", sizeof(dw::BlockPlan)},         {"BookDrafts", sizeof(dw::BookDrafts)},     {"Correction", sizeof(dw::Correction)},
    {"ChainKey", sizeof(dw::ChainKey)},           {"ChainOutput", sizeof(dw::ChainOutput)},
    {"ExpertsSetting", sizeof(dw::ExpertsSetting)}, {"PassInput", sizeof(dw::PassInput)},
    {"Guesses", sizeof(dw::Guesses)},             {"MedusaLayers", sizeof(dw::MedusaLayers)},
    {"ProgramOp", sizeof(dw::ProgramOp)},         {"FillBook", sizeof(dw::FillBook)},           {"RequestBook", sizeof(dw::RequestBook)},
    {"RopeCall", sizeof(dw::RopeCall)},           {"Rounds", sizeof(dw::Rounds)},             {"RowBook", sizeof(dw::RowBook)},
    {"SlotPool", sizeof(dw::SlotPool)},
    {"SuffixDraft", sizeof(dw::SuffixDraft)},     {"SuffixLimits", sizeof(dw::SuffixLimits)},
    {"TableBook", sizeof(dw::TableBook)},
    {"TreeOutput", sizeof(dw::TreeOutput)},       {"TreeWish", sizeof(dw::TreeWish)},
    {"VerifyDraw", sizeof(dw::VerifyDraw)},
};
}  // namespace

// Name and size of structure i, null behind the last.
DW_EXPORT const char* dw_layout(int i, int64_t* bytes) {
  return dw::guarded([&]() -> const char* {
    if (i < 0 || i >= int(sizeof(layouts) / sizeof(layouts[0]))) return nullptr;
    *bytes = layouts[i].bytes;
    return layouts[i].name;
  });
}

// Name of field i of the shared records as "Record.field", where it begins and how long it is; null behind the last.
DW_EXPORT const char* dw_layout_field(int i, int64_t* offset, int64_t* bytes) {
  return dw::guarded([&]() -> const char* {
    if (i < 0 || i >= int(sizeof(fields) / sizeof(fields[0]))) return nullptr;
    *offset = fields[i].offset, *bytes = fields[i].bytes;
    return fields[i].name;
  });
}
