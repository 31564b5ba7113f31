// Prompt lookup: where each n-gram of a request's tokens ended last. The Python index in propose/lookup/ngram.py is the
// reference of this one, docs/algorithms/ngram.md says what it is for.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "boundary.h"
#include "isa.h"
#include "look_ups.h"

namespace {

// One size of n-grams: open addressing, at most half full. A slot holds where its n-gram ended last, plus one; which
// n-gram that is, the tokens say.
class Table {
 public:
  explicit Table(int64_t size) : size_(size), slots_(64) {}

  void put(const std::vector<int32_t>& tokens, int64_t end) {
    if (2 * (used_ + 1) > (int64_t)slots_.size()) grow(tokens);
    int32_t& slot = slots_[find(tokens, tokens.data() + end - size_ + 1)];
    used_ += slot == 0;
    slot = (int32_t)end + 1;
  }

  // Where the n-gram that begins at `key` ended last; -1: nowhere.
  int64_t get(const std::vector<int32_t>& tokens, const int32_t* key) const { return slots_[find(tokens, key)] - 1; }

  int64_t size() const { return size_; }

 private:
  size_t find(const std::vector<int32_t>& tokens, const int32_t* key) const {
    uint64_t hash = 0x9e3779b97f4a7c15ull;
    for (int64_t i = 0; i < size_; i++) hash = (hash ^ (uint32_t)key[i]) * 0xff51afd7ed558ccdull, hash ^= hash >> 32;
    const size_t mask = slots_.size() - 1;
    for (size_t place = hash & mask;; place = (place + 1) & mask) {
      const int32_t slot = slots_[place];
      if (slot == 0 || std::equal(key, key + size_, tokens.data() + slot - size_)) return place;
    }
  }

  void grow(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> old(2 * slots_.size());
    old.swap(slots_);
    for (int32_t slot : old) {
      if (slot) slots_[find(tokens, tokens.data() + slot - size_)] = slot;
    }
  }

  int64_t size_, used_ = 0;
  std::vector<int32_t> slots_;
};

class Index {
 public:
  Index(int64_t longest, int64_t shortest) {
    for (int64_t n = longest; n >= shortest; n--) tables_.emplace_back(n);
  }

  // Takes in the n-grams that end before token `end` of a text that begins with what was taken in before.
  void extend(const int32_t* tokens, int64_t end) {
    int64_t done = (int64_t)tokens_.size();
    if (end <= done) return;
    tokens_.insert(tokens_.end(), tokens + done, tokens + end);
    for (Table& table : tables_) {
      for (int64_t last = std::max(done, table.size() - 1); last < end; last++) table.put(tokens_, last);
    }
  }

  // Where the longest suffix of tokens [n] that is known ended last, and its length; 0: none is.
  int64_t find(const int32_t* tokens, int64_t n, int64_t* end) const {
    for (const Table& table : tables_) {
      if (table.size() > n) continue;
      *end = table.get(tokens_, tokens + n - table.size());
      if (*end >= 0) return table.size();
    }
    return 0;
  }

  // Half of what an extension was about may be in after it failed.
  bool broken = false;

 private:
  std::vector<Table> tables_;
  std::vector<int32_t> tokens_;
};

}  // namespace

DW_EXPORT void* dw_ngram_new(int64_t longest, int64_t shortest) {
  return dw::guarded([&]() -> void* {
    dw::require(1 <= shortest && shortest <= longest, "lengths of n-grams");
    return new Index(longest, shortest);
  });
}

DW_EXPORT void dw_ngram_free(void* index) {
  dw::guarded([&] { delete static_cast<Index*>(index); });
}

// For each of R requests: takes in its known tokens but the last one, and copies what followed the longest suffix of all
// its tokens. `columns` [5, R]: index; address of its tokens, int32; how many are known; how many there are; how many are
// wanted. `found`: length of the match [R], 0: none; drafts [R, width].
void dw::ngram_step(int64_t requests, const int64_t* columns, int64_t width, int32_t* found) {
  const int64_t *at = columns + requests, *known = at + requests, *total = known + requests, *wanted = total + requests;
  for (int64_t r = 0; r < requests; r++) {
    Index* index = (Index*)(uintptr_t)columns[r];
    const int32_t* tokens = (const int32_t*)(uintptr_t)at[r];
    require(0 < known[r] && known[r] <= total[r] && wanted[r] <= width, "tokens, and room for drafts");
    require(!index->broken, "an index that is whole");
    index->broken = true;
    index->extend(tokens, known[r] - 1);
    index->broken = false;
    int32_t* drafts = found + requests + r * width;
    int64_t end = -1;
    found[r] = wanted[r] > 0 ? (int32_t)index->find(tokens, total[r], &end) : 0;
    if (found[r] == 0) continue;
    // Past the end of the tokens the copy goes on with itself: a suffix that overlaps its own occurrence is a period.
    const int64_t period = total[r] - end - 1;
    for (int64_t i = 0; i < wanted[r]; i++) drafts[i] = i < period ? tokens[end + 1 + i] : drafts[i - period];
  }
}

DW_EXPORT void dw_ngram_step(int64_t requests, const int64_t* columns, int64_t width, int32_t* found) {
  dw::guarded([&] { dw::ngram_step(requests, columns, width, found); });
}
