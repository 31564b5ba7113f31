// A trie over the suffixes of token sequences, cut at a depth, with the number of times each string occurs: what the suffix
// proposer looks things up in (docs/algorithms/suffix.md). Counts are exact after every token.
//
// Paths are compressed: a node stands where strings branch or a sequence ends, and its edge is labelled by a place in some
// sequence's tokens. Every string that ends an open sequence therefore ends in a node, its locus; taking in tokens moves at
// most `depth` loci down. Sequences are removed in the order in which they began. A label always lies in the newest
// sequence that passes its edge, so that a removal never takes tokens away that an edge still needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace dw {

// An array that grows by pieces: nothing is copied, nothing is reserved beyond the last piece.
template <class T, unsigned kLog>
class Pieces {
 public:
  T& operator[](uint32_t i) { return pieces_[i >> kLog][i & ((1u << kLog) - 1)]; }
  const T& operator[](uint32_t i) const { return pieces_[i >> kLog][i & ((1u << kLog) - 1)]; }
  void reserve(uint64_t n) {
    while ((uint64_t(pieces_.size()) << kLog) < n) pieces_.emplace_back(new T[1u << kLog]);
  }
  uint64_t bytes() const { return pieces_.size() * (sizeof(T) << kLog) + pieces_.capacity() * sizeof(void*); }

 private:
  std::vector<std::unique_ptr<T[]>> pieces_;
};

// Where a string ends: `offset` tokens into the edge that leads to `node`.
struct Locus {
  uint32_t node, offset;
};

constexpr int32_t kMaxDraft = 63;

// What may be drafted. Mirrored in propose/lookup/suffix.py.
struct SuffixLimits {
  double factor, offset;   // at most floor(match length * factor + offset) nodes
  double min_prob;         // nodes less likely than this are left out
  int32_t budget;          // nodes, at most kMaxDraft
  int32_t max_depth;       // no node is deeper
  int32_t shape;           // 0: a chain; 1: the likeliest nodes first; 2: the first nodes of the given tree
  int32_t tree_size;       // at most kMaxDraft
  const int32_t* parents;  // [tree_size]; -1: a child of the root
  const int32_t* ranks;    // [tree_size]; rank of a node among its parent's children
};

struct SuffixDraft {
  double score = 0;  // sum of the nodes' probabilities
  int32_t match_len = 0;
  int32_t source = 0;  // which tree it comes from, as the caller numbers them
  int32_t size = 0;
  int32_t tokens[kMaxDraft];
  int32_t parents[kMaxDraft];

  SuffixDraft() = default;
  SuffixDraft(const SuffixDraft& other) { *this = other; }
  SuffixDraft& operator=(const SuffixDraft& other) {  // most have room for many more nodes than they have
    score = other.score, match_len = other.match_len, source = other.source, size = other.size;
    std::copy_n(other.tokens, size, tokens);
    std::copy_n(other.parents, size, parents);
    return *this;
  }
};

class SuffixTree {
 public:
  explicit SuffixTree(uint32_t depth);

  uint32_t begin();                                              // a new sequence, open, newer than all others
  void append(uint32_t seq, const int32_t* tokens, uint64_t n);  // reopens it if it is closed
  void close(uint32_t seq);                                      // frees what only `append` needs
  bool remove(uint32_t seq);                                     // queued; false if an older sequence is still there
  uint64_t settle(uint64_t most);  // take away at most so many suffixes of removed sequences; how many are left

  // The best continuation of `context` [n] replaces `best` if it is better: by score, then by match length. `seq` >= 0: a
  // sequence whose tokens end the context (its loci, if it is open, save the search).
  void draft(int64_t seq, const int32_t* context, uint64_t n, const SuffixLimits&, int32_t source, SuffixDraft* best);

  // Asks the memory for what `append` will look at if sequence `seq` is to become `tokens` [n]. Each stage finds its addresses
  // in what the one before asked for.
  static constexpr int kStages = 4;
  void fetch(uint32_t seq, const int32_t* tokens, uint64_t n, int stage) const;

  uint64_t count(const int32_t* tokens, uint64_t n) const;  // occurrences of a string of at most `depth` tokens
  uint64_t agree(uint32_t seq, const int32_t* tokens, uint64_t n) const;  // leading tokens of the sequence that equal these
  uint64_t length(uint32_t seq) const { return seqs_[seq].length; }
  uint64_t num_tokens() const { return num_tokens_; }
  uint64_t num_nodes() const { return num_nodes_; }
  uint64_t bytes() const;
  int check() const;  // 0, or the line of the broken rule; slow, for tests

 private:
  static constexpr uint32_t kRootNode = 0;
  static constexpr uint32_t kNoNode = 0xFFFFFFFF;

  struct Node {  // 32 bytes: most of the memory
    uint32_t parent;
    int32_t token;   // first of the edge
    uint32_t start;  // place of that token in the newest occurrence
    uint32_t count;  // occurrences, the same all along the edge
    uint32_t next;   // in its hash chain, if it has many siblings, or in the list of free nodes
    uint32_t kids;   // the only child, or the list of children: how many, then their nodes, the most frequent first; behind the
                     // room for these, if they are few, their tokens
    uint32_t slot;   // index in the parent's list
    uint16_t length;
    uint8_t log;  // 0: no child; 1: one; more: a list with room for (1 << log) - 1
    uint8_t unused;
  };
  static_assert(sizeof(Node) == 32, "two nodes share a cache line");

  // 13 tokens of one sequence. Place p is word p % 16 of block p / 16; the first three words are the block's own numbers.
  static constexpr uint32_t kFirstSlot = 3, kTokens = 16 - kFirstSlot;
  struct alignas(64) Block {
    uint32_t next;
    uint32_t order;   // of the sequence; larger is newer
    uint32_t number;  // of the block in its sequence
    int32_t tokens[kTokens];
  };
  static_assert(sizeof(Block) == 64, "a cache line");

  struct Seq {
    uint32_t order = 0;
    uint32_t first = 0, last = 0;  // blocks
    uint32_t length = 0;
    uint32_t gone = 0, gone_at = 0;  // leading suffixes taken away; place of the next
    bool removed = false, open = false;
    std::vector<uint32_t> loci;  // nodes of the suffixes that can still grow, longest first
  };

  struct Candidate {  // a node of a draft that may be taken
    double prob;
    uint32_t order;
    Locus at;
    int32_t parent, depth;
    // Whether a is taken after b: the likelier first, of equal ones that which came first.
    static bool after(const Candidate& a, const Candidate& b) {
      return a.prob != b.prob ? a.prob < b.prob : a.order > b.order;
    }
  };

  int32_t token_at(uint32_t place) const { return blocks_[place >> 4].tokens[(place & 15) - kFirstSlot]; }
  static uint32_t first_place(const Seq& seq) { return seq.first << 4 | kFirstSlot; }
  // Example: place 30 (word 14 of block 1), 3 steps, block 1 followed by block 7: word 4 of it, place 7 * 16 + 4.
  uint32_t after(uint32_t place, uint32_t steps) const {
    uint32_t block = place >> 4, at = (place & 15) + steps;
    for (; at > 15; at -= kTokens) block = blocks_[block].next;
    return block << 4 | at;
  }
  uint32_t order_of(uint32_t place) const { return blocks_[place >> 4].order; }
  bool newer(uint32_t a, uint32_t b) const;
  uint32_t push_token(Seq& seq, int32_t token);
  void open(Seq& seq);

  uint32_t new_node(uint32_t parent, int32_t token, uint32_t start, uint32_t count, uint32_t length);
  void free_node(uint32_t n);
  // Lists of nodes whose `log` is kHashed or more have no tokens: the children are in the table.
  static constexpr unsigned kHashed = 4;
  static unsigned words(unsigned log) { return log < kHashed ? log + 1 : log; }
  uint32_t* list(const Node& node) { return node.log > 12 ? big_lists_[node.kids].get() : &lists_[node.kids]; }
  const uint32_t* list(const Node& node) const {
    return node.log > 12 ? big_lists_[node.kids].get() : &lists_[node.kids];
  }
  uint32_t num_children(const Node& node) const { return node.log < 2 ? node.log : list(node)[0]; }
  const uint32_t* children(const Node& node) const { return node.log < 2 ? &node.kids : list(node) + 1; }
  uint32_t new_list(unsigned log);
  void free_list(uint32_t place, unsigned log);
  void resize_list(Node& node, unsigned log);
  void add_child(uint32_t parent, uint32_t child);
  void drop_child(uint32_t child);
  void replace_child(uint32_t child, uint32_t fresh);
  void raise(uint32_t n);
  void lower(uint32_t n);
  void swap_children(const Node& parent, uint32_t i, uint32_t j);

  uint32_t bucket_of(uint32_t parent, int32_t token) const;
  uint32_t find(uint32_t parent, int32_t token) const {
    const Node& above = nodes_[parent];
    if (above.log > 1) return find_of_many(parent, token);
    return above.log == 1 && nodes_[above.kids].token == token ? above.kids : kNoNode;
  }
  uint32_t find_of_many(uint32_t parent, int32_t token) const;
  void link(uint32_t n);
  void unlink(uint32_t n);
  uint32_t* link_to(uint32_t n);

  uint32_t grow(uint32_t at, const int32_t* tokens, uint32_t n, uint32_t place, uint32_t order);
  uint32_t alike(uint32_t place, const int32_t* tokens, uint32_t n) const;
  void shorten(Node& node, uint32_t by);
  uint32_t split(uint32_t child, uint32_t by);
  void join(uint32_t upper, uint32_t lower);
  void forget(const Seq& seq);
  bool walk(const int32_t* tokens, uint64_t n, Locus* found) const;

  bool likeliest(Locus* at, double* prob, double min_prob) const;
  void ranked(uint32_t node, double prob, double min_prob, uint32_t most);
  void expand(Locus at, double prob, int32_t parent, int32_t depth, const SuffixLimits&, uint32_t most);
  void chain(Locus from, int32_t most, const SuffixLimits&, SuffixDraft* out);
  void best_first(Locus from, int32_t most, const SuffixLimits&, SuffixDraft* out);
  void shaped(Locus from, int32_t most, const SuffixLimits&, SuffixDraft* out);

  uint32_t depth_;
  Pieces<Node, 10> nodes_;
  Pieces<uint32_t, 12> buckets_;
  Pieces<uint32_t, 12> lists_;
  Pieces<Block, 6> blocks_;
  std::vector<std::unique_ptr<uint32_t[]>> big_lists_;  // those that are too long for a piece
  std::vector<uint32_t> free_big_lists_;
  uint64_t big_bytes_ = 0;
  std::vector<Seq> seqs_;
  std::vector<uint32_t> free_seqs_;
  std::deque<uint32_t> removed_;
  uint32_t node_end_ = 0, free_nodes_, num_nodes_ = 0;
  uint32_t list_end_ = 0, free_lists_[16];
  uint32_t block_end_ = 0, free_blocks_;
  uint32_t num_buckets_ = 0, round_ = 1;      // round_: buckets when this round of splits began
  uint64_t num_linked_ = 0;                   // nodes in them
  uint32_t next_order_ = 0, oldest_ = 0;      // orders of the next sequence and of the oldest that is not removed
  uint64_t num_tokens_ = 0, pending_ = 0;      // pending_: tokens of removed sequences that are still there
  std::vector<Locus> matches_;                // scratch of `draft`
  std::vector<uint32_t> ranked_;
  std::vector<Candidate> queue_;
  uint32_t queued_ = 0;
};

}  // namespace dw
