// Several rounds of decoding in one call: the target's pass, verification, drafts, and again. What Python does between them in a step
// of its own would find nothing of it in the caches. runner/local.py is the reference: it does the same, a call for each part.
#pragma once
#include <cstdint>

#include "book_drafts.h"
#include "linear.h"
#include "look_ups.h"
#include "medusa.h"

namespace dw {

// What came of a request's newest proposal that was verified: nothing, something or all of it was accepted; or the one behind it was not
// verified at all, or there was none.
enum Outcome : uint8_t { NOTHING = 0, SOME = 1, ALL = 2, UNKNOWN = 3, OUTCOMES = 4 };

// Who looks up, and whose passes draft for those of whom nothing was found. ELSEWHERE: Python, behind the first round.
enum RoundLookUp : int64_t { NO_LOOK_UP = 0, NGRAMS = 1, SUFFIXES = 2 };
enum RoundDrafter : int64_t { NO_PASSES = 0, CHAINS = 1, TREES = 2, GUESSES = 3, ELSEWHERE = 4 };

// What Medusa's heads draft, all from the hidden state of a request's newest row. Mirrored by rounds.py.
struct Guesses {
  const MedusaLayers* layers;
  const int32_t* budgets;     // [requests] drafts of each, at most
  int64_t max_len;            // no draft stands at this position or behind it
  int64_t stream;             // a NoiseStream or NO_NOISE
  const int64_t* target_ids;  // the token that each drawn id stands for, or null
  float* q;                   // [requests * drafts, vocab] written: what is drawn from; or null: point masses
  const int32_t* tree;        // [2, nodes] parents and ranks of the tree that all want, or null: chains
  int64_t nodes;
  int64_t method;             // number of its name
};

// R requests that all decode and are all decided in columns. Mirrored by rounds.py.
struct Rounds {
  int64_t requests;
  RowBook* const* books;     // [requests]
  int64_t block_size;
  int64_t rounds;            // at most
  int64_t most_ns;           // another round begins only if it would end before that, if it takes as long as the one before
  const int32_t* hurry;      // not 0: no other round begins; other threads write it meanwhile
  int64_t most_nodes;        // to verify in one round
  const int32_t* wanted;     // [requests] nodes to verify in the first round, at most
  const uint8_t* cuts;       // [requests, OUTCOMES, MOST_DRAFTS + 1] how many of so many nodes that wait are verified in later rounds, by
                             // what came of the proposal before; null: all
  const uint8_t* outcomes;   // [requests] what came of that before the first round
  // The target.
  const Program* program;
  const PassInput* pass;     // arena, results; rows are filled in here
  int64_t room;              // rows that arena and results have room for
  const float* logits;       // the results: [room, vocab]
  int64_t vocab;
  const SlotPool* pools;     // [num_pools] storages of keys, where accepted nodes of trees move together
  int64_t num_pools;
  // Drafts.
  int64_t look_up, drafter;  // a RoundLookUp, a RoundDrafter
  const int32_t* budgets;    // [requests] drafts of each, at most
  const uint8_t* once;       // [requests] not 0: the request drafts behind the first round only; null: nobody. For look-ups alone
  int64_t method;            // number of the look-up's name
  int64_t shortest;          // tokens of a match that is trusted more than the drafter, if there are both
  const int64_t* indexes;    // [requests] what is looked up in
  void* global;              // SUFFIXES: the tree of all outputs, or null
  const int64_t* outputs;    // [requests] SUFFIXES: which sequence of it is the request's
  const SuffixLimits* limits;
  const Program* drafting;   // CHAINS, TREES
  const PassInput* draft_pass;
  const ChainOutput* chains;
  const TreeOutput* trees;
  const Guesses* guesses;    // GUESSES
  BookDrafts* ask;           // its budgets are those of requests of which no match was found
  const int64_t* target_ids;  // tokens of the drafter's vocabulary, or null: these are the target's
  int64_t draft_vocab;
  const float* drawn;        // [requests * drafts, draft_vocab] what it draws from, and
  float* told;               // the same over the target's vocabulary, to which the books point; 0 where it has no token
  // What the drafter reads of the target, or null.
  const void* const* sources;  // [num_sources] results of the target's pass, [room, source_bytes]
  int64_t num_sources, source_bytes;
  const Linear* join;        // makes one row of all sources; null: there is one source, whose rows they are
  int64_t join_width;        // of a source, in elements
  char* features;            // [2, feature_room, feature_bytes] of the rows whose tokens became final: rounds take turns with the halves, and
  int64_t first_half;        // the first one writes this one: 0 or 1
  int64_t feature_bytes, feature_room;
  int32_t* counts;           // [requests] how many of each; also `ask->counts`
  char* kept;                // or null; [blocks, kept_bytes] begins with the feature of a block's last token
  int64_t kept_bytes, num_kept;
  // Answers, of each round one behind the other.
  int32_t* numbers;          // [rounds, 8, requests] as `dw_take_in` reads them
  int32_t* tokens;           // [rounds, requests + most_nodes]
  int32_t* nodes;            // [rounds, 3 * most_nodes]: tokens, parents and rows of q of as many nodes as there were
  int32_t* paths;            // [rounds, most_nodes]
  int32_t* sizes;            // [rounds, 2] nodes, and tokens
  int32_t* going;            // [requests] of the last one: whether the request has not ended
  int64_t done;              // rounds
  int64_t drafted;           // whether the drafts behind the last one were made; else nothing was asked for them
  int64_t feature_rows;      // of the last one
  int64_t forward_ns, verify_ns, draft_ns;
  int64_t steady_ns;         // of a round of the later half, all in all: their median
};

}  // namespace dw
