// What a block drafter's logits of a place become once the tokens before it are known. Formulas:
// draftwise/models/heads/markov.py and corrections.py, whose torch code is the reference.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"
#include "pool.h"
#include "team.h"

namespace dw {

enum CorrectionKind : int32_t {
  MARKOV_VANILLA = 0,  // table: rows of tokens [table_rows, width]; out
  MARKOV_GATED = 1,    // join [hidden | row], bias [width]
  MARKOV_RNN = 2,      // join [state | row | hidden], bias [3 width]; carries a state of `width` numbers
  DOMINO = 3,          // table: embeddings [table_rows, width]; join (input), state_join, inner, out; state of `state_width`
  PATH_SELECTOR = 4,   // table, table2: before and after [table_rows, width]; join (projection)
};

// Mirrored by blocks.py.
struct Correction {
  int32_t kind;
  int32_t number;       // DOMINO: the first draft that is corrected; PATH_SELECTOR: candidates of a place
  int64_t width;        // of the table's rows
  int64_t table_rows;   // tokens of the target
  int64_t state_width;  // numbers carried from place to place; 0: none
  const void* table;    // of the type of hidden rows, as all tables and products
  const void* table2;
  const Linear* join;
  const Linear* state_join;
  const Linear* inner;
  const Linear* out;  // gives logits
  const float* bias;
};

// Corrects rows of logits of one place.
class Corrector {
 public:
  // `pool` is used for large products alone. Throws std::invalid_argument if layers and sizes do not fit together.
  Corrector(const Correction* correction, Pool* pool, DType dtype, int64_t hidden, int64_t vocab);

  // previous [rows]: the target's id of the token before; hidden [rows]: where the block's rows lie; state
  // [rows, state_width]: behind the place before, becomes that behind this one; logits [rows, vocab].
  void run(int64_t place, int64_t rows, const int64_t* previous, const char* const* hidden, float* state, float* logits);

  // Whether so many rows are worth the threads of the pool.
  bool shares(int64_t rows) const;
  // The products of few rows are shared by a team from now on; null: they are not.
  void use(Team* team) { team_ = team; }

 private:
  void multiply(const LinearCall& call);
  Pool* threads_for(const Linear* layer, int64_t rows) const;
  void say(const char* x, int64_t rows, float* logits);  // logits += out(x)
  char* gathered(const void* table, int64_t rows, const int64_t* ids, std::vector<char>& into);
  void product(const Linear* layer, const char* x, int64_t rows, std::vector<char>& out, int64_t width);
  float number(const char* row, int64_t i) const;
  void put(char* row, int64_t i, float value) const;
  void select(int64_t rows, const int64_t* previous, const char* const* hidden, float* logits);
  void domino(int64_t place, int64_t rows, const int64_t* previous, const char* const* hidden, float* state,
              float* logits);

  const Correction& c_;
  Pool* pool_;
  Team* team_ = nullptr;
  DType dtype_;
  int64_t size_;  // bytes of a number
  int64_t hidden_, vocab_;
  std::vector<char> row_, joined_, product_, other_;
};

}  // namespace dw
