// Kernels of attention.h for one instruction set and one kind of arithmetic; the including file makes its tables of them.
#pragma once

#include "attention_states.h"
#include "attention_steps.h"

namespace dw {
namespace {

// out = acc / sum, for the query vectors [first, first + states.M) of the tile. A zero has no sign: which one a sum has may depend on what
// nobody sees.
template <class Steps>
void write_out(const Work<typename Steps::Row, typename Steps::Cache>& w, const States& states, int first) {
  using T = typename Steps::Row;
  for (int i = 0; i < states.M; i++) {
    const int m = first + i;
    int row = w.rows.first_row + w.item.tile.first + m / w.group, head = w.item.head * w.group + m % w.group;
    T* to = (T*)w.call.out + ((int64_t)row * w.call.num_heads + head) * w.dim;
    const float* from = states.acc(0) + i * w.padded;
    float sum = states.sum(0)[i];
    if (w.call.sinks != nullptr) {
      // relative to the greater one of both; a sink that is much greater leaves nothing: the sum is infinite
      const float sink = w.call.sinks[head], top = states.top(0)[i], peak = sink > top ? sink : top;
      const float down[LANES] = {top - peak, sink - peak};
      const vf both = exp(load(down));
      sum = (sum * both[0] + both[1]) / both[0];
    }
    int d = 0;
    for (; d + 4 * LANES <= w.dim; d += 4 * LANES)
      for (int c = 0; c < 4 * LANES; c += 2 * LANES)
        store_values<Steps::EVEN_ODD>(to + d + c, load(from + d + c) / sum + 0.0f, load(from + d + c + LANES) / sum + 0.0f);
    for (; d < w.dim; d += LANES) store_n(to + d, load(from + d) / sum + 0.0f, w.dim - d < LANES ? w.dim - d : LANES);
  }
}

template <class Steps>
void run_item(const AttentionItem* item) {
  Arena arena{item->scratch};
  Work<typename Steps::Row, typename Steps::Cache> w(*item, arena);
  Steps steps(arena, w.M, w.dim, w.group);
  const QueryTile& tile = item->tile;
  int lowest = INT32_MAX;  // first key that any row sees
  for (int i = 0; i < tile.count; i++) {
    const int f = w.rows.first_visible(w.position(i));
    if (f < lowest) lowest = f;
  }
  steps.begin(w);
  if (w.rows.tree) {
    w.find_paths();
    if (item->end * PARTITION > w.rows.context) steps.score_own(w);
  }
  States states(w.at.states, w.M, w.padded, item->begin == tile.begin);
  for (int part = item->begin; part < item->end; part++) {
    w.base = part * PARTITION;
    w.look_ahead(part);
    const int plain = w.plain_end() - w.base;
    w.plain = plain < 0 ? 0 : plain > PARTITION ? PARTITION : plain;
    const int skip = lowest > w.base ? (lowest - w.base) / LANES * LANES : 0;
    if (w.plain > skip) w.find_slots(w.base + skip, w.plain - skip, w.at.slots + skip);
    w.find_seen();
    const int at = states.next();
    steps.partition(w, skip, states.top(at), states.sum(at), states.acc(at));
    states.push(0, part);
  }
  steps.end();
  if (item->partials != nullptr) {
    memcpy(item->partials, states.memory, sizeof(float) * (size_t)(states.next() * state_floats(w.M, w.padded)));
  } else {
    states.finish();
    write_out<Steps>(w, states, 0);
  }
}

template <class Steps>
void merge_item(const AttentionMerge* call) {
  Arena arena{call->item.scratch};
  Work<typename Steps::Row, typename Steps::Cache> w(call->item, arena);
  const int M = call->last - call->first;
  States states(w.at.states, M, w.padded, true);
  for (int i = 0; i < call->count; i++) {
    const AttentionPiece& piece = call->pieces[i];
    BlockStack blocks(piece.begin == call->item.tile.begin);
    blocks.push_all(piece.begin, piece.end);
    const States stored((float*)call->partials + piece.partial, w.M, w.padded, true);
    for (int b = 0; b < blocks.depth; b++) {
      const int at = states.next();
      memcpy(states.top(at), stored.top(b) + call->first, sizeof(float) * (size_t)M);
      memcpy(states.sum(at), stored.sum(b) + call->first, sizeof(float) * (size_t)M);
      memcpy(states.acc(at), stored.acc(b) + call->first * w.padded, sizeof(float) * (size_t)(M * w.padded));
      states.push(blocks.level[b], blocks.index[b]);
    }
  }
  states.finish();
  write_out<Steps>(w, states, call->first);
}

template <class Steps>
int64_t scratch_floats(const AttentionCall* call, int vectors, int partitions) {
  Arena arena{nullptr};
  Scratch scratch(arena, vectors, whole_vectors(call->head_dim), partitions);
  Steps steps(arena, vectors, call->head_dim, call->num_heads / call->num_kv_heads);
  return arena.floats;
}

}  // namespace
}  // namespace dw

#define DW_ATTENTION(...) \
  {run_item<__VA_ARGS__>, merge_item<__VA_ARGS__>, scratch_floats<__VA_ARGS__>, __VA_ARGS__::VECTORS}
