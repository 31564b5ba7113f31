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
