#include "team.h"

#include <atomic>
#include <exception>
#include <thread>

#include "system.h"

namespace dw {
namespace {

constexpr int MAX_MEMBERS = 64;
constexpr uint64_t STOP = ~(uint64_t)0;
constexpr int SPINS = 500;               // some ten microseconds
constexpr int SHORTEST_REST = 128, LONGEST_REST = 8192;  // passes on one thread where a team loses too much
constexpr int64_t WINDOW_NS = 50 * 1000 * 1000;  // of passes in a team, after which what was lost is forgotten
constexpr int64_t MUCH_NS = 4 * 1000 * 1000;     // a neighbour's time slice; what is lost now and then costs less than resting

// The cores are shared by all engines of the process, and so is what is known about them. Where another program computes on a
// core, whoever waits for the member on it loses milliseconds at a time, and one thread alone is faster. Where the core is
// merely interrupted now and then, two threads with a wait in between still are. Two threads halve a pass at best, so one
// is faster once more than half of the time is spent waiting: that is measured, over passes of a window.
std::atomic<int> g_rest{0};  // passes left on one thread
std::atomic<int> g_next_rest{SHORTEST_REST};
std::atomic<int64_t> g_spent{0};  // nanoseconds of the window's passes
std::atomic<int64_t> g_lost{0};   // of them, spent waiting

void lose(int64_t ns) { g_lost.fetch_add(ns, std::memory_order_relaxed); }

// Example: 60 passes of 0.4 ms and two waits of 3 ms among them: 30 ms, 6 of them lost, less than half: the team goes on. Three
// waits of 3 ms in ten passes: 13 ms, 9 of them lost: the next 128 passes run on one thread, 256 if it is no better then.
void judge(int64_t ns) {
  int64_t spent = g_spent.fetch_add(ns, std::memory_order_relaxed) + ns, lost = g_lost.load(std::memory_order_relaxed);
  bool bad = lost > MUCH_NS && 2 * lost > spent;
  if (!bad && spent < WINDOW_NS) return;
  int rest = g_next_rest.load(std::memory_order_relaxed);
  g_next_rest.store(!bad ? SHORTEST_REST : rest * 2 < LONGEST_REST ? rest * 2 : LONGEST_REST, std::memory_order_relaxed);
  if (bad) g_rest.store(rest, std::memory_order_relaxed);
  g_spent.store(0, std::memory_order_relaxed);
  g_lost.store(0, std::memory_order_relaxed);
}

struct alignas(64) Member {
  std::atomic<uint64_t> begun{0};  // the last command whose part of this member somebody has taken
  std::atomic<uint64_t> done{0};   // and the last that it has finished itself
};

}  // namespace

struct Team {
  // Sequence number and, in the lowest byte, the number of parts.
  alignas(64) std::atomic<uint64_t> command{0};
  void (*fn)(void*, int, int) = nullptr;
  void* arg = nullptr;
  alignas(64) std::atomic<int> joined{0};
  uint64_t sequence = 0;
  bool led = false;
  int64_t stopped_at = 0;
  void (*leader)(void*, Team*) = nullptr;
  void* leader_arg = nullptr;
  std::atomic<bool> failed{false};  // a part has thrown: `error`, which the first to fail writes
  std::exception_ptr error;
  Member members[MAX_MEMBERS];
};

namespace {

// Takes a part if nobody has. Who takes it finishes it before the next job, so the job cannot change meanwhile.
bool take(Team& team, int member, uint64_t command) {
  std::atomic<uint64_t>& begun = team.members[member].begun;
  uint64_t last = begun.load(std::memory_order_relaxed);
  return last < command && begun.compare_exchange_strong(last, command, std::memory_order_acq_rel);
}

void run_part(Team& team, void (*fn)(void*, int, int), void* arg, int part, int parts) {
  try {
    fn(arg, part, parts);
  } catch (...) {
    if (!team.failed.exchange(true, std::memory_order_relaxed)) team.error = std::current_exception();
  }
}

void follow(Team& team) {
  int me = team.joined.fetch_add(1, std::memory_order_acq_rel) + 1;
  uint64_t last = 0;
  for (int spins = 0;;) {
    uint64_t command = team.command.load(std::memory_order_acquire);
    if (command == STOP) return;
    if (command == last) {
      pause_briefly();
      if (++spins > SPINS) std::this_thread::yield();
      continue;
    }
    last = command;
    spins = 0;
    int parts = (int)(command & 0xff);
    if (me >= parts || !take(team, me, command)) continue;
    run_part(team, team.fn, team.arg, me, parts);
    team.members[me].done.store(command, std::memory_order_release);
  }
}

void member_task(void* arg, int, int thread) {
  Team& team = *(Team*)arg;
  if (thread != 0) return follow(team);
  // The calling thread, with its own task first; when it is done it meets here the tasks of threads that never woke.
  if (team.led) return;
  team.led = true;
  struct Stop {  // also when the leader throws: the members wait for it
    Team& team;
    ~Stop() {
      team.command.store(STOP, std::memory_order_release);
      // parallel_for returns when every member has seen this; one that is off its core has not
      if (team.joined.load(std::memory_order_acquire) > 0) team.stopped_at = now_ns();
    }
  } stop{team};
  team.leader(team.leader_arg, &team);
}

void wait_for(const Member& member, uint64_t command) {
  int64_t since = 0;
  for (int spins = 0; member.done.load(std::memory_order_acquire) != command; spins++) {
    pause_briefly();
    if (spins < SPINS) continue;
    if (since == 0) since = now_ns();
    std::this_thread::yield();
  }
  if (since != 0) lose(now_ns() - since);
}

}  // namespace

bool team_ready(Pool* pool) {
  if (pool_threads(pool) < 2) return false;
  int rest = g_rest.load(std::memory_order_relaxed);
  if (rest > 0) {
    g_rest.store(rest - 1, std::memory_order_relaxed);
    return false;
  }
  return true;
}

void team_run(Pool* pool, void (*leader)(void*, Team*), void* arg) {
  Team team;
  team.leader = leader;
  team.leader_arg = arg;
  int threads = pool_threads(pool);
  int64_t start = now_ns();
  parallel_for(pool, threads < MAX_MEMBERS ? threads : MAX_MEMBERS, member_task, &team);
  int64_t end = now_ns();
  if (team.stopped_at != 0) lose(end - team.stopped_at);
  judge(end - start);
}

void team_do(Team* team, void (*fn)(void*, int, int), void* arg) {
  int parts = team->joined.load(std::memory_order_acquire) + 1;
  if (parts == 1) return fn(arg, 0, 1);
  team->fn = fn;
  team->arg = arg;
  uint64_t command = ++team->sequence << 8 | (uint64_t)parts;
  team->command.store(command, std::memory_order_release);
  run_part(*team, fn, arg, 0, parts);
  for (int member = 1; member < parts; member++) {
    if (take(*team, member, command)) {
      run_part(*team, fn, arg, member, parts);
    } else {
      wait_for(team->members[member], command);
    }
  }
  if (team->failed.load(std::memory_order_relaxed)) std::rethrow_exception(team->error);  // and the pass is over
}

}  // namespace dw
