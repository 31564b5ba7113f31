// Drafts of requests whose books (steps.h) the call that runs the drafter's passes reads and writes by itself: between the target's pass
// and the drafter's every line of code has to be fetched again, so that few of them should run there.
#pragma once
#include <cstdint>

#include "program.h"
#include "steps.h"
#include "tree.h"

namespace dw {

// Requests of one drafter that want drafts of one kind (RowBook::kind). Mirrored by book_drafts.py.
struct BookDrafts {
  int64_t requests;
  RowBook* const* books;    // [requests]
  const int32_t* budgets;   // [requests] drafts of each, at most
  int64_t block_size;
  int64_t max_len;          // no token at this position or later is fed
  int64_t most;             // drafts in a row
  int64_t most_rows;        // of the first pass
  int64_t room, head_room;  // rows that arena and results have room for, and rows of logits
  int64_t vocab;            // tokens of the target
  int64_t method;           // number of the drafter's name
  int64_t shares;           // not 0: the target's storage is the drafter's, too, and has all known tokens but the last
  const float* q;           // what becomes a row of `vocab` of q for each draft, or null: point masses
  // Of drafters that read features, or null.
  int64_t feature_rows;     // how many there are
  const int32_t* counts;    // [requests] features of each, of its tokens seen, seen + 1, ...
  int32_t* seen;            // [requests] tokens whose features were read before; written
  int32_t* last;            // [requests] written: the row of its newest feature
  const int32_t* gaps;      // [requests] leading tokens that others may reuse; -1: all that are stored
  const int32_t* first_keys;  // [requests] keys before it are seen by nobody
  // Of trees.
  const int32_t* tree;      // [2, nodes] parents and ranks of a static one, parents first; null: a dynamic one
  int64_t nodes;
  int64_t top_k, depth;     // of a dynamic one, see TreeWish
  const float* noise;       // [requests] by what the shared noise is multiplied; null: there is none
  int64_t scratch, scratch_each, together;  // the first scratch block, how many each request has, and how many requests have some
  int64_t rows, head_rows;  // written with NO_ROOM: what there has to be room for
};

enum BookAnswer : int64_t { DRAFTED = 0, NOT_SO = 1, NO_ROOM = 2 };

// The first `nodes` of the `size` nodes of a static tree, without those that are deeper than `depth`: how many; their parents, and their
// ranks. `tree`: as in BookDrafts. As `native.cut_shape`. Example: parents (-1, 0, 1, -1, 3), five nodes, depth 2: (-1, 0, -1, 2).
int32_t cut_shape(const int32_t* tree, int64_t size, int64_t nodes, int64_t depth, int32_t* parents, int32_t* ranks);

// As `dw_book_chains` and `dw_book_trees`.
int64_t book_chains(const Program*, Pool*, const PassInput&, const ChainOutput&, BookDrafts&);
int64_t book_trees(const Program*, Pool*, const PassInput&, const TreeOutput&, BookDrafts&);

}  // namespace dw
