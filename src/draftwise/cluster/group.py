"""All ranks of one engine as the host sees them: asked together, watched, and ended together.

Wherever they run: `RankHandle` is the host's way to one of them, on this machine (`processes`) or on another
(`remote`). A rank that dies, raises or does not answer in time ends all of them: nobody is left waiting for one that is
gone.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import select
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from draftwise.cluster.children import PATIENCE
from draftwise.cluster.messages import Answer, Order, receive, send
from draftwise.errors import DraftwiseError, EngineDeadError

_NOTICED = 1.0
"""Seconds after which the end of a process has been noticed."""


class RankHandle(ABC):
    """One rank."""

    def __init__(self, rank: int, channel: Connection) -> None:
        self.rank = rank
        self.channel = channel

    @abstractmethod
    def gone(self) -> bool:
        """Whether it has ended, as far as can be seen at once."""

    @abstractmethod
    def end(self) -> str:
        """How it ended, for people, behind "rank 1 "; waits a moment if it is just ending."""

    @abstractmethod
    def said(self) -> Sequence[str]:
        """The last lines that it wrote; all of them, once it has ended."""

    @abstractmethod
    def posted(self) -> int:
        """Exchanges that it has begun: who waits for another has begun one more than it."""

    @abstractmethod
    def kill(self) -> None:
        """Begin to end the process, whatever it is doing."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Whether it has ended within this time."""

    @abstractmethod
    def disown(self) -> None:
        """In a forked child: it is the parent's."""


class Holding:
    """The resources that the ranks of an engine share."""

    def let_go(self) -> None:
        """Before they are waited for: what keeps them alive is let go of."""

    def put_away(self) -> None:
        """When they have ended."""

    def disown(self) -> None:
        """In a forked child: it is the parent's."""


class RankGroup:
    """All ranks of one engine."""

    def __init__(self, ranks: Sequence[RankHandle], holding: Holding, *, seconds: float) -> None:
        """
        Args:
            ranks: as they were started, in their order; `tell` tells them what they are.
            seconds: that an order may take.
        """
        self.ranks = list(ranks)
        self.size = len(self.ranks)
        self._holding = holding
        self._seconds = seconds
        self._number = 0
        self._failure: EngineDeadError | None = None
        self._lock = threading.Lock()  # of the failure: the watcher and a waiting caller may both see it
        self._closer = weakref.finalize(self, end_all, self.ranks, holding)

    # ------------------------------------------------------------------------------------------------ orders

    def tell(self, start: Callable[[int], object]) -> None:
        """Send each rank its setting; `first_answer` waits until they are built."""
        for one in self.ranks:
            with contextlib.suppress(OSError):  # it is dead already: `first_answer` says so
                send(one.channel, start(one.rank))

    def first_answer(self) -> Any:
        """Rank 0's facts about its engine, once all ranks are built.

        Raises:
            DraftwiseError: what a rank raised while it was built; EngineDeadError if it died.
        """
        facts = None
        for one, (answer, told) in self._collected(None):
            if answer.error is not None:
                error = answer.error
                self._give_up(f"rank {one.rank} could not be built: {error}", (one,))
                raise error if isinstance(error, DraftwiseError) else self._dead()
            if one.rank == 0:
                facts = told
        return facts

    def ask(self, order: Callable[[int], Order]) -> list[Answer]:
        """Give all ranks an order and wait for their answers, in the order of the ranks.

        Raises:
            EngineDeadError: a rank died, raised, or did not answer in time; which, and its last words.
        """
        if self._failure is not None:
            raise self._dead()
        self._number += 1
        number = self._number
        message = pickle.dumps(order(number), pickle.HIGHEST_PROTOCOL)
        for one in self.ranks:
            try:
                one.channel.send_bytes(message)
            except OSError:
                raise self._lost(one) from None
        answers: dict[int, Answer] = {}
        for one, answer in self._collected(number):
            if answer.error is not None:
                raise self._failed(one, answer.error)
            answers[one.rank] = answer
        return [answers[rank] for rank in range(self.size)]

    def _collected(self, number: int | None) -> Any:
        """(rank, answer) as they come; answers to earlier orders, whose caller went away, are thrown away."""
        deadline = time.monotonic() + self._seconds if number is not None else None
        waiting = {one.channel.fileno(): one for one in self.ranks}
        poller = select.poll()
        for descriptor in waiting:
            poller.register(descriptor, select.POLLIN)
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = poller.poll(left)
            if not ready:
                raise self._late(list(waiting.values()))
            for descriptor, _ in ready:
                one = waiting[descriptor]
                try:
                    answer = receive(one.channel)
                except (EOFError, OSError):
                    raise self._lost(one) from None
                if number is not None and answer.number != number:
                    continue
                poller.unregister(descriptor)
                del waiting[descriptor]
                yield one, answer

    # ----------------------------------------------------------------------------------------------- failing

    @property
    def failure(self) -> EngineDeadError | None:
        """The reason why the group is unusable; None: no failure is known."""
        if self._failure is None:
            for one in self.ranks:
                if one.gone():
                    self._lost(one)
                    break
        return self._failure

    def part(self, ranks: Sequence[int], what: str) -> EngineDeadError:
        """End all because some ranks came apart from the others."""
        return self._give_up(what, [self.ranks[rank] for rank in ranks])

    def _failed(self, one: RankHandle, error: BaseException) -> EngineDeadError:
        """The error when a rank says that it failed. If an exchange with the others broke, it is another one's end that
        it noticed, and perhaps sooner than this process."""
        if isinstance(error, OSError) and error.errno == errno.EIO:
            deadline = time.monotonic() + _NOTICED
            while time.monotonic() < deadline:
                for other in self.ranks:
                    if other is not one and other.gone() and not _has_answered(other):
                        return self._lost(other)
                time.sleep(0.01)
        return self._give_up(f"rank {one.rank} failed: {type(error).__name__}: {error}", (one,))

    def _lost(self, one: RankHandle) -> EngineDeadError:
        return self._give_up(f"rank {one.rank} {one.end()}", (one,))

    def _late(self, waiting: Sequence[RankHandle]) -> EngineDeadError:
        """The error when no rank of ``waiting`` answered in time. A rank that waits for another has begun more
        exchanges than it."""
        posted = {one.rank: one.posted() for one in waiting}
        behind = min(posted.values())
        hung = [one for one in waiting if posted[one.rank] == behind]
        names = ", ".join(str(one.rank) for one in hung)
        return self._give_up(f"rank {names} did not answer within {self._seconds:g} s (worker_timeout)", hung)

    def _give_up(self, what: str, about: Sequence[RankHandle]) -> EngineDeadError:
        with self._lock:
            if self._failure is None:
                kill_all(self.ranks)
                words = "\n".join(f"[rank {one.rank}] {line}" for one in about for line in one.said())
                self._failure = EngineDeadError(f"{what}; its last words:\n{words}" if words else what)
        return self._dead()

    def _dead(self) -> EngineDeadError:
        assert self._failure is not None
        return EngineDeadError(*self._failure.args)

    # ------------------------------------------------------------------------------------------------ ending

    def close(self) -> None:
        """Let the ranks end, and see that they have."""
        if self._failure is None:
            self._number += 1
            for one in self.ranks:
                with contextlib.suppress(OSError):
                    send(one.channel, Order(self._number, "close"))
            self._failure = EngineDeadError("the engine was closed")
        self._closer()

    def forked(self) -> None:
        """In a forked child: the ranks are the parent's."""
        self._closer.detach()
        self._holding.disown()
        for one in self.ranks:
            one.channel.close()
            one.disown()
        self._failure = EngineDeadError("the ranks belong to the process that this one was forked from")


def _has_answered(one: RankHandle) -> bool:
    """Whether a rank that has ended said something before, such as that it failed."""
    try:
        return one.channel.poll(0) and receive(one.channel) is not None
    except (EOFError, OSError):
        return False


def kill_all(ranks: Sequence[RankHandle]) -> None:
    """End them at once."""
    for one in ranks:
        one.kill()
    for one in ranks:
        one.wait(PATIENCE)


def end_all(ranks: Sequence[RankHandle], holding: Holding) -> None:
    """Nothing keeps them alive any more, so that ranks end; those that do not are ended."""
    holding.let_go()
    deadline = time.monotonic() + PATIENCE
    for one in ranks:
        one.wait(max(0.01, deadline - time.monotonic()))
    kill_all(ranks)
    for one in ranks:
        one.channel.close()
        one.said()  # the reader of its output is at the end
    holding.put_away()
