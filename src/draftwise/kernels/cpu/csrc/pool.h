// A pool of persistent threads. The calling thread takes part, so a pool of n has n - 1 workers. Workers that find
// nothing to do poll for some tens of microseconds (the gap between two kernels of a pass), then sleep in the kernel.
#pragma once

#include <cstdint>

namespace dw {

struct Pool;

// `threads` >= 1, the caller included. Threads start at the first use, and again in a forked child.
Pool* pool_create(int threads);
void pool_destroy(Pool*);  // not while a parallel_for runs
int pool_threads(const Pool*);

// Runs fn(arg, task, thread) for every task in [0, tasks) and returns when all are done; `thread` in
// [0, pool_threads) is distinct among tasks that run at the same moment (an index for scratch). The caller runs task 0 (a team's leader
// is there, team.h). The others are claimed one by one, so a thread that is late costs nothing but its help; results must not
// depend on who runs what. If tasks throw, those not begun are left out and the first exception is thrown here, once nobody
// runs any more. Memory written before the call is visible to tasks, memory written by tasks is visible after it. A call from
// inside a task runs inline; calls from several threads take turns. With a null pool, or one task, everything runs on the caller.
void parallel_for(Pool*, int tasks, void (*fn)(void* arg, int task, int thread), void* arg);

// Between begin and end, workers keep polling (they are woken at once, without waiting for them), so that the kernels of one pass
// never pay for waking a thread. Not nested; a pool left open for 10 ms without work sleeps again.
void pool_begin(Pool*);
void pool_end(Pool*);

}  // namespace dw
