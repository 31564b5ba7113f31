#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "boundary.h"
#include "system.h"

namespace dw {
namespace {

constexpr int64_t kPollNs = 40 * 1000;            // a worker polls this long before it sleeps
constexpr int64_t kOpenPollNs = 10 * 1000 * 1000;  // and this long inside pool_begin .. pool_end
constexpr unsigned kPausesPerClock = 16;

std::atomic<uint32_t> g_forks{0};  // number of forks behind this process
std::mutex g_start;                // held while threads are started, and across a fork

void before_fork() { g_start.lock(); }
void after_fork_in_parent() { g_start.unlock(); }
void after_fork_in_child() {
  g_forks.fetch_add(1, std::memory_order_relaxed);
  g_start.unlock();
}

__attribute__((constructor)) void survive_forks() {
  around_forks(before_fork, after_fork_in_parent, after_fork_in_child);
}

using TaskFn = void (*)(void*, int, int);

// What threads share. Replaced as a whole in a forked child, whose copy may be in any state.
struct State {
  // generation in the upper half, unclaimed tasks of that job in the lower. While tasks are unclaimed the job's
  // fields below cannot change, so a worker that claims by compare-and-swap has read the fields of that very job.
  alignas(64) std::atomic<uint64_t> control{0};
  std::atomic<TaskFn> fn{nullptr};
  std::atomic<void*> arg{nullptr};
  std::atomic<int> tasks{0};

  alignas(64) std::atomic<int> done{0};  // finished tasks of the current job
  std::atomic<bool> failed{false};       // one of them has thrown: `error`, which the first to fail writes
  std::exception_ptr error;

  alignas(64) std::atomic<int> sleeping{0};
  std::atomic<bool> open{false};  // inside pool_begin .. pool_end
  std::atomic<bool> stop{false};
  std::mutex sleep_mutex;
  std::condition_variable wake;
  uint64_t epoch = 0;  // under sleep_mutex; counts wake-ups

  std::vector<std::thread> workers;
  std::atomic<int> leader{-1};  // the processor that the workers stay off
};

void run_task(State& s, TaskFn fn, void* arg, int task, int thread) {
  if (!s.failed.load(std::memory_order_relaxed)) {
    try {
      fn(arg, task, thread);
    } catch (...) {
      if (!s.failed.exchange(true, std::memory_order_relaxed)) s.error = std::current_exception();
    }
  }
  s.done.fetch_add(1, std::memory_order_release);
}

// Takes tasks until none is left.
void work(State& s, int thread) {
  for (;;) {
    uint64_t control = s.control.load(std::memory_order_acquire);
    if (uint32_t(control) == 0) return;
    TaskFn fn = s.fn.load(std::memory_order_relaxed);
    void* arg = s.arg.load(std::memory_order_relaxed);
    int tasks = s.tasks.load(std::memory_order_relaxed);
    if (!s.control.compare_exchange_weak(control, control - 1, std::memory_order_acq_rel)) continue;
    run_task(s, fn, arg, tasks - int(uint32_t(control)), thread);
  }
}

thread_local Pool* t_pool = nullptr;  // the pool whose task this thread is running, with its index
thread_local int t_thread = 0;

// A thread runs tasks of a pool as long as this lives.
class Running {
 public:
  explicit Running(Pool* pool) : outer_(t_pool), outer_thread_(t_thread) {
    t_pool = pool;
    t_thread = 0;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() {
    t_pool = outer_;
    t_thread = outer_thread_;
  }

 private:
  Pool* outer_;
  int outer_thread_;
};

bool has_work(const State& s) { return uint32_t(s.control.load(std::memory_order_acquire)) != 0; }

void worker_main(Pool* pool, State* state, int thread) {
  State& s = *state;
  t_pool = pool;
  t_thread = thread;
  int64_t idle_since = now_ns();
  for (unsigned polls = 0;; ++polls) {
    if (s.stop.load(std::memory_order_acquire)) return;
    if (has_work(s)) {
      work(s, thread);
      idle_since = now_ns();
      continue;
    }
    pause_briefly();
    if (polls % kPausesPerClock != 0) continue;
    int64_t limit = s.open.load(std::memory_order_relaxed) ? kOpenPollNs : kPollNs;
    if (now_ns() - idle_since < limit) continue;
    {
      std::unique_lock<std::mutex> lock(s.sleep_mutex);
      uint64_t epoch = s.epoch;
      // Either this thread sees the job published before, or the publisher sees that it sleeps (both sequentially
      // consistent), and then waits for the mutex to announce.
      s.sleeping.fetch_add(1, std::memory_order_seq_cst);
      if (uint32_t(s.control.load(std::memory_order_seq_cst)) == 0 && !s.stop.load(std::memory_order_seq_cst))
        s.wake.wait(lock, [&] { return s.epoch != epoch; });
      s.sleeping.fetch_sub(1, std::memory_order_seq_cst);
    }
    idle_since = now_ns();
  }
}

// Linux may wake a worker on the very processor that its waker keeps busy although another one is free: where two cores share no
// cache it does not look further, and only the next round of balancing, milliseconds later, parts them. Until then the two take
// turns on one core and wait for each other, which is slower than one thread alone (prompt of 128 and 8 tokens of the embedded
// model after 0.3 s of rest, two cores: 24 ms, one thread 16 ms, two threads apart 12 ms). So workers stay off the leader's processor.
// Not called once they have been told to end: what is wished of a thread that has ended, glibc wishes of the caller.
void part_from_leader(State& s) {
  int here = current_processor();
  if (here < 0 || s.leader.exchange(here, std::memory_order_relaxed) == here) return;
  for (std::thread& worker : s.workers) keep_off(worker.native_handle(), here);
}

void wake_sleepers(State& s) {
  if (s.sleeping.load(std::memory_order_seq_cst) == 0) return;
  {
    std::lock_guard<std::mutex> lock(s.sleep_mutex);
    ++s.epoch;
  }
  s.wake.notify_all();
}

}  // namespace

struct Pool {
  int threads;
  std::atomic<uint32_t> forks;
  std::atomic<State*> state;
  std::mutex* turn;  // one job at a time
};

namespace {

void start_workers(Pool* pool, State* state) {
  State& s = *state;
  s.workers.reserve(size_t(pool->threads - 1));
  NoSignals blocked;
  try {
    for (int thread = 1; thread < pool->threads; ++thread) s.workers.emplace_back(worker_main, pool, state, thread);
  } catch (const std::system_error&) {  // fewer threads: slower, not wrong
  } catch (const std::bad_alloc&) {
  }
}

bool started(const Pool* pool) {
  // The number of forks first: it is written behind the state, so that who sees it does not get the parent's.
  return pool->forks.load(std::memory_order_acquire) == g_forks.load(std::memory_order_relaxed) &&
         pool->state.load(std::memory_order_acquire) != nullptr;
}

// Threads do not survive a fork, and their copy of the state may be in the middle of a job.
State& ensure_started(Pool* pool) {
  if (!started(pool)) {
    std::lock_guard<std::mutex> lock(g_start);
    if (!started(pool)) {
      auto turn = std::make_unique<std::mutex>();
      auto state = std::make_unique<State>();
      start_workers(pool, state.get());
      // after a fork the parent's copies are left alone: a thread that no longer exists may hold them
      if (pool->state.load() != nullptr) pool->turn = turn.release();
      pool->state.store(state.release(), std::memory_order_release);
      pool->forks.store(g_forks.load(), std::memory_order_release);
    }
  }
  return *pool->state.load(std::memory_order_acquire);
}

}  // namespace

Pool* pool_create(int threads) {
  require(threads >= 1, "threads");
  auto turn = std::make_unique<std::mutex>();
  auto* pool = new Pool{threads, {g_forks.load()}, {nullptr}, turn.get()};
  turn.release();
  return pool;
}

void pool_destroy(Pool* pool) {
  if (pool == nullptr) return;
  if (started(pool)) {
    State* state = pool->state.load();
    state->stop.store(true, std::memory_order_seq_cst);
    wake_sleepers(*state);
    for (std::thread& worker : state->workers) worker.join();
    delete state;
  }
  if (started(pool) || pool->state.load() == nullptr) delete pool->turn;
  delete pool;
}

int pool_threads(const Pool* pool) { return pool == nullptr ? 1 : pool->threads; }

void parallel_for(Pool* pool, int tasks, TaskFn fn, void* arg) {
  if (tasks <= 0) return;
  bool nested = pool != nullptr && t_pool == pool;
  if (pool == nullptr || nested) {
    for (int task = 0; task < tasks; ++task) fn(arg, task, nested ? t_thread : 0);
    return;
  }
  State& s = ensure_started(pool);
  std::lock_guard<std::mutex> turn(*pool->turn);
  if (tasks == 1 || s.workers.empty()) {
    Running running(pool);
    for (int task = 0; task < tasks; ++task) fn(arg, task, 0);
    return;
  }
  s.done.store(0, std::memory_order_relaxed);
  s.fn.store(fn, std::memory_order_relaxed);
  s.arg.store(arg, std::memory_order_relaxed);
  s.tasks.store(tasks, std::memory_order_relaxed);
  uint64_t generation = (s.control.load(std::memory_order_relaxed) >> 32) + 1;
  s.control.store(generation << 32 | uint32_t(tasks - 1), std::memory_order_seq_cst);
  if (s.sleeping.load(std::memory_order_seq_cst) != 0) part_from_leader(s);
  wake_sleepers(s);

  {
    Running running(pool);
    run_task(s, fn, arg, 0, 0);
    work(s, 0);
  }
  for (int spins = 0; s.done.load(std::memory_order_acquire) != tasks; ++spins) {
    pause_briefly();
    if (spins > 2000) std::this_thread::yield();  // the thread that has the last task lost its core: do not hold another
  }
  if (s.failed.load(std::memory_order_relaxed)) {
    std::exception_ptr error = std::move(s.error);
    s.error = nullptr;
    s.failed.store(false, std::memory_order_relaxed);
    std::rethrow_exception(error);
  }
}

void pool_begin(Pool* pool) {
  if (pool == nullptr || pool->threads == 1) return;
  State& s = ensure_started(pool);
  s.open.store(true, std::memory_order_seq_cst);
  part_from_leader(s);
  wake_sleepers(s);
}

void pool_end(Pool* pool) {
  if (pool == nullptr || pool->threads == 1 || !started(pool)) return;
  pool->state.load()->open.store(false, std::memory_order_relaxed);
}

}  // namespace dw

using dw::guarded;
using dw::Pool;

DW_EXPORT Pool* dw_pool_create(int threads) {
  return guarded([&] { return dw::pool_create(threads); });
}
DW_EXPORT void dw_pool_destroy(Pool* pool) {
  guarded([&] { dw::pool_destroy(pool); });
}
DW_EXPORT void dw_pool_begin(Pool* pool) {
  guarded([&] { dw::pool_begin(pool); });
}
DW_EXPORT void dw_pool_end(Pool* pool) {
  guarded([&] { dw::pool_end(pool); });
}
DW_EXPORT void dw_parallel_for(Pool* pool, int tasks, void (*fn)(void*, int, int), void* arg) {
  guarded([&] { dw::parallel_for(pool, tasks, fn, arg); });
}
