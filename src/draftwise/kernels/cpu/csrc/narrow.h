// A pass whose rows without logits end early. Behind the last layer's keys and values, nothing but a row's own result depends on it:
// where only the results of the head's rows are read, the rest of the pass is run for these alone. Their bits are the same, as those
// of a row in any batch.
//
// Example: a prompt's rows 0 .. 4 at keys 10 .. 14 and a request with one row 5 at key 7; the head wants rows 4 and 5. From OP_NARROW on,
// the batch has row 0 at key 14 (context 14, all of which it sees) and row 1 at key 7.
#pragma once

#include <cstdint>
#include <vector>

#include "program.h"

namespace dw {

// Where the narrow batch lies.
struct NarrowRows {
  std::vector<int32_t> starts, contexts;
  std::vector<uint64_t> ancestors;
};

// Whether the pass can be narrowed: its head wants less than all rows, nobody reads others, and those that it wants are a
// request's last ones, or all of a tree. Then `narrow` is what follows OP_NARROW.
bool narrowed(const PassInput& wide, NarrowRows& rows, PassInput* narrow);

// Rows index[0], index[1], ... of `bytes` each to the front, in place; `index` ascends.
void move_up(void* rows, int64_t bytes, const int64_t* index, int64_t count);

}  // namespace dw
