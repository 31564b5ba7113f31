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
  if (n == 0) return;
  uint32_t place = push_token(seq, tokens[0]);
  for (uint64_t i = 1; i < n; ++i) push_token(seq, tokens[i]);
  // One suffix after the other, each by all of its tokens, the longest first: the last that passes an edge then is the newest that
  // does so, and names the place of its label.
  std::vector<uint32_t>& loci = seq.loci;
  const size_t known = loci.size();
  size_t kept = 0;
  for (size_t i = 0; i < known; ++i) {
    const uint64_t length = known - i, more = std::min<uint64_t>(n, depth_ - length);
    const uint32_t locus = grow(loci[i], tokens, uint32_t(more), place, seq.order);
    if (length + n <= depth_) loci[kept++] = locus;
  }
  loci.resize(kept);
  if (loci.capacity() < depth_) loci.reserve(std::min<uint64_t>(depth_, kept + n));
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t locus = grow(kRootNode, tokens + i, uint32_t(std::min<uint64_t>(n - i, depth_)), place, seq.order);
    if (n - i <= depth_) loci.push_back(locus);
    if (i + 1 < n) place = after(place, 1);
  }
}

void SuffixTree::close(uint32_t s) {
  seqs_[s].open = false;
  std::vector<uint32_t>().swap(seqs_[s].loci);
}

void SuffixTree::open(Seq& seq) {
  uint32_t n = std::min(seq.length, depth_);
  std::vector<int32_t> tail(n);
  uint32_t place = seq.length ? first_place(seq) : 0;
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

// The string that ends in node `at` and is one occurrence of an open sequence's end goes on with `tokens` [n], the first of
// which stands in `place`. Returns the node in which it ends now.
uint32_t SuffixTree::grow(uint32_t at, const int32_t* tokens, uint32_t n, uint32_t place, uint32_t order) {
  while (n > 0) {
    Node& upper = nodes_[at];
    if (upper.log == 0 && upper.count == 1 && at != kRootNode) {  // the only occurrence: the edge grows
      upper.length = uint16_t(upper.length + n);
      return at;
    }
    const uint32_t child = find(at, tokens[0]);
    if (child == kNoNode) {
      const uint32_t leaf = new_node(at, tokens[0], place, 1, n);
      add_child(at, leaf);
      return leaf;
    }
    Node& below = nodes_[child];
    // Whether the node is here for our end alone: it goes when we go on.
    const bool ours = at != kRootNode && below.count + 1 == upper.count && upper.log == 1;
    const uint32_t passed = alike(below.start, tokens, std::min<uint32_t>(n, below.length));
    if (passed == below.length) {
      raise(child);
      if (int32_t(order - order_of(below.start)) >= 0) below.start = place;
      if (ours) join(at, child);
      at = child;
    } else if (ours) {  // the node moves down the edge; its only child is in no table
      upper.length = uint16_t(upper.length + passed);
      shorten(below, passed);
    } else {
      at = split(child, passed);
      if (int32_t(order - order_of(nodes_[at].start)) >= 0) nodes_[at].start = place;
    }
    n -= passed;
    tokens += passed;
    if (n > 0) place = after(place, passed);
  }
  return at;
}

// How many of `tokens` [n] stand from `place` on; the first one does.
uint32_t SuffixTree::alike(uint32_t place, const int32_t* tokens, uint32_t n) const {
  const Block* block = &blocks_[place >> 4];
  uint32_t at = (place & 15) - kFirstSlot;
  for (uint32_t i = 1; i < n; ++i) {
    if (++at == kTokens) {
      block = &blocks_[block->next];
      at = 0;
    }
    if (block->tokens[at] != tokens[i]) return i;
  }
  return n;
}

// The first `by` tokens of its edge now lie above the node.
void SuffixTree::shorten(Node& node, uint32_t by) {
  node.start = after(node.start, by);
  node.length = uint16_t(node.length - by);
  node.token = token_at(node.start);
}

// A node `by` tokens down the edge to `child`, where one more string ends.
uint32_t SuffixTree::split(uint32_t child, uint32_t by) {
  Node& below = nodes_[child];
  const uint32_t middle = new_node(below.parent, below.token, below.start, below.count, by);
  replace_child(child, middle);
  below.parent = middle;
  shorten(below, by);
  add_child(middle, child);
  raise(middle);
  return middle;
}

void SuffixTree::fetch(uint32_t s, const int32_t* tokens, uint64_t n, int stage) const {
  const Seq& seq = seqs_[s];
  if (stage == 0) {
    __builtin_prefetch(&seq);
    return;
  }
  if (!seq.open || seq.length == 0 || seq.length >= n) return;
  if (stage == 1) {
    for (size_t i = 0; i < seq.loci.size(); i += 16) __builtin_prefetch(&seq.loci[i], 1);
    __builtin_prefetch(&blocks_[seq.last], 1);
    return;
  }
  const int32_t token = tokens[seq.length];
  for (uint32_t at : seq.loci) {
    const Node& node = nodes_[at];
    if (stage == 2) {
      __builtin_prefetch(&node, 1);
    } else if (node.log == 1) {
      __builtin_prefetch(&nodes_[node.kids], 1);
    } else if (node.log > 1) {
      __builtin_prefetch(node.log < kHashed ? list(node) : &buckets_[bucket_of(at, token)]);
    }
  }
  constexpr uint64_t kFew = 8;  // of the new tokens, each of which begins a suffix
  if (nodes_[kRootNode].log < kHashed) return;
  for (uint64_t i = seq.length; i < n && i < seq.length + kFew; ++i) {
    const uint32_t& bucket = buckets_[bucket_of(kRootNode, tokens[i])];
    if (stage == 2) {
      __builtin_prefetch(&bucket);
    } else if (bucket != kNoNode) {
      __builtin_prefetch(&nodes_[bucket], 1);
    }
  }
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
  if (at != kRootNode && node.log == 1 && nodes_[node.kids].count == node.count) join(at, node.kids);
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
  uint32_t place = limit ? first_place(seq) : 0;
  for (uint64_t i = 0; i < limit; ++i) {
    if (token_at(place) != tokens[i]) return i;
    if (i + 1 < limit) place = after(place, 1);
  }
  return limit;
}

}  // namespace dw
