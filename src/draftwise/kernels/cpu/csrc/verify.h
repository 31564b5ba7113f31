// Verification: which drafts a step keeps, and what follows them. The rules, and why they are lossless, are in
// draftwise/verify; the torch code there is the reference of this one.
//
// Every request is decided by itself, in one order of arithmetic: what it gets depends neither on the others of the
// call nor on the number of threads. Only rows that its walk reaches are looked at.
#pragma once

#include <cstdint>

#include "pool.h"

namespace dw {

enum Rule : int32_t { GREEDY = 0, COUPLED = 1, REJECTION = 2, BLOCK = 3 };
enum Draw : int32_t { FIXED = 0, INDEPENDENT = 1, WITHOUT_REPLACEMENT = 2 };

// What of a request stays as it is: packed once by `SamplingState`, and mirrored there.
struct VerifyDraw {
  uint64_t seed;
  double top_p;
  float scale;
  float log_min_p;
  int32_t top_k;
  uint32_t sample_index;
};

// One request: rows `first_row` (the root's) .. first_row + nodes of the logits. Begins with what `VerifyDraw` says.
struct VerifyRequest {
  uint64_t seed;
  double top_p;       // 1: all
  float scale;        // one over the temperature
  float log_min_p;    // -inf: all
  int32_t top_k;      // 0: all
  uint32_t sample_index;
  int32_t base;       // committed tokens
  int32_t first_row;
  int32_t nodes;
  int32_t rule;
  int32_t draw;       // FIXED: point masses, without q
  int32_t reserved;
  const float* q;     // [parents, vocab], or null
};

// Nodes of all requests lie one after the other.
struct VerifyBatch {
  const float* logits;  // [rows, vocab]
  int64_t vocab;
  int64_t requests;
  const VerifyRequest* wishes;
  const int32_t* tokens;   // [nodes]
  const int32_t* parents;  // [nodes] -1: the root
  const int32_t* q_rows;   // [nodes] of the request's q
  int32_t* kept;           // [requests] length of the accepted path
  int32_t* last;           // [requests] the token after it; -1: the row has no distribution
  int32_t* paths;          // [nodes] the accepted nodes of a request, where its nodes begin
};

void verify(Pool*, const VerifyBatch*);

// As `dw_verify`.
void verify_columns(Pool*, const float* logits, int64_t vocab, int64_t requests, const VerifyDraw* draws, const int32_t* columns,
                    const uint64_t* q_at, int64_t nodes, const int32_t* given, int32_t* found);

}  // namespace dw
