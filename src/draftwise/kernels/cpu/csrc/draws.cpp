// Chains drawn from logits that are all there: every head says one token of each request.

#include "boundary.h"
#include "ops.h"
#include "pool.h"
#include "sample.h"

namespace dw {

// logits [steps, requests, vocab] -> tokens [requests, steps]; q [requests, steps, vocab], what they were drawn from,
// with DRAFT_NOISE. Token j of request i is drawn as the j-th of a loop (draw_draft), whatever stands before it.
// Example: two heads, three requests: token 1 of request 2 is drawn from row 1 * 3 + 2 of the logits, and its
// distribution is row 2 * 2 + 1 of q.
static void draw_chains(Pool* pool, const float* logits, int64_t steps, int64_t requests, int64_t vocab,
                        const ChainKey* keys, int32_t stream, const int64_t* target_ids, int64_t* tokens, float* q) {
  struct Context {
    const float* logits;
    int64_t steps, requests, vocab;
    const ChainKey* keys;
    int32_t stream;
    const int64_t* target_ids;
    int64_t* tokens;
    float* q;
  } context{logits, steps, requests, vocab, keys, stream, target_ids, tokens, q};
  constexpr int64_t SHARED_WORK = 1 << 17;  // logits from which a second thread brings more than it costs
  parallel_for(
      steps * requests * vocab < SHARED_WORK ? nullptr : pool, (int)(steps * requests),
      [](void* arg, int place, int) {
        const Context& c = *(const Context*)arg;
        const int64_t request = place / c.steps, step = place % c.steps;
        const int64_t token =
            draw_draft(c.logits + (step * c.requests + request) * c.vocab, c.keys[request], c.stream, step, c.target_ids,
                       c.q != nullptr ? c.q + place * c.vocab : nullptr, c.vocab);
        c.tokens[place] = c.target_ids != nullptr ? c.target_ids[token] : token;
      },
      &context);
}

}  // namespace dw

DW_EXPORT void dw_draw_chains(dw::Pool* pool, const float* logits, int64_t steps, int64_t requests, int64_t vocab,
                              const dw::ChainKey* keys, int32_t stream, const int64_t* target_ids, int64_t* tokens,
                              float* q) {
  dw::guarded([&] { dw::draw_chains(pool, logits, steps, requests, vocab, keys, stream, target_ids, tokens, q); });
}
