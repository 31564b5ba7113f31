// Threads that stay together for a whole pass. `parallel_for` hands out tasks one by one, which costs a microsecond or
// two; the kernels of a small model take no longer. In a team the calling thread leads: it announces one job after the
// other, each cut into as many equal parts as there are members at that moment.
//
// Nobody waits for a sleeper: a thread that wakes late joins at the next job, and a part that its member has not begun
// when the leader is done with its own is done by the leader. What remains is a member that loses its core in the
// middle of a part. It happens when other programs want the cores; once more than half of the time goes into waiting, passes
// run on one thread for a while, and for longer when it is no better afterwards.
#pragma once

#include "pool.h"

namespace dw {

struct Team;

// Whether sharing is worth a try now: false for a while after too much waiting. Counts as one pass.
bool team_ready(Pool*);

// Runs leader(arg, team) on the calling thread; the pool's other threads help with what it gives to `team_do`.
void team_run(Pool*, void (*leader)(void* arg, Team*), void* arg);

// fn(arg, part, parts) for every part; returns when all are done, and throws the first exception of one. `parts` may differ
// from call to call.
void team_do(Team*, void (*fn)(void* arg, int part, int parts), void* arg);

}  // namespace dw
