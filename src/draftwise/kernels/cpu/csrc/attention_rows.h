// Where the rows of a request stand and what they see: for the plan and for the kernels.
#pragma once

#include "attention.h"

namespace dw {
namespace {

struct RequestRows {
  const BatchView& batch;
  int request;
  int context, first_row;  // committed keys; row of the batch
  int own_keys;            // keys behind the committed ones: a tree's rows of earlier passes, then the rows of this one
  int first_key;           // nobody sees a key before it
  int window;              // positions; 0: all
  bool tree;
  bool whole;  // every row sees all rows of this pass

  RequestRows(const BatchView& view, int r, int window_size, bool all_rows)
      : batch(view), request(r), context(view.context_len[r]), first_row(view.query_start[r]),
        own_keys(view.query_start[r + 1] - first_row + (view.tree_start != nullptr ? view.tree_start[r] : 0)),
        first_key(view.first_key != nullptr ? view.first_key[r] : 0), window(window_size), tree(view.is_tree[r] != 0), whole(all_rows && !tree) {}

  int rows() const { return batch.query_start[request + 1] - first_row; }
  // Rows of the tree on the path of row `row`, itself included.
  uint64_t path(int row) const {
    const uint64_t bits = batch.ancestors[first_row + row];
    return own_keys < MAX_TREE_ROWS ? bits & ((uint64_t(1) << own_keys) - 1) : bits;
  }
  int position(int row) const { return tree ? context + __builtin_popcountll(path(row)) - 1 : context + row; }
  // The last position that a row sees.
  int last_visible(int row) const { return whole ? context + own_keys - 1 : position(row); }
  int first_visible(int position) const {
    const int from = window > 0 && position >= window ? position - window + 1 : 0;
    return from > first_key ? from : first_key;
  }
};

}  // namespace
}  // namespace dw
