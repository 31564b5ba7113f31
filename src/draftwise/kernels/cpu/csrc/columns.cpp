// The rows of a ragged batch, from what is known of its requests side by side. The numpy code in models/inputs.py is the
// reference of this one.
#include <algorithm>
#include <cstdint>

#include "boundary.h"
#include "isa.h"

// `columns`: starts [requests + 1] of each request's rows, and their number T; first [requests]: key of each request's
// first row; widths [requests] of its block table; at [requests]: where that begins in `blocks`; tokens [T].
// `rows` [3, T]: tokens, positions (keys + offset), slots. `tables` [requests, width]: block tables, 0 behind their ends.
DW_EXPORT void dw_pack_rows(int64_t requests, int64_t block_size, int64_t offset, const int32_t* columns,
                            const int32_t* blocks, int64_t width, int64_t* rows, int32_t* tables) {
  dw::guarded([&] {
    const int32_t *starts = columns, *first = starts + requests + 1, *widths = first + requests, *at = widths + requests,
                  *tokens = at + requests;
    const int64_t total = starts[requests];
    int64_t *positions = rows + total, *slots = positions + total;
    for (int64_t r = 0; r < requests; r++) {
      const int32_t* own = blocks + at[r];
      dw::require(0 <= widths[r] && widths[r] <= width, "tables that are wide enough");
      int32_t* table = tables + r * width;
      std::copy(own, own + widths[r], table);
      std::fill(table + widths[r], table + width, 0);
      const int64_t begin = starts[r], end = starts[r + 1];
      dw::require(0 <= begin && begin <= end && end <= total, "rows in order");
      dw::require(begin == end || (first[r] >= 0 && (first[r] + (end - begin) - 1) / block_size < widths[r]),
                  "a block for each row");
      int64_t key = first[r], block = key / block_size, place = key % block_size;
      for (int64_t t = begin; t < end; t++, key++) {
        rows[t] = tokens[t];
        positions[t] = key + offset;
        slots[t] = (int64_t)own[block] * block_size + place;
        if (++place == block_size) place = 0, block++;
      }
    }
  });
}

// The same for runs of known tokens, of which it is said where they lie. `columns`: first [requests] key of each run; stop
// [requests], the one behind it; widths [requests] of the block tables; where the tables begin in memory [requests]; where
// the tokens do [requests], those of key 0. `starts` [requests + 1] and `contexts` [requests] are written, too.
// Example: tokens of a request 5 6 7 8, first 2, stop 4: rows 7 and 8, at keys 2 and 3.
DW_EXPORT void dw_pack_spans(int64_t requests, int64_t block_size, int64_t offset, const int64_t* columns, int64_t width,
                             int64_t total, int64_t* rows, int32_t* tables, int32_t* starts, int32_t* contexts) {
  dw::guarded([&] {
    const int64_t *first = columns, *stop = first + requests, *widths = stop + requests, *tables_at = widths + requests,
                  *tokens_at = tables_at + requests;
    int64_t *positions = rows + total, *slots = positions + total, t = 0;
    starts[0] = 0;
    for (int64_t r = 0; r < requests; r++) {
      const int64_t blocks = widths[r];
      dw::require(0 <= blocks && blocks <= width, "tables that are wide enough");
      dw::require(0 <= first[r] && first[r] <= stop[r] && stop[r] - first[r] <= total - t, "rows in order");
      dw::require(stop[r] <= blocks * block_size, "a block for each row");
      const int32_t *own = (const int32_t*)(uintptr_t)tables_at[r], *tokens = (const int32_t*)(uintptr_t)tokens_at[r];
      int32_t* table = tables + r * width;
      std::copy(own, own + blocks, table);
      std::fill(table + blocks, table + width, 0);
      contexts[r] = (int32_t)first[r];
      int64_t block = first[r] / block_size, place = first[r] % block_size;
      for (int64_t key = first[r]; key < stop[r]; key++, t++) {
        rows[t] = tokens[key];
        positions[t] = key + offset;
        slots[t] = (int64_t)own[block] * block_size + place;
        if (++place == block_size) place = 0, block++;
      }
      starts[r + 1] = (int32_t)t;
    }
    dw::require(t == total, "as many rows as there is room for");
  });
}

// Positions and ancestors of trees below their roots: bit 0 of a row's mask is the root, bit i + 1 node i. `columns`: the
// root's row [trees]; nodes [trees]. `parents`: of all nodes, one tree behind the other; -1: the root. A root's position
// stands in `positions` [total] already.
// Example: parents -1 -1 0 below a root at position 10: positions 10 11 11 12, masks 0b0001 0b0011 0b0101 0b1011.
DW_EXPORT void dw_place_trees(int64_t trees, const int64_t* columns, const int32_t* parents, int64_t total,
                              int64_t* positions, uint64_t* ancestors) {
  dw::guarded([&] {
    const int64_t *roots = columns, *nodes = roots + trees;
    for (int64_t k = 0; k < trees; k++) {
      dw::require(0 <= roots[k] && 0 <= nodes[k] && nodes[k] < 64 && roots[k] + nodes[k] < total, "rows of the batch");
      int64_t* position = positions + roots[k];
      uint64_t* mask = ancestors + roots[k];
      mask[0] = 1;
      for (int64_t i = 0; i < nodes[k]; i++) {
        const int64_t above = (int64_t)parents[i] + 1;
        dw::require(0 <= above && above <= i, "parents before their children");
        position[i + 1] = position[above] + 1;
        mask[i + 1] = mask[above] | (uint64_t)1 << (i + 1);
      }
      parents += nodes[k];
    }
  });
}
