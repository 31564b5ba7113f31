"""The thread pool: every task once, from any thread, nested, after a fork, and asleep when idle."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import pytest
import torch
from tests.native import native_or_skip

from draftwise.kernels.cpu.linear import LinearKernels
from draftwise.kernels.cpu.pool import TASK, ThreadPool


@pytest.fixture(params=[1, 2, 5])
def pool(request: pytest.FixtureRequest) -> ThreadPool:
    return ThreadPool(native_or_skip(), request.param)


def run_counting(pool: ThreadPool, tasks: int) -> list[int]:
    counts = [0] * tasks

    def task(_: object, index: int, thread: int) -> None:
        assert 0 <= thread < pool.threads
        counts[index] += 1

    pool.parallel_for(tasks, TASK(task))
    return counts


def threads_of(pool: ThreadPool) -> set[int]:
    """The system's numbers of its threads, the caller's among them."""
    all_of_them = threading.Barrier(pool.threads, timeout=60)  # so that each gets one of the tasks
    found: set[int] = set()

    def task(_: object, index: int, thread: int) -> None:
        found.add(threading.get_native_id())
        all_of_them.wait()

    pool.parallel_for(pool.threads, TASK(task))
    return found


def test_every_task_runs_once(pool: ThreadPool) -> None:
    for tasks in (0, 1, 2, 3, 17, 1000):
        assert run_counting(pool, tasks) == [1] * tasks


def test_many_small_jobs_in_a_row(pool: ThreadPool) -> None:
    for tasks in range(1, 400):
        assert run_counting(pool, tasks % 7) == [1] * (tasks % 7)


def test_threads_that_run_at_once_have_their_own_index(pool: ThreadPool) -> None:
    running: set[int] = set()
    lock = threading.Lock()
    clashes = []

    def task(_: object, index: int, thread: int) -> None:
        with lock:
            clashes.append(thread in running)
            running.add(thread)
        time.sleep(0.0005)
        with lock:
            running.discard(thread)

    pool.parallel_for(40, TASK(task))
    assert len(clashes) == 40 and not any(clashes)


def test_all_threads_take_part() -> None:
    pool = ThreadPool(native_or_skip(), 3)
    seen = set()

    def task(_: object, index: int, thread: int) -> None:
        seen.add(thread)
        time.sleep(0.005)  # the lock is free: the others come in

    pool.parallel_for(30, TASK(task))
    assert seen == {0, 1, 2}


def test_the_caller_runs_the_first_task() -> None:
    """There a team is led (csrc/team.h), whose members wait for the leader: were all tasks theirs, it would never come.
    Without that, a program could hang on 66 processors or more."""
    pool = ThreadPool(native_or_skip(), 16)
    first = []

    def task(_: object, index: int, thread: int) -> None:
        if index == 0:
            first.append(threading.get_native_id())

    named = TASK(task)
    for _ in range(300):  # some workers sleep by then, and others are quicker than the caller that wakes them
        pool.parallel_for(4, named)
        time.sleep(1e-4)
    assert first == [threading.get_native_id()] * 300


def test_a_call_inside_a_task_runs_inline(pool: ThreadPool) -> None:
    inner = []

    def nested(_: object, index: int, thread: int) -> None:
        inner.append(index)

    nested_task = TASK(nested)

    def task(_: object, index: int, thread: int) -> None:
        pool.parallel_for(3, nested_task)

    pool.parallel_for(4, TASK(task))
    assert sorted(inner) == sorted([0, 1, 2] * 4)


def test_several_callers_and_several_pools_at_once() -> None:
    pools = [ThreadPool(native_or_skip(), 3) for _ in range(2)]
    wrong = []

    def caller(pool: ThreadPool) -> None:
        for _ in range(50):
            if run_counting(pool, 5) != [1] * 5:
                wrong.append(pool)

    callers = [threading.Thread(target=caller, args=(pools[i % 2],)) for i in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_works_in_a_forked_child(pool: ThreadPool) -> None:
    assert run_counting(pool, 9) == [1] * 9  # threads are up
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = all(run_counting(pool, 9) == [1] * 9 for _ in range(20))
            pool.close()
        finally:
            os._exit(0 if ok else 1)
    deadline = time.monotonic() + 20
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert done[1] == 0
    assert run_counting(pool, 9) == [1] * 9  # the parent is not disturbed


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("children", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_forks_while_another_thread_packs_and_computes(children: int) -> None:
    """The allocator's lock is held over a fork: a child finds it free. Without that, 3 of 32 children hung."""
    library = native_or_skip()
    pool = ThreadPool(library, 2)
    kernels = LinearKernels(library, pool)
    small, rows = torch.ones(4, 4), torch.ones(1, 4)  # mostly allocation
    stop = threading.Event()

    def pack() -> None:
        while not stop.is_set():
            kernels.run(rows, kernels.pack(small))

    packers = [threading.Thread(target=pack) for _ in range(2)]
    for packer in packers:
        packer.start()
    try:
        for _ in range(children):
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # hangs end it
                os._exit(0 if kernels.run(rows, kernels.pack(small))[0, 0] == 4 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        for packer in packers:
            packer.join()


def test_idle_threads_cost_nothing() -> None:
    pool = ThreadPool(native_or_skip(), 4)
    run_counting(pool, 8)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05


def test_an_open_pool_wakes_and_sleeps_again() -> None:
    library = native_or_skip()
    pool = ThreadPool(library, 3)
    begin = library.function("dw_pool_begin", None, [ctypes.c_void_p])
    end = library.function("dw_pool_end", None, [ctypes.c_void_p])
    for _ in range(20):
        begin(pool.pointer)
        assert run_counting(pool, 6) == [1] * 6
        end(pool.pointer)
    begin(pool.pointer)  # forgotten: sleeps all the same
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.05
    end(pool.pointer)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors"
)
def test_workers_stay_off_the_leaders_processor() -> None:
    """Where the system would wake them there, they take turns with the thread that waits for them."""
    library = native_or_skip()
    begin = library.function("dw_pool_begin", None, [ctypes.c_void_p])
    end = library.function("dw_pool_end", None, [ctypes.c_void_p])
    allowed = os.sched_getaffinity(0)
    pool = ThreadPool(library, 3)
    for one in sorted(allowed)[:2]:
        os.sched_setaffinity(0, {one})  # the leader is there, and stays there when it may go elsewhere again
        os.sched_setaffinity(0, allowed)
        begin(pool.pointer)
        workers = threads_of(pool) - {threading.get_native_id()}
        assert len(workers) == 2
        for worker in workers:
            assert len(allowed - os.sched_getaffinity(worker)) == 1
        end(pool.pointer)
    for workers in (1, 2, 4) * 20:  # also where workers end while the pool is closed
        pool = ThreadPool(library, workers + 1)
        begin(pool.pointer)
        if workers != 2:
            time.sleep(0.002)
        end(pool.pointer)
        pool.close()
    assert os.sched_getaffinity(0) == allowed, "the program's own thread is left alone"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs processors by thread")
def test_a_program_on_one_processor_keeps_its_workers_there() -> None:
    library = native_or_skip()
    begin = library.function("dw_pool_begin", None, [ctypes.c_void_p])
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        pool = ThreadPool(library, 2)
        begin(pool.pointer)
        (worker,) = threads_of(pool) - {threading.get_native_id()}
        assert os.sched_getaffinity(worker) == {min(allowed)}
        pool.close()
    finally:
        os.sched_setaffinity(0, allowed)


def test_close_ends_the_threads() -> None:
    pool = ThreadPool(native_or_skip(), 4)
    before = len(os.listdir("/proc/self/task"))
    run_counting(pool, 8)
    assert len(os.listdir("/proc/self/task")) == before + 3
    pool.close()
    assert len(os.listdir("/proc/self/task")) == before


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs signals of threads")
def test_workers_leave_signals_to_the_program_but_for_their_own_faults() -> None:
    """A crash in a kernel has to reach faulthandler; Ctrl-C is for the program's threads."""
    pool = ThreadPool(native_or_skip(), 2)
    both = threading.Barrier(2, timeout=60)  # so that the worker gets one of the two tasks
    masks: dict[int, set[int]] = {}

    def task(_: object, index: int, thread: int) -> None:
        masks[threading.get_native_id()] = {int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])}
        both.wait()

    pool.parallel_for(2, TASK(task))
    del masks[threading.get_native_id()]
    (blocked,) = masks.values()
    assert {signal.SIGINT, signal.SIGTERM} <= blocked
    assert not blocked & {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
