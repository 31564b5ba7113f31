// Tasks that throw, compiled with the pool and the team of csrc/. Prints what went wrong; 0 if nothing did.
#include <atomic>
#include <cstdio>
#include <new>
#include <stdexcept>

#include "pool.h"
#include "team.h"

namespace {

int problems = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s\n", what);
  ++problems;
}

struct Job {
  std::atomic<int> ran{0};
  int bad = -1;  // the task that throws
  bool team_leader_throws = false;
};

void task(void* raw, int index, int) {
  Job& job = *static_cast<Job*>(raw);
  job.ran.fetch_add(1);
  if (index == job.bad) throw std::bad_alloc();
}

bool throws(dw::Pool* pool, Job& job, int tasks) {
  try {
    dw::parallel_for(pool, tasks, task, &job);
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

void lead(void* raw, dw::Team* team) {
  Job& job = *static_cast<Job*>(raw);
  for (int round = 0; round < 50; ++round) {
    if (round == job.bad && job.team_leader_throws) throw std::invalid_argument("leader");
    struct Part {
      Job* job;
      int round;
    } part{&job, round};
    dw::team_do(
        team,
        [](void* arg, int index, int parts) {
          Part& p = *static_cast<Part*>(arg);
          p.job->ran.fetch_add(1);
          if (p.round == p.job->bad && index == parts - 1 && !p.job->team_leader_throws) throw std::bad_alloc();
        },
        &part);
  }
}

}  // namespace

int main() {
  for (int threads : {1, 2, 4}) {
    dw::Pool* pool = dw::pool_create(threads);
    for (int tasks : {1, 2, 17, 300})
      for (int bad = 0; bad < tasks; bad += 1 + tasks / 5) {
        Job broken, whole;
        broken.bad = bad;
        expect(throws(pool, broken, tasks), "an exception of a task was lost");
        expect(!throws(pool, whole, tasks) && whole.ran == tasks, "the job after a broken one is not whole");
      }
    for (int bad = 0; bad < 50; bad += 7) {
      for (bool leader : {false, true}) {
        Job broken, whole;
        broken.bad = bad;
        broken.team_leader_throws = leader;
        bool thrown = false;
        try {
          dw::team_run(pool, lead, &broken);
        } catch (const std::exception&) {
          thrown = true;
        }
        expect(thrown, "an exception in a team was lost");
        dw::team_run(pool, lead, &whole);
        expect(whole.ran >= 50, "the team after a broken one is not whole");
      }
    }
    dw::pool_destroy(pool);
  }
  return problems != 0;
}
