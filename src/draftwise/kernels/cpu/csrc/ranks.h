// Processes that share a model ("ranks") add up and gather rows: those of one machine through memory that all of them have mapped,
// those of several through sockets (links.h).
//
// Of every exchange a rank writes its own piece into a slot of its own, says so, waits until all have said so, and reads all
// slots. Slots take turns between two halves: whoever writes half k has seen everybody at exchange k - 1, so that nobody reads
// exchange k - 2, which stood there, any more. One wait per exchange is therefore enough.
//
// Sums go in the order of the ranks, in float32, and are rounded once: every rank gets the same bits, whatever the batch.
#pragma once

#include <cstdint>

#include "linear.h"

namespace dw {

struct Ranks;

// `memory` is zeroed at first, mapped by all ranks of this machine, and outlives this: (size + 1) * 64 + 2 * size * piece bytes. The
// ranks exchange `piece` bytes at a time (a multiple of 64). `sockets` [size]: a connected stream socket to each rank on
// another machine, -1 for the others; null: all are on this one. A rank that waits longer than `seconds` for another throws
// std::runtime_error; so does everybody of this machine who waits after that.
Ranks* ranks_create(void* memory, int64_t size, int64_t rank, int64_t piece, double seconds, const int32_t* sockets);
void ranks_free(Ranks*);

// x [count] of dtype = the sum over all ranks.
void ranks_sum(Ranks*, DType dtype, void* x, int64_t count);

// part [rows, own width] float32 -> out [rows, total]: rank r has columns step * r .. step * (r + 1) - 1, as far as there are any.
void ranks_gather(Ranks*, const float* part, int64_t step, int64_t total, float* out, int64_t rows);

// mine [bytes] -> all [size, bytes].
void ranks_share(Ranks*, const void* mine, int64_t bytes, void* all);

// Rows of a table that has `table_rows` of a larger one, from `first` on: out = zeros for ids that are elsewhere. `bytes` of a row.
void gather_part_rows(const void* table, int64_t first, int64_t table_rows, const int64_t* ids, void* out, int64_t rows,
                      int64_t bytes);

}  // namespace dw
