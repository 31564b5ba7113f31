// What the scheduler knows of a request in numbers. Python writes and reads the same memory (sched/request.py, kv/manager.py).
#pragma once
#include <cstdint>

namespace dw {

struct RequestBook {
  int64_t num_tokens, num_computed, num_proposed, max_total;
  int32_t* tokens;         // [max_total]
  const int32_t* stops;   // [num_stops] that may end the request
  int64_t num_stops;
  int64_t watched;  // not 0: somebody looks at each of its steps
  double last_token_time;
  int64_t plain_steps, methods[3], steps[3];  // steps without drafts; numbers of methods, at least 1, 0: none; steps of each
  int64_t num_drafts, num_drafted, num_accepted, deepest;
  int32_t accepted_at[64];  // steps that accepted more than so many drafts
};

// Of its blocks: as in kv/manager.py. From `due` committed tokens on somebody has to look.
struct TableBook {
  int64_t committed, reserved, due, num_blocks;
};

}  // namespace dw
