// The memory of a suffix tree: tokens, nodes, lists of children, and the table that finds a child by its token.
#include <algorithm>
#include <utility>

#include "suffix.h"

namespace dw {
namespace {

constexpr unsigned kMaxPieceLog = 12;  // longest list that fits a piece of `lists_`

uint32_t hash(uint32_t parent, int32_t token) {
  uint64_t x = ((uint64_t(parent) << 32) | uint32_t(token)) * 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 31)) * 0xD6E8FEB86659FD93ull;
  return uint32_t(x >> 32);
}

}  // namespace

SuffixTree::SuffixTree(uint32_t depth) : depth_(depth), free_nodes_(kNoNode), free_blocks_(kNoNode) {
  std::fill(std::begin(free_lists_), std::end(free_lists_), kNoNode);
  buckets_.reserve(1);
  buckets_[0] = kNoNode;
  num_buckets_ = 1;
  new_node(kNoNode, -1, 0, 0, 0);  // the root; not counted, in no hash chain
  num_nodes_ = 0;
}

// ---------------------------------------------------------------------------------------------------- tokens

bool SuffixTree::newer(uint32_t a, uint32_t b) const {
  const Block &x = blocks_[a >> 4], &y = blocks_[b >> 4];
  if (x.order != y.order) return int32_t(x.order - y.order) > 0;
  return (x.number << 4 | (a & 15)) > (y.number << 4 | (b & 15));
}

uint32_t SuffixTree::push_token(Seq& seq, int32_t token) {
  const uint32_t at = seq.length % kTokens;
  if (at == 0) {
    uint32_t fresh = free_blocks_;
    if (fresh != kNoNode) {
      free_blocks_ = blocks_[fresh].next;
    } else {
      blocks_.reserve(uint64_t(block_end_) + 1);
      fresh = block_end_++;
    }
    Block& block = blocks_[fresh];
    block.next = kNoNode;
    block.order = seq.order;
    block.number = seq.length / kTokens;
    if (seq.length == 0) {
      seq.first = fresh;
      seq.gone_at = first_place(seq);
    } else {
      blocks_[seq.last].next = fresh;
    }
    seq.last = fresh;
  }
  blocks_[seq.last].tokens[at] = token;
  ++seq.length;
  ++num_tokens_;
  return seq.last << 4 | (kFirstSlot + at);
}

// ------------------------------------------------------------------------------------------- nodes and lists

uint32_t SuffixTree::new_node(uint32_t parent, int32_t token, uint32_t start, uint32_t count, uint32_t length) {
  uint32_t n = free_nodes_;
  if (n != kNoNode) {
    free_nodes_ = nodes_[n].next;
  } else {
    nodes_.reserve(uint64_t(node_end_) + 1);
    n = node_end_++;
  }
  ++num_nodes_;
  nodes_[n] = Node{parent, token, start, count, kNoNode, 0, 0, uint16_t(length), 0, 0};
  return n;
}

void SuffixTree::free_node(uint32_t n) {
  if (nodes_[n].log > 1) free_list(nodes_[n].kids, words(nodes_[n].log));
  nodes_[n].next = free_nodes_;
  free_nodes_ = n;
  --num_nodes_;
}

// A list of 1 << log words.
uint32_t SuffixTree::new_list(unsigned log) {
  if (log > kMaxPieceLog) {
    uint32_t place = uint32_t(big_lists_.size());
    if (free_big_lists_.empty()) {
      big_lists_.emplace_back();
    } else {
      place = free_big_lists_.back();
      free_big_lists_.pop_back();
    }
    big_lists_[place].reset(new uint32_t[size_t(1) << log]);
    big_bytes_ += uint64_t(4) << log;
    return place;
  }
  if (free_lists_[log] != kNoNode) {
    uint32_t place = free_lists_[log];
    free_lists_[log] = lists_[place];
    return place;
  }
  // Lists lie at multiples of their size, so that none straddles two pieces; the gap before one is kept for small lists.
  // Example: end 6, log 3: 2 words at 6 become free, the list is at 8.
  while (list_end_ & ((1u << log) - 1)) {
    unsigned gap = unsigned(__builtin_ctz(list_end_));
    lists_[list_end_] = free_lists_[gap];
    free_lists_[gap] = list_end_;
    list_end_ += 1u << gap;
  }
  uint32_t place = list_end_;
  list_end_ += 1u << log;
  lists_.reserve(list_end_);
  return place;
}

void SuffixTree::free_list(uint32_t place, unsigned log) {
  if (log > kMaxPieceLog) {
    big_lists_[place].reset();
    big_bytes_ -= uint64_t(4) << log;
    free_big_lists_.push_back(place);
    return;
  }
  lists_[place] = free_lists_[log];
  free_lists_[log] = place;
}

// From a list, or the only child, to a list with room for more, or for less.
void SuffixTree::resize_list(Node& node, unsigned log) {
  const uint32_t fresh = new_list(words(log)), count = num_children(node);
  uint32_t* to = words(log) > kMaxPieceLog ? big_lists_[fresh].get() : &lists_[fresh];
  to[0] = count;
  std::copy(children(node), children(node) + count, to + 1);
  const bool linked = node.log >= kHashed;
  if (node.log > 1) free_list(node.kids, words(node.log));
  node.kids = fresh;
  node.log = uint8_t(log);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t child = to[1 + i];
    if (log < kHashed) to[(1u << log) + i] = uint32_t(nodes_[child].token);
    if (log >= kHashed && !linked) link(child);
    if (log < kHashed && linked) unlink(child);
  }
}

void SuffixTree::add_child(uint32_t parent, uint32_t child) {
  Node& node = nodes_[parent];
  const uint32_t slot = num_children(node);
  nodes_[child].slot = slot;
  if (node.log == 0) {
    node.kids = child;
    node.log = 1;
    return;
  }
  if (slot + 1 == (1u << node.log)) resize_list(node, node.log + 1u);
  uint32_t* kids = list(node);
  kids[0] = slot + 1;
  kids[1 + slot] = child;
  if (node.log < kHashed) {
    kids[(1u << node.log) + slot] = uint32_t(nodes_[child].token);
  } else {
    link(child);
  }
}

// A child of count 1: those stand at the end of the list, so any of them may fill its place.
void SuffixTree::drop_child(uint32_t child) {
  Node& node = nodes_[nodes_[child].parent];
  if (node.log == 1) {
    node.log = 0;
    return;
  }
  uint32_t *kids = list(node), *tokens = kids + (1u << node.log);
  if (node.log >= kHashed) unlink(child);
  const uint32_t slot = nodes_[child].slot, end = --kids[0], last = kids[1 + end];
  kids[1 + slot] = last;
  if (node.log < kHashed) tokens[slot] = tokens[end];
  nodes_[last].slot = slot;
  if (end == 1) {
    const uint32_t only = kids[1];
    free_list(node.kids, words(node.log));
    node.kids = only;
    node.log = 1;
  } else if (end < (1u << node.log) / 4) {
    resize_list(node, node.log - 1u);
  }
}

// `fresh`, of the same parent and token, comes in a child's place.
void SuffixTree::replace_child(uint32_t child, uint32_t fresh) {
  Node& node = nodes_[nodes_[child].parent];
  nodes_[fresh].slot = nodes_[child].slot;
  if (node.log == 1) {
    node.kids = fresh;
    return;
  }
  list(node)[1 + nodes_[child].slot] = fresh;
  if (node.log < kHashed) return;
  uint32_t* at = link_to(child);
  nodes_[fresh].next = nodes_[child].next;
  *at = fresh;
}

// One more occurrence. The node changes places with the first of its siblings of equal count, so that the list stays sorted.
// Children of the root are not sorted: nothing is drafted from the root.
void SuffixTree::raise(uint32_t n) {
  Node& node = nodes_[n];
  if (node.parent != kRootNode && node.slot > 0) {
    const Node& above = nodes_[node.parent];
    const uint32_t* kids = list(above) + 1;
    if (nodes_[kids[node.slot - 1]].count == node.count) {
      uint32_t low = 0, high = node.slot - 1;
      while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (nodes_[kids[middle]].count == node.count) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      swap_children(above, low, node.slot);
    }
  }
  ++node.count;
}

void SuffixTree::lower(uint32_t n) {
  Node& node = nodes_[n];
  const Node& above = nodes_[node.parent];
  if (node.parent != kRootNode && above.log > 1) {
    const uint32_t* kids = list(above);
    uint32_t low = node.slot, high = kids[0] - 1;
    ++kids;
    if (low < high && nodes_[kids[low + 1]].count == node.count) {
      while (low < high) {
        uint32_t middle = (low + high + 1) / 2;
        if (nodes_[kids[middle]].count == node.count) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      swap_children(above, low, node.slot);
    }
  }
  --node.count;
}

void SuffixTree::swap_children(const Node& parent, uint32_t i, uint32_t j) {
  uint32_t *kids = list(parent) + 1, *tokens = list(parent) + (1u << parent.log);
  std::swap(kids[i], kids[j]);
  if (parent.log < kHashed) std::swap(tokens[i], tokens[j]);
  nodes_[kids[i]].slot = i;
  nodes_[kids[j]].slot = j;
}

// ---------------------------------------------------------------------------------------- children by token

// A child without siblings is named by its parent. So where a sequence ends in a text that occurred before, and its nodes move
// down an edge with every token, no list has to know. A few children are found by the tokens in their list, which fill one or two
// lines of a cache. More than these are in a table.
//
// Linear hashing (Litwin 1980): buckets below num_buckets_ - round_ and from round_ on are already split.
uint32_t SuffixTree::bucket_of(uint32_t parent, int32_t token) const {
  uint32_t h = hash(parent, token);
  uint32_t bucket = h & (2 * round_ - 1);
  return bucket < num_buckets_ ? bucket : h & (round_ - 1);
}

uint32_t SuffixTree::find_of_many(uint32_t parent, int32_t token) const {
  const Node& above = nodes_[parent];
  if (above.log < kHashed) {
    const uint32_t *kids = list(above), *tokens = kids + (1u << above.log);
    for (uint32_t i = 0; i < kids[0]; ++i) {
      if (tokens[i] == uint32_t(token)) return kids[1 + i];
    }
    return kNoNode;
  }
  uint32_t n = buckets_[bucket_of(parent, token)];
  while (n != kNoNode && (nodes_[n].parent != parent || nodes_[n].token != token)) n = nodes_[n].next;
  return n;
}

void SuffixTree::link(uint32_t n) {
  if (++num_linked_ > num_buckets_) {  // split one bucket
    uint32_t fresh = num_buckets_++, old = fresh - round_;
    buckets_.reserve(num_buckets_);
    uint32_t stay = kNoNode, go = kNoNode, mask = 2 * round_ - 1;
    for (uint32_t i = buckets_[old], next; i != kNoNode; i = next) {
      Node& node = nodes_[i];
      next = node.next;
      uint32_t& chain = (hash(node.parent, node.token) & mask) == fresh ? go : stay;
      node.next = chain;
      chain = i;
    }
    buckets_[old] = stay;
    buckets_[fresh] = go;
    if (num_buckets_ == 2 * round_) round_ *= 2;
  }
  uint32_t& bucket = buckets_[bucket_of(nodes_[n].parent, nodes_[n].token)];
  nodes_[n].next = bucket;
  bucket = n;
}

void SuffixTree::unlink(uint32_t n) {
  *link_to(n) = nodes_[n].next;
  --num_linked_;
}

// What names node n in its hash chain.
uint32_t* SuffixTree::link_to(uint32_t n) {
  uint32_t* at = &buckets_[bucket_of(nodes_[n].parent, nodes_[n].token)];
  while (*at != n) at = &nodes_[*at].next;
  return at;
}

// ----------------------------------------------------------------------------------------------------- books
uint64_t SuffixTree::bytes() const {
  uint64_t total = sizeof *this + nodes_.bytes() + buckets_.bytes() + lists_.bytes() + blocks_.bytes() + big_bytes_;
  total += big_lists_.capacity() * sizeof(void*) + free_big_lists_.capacity() * 4 + seqs_.capacity() * sizeof(Seq);
  total += (free_seqs_.capacity() + removed_.size()) * 4;
  for (const Seq& seq : seqs_) total += seq.loci.capacity() * 4;
  return total;
}

#define DW_RULE(condition) \
  if (!(condition)) return __LINE__
int SuffixTree::check() const {
  uint64_t seen = 0, siblings = 0;
  std::vector<std::pair<uint32_t, uint32_t>> stack{{kRootNode, 0}};  // node, depth where its edge ends
  while (!stack.empty()) {
    auto [n, depth] = stack.back();
    stack.pop_back();
    const Node& node = nodes_[n];
    uint32_t children = num_children(node);
    const uint32_t* kids = this->children(node);
    DW_RULE(depth <= depth_);
    DW_RULE(node.log < 2 || (children >= 2 && children < (1u << node.log)));
    if (node.log >= kHashed) siblings += children;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < children; ++i) {
      uint32_t k = kids[i];
      const Node& kid = nodes_[k];
      DW_RULE(kid.parent == n && kid.slot == i && kid.length >= 1 && kid.count >= 1);
      DW_RULE(kid.token == token_at(kid.start));
      DW_RULE(find(n, kid.token) == k);
      DW_RULE(n == kRootNode || i == 0 || nodes_[kids[i - 1]].count >= kid.count);
      DW_RULE(n == kRootNode || children > 1 || kid.count < node.count);
      DW_RULE(int32_t(order_of(kid.start) - (removed_.empty() ? oldest_ : seqs_[removed_.front()].order)) >= 0);
      sum += kid.count;
      stack.emplace_back(k, depth + kid.length);
      ++seen;
    }
    DW_RULE(n == kRootNode || sum <= node.count);
    DW_RULE(n != kRootNode || sum == num_tokens_);
  }
  DW_RULE(seen == num_nodes_);
  uint64_t linked = 0;
  for (uint32_t b = 0; b < num_buckets_; ++b) {
    for (uint32_t i = buckets_[b]; i != kNoNode; i = nodes_[i].next) ++linked;
  }
  DW_RULE(linked == siblings && linked == num_linked_);
  for (const Seq& seq : seqs_) {
    if (!seq.open) continue;
    DW_RULE(seq.loci.size() == std::min(seq.length, depth_));
    for (size_t i = 0; i < seq.loci.size(); ++i) {
      uint32_t n = seq.loci[i], depth = 0;
      for (uint32_t at = n; at != kRootNode; at = nodes_[at].parent) depth += nodes_[at].length;
      DW_RULE(depth == seq.loci.size() - i);
    }
  }
  return 0;
}
#undef DW_RULE

}  // namespace dw
