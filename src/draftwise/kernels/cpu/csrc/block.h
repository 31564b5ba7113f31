// Drafts of a block drafter in one call: the features of new tokens are stored, one pass over root and masks of every
// request says something of each of its next tokens, and these are drawn one after the other, each corrected by what was
// drawn before it (corrections.h).
#pragma once

#include <cstdint>

#include "corrections.h"
#include "program.h"
#include "tree.h"

namespace dw {

// What a block is made of, and where its rows are stored: in the slots behind the known tokens, which a request may have
// blocks for or not; scratch blocks follow its own. Mirrored by blocks.py.
struct BlockPlan {
  int64_t rows;           // of a block: the root's and the masks'
  int64_t places;         // drafts that it has room for
  int64_t first_row;      // which row says the first draft: 0 or 1
  int64_t mask_token;
  int64_t vocab;          // of the logits
  int64_t hidden;         // numbers of a hidden row
  int64_t together;       // requests in one pass, at most
  int64_t scratch_first;  // request i of a pass has the scratch blocks scratch_first + i * scratch_each ..
  int64_t scratch_each;
  int64_t dtype;                 // of hidden rows
  const Correction* correction;  // or null
};

// Drafts behind requests of which `context` is a pass of `store`: rows of features of each request's new tokens, up to the last known
// one. `own`: results and arena of a pass of `program`.
void block_chains(const Program* store, const Program* program, Pool*, const PassInput* context, const PassInput* own, const BlockPlan*,
                  const ChainOutput*);
void block_trees(const Program* store, const Program* program, Pool*, const PassInput* context, const PassInput* own, const BlockPlan*,
                 const TreeOutput*);

}  // namespace dw
