"""Which adapters the executor holds: places, given to requests when they are admitted, as blocks of the cache are."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from typing import Literal, NamedTuple

from draftwise.sched.order import Waiting
from draftwise.sched.request import Request

MOST_OVERTAKING = 64
"""So many requests with adapters may be admitted before an older one whose adapter finds no place. Then the adapter
with the fewest requests gets no more of them until its place is free."""


class Move(NamedTuple):
    """What an executor is to be told before the next step."""

    what: Literal["load", "drop"]
    adapter: int


class AdapterPlaces:
    """The executor holds at most ``most`` adapters. One that no running request has makes room, least recently used
    first. A request whose adapter finds no place waits, and others overtake it for a while.

    Example (two places): requests with adapters 1, 2, 3, 1 and without one wait. 1 and 2 get places, the third is
    passed over, the fourth shares the first one's place, and the fifth needs none. When 2's last request has ended, 3
    takes its place.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: dict[int, int] = {}  # requests of each adapter that run
        self._held: dict[int, None] = {}  # least recently used first
        self.moves: list[Move] = []
        """What the executor is to be told before the next step, in order."""
        self._passed: int | None = None  # the oldest request that was passed over
        self._overtaking = 0  # requests with adapters that were admitted since
        self._ending = 0  # the adapter whose place that one gets, once too many have been

    def first(self, waiting: Waiting) -> Request | None:
        """Which request is the next to be admitted; None: all wait for places. Takes no longer if more wait."""
        if not waiting:
            return None
        head = waiting.first
        if self._fits(head.adapter):
            return head
        if self._passed != head.rid:
            self._passed, self._overtaking, self._ending = head.rid, 0, 0
        firsts = [waiting.by_adapter[adapter].first for adapter in self._overtakers(waiting)]
        return min(firsts, key=lambda request: request.order, default=None)

    def num_entering(self, waiting: Waiting) -> int:
        """The number of those who wait whose adapters find places while all who run go on."""
        if not waiting:
            return 0
        if self._fits(waiting.first.adapter):
            queues, free = waiting.by_adapter, self._most - len(self._running)
            others = [adapter for adapter in queues if adapter and adapter not in self._running]
            if len(others) > free:
                others = nsmallest(free, others, key=lambda adapter: queues[adapter].first.order)
            adapters = [*others, *(a for a in (0, *self._running) if a in queues)]
        else:
            adapters = self._overtakers(waiting)
        return sum([len(waiting.by_adapter[adapter]) for adapter in adapters])

    def _overtakers(self, waiting: Waiting) -> list[int]:
        """Adapters of those who may be admitted before the first one, which finds no place."""
        kept_out = None
        if self._passed == waiting.first.rid and self._overtaking >= MOST_OVERTAKING:
            if self._ending not in self._running:
                self._ending = min(self._running, key=lambda adapter: self._running[adapter])
            kept_out = self._ending
        return [a for a in (0, *self._running) if a != kept_out and a in waiting.by_adapter]

    def _fits(self, adapter: int) -> bool:
        return not adapter or adapter in self._running or len(self._running) < self._most

    @property
    def running(self) -> set[int]:
        """Adapters of requests that run."""
        return set(self._running)

    def enter(self, request: Request) -> None:
        """A request that `first` named begins to run."""
        adapter = request.adapter
        if not adapter:
            return
        if self._passed == request.rid:
            self._passed = None
        elif self._passed is not None:
            self._overtaking += 1
        if adapter in self._held:
            del self._held[adapter]  # it goes to the end
        else:
            if len(self._held) >= self._most:
                self.forget(next(other for other in self._held if other not in self._running))
            self.moves.append(Move("load", adapter))
        self._held[adapter] = None
        self._running[adapter] = self._running.get(adapter, 0) + 1

    def leave(self, request: Request) -> None:
        """A request that was running ended, or lost its place."""
        adapter = request.adapter
        if not adapter:
            return
        self._running[adapter] -= 1
        if not self._running[adapter]:
            del self._running[adapter]

    def forget(self, adapter: int) -> None:
        """The executor need not hold an adapter that no running request has."""
        assert adapter not in self._running, f"adapter {adapter} is in use"
        if adapter not in self._held:
            return
        del self._held[adapter]
        load = Move("load", adapter)
        if load in self.moves:
            self.moves.remove(load)  # the executor never heard of it
        else:
            self.moves.append(Move("drop", adapter))

    def take_move(self) -> Move | None:
        """What the executor is to be told next, in order; None: nothing more."""
        return self.moves.pop(0) if self.moves else None

    def put_back(self, move: Move) -> None:
        """A move could not be carried out: it is the next one again."""
        self.moves.insert(0, move)

    def check(self, running: Iterable[Request]) -> None:
        """Raise AssertionError if the books do not agree with who runs."""
        found: dict[int, int] = {}
        for request in running:
            if request.adapter:
                found[request.adapter] = found.get(request.adapter, 0) + 1
        assert found == self._running, f"adapters of running requests are {found}, not {self._running}"
        assert self._running.keys() <= self._held.keys(), "a request runs without a place for its adapter"
        assert len(self._held) <= self._most, f"{len(self._held)} adapters are held, not {self._most}"
