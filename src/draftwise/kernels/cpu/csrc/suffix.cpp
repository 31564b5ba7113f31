// How a suffix tree grows and shrinks: one token, or one suffix, at a time.
#include <algorithm>
#include <cassert>

#include "suffix.h"

namespace dw {

// ------------------------------------------------------------------------------------------------- sequences

uint32_t SuffixTree::begin() {
  uint32_t s = uint32_t(seqs_.size());
  if (free_seqs_.empty()) {
    seqs_.emplace_back();
  } else {
    s = free_seqs_.back();
    free_seqs_.pop_back();
    seqs_[s] = Seq{};
  }
  seqs_[s].order = next_order_++;
  seqs_[s].open = true;
  return s;
}

void SuffixTree::append(uint32_t s, const int32_t* tokens, uint64_t n) {
  Seq& seq = seqs_[s];
  assert(!seq.removed);
  if (!seq.open) open(seq);
  std::vector<uint32_t>& loci = seq.loci;
  if (loci.capacity() < depth_ && n) loci.reserve(std::min<uint64_t>(depth_, loci.size() + n));
  for (uint64_t i = 0; i < n; ++i) {
    int32_t token = tokens[i];
    uint32_t place = push_token(seq, token);
    if (loci.size() == depth_) loci.erase(loci.begin());
    for (uint32_t& locus : loci) locus = step(locus, token, place, seq.order);
    loci.push_back(step(kRootNode, token, place, seq.order));
  }
}

void SuffixTree::close(uint32_t s) {
  seqs_[s].open = false;
  std::vector<uint32_t>().swap(seqs_[s].loci);
}

void SuffixTree::open(Seq& seq) {
  uint32_t n = std::min(seq.length, depth_);
  std::vector<int32_t> tail(n);
  uint32_t place = seq.length ? seq.first << 4 : 0;
  if (n) place = after(place, seq.length - n);
  for (uint32_t i = 0; i < n; ++i) {
    tail[i] = token_at(place);
    if (i + 1 < n) place = after(place, 1);
  }
  for (uint32_t i = 0; i < n; ++i) {
    Locus locus{};
    bool found = walk(tail.data() + i, n - i, &locus);
    assert(found && locus.offset == nodes_[locus.node].length);
    (void)found;
    seq.loci.push_back(locus.node);
  }
  seq.open = true;
}

bool SuffixTree::remove(uint32_t s) {
  Seq& seq = seqs_[s];
  if (seq.removed || seq.order != oldest_) return false;
  ++oldest_;
  close(s);
  seq.removed = true;
  removed_.push_back(s);
  pending_ += seq.length;
  return true;
}

uint64_t SuffixTree::settle(uint64_t most) {
  while (!removed_.empty()) {
    Seq& seq = seqs_[removed_.front()];
    for (; seq.gone < seq.length && most; --most) {
      forget(seq);
      if (++seq.gone < seq.length) seq.gone_at = after(seq.gone_at, 1);
      --num_tokens_;
      --pending_;
    }
    if (seq.gone < seq.length) break;
    if (seq.length) {
      blocks_[seq.last].next = free_blocks_;
      free_blocks_ = seq.first;
    }
    free_seqs_.push_back(removed_.front());
    removed_.pop_front();
  }
  return pending_;
}

// The string that ends in node `at` and is one occurrence of an open sequence's end goes on with `token`, which stands in
// `place`. Returns the node in which it ends now.
uint32_t SuffixTree::step(uint32_t at, int32_t token, uint32_t place, uint32_t order) {
  Node& upper = nodes_[at];
  if (upper.log == 0 && upper.count == 1 && at != kRootNode) {  // the only occurrence: the edge grows
    ++upper.length;
    return at;
  }
  uint32_t child = find(at, token);
  if (child == kNoNode) {
    child = new_node(at, token, place, 1, 1);
    add_child(at, child);
    return child;
  }
  Node& below = nodes_[child];
  // Whether the node is here for our end alone: it goes when we go on.
  bool ours = at != kRootNode && below.count + 1 == upper.count && list(upper)[0] == 1;
  if (below.length == 1) {
    raise(child);
    if (int32_t(order - order_of(below.start)) >= 0) below.start = place;
    if (ours) join(at, child);
    return child;
  }
  if (ours) {  // the node moves down the edge; its only child is in no table
    ++upper.length;
    below.start = after(below.start, 1);
    --below.length;
    below.token = token_at(below.start);
    return at;
  }
  uint32_t middle = new_node(at, token, below.start, below.count, 1);
  Node& split = nodes_[middle];
  replace_child(child, middle);
  below.parent = middle;
  below.start = after(below.start, 1);
  --below.length;
  below.token = token_at(below.start);
  add_child(middle, child);
  raise(middle);
  if (int32_t(order - order_of(split.start)) >= 0) split.start = place;
  return middle;
}

// `upper` has one child left, `lower`, and as many occurrences: the two edges become one.
void SuffixTree::join(uint32_t upper, uint32_t lower) {
  Node &above = nodes_[upper], &below = nodes_[lower];
  below.length = uint16_t(below.length + above.length);
  below.start = above.start;
  below.parent = above.parent;
  below.token = above.token;
  replace_child(upper, lower);
  free_node(upper);
}

// Take away the occurrence of the suffix that begins with token `gone` of a removed sequence.
void SuffixTree::forget(const Seq& seq) {
  uint32_t left = std::min(depth_, seq.length - seq.gone);
  uint32_t place = seq.gone_at, at = kRootNode;
  for (;;) {
    uint32_t n = find(at, token_at(place));
    assert(n != kNoNode);
    uint32_t length = nodes_[n].length;
    assert(length <= left);
    if (nodes_[n].count == 1) {  // a leaf: one occurrence does not branch
      assert(length == left && nodes_[n].log == 0);
      drop_child(n);
      free_node(n);
      break;
    }
    lower(n);
    at = n;
    left -= length;
    if (left == 0) break;
    place = after(place, length);
  }
  Node& node = nodes_[at];
  if (at != kRootNode && node.log && list(node)[0] == 1 && nodes_[list(node)[1]].count == node.count) {
    join(at, list(node)[1]);
  }
}

bool SuffixTree::walk(const int32_t* tokens, uint64_t n, Locus* found) const {
  uint32_t at = kRootNode, offset = 0;
  for (uint64_t i = 0; i < n;) {
    at = find(at, tokens[i]);
    if (at == kNoNode) return false;
    const Node& node = nodes_[at];
    offset = uint32_t(std::min<uint64_t>(node.length, n - i));
    uint32_t place = node.start;
    for (uint32_t j = 1; j < offset; ++j) {
      place = after(place, 1);
      if (token_at(place) != tokens[i + j]) return false;
    }
    i += offset;
  }
  *found = Locus{at, offset};
  return true;
}

// --------------------------------------------------------------------------------------------------- queries

uint64_t SuffixTree::count(const int32_t* tokens, uint64_t n) const {
  Locus found{};
  return n && walk(tokens, n, &found) ? nodes_[found.node].count : 0;
}

uint64_t SuffixTree::agree(uint32_t s, const int32_t* tokens, uint64_t n) const {
  const Seq& seq = seqs_[s];
  uint64_t limit = std::min<uint64_t>(n, seq.length);
  uint32_t place = seq.first << 4;
  for (uint64_t i = 0; i < limit; ++i) {
    if (token_at(place) != tokens[i]) return i;
    if (i + 1 < limit) place = after(place, 1);
  }
  return limit;
}

}  // namespace dw
