// Parts of linear layers one after the other, of many layers: who computes one says what it will read next.
#pragma once

#include "linear.h"

namespace dw {

// Where the weights of a part begin.
const uint8_t* linear_part(const Linear*, int part, int parts);

// As `linear_run_part`. `after`: the weights that this thread probably reads next, fetched towards the end; or null.
void linear_run_part_before(const LinearCall* call, int part, int parts, const uint8_t* after);

}  // namespace dw
