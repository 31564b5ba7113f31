// What the executor knows of a request in numbers. Python writes and reads the same memory (runner/rows.py).
#pragma once
#include <cstdint>

#include "verify.h"

namespace dw {

constexpr int64_t MOST_DRAFTS = 63;

// How a request takes part in a step: it is decided in columns, or apart from them, or a part of its known tokens is computed that
// does not reach the last one.
enum Part : int32_t { IN_COLUMNS = 0, APART = 1, CHUNK = 2 };

// How much of a request's keys one drafter has.
struct FillBook {
  int64_t tokens, drafts;
};

struct RowBook {
  int64_t num_tokens, num_computed, max_total;
  int64_t capacity;       // of `tokens`
  int32_t* tokens;
  int64_t num_blocks;
  const int32_t* blocks;  // [num_blocks]
  const int32_t* stops;   // [num_stops] tokens that end the request
  int64_t num_stops;
  int64_t rule;           // a `Rule`; -1: kernels do not decide this request, or more than its draws has to be looked at
  int64_t waiting;        // nodes that wait to be verified
  int64_t placed;         // whether all that follows is known of them; 0: `drafts` and `parents` are
  int64_t draw;           // a `Draw`
  const float* q;         // of these nodes, or null
  int64_t method;         // number of their method's name
  FillBook* fill;         // of the request's own drafter, or null
  uint8_t* marks;         // [blocks of the cache] what that drafter has filled
  int64_t num_prompt;
  int64_t kind;           // requests of one number, not 0, want chains that are drawn alike
  bool drafting_failed;
  VerifyDraw draws;
  int32_t drafts[MOST_DRAFTS], parents[MOST_DRAFTS], q_rows[MOST_DRAFTS];
};

// Chains, or trees, that were drafted together. `tokens`, `parents` [requests, width]; parents null: chains. `q`: what the first token
// of the first request was drawn from, a row of `vocab` for each token; null: point masses.
struct PlacedDrafts {
  int64_t width;
  const int32_t *tokens, *parents;
  const int32_t* sizes;   // [requests] tokens of each
  const int32_t* most;    // [requests] how many it may have
  const int32_t* filled;  // [requests] leading tokens that the drafter has stored now; -1: as before
  bool keeps;             // whether it has stored a chain's drafts, too, but the last one
  int64_t vocab;
  const float* q;
  int64_t method;         // number of the method's name
};

// Memory for the rows of a step and for what verification is told; see `dw_step_rows`.
struct StepRows {
  int64_t* rows;
  int32_t *starts, *contexts, *tables;
  uint8_t* is_tree;
  uint64_t* ancestors;
  int32_t *first_rows, *with_logits;
  VerifyDraw* draws;
  int32_t *numbers, *given;
  uint64_t* q_at;
  int32_t* methods;
};

// A storage of keys, [layers, slots, ...]: slots and layers are so many bytes apart.
struct SlotPool {
  uint8_t* at;
  int64_t layers, layer_bytes, slots, slot_bytes;
};

// As the functions of the same names that Python calls.
bool step_size(int64_t requests, RowBook* const* books, int64_t block_size, const int32_t* asked, int32_t* own, int32_t* parts,
               int64_t* facts);
void step_rows(int64_t requests, RowBook* const* books, int64_t block_size, const int32_t* fresh, const int32_t* own,
               const int32_t* parts, const int64_t* facts, const StepRows&);
int64_t step_taken(int64_t requests, int64_t decided, RowBook* const* books, const int32_t* at_of, int64_t block_size,
                   const int32_t* own, const int32_t* methods, int64_t nodes, const int32_t* given, const int32_t* found,
                   int32_t* columns, int32_t* goes_on, int32_t* tokens, int64_t* moves, const int32_t* fresh, const int32_t* starts,
                   int64_t* read, int64_t room, int32_t* counts, int64_t* facts);
void move_slots(const SlotPool&, int64_t moves, const int64_t* from, const int64_t* to);

// Writes them into the books. Answers -1, or the first request about which something cannot be: nothing was written.
int64_t place_drafts(int64_t requests, RowBook* const* books, int64_t block_size, const PlacedDrafts&);

}  // namespace dw
