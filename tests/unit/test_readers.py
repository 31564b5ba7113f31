"""Waking readers: at once when few read, in company when many do, and nobody is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from draftwise.engine.readers import Readers


class Clock:
    """An event loop as `Readers` uses it, whose time goes on when told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[..., Any], tuple[Any, ...]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., Any], *args: Any) -> None:
        self.timers.append((when, call, args))

    def call_soon_threadsafe(self, call: Callable[..., Any], *args: Any) -> None:
        call(*args)

    def go_to(self, when: float) -> None:
        self.now = when
        due = [t for t in self.timers if t[0] <= when]
        self.timers = [t for t in self.timers if t[0] > when]
        for _, call, args in due:
            call(*args)


class Reader:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.due = 0.0

    def woken(self) -> bool:
        was = self.event.is_set()
        self.event.clear()
        return was


def readers(count: int, rate: float | None) -> tuple[Clock, Readers, list[Reader]]:
    clock = Clock()
    made = Readers(clock, rate)  # type: ignore[arg-type]
    return clock, made, [Reader() for _ in range(count)]


def test_few_readers_are_told_every_step() -> None:
    clock, made, few = readers(8, 10.0)
    for _ in range(3):
        made.tell(few, ())
        assert all(r.woken() for r in few)
    assert not clock.timers


def test_without_a_limit_many_are_told_every_step() -> None:
    _, made, many = readers(100, None)
    for _ in range(3):
        made.tell(many, ())
        assert all(r.woken() for r in many)


def test_many_readers_get_every_second_of_steps_that_are_half_as_long_as_their_gap() -> None:
    clock, made, many = readers(64, 2500.0)  # 25.6 ms
    told = []
    for step in range(6):
        clock.go_to(100 + 0.013 * step)
        made.tell(many, ())
        told.append(all(r.woken() for r in many))
    assert told == [True, False, True, False, True, False]


def test_the_end_is_told_at_once_and_only_once() -> None:
    clock, made, many = readers(64, 2500.0)
    made.tell(many, ())
    for r in many:
        r.woken()
    clock.go_to(100.001)
    made.tell(many, ())
    made.tell((), many[:1])
    assert many[0].woken() and not any(r.woken() for r in many[1:])
    clock.go_to(101.0)
    assert not many[0].woken() and all(r.woken() for r in many[1:])


def test_what_is_held_goes_out_without_another_step() -> None:
    clock, made, many = readers(64, 2500.0)
    made.tell(many, ())
    for r in many:
        r.woken()
    clock.go_to(100.010)
    made.tell(many, ())
    assert not any(r.woken() for r in many)
    clock.go_to(100.0256 + 0.0128 + 1e-6)  # due, and half a gap of grace
    assert all(r.woken() for r in many)
    assert not clock.timers


def test_a_closed_event_loop_is_no_error() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert not Readers(loop, None).tell([Reader()], ())
