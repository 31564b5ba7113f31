#include "corrections.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "boundary.h"
#include "ops.h"

namespace dw {
namespace {

constexpr int64_t SHARED_WORK = 4 << 20;  // rows times bytes of weights from which a second thread brings more than it costs

constexpr int64_t TEAM_BYTES = 64 << 10;   // of weights that are worth a team's second thread

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The index of the k-th largest number, by which `order` is cut; lower ones first among equals.
void largest(const float* x, int64_t n, int64_t k, std::vector<int64_t>& order) {
  order.clear();
  for (int64_t i = 0; i < n; i++) {
    if ((int64_t)order.size() == k && !(x[i] > x[order.back()])) continue;
    if ((int64_t)order.size() == k) order.pop_back();
    auto at = order.end();
    while (at != order.begin() && x[i] > x[*(at - 1)]) --at;
    order.insert(at, i);
  }
}

}  // namespace

Corrector::Corrector(const Correction* correction, Pool* pool, DType dtype, int64_t hidden, int64_t vocab)
    : c_(*correction), pool_(pool), dtype_(dtype), size_(dtype == BF16 ? 2 : 4), hidden_(hidden), vocab_(vocab) {
  const auto is = [&](const Linear* layer, int64_t inputs, int64_t outputs) {
    return layer != nullptr && linear_inputs(layer) == inputs && linear_outputs(layer) == outputs &&
           linear_input_dtype(layer) == dtype;
  };
  const int64_t w = c_.width, s = c_.state_width;
  require(dtype == BF16 || dtype == F32, "float32 or bfloat16");
  require(c_.table != nullptr && w > 0, "a table of tokens");
  switch (c_.kind) {
    case MARKOV_VANILLA:
      require(s == 0 && is(c_.out, w, vocab), "a layer for logits");
      break;
    case MARKOV_GATED:
      require(s == 0 && c_.bias != nullptr && is(c_.join, hidden + w, w) && is(c_.out, w, vocab), "a gate");
      break;
    case MARKOV_RNN:
      require(s == w && c_.bias != nullptr && is(c_.join, 2 * w + hidden, 3 * w) && is(c_.out, w, vocab), "a joint");
      break;
    case DOMINO:
      require(s > 0 && is(c_.join, w, 3 * s) && is(c_.state_join, s, 3 * s) && c_.inner != nullptr &&
                  is(c_.inner, hidden + s, linear_outputs(c_.inner)) && is(c_.out, linear_outputs(c_.inner), vocab),
              "a recurrent unit and its projection");
      break;
    case PATH_SELECTOR:
      require(s == 0 && c_.table2 != nullptr && c_.table_rows == vocab && c_.number > 0 && is(c_.join, hidden, w),
              "a path selector over the target's tokens");
      break;
    default:
      require(false, "a kind that is known");
  }
}

float Corrector::number(const char* row, int64_t i) const {
  float value;
  if (dtype_ == F32) {
    memcpy(&value, row + 4 * i, 4);
    return value;
  }
  uint16_t half;
  memcpy(&half, row + 2 * i, 2);
  const uint32_t bits = (uint32_t)half << 16;
  memcpy(&value, &bits, 4);
  return value;
}

void Corrector::put(char* row, int64_t i, float value) const {
  if (dtype_ == F32) {
    memcpy(row + 4 * i, &value, 4);
    return;
  }
  uint32_t bits;  // to the nearest bfloat16, ties to even
  memcpy(&bits, &value, 4);
  const uint16_t half = (uint16_t)(value != value ? (bits >> 16) | 64 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  memcpy(row + 2 * i, &half, 2);
}

char* Corrector::gathered(const void* table, int64_t rows, const int64_t* ids, std::vector<char>& into) {
  into.resize((size_t)(rows * c_.width * size_));
  gather_rows(table, c_.table_rows, ids, into.data(), rows, c_.width * size_);
  return into.data();
}

void Corrector::product(const Linear* layer, const char* x, int64_t rows, std::vector<char>& out, int64_t width) {
  const int64_t outputs = linear_outputs(layer);
  out.resize((size_t)(rows * outputs * size_));
  multiply(LinearCall{layer, x, width, out.data(), outputs, dtype_, rows, EP_STORE});
}

void Corrector::say(const char* x, int64_t rows, float* logits) {
  multiply(LinearCall{c_.out, x, linear_inputs(c_.out), logits, vocab_, F32, rows, EP_ADD});
}

void Corrector::multiply(const LinearCall& call) {
  if (team_ == nullptr || linear_bytes(call.weights) < TEAM_BYTES) return linear_run(threads_for(call.weights, call.rows), &call);
  LinearCall own = call;
  team_do(team_, [](void* arg, int part, int parts) { linear_run_part((const LinearCall*)arg, part, parts); }, &own);
}

Pool* Corrector::threads_for(const Linear* layer, int64_t rows) const {
  return rows * linear_bytes(layer) < SHARED_WORK ? nullptr : pool_;
}

bool Corrector::shares(int64_t rows) const { return c_.out != nullptr && threads_for(c_.out, rows) != nullptr; }

void Corrector::run(int64_t place, int64_t rows, const int64_t* previous, const char* const* hidden, float* state,
                    float* logits) {
  if (c_.kind == PATH_SELECTOR) return select(rows, previous, hidden, logits);
  if (c_.kind == DOMINO) return domino(place, rows, previous, hidden, state, logits);
  const int64_t w = c_.width, wide = w * size_, hidden_bytes = hidden_ * size_;
  char* row = gathered(c_.table, rows, previous, row_);
  if (c_.kind == MARKOV_GATED) {
    joined_.resize((size_t)(rows * (hidden_bytes + wide)));
    for (int64_t r = 0; r < rows; r++) {
      char* to = joined_.data() + r * (hidden_bytes + wide);
      memcpy(to, hidden[r], (size_t)hidden_bytes);
      memcpy(to + hidden_bytes, row + r * wide, (size_t)wide);
    }
    product(c_.join, joined_.data(), rows, product_, hidden_ + w);
    for (int64_t i = 0; i < rows * w; i++)
      put(row, i, sigmoid(number(product_.data(), i) + c_.bias[i % w]) * number(row, i));
  } else if (c_.kind == MARKOV_RNN) {
    joined_.resize((size_t)(rows * (hidden_bytes + 2 * wide)));
    for (int64_t r = 0; r < rows; r++) {
      char* to = joined_.data() + r * (hidden_bytes + 2 * wide);
      for (int64_t i = 0; i < w; i++) put(to, i, state[r * w + i]);
      memcpy(to + wide, row + r * wide, (size_t)wide);
      memcpy(to + 2 * wide, hidden[r], (size_t)hidden_bytes);
    }
    product(c_.join, joined_.data(), rows, product_, 2 * w + hidden_);
    for (int64_t r = 0; r < rows; r++) {
      const char* parts = product_.data() + r * 3 * wide;
      for (int64_t i = 0; i < w; i++) {
        const float gate = sigmoid(number(parts, i) + c_.bias[i]);
        const float candidate = std::tanh(number(parts, w + i) + c_.bias[w + i]);
        float& kept = state[r * w + i];
        kept = gate * kept + (1.0f - gate) * candidate;
        put(row, r * w + i, std::tanh(number(parts, 2 * w + i) + c_.bias[2 * w + i]));
      }
    }
  }
  say(row, rows, logits);
}

// torch's GRU without biases: parts are reset, update, candidate.
void Corrector::domino(int64_t place, int64_t rows, const int64_t* previous, const char* const* hidden, float* state,
                       float* logits) {
  const int64_t s = c_.state_width, hidden_bytes = hidden_ * size_, state_bytes = s * size_;
  product(c_.join, gathered(c_.table, rows, previous, row_), rows, product_, c_.width);
  row_.resize((size_t)(rows * state_bytes));
  for (int64_t i = 0; i < rows * s; i++) put(row_.data(), i, state[i]);
  product(c_.state_join, row_.data(), rows, other_, s);
  for (int64_t r = 0; r < rows; r++) {
    const char *in = product_.data() + r * 3 * state_bytes, *own = other_.data() + r * 3 * state_bytes;
    for (int64_t i = 0; i < s; i++) {
      const float reset = sigmoid(number(in, i) + number(own, i));
      const float update = sigmoid(number(in, s + i) + number(own, s + i));
      const float fresh = std::tanh(number(in, 2 * s + i) + reset * number(own, 2 * s + i));
      float& kept = state[r * s + i];
      kept = (1.0f - update) * fresh + update * kept;
    }
  }
  if (place < c_.number) return;
  joined_.resize((size_t)(rows * (hidden_bytes + state_bytes)));
  for (int64_t r = 0; r < rows; r++) {
    char* to = joined_.data() + r * (hidden_bytes + state_bytes);
    memcpy(to, hidden[r], (size_t)hidden_bytes);
    for (int64_t i = 0; i < s; i++) put(to + hidden_bytes, i, state[r * s + i]);
  }
  product(c_.inner, joined_.data(), rows, product_, hidden_ + s);
  const int64_t inner = linear_outputs(c_.inner);
  for (int64_t i = 0; i < rows * inner; i++) {
    const float x = number(product_.data(), i);
    put(product_.data(), i, x * sigmoid(x));
  }
  say(product_.data(), rows, logits);
}

// Of the likeliest tokens each gets (before[previous] * projection(hidden)) . after[token]; nothing else is drafted.
void Corrector::select(int64_t rows, const int64_t* previous, const char* const* hidden, float* logits) {
  const int64_t w = c_.width;
  const char* before = gathered(c_.table, rows, previous, row_);
  joined_.resize((size_t)(rows * hidden_ * size_));
  for (int64_t r = 0; r < rows; r++) memcpy(joined_.data() + r * hidden_ * size_, hidden[r], (size_t)(hidden_ * size_));
  product(c_.join, joined_.data(), rows, product_, hidden_);
  std::vector<int64_t> best;
  std::vector<float> context((size_t)w), scores;
  for (int64_t r = 0; r < rows; r++) {
    float* own = logits + r * vocab_;
    largest(own, vocab_, std::min<int64_t>(c_.number, vocab_), best);
    for (int64_t i = 0; i < w; i++)
      context[(size_t)i] = number(before, r * w + i) * number(product_.data(), r * w + i);
    scores.clear();
    for (int64_t token : best) {
      const char* after = (const char*)c_.table2 + token * w * size_;
      float sum = 0.0f;
      for (int64_t i = 0; i < w; i++) sum += number(after, i) * context[(size_t)i];
      scores.push_back(own[token] + sum);
    }
    std::fill(own, own + vocab_, -std::numeric_limits<float>::infinity());
    for (size_t i = 0; i < best.size(); i++) own[best[i]] = scores[i];
  }
}

}  // namespace dw
