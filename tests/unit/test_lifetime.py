"""What computes is waited for at the end of a program, and what has threads begins anew in a forked child."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from draftwise import lifetime
from draftwise.kernels.cpu.library import release_with
from draftwise.runner.threaded import _Thread


def test_the_end_waits_for_who_is_inside_and_lets_nobody_in() -> None:
    door = lifetime._Door()
    inside, leave = threading.Event(), threading.Event()

    def compute() -> None:
        door.enter()
        door.enter()  # a step inside a step
        door.leave()
        inside.set()
        leave.wait()
        door.enter()  # still, although the door is shut by now
        door.leave()
        door.leave()

    thread = threading.Thread(target=compute)
    thread.start()
    inside.wait()
    assert not door.close(timeout=0.01), "somebody is inside"
    with pytest.raises(lifetime.ProgramEnding):
        door.enter()
    leave.set()
    assert door.close(timeout=30)
    thread.join()


def test_the_end_does_not_wait_for_itself() -> None:
    door = lifetime._Door()
    door.enter()
    assert door.close(timeout=0)


def test_native_memory_is_released_once_and_not_at_the_end_of_the_program() -> None:
    class Owner:
        pass

    freed: list[int] = []
    owner = Owner()
    release = release_with(owner, freed.append, 7)
    assert release.atexit is False  # type: ignore[attr-defined]
    del owner
    gc.collect()
    release()
    assert freed == [7]


def test_a_thread_does_what_it_was_given_in_order_and_nothing_after_its_end() -> None:
    done: list[int] = []
    thread = _Thread("test")
    for i in range(5):
        thread.start(done.append, i)
    thread.ask_to_stop()
    thread.ask_to_stop()
    thread.wait_stopped(30)
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(lifetime.ProgramEnding):
        thread.start(done.append, 5)


def test_a_thread_ends_when_its_owner_is_gone() -> None:
    thread = _Thread("test")
    began = threading.Event()
    thread.start(began.set)
    began.wait()
    native = thread._thread
    assert native is not None
    del thread
    gc.collect()
    native.join(30)
    assert not native.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_thread_begins_anew_in_a_forked_child() -> None:
    thread = _Thread("test")
    busy = threading.Event()
    thread.start(busy.wait)  # at work while the process forks, its queue waiting behind it
    child = os.fork()
    if child == 0:
        done = threading.Event()
        thread.start(done.set)
        os._exit(0 if done.wait(20) else 1)
    assert os.waitpid(child, 0)[1] == 0
    busy.set()
    thread.ask_to_stop()
    thread.wait_stopped(30)
