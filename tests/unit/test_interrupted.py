"""Signals at any moment of what an engine's caller does around the steps."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from draftwise.engine import interrupts, surroundings, turns
from draftwise.engine.interrupts import WholeSteps
from draftwise.engine.surroundings import Alone
from draftwise.engine.turns import Turns
from draftwise.errors import RequestError

FILES = {turns.__file__, surroundings.__file__, interrupts.__file__}
ALARM = getattr(signal, "SIGALRM", signal.SIGTERM)


class Late(Exception):
    """What the alarm raises."""


def late(number: int, frame: FrameType | None) -> None:
    raise Late


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, ALARM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where tests run in the background
    signal.signal(ALARM, late)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Comes:
    """Has a signal come at the n-th line of the files above, where Python could look at it."""

    def __init__(self, number: int, at: int) -> None:
        self._number, self.left = number, at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "_run":  # that is a handler
            return None
        if event in ("call", "line"):
            self.left -= 1
            if not self.left:
                handler = signal.getsignal(self._number)
                assert callable(handler)
                handler(self._number, frame)
        return self

    def during(self, work: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        except (KeyboardInterrupt, Late):
            pass
        finally:
            sys.settrace(before)


def somebody_else_can(take: Callable[[], Any]) -> bool:
    done = threading.Event()

    def use() -> None:
        with take():
            done.set()

    threading.Thread(target=use, daemon=True).start()
    return done.wait(2.0)


@pytest.mark.parametrize("kind", [Turns, Alone])
def test_an_interrupted_turn_ends(kind: type[Turns] | type[Alone]) -> None:
    for moment in range(1, 30):
        held, signalled = kind(), Comes(signal.SIGINT, moment)

        def use(held: Turns | Alone = held) -> None:
            with held.take():
                pass

        signalled.during(use)
        assert somebody_else_can(held.take), f"line {moment}"
        if signalled.left > 0:
            break
    assert moment > 2 and signalled.left > 0
    use()  # by the same thread, too


def test_no_turn_within_a_turn() -> None:
    held = Turns()
    with held.take(), pytest.raises(RequestError, match="is generating"):
        held.take()
    assert somebody_else_can(held.take)


@pytest.mark.parametrize("number", [signal.SIGINT, ALARM])
def test_no_signal_is_held_behind_the_steps(number: int) -> None:
    """Whenever one came before: a handler that nobody asks for what it holds would keep the program from ending."""

    def steps() -> None:
        with WholeSteps() as whole:
            whole.check()

    for moment in range(1, 300):
        signalled = Comes(number, moment)
        signalled.during(steps)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Late):
            signal.raise_signal(ALARM)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(ALARM, late)
        if signalled.left > 0:
            break
    assert moment > 20 and signalled.left > 0
