#include "draws.h"

#include <algorithm>

#include "boundary.h"
#include "ops.h"
#include "program.h"

namespace dw {

int64_t draw_one(const float* row, const ChainKey* keys, int64_t chain, int32_t stream, int64_t step, const int64_t* target_ids, float* q,
                 int64_t vocab) {
  // a draft has to be some token, whatever its drafter's logits are
  const int64_t token = stream == NO_NOISE ? std::max<int64_t>(sample_kernels().argmax(row, vocab), 0)
                                           : draw_draft(row, keys[chain], stream, step, target_ids, q, vocab);
  return target_ids != nullptr ? target_ids[token] : token;
}

void draw_chains(Pool* pool, const float* logits, int64_t steps, int64_t requests, int64_t vocab,
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
        const float* row = c.logits + (step * c.requests + request) * c.vocab;
        c.tokens[place] = draw_one(row, c.keys, request, c.stream, step, c.target_ids,
                                   c.q != nullptr ? c.q + place * c.vocab : nullptr, c.vocab);
      },
      &context);
}

}  // namespace dw

DW_EXPORT void dw_draw_chains(dw::Pool* pool, const float* logits, int64_t steps, int64_t requests, int64_t vocab,
                              const dw::ChainKey* keys, int32_t stream, const int64_t* target_ids, int64_t* tokens,
                              float* q) {
  dw::guarded([&] { dw::draw_chains(pool, logits, steps, requests, vocab, keys, stream, target_ids, tokens, q); });
}
