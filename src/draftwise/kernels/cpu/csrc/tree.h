// Draft trees, level by level, in one call: which nodes there are, and the passes that read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "program.h"

namespace dw {

// What one request wants. A static tree has `shape_nodes` nodes, parents first; a dynamic one (shape_nodes 0) follows the
// drafter's confidence. The score of a token behind a node is scale * logit + noise_scale * noise: the shared noise of the
// token's position, which all nodes of a level read (noise.h). Mirrored by trees.py.
struct TreeWish {
  const int32_t* shape_parents;  // [shape_nodes] -1: the root
  const int32_t* shape_ranks;    // [shape_nodes] among the best tokens behind the parent
  uint64_t seed;                 // of the noise
  int64_t context;               // keys before the tree's first node
  uint32_t sample_index;
  int32_t shape_nodes;
  int32_t top_k, depth, nodes;   // dynamic: nodes expanded per level and children of each; levels; nodes kept
  float scale, noise_scale;      // noise_scale 0: there is no noise
};

// Mirrored by trees.py.
struct TreeOutput {
  int64_t vocab;
  const TreeWish* wishes;     // [requests]
  int32_t* tokens;            // [requests, MAX_TREE_ROWS]
  int32_t* parents;           // [requests, MAX_TREE_ROWS]
  int32_t* counts;            // [requests]
  const int64_t* target_ids;  // [vocab] the token that each drawn id stands for, or null
  int64_t key_offset;         // by how much a row's position is less than its key, in a chain
  int64_t feature_bytes;      // of a row
  int64_t room;               // rows that arena and results have room for
  int32_t feature_in;         // the external buffer of the rows of features; -1: none
  int32_t feature_out;        // where a pass leaves those of the next one
};

// Drafts a tree below each request of a first pass, which has one head row for each; in the others the requests have the rows of a
// level of their trees. Block tables reach as far as nodes are fed.
void draft_trees(const Program*, Pool*, const PassInput* first, const TreeOutput*);

struct Candidate {
  int32_t token;
  float score;  // log-probability
};

// One request's tree while it grows.
class TreeDraft {
 public:
  TreeDraft(const TreeWish* wish, int64_t vocab, const int64_t* target_ids);

  // Nodes whose logits come next, in the order in which they are fed; -1: the root.
  const std::vector<int>& open() const { return open_; }
  // Children of the open node number `index`, whose logits these are. Open nodes come in order.
  // `noise` is the level's: made at the first of them, read at the others.
  void take(int index, const float* logits, std::vector<float>& scratch, std::vector<float>& noise);
  // After all of them: choose the nodes to feed now. False: the tree is complete.
  bool next_level();

  int32_t token(int node) const { return nodes_[(size_t)node].token; }
  int parent(int node) const { return nodes_[(size_t)node].parent; }
  int depth(int node) const { return nodes_[(size_t)node].depth; }
  int number(int node) const { return node < 0 ? -1 : nodes_[(size_t)node].number; }  // among the fed ones
  uint64_t ancestors(int node) const { return node < 0 ? 0 : nodes_[(size_t)node].ancestors; }
  int fed() const { return fed_; }

  // Nodes of the tree as drafted: how many.
  int finish(int32_t* tokens, int32_t* parents) const;

 private:
  struct Node {
    int32_t token;  // of the target; -1: a place of a static shape that nothing was found for
    int parent;
    int depth;
    int number = -1;
    uint64_t ancestors = 0;
    float score = 0.0f;
  };

  bool is_static() const { return wish_->shape_nodes > 0; }
  int children_wanted(int node) const;
  int32_t target(int32_t token) const;
  void feed(int node);
  void take_static(int node, const std::vector<Candidate>& best);
  void take_dynamic(int node, const std::vector<Candidate>& best);
  void sort_best_first(std::vector<int>& order) const;

  const TreeWish* wish_;
  int64_t vocab_;
  const int64_t* target_ids_;
  std::vector<Node> nodes_;
  std::vector<int> open_;
  std::vector<Candidate> best_;
  int level_ = 0;
  int level_first_ = 0;  // dynamic: first node of the latest level
  int fed_ = 0;
};

// The k largest of x = scale * logits + noise_scale * noise (noise may be null), best first, lower tokens first among
// equals, with log softmax(x). Tokens of -inf are left out.
void best_tokens(const float* logits, const float* noise, float scale, float noise_scale, int64_t vocab, int k,
                 std::vector<float>& scratch, std::vector<Candidate>& out);

}  // namespace dw
