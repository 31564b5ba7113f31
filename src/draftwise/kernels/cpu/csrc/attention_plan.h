// How one call of attention is cut: into tiles of rows, pieces of their keys, and tasks of about equal work.
//
// All (tile, head) items stand in a row, each as long as it takes; tasks are equal lengths of that row. Where the ends of items are good
// enough borders, no item is cut. Where they are not, as for one long request, an item is cut at a border of partitions, and its
// pieces are merged in a second phase. Bits do not depend on any of this.
//
// Example: 2 threads, one row over 100 partitions and 1 key/value head: 8 tasks of 12 or 13 partitions, then one merge per thread.
#pragma once

#include "attention.h"

namespace dw {

struct CutItem {
  int32_t first_piece, pieces;
};

struct AttentionRun {
  const AttentionCall* call;
  const BatchView* batch;
  const AttentionKernels* kernels;
  const QueryTile* tiles;
  int num_tiles;
  int tile_rows;
  const AttentionPiece* pieces;
  int num_pieces;
  const int32_t* task_ends;  // pieces of task t: [task_ends[t - 1], task_ends[t])
  const CutItem* cuts;
  int merge_ways;  // tasks that share the merging of one item
  int most_partitions;
  float* partials;
  int64_t partial_floats;
  int tasks[2];
  bool one_thread;  // too little work to share
};

// What threads claim: `ATTENTION_TASKS` per thread where tasks are claimed one by one, one where every thread has its own.
constexpr int ATTENTION_TASKS = 4;

// Cuts a call for `threads` threads and `per_thread` tasks each; `serial`: products below which one thread does it alone. The run
// points to memory of the calling thread, valid until its next plan.
AttentionRun attention_plan(DType, const AttentionCall*, const BatchView*, int threads, int per_thread, int64_t serial);
void attention_task(const AttentionRun*, int phase, int task);

}  // namespace dw
