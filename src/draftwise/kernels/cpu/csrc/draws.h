// Chains drawn from logits that are all there: every head says one token of each request.
#pragma once
#include <cstdint>

#include "pool.h"
#include "sample.h"

namespace dw {

// Token number `step` of a chain from a row of logits, as a token of the target: drawn (draw_draft), or with NO_NOISE the likeliest.
// `keys`: of all chains, of which this is number `chain`, or null; `q` [vocab]: what it was drawn from, or null.
int64_t draw_one(const float* row, const ChainKey* keys, int64_t chain, int32_t stream, int64_t step, const int64_t* target_ids, float* q,
                 int64_t vocab);

// logits [steps, requests, vocab] -> tokens [requests, steps]; q [requests, steps, vocab], what they were drawn from,
// with DRAFT_NOISE. Token j of request i is drawn as the j-th of a loop (draw_draft), whatever stands before it; with NO_NOISE it is
// the likeliest. Example: two heads, three requests: token 1 of request 2 is drawn from row 1 * 3 + 2 of the logits, and its
// distribution is row 2 * 2 + 1 of q.
void draw_chains(Pool*, const float* logits, int64_t steps, int64_t requests, int64_t vocab, const ChainKey* keys, int32_t stream,
                 const int64_t* target_ids, int64_t* tokens, float* q);

}  // namespace dw
