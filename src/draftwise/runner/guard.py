"""How the executor calls drafters: whatever one of them does wrong costs its requests their speculation, and nobody
anything else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TypeVar

from draftwise.propose.base import Proposer
from draftwise.runner.rows import Row
from draftwise.types import DrafterFailure

logger = logging.getLogger("draftwise")

T = TypeVar("T")

_MOST_REMEMBERED = 10_000
"""Requests that left after their drafter failed. Nobody says here which of them were preempted and come back; one that
is forgotten costs one more failure."""
_MOST_REPORTED = 1_000
"""Failures that wait for a step to report them."""


class Guard:
    """Every call of a drafter goes through `ask`. A request whose drafter failed does not use it again, not even if it
    comes back after a preemption: what the drafter kept for it is in no known state."""

    def __init__(self, proposers: Mapping[str, Proposer]) -> None:
        self._proposers = proposers
        self._failed: dict[int, None] = {}  # requests, in the order in which they failed
        self._failures: list[DrafterFailure] = []
        self._said: set[tuple[str, str, str]] = set()
        self.failed_once = False
        """Whether a drafter ever failed: until then nobody need look at `Row.drafting_failed`."""

    def ask(
        self, name: str, hook: str, rows: Sequence[Row], call: Callable[[Proposer], T], otherwise: T
    ) -> T:
        """The answer of ``call`` to proposer ``name``; ``otherwise`` if it raises. Checks of the answer belong into
        ``call``: a wrong one is a failure, too. ``rows``: the requests that it concerns."""
        try:
            return call(self._proposers[name])
        except Exception as error:
            self.failed(name, hook, rows, error)
            return otherwise

    def failed(self, name: str, hook: str, rows: Sequence[Row], error: Exception) -> None:
        """These requests go on without speculation. What was marked as filled stays so: it was written before."""
        self.failed_once = True
        for row in rows:
            row.drafting_failed = True
            self._failed[row.rid] = None
        while len(self._failed) > _MOST_REMEMBERED:
            del self._failed[next(iter(self._failed))]
        rids = tuple(row.rid for row in rows)
        if len(self._failures) < _MOST_REPORTED:
            self._failures.append(DrafterFailure(name, hook, rids, f"{type(error).__name__}: {error}"))
        kind = name, hook, type(error).__name__
        if kind in self._said:
            logger.debug("drafter %r failed in %s for requests %s", name, hook, rids, exc_info=error)
            return
        self._said.add(kind)
        logger.warning(
            "drafter %r failed in %s: requests %s go on without speculation (failures of this kind are counted from "
            "now on, in llm.stats().drafter_failures)",
            name,
            hook,
            rids,
            exc_info=error,
        )

    def returns(self, row: Row) -> None:
        """A request enters: did its drafter fail before?"""
        row.drafting_failed = row.rid in self._failed

    def left(self, row: Row) -> None:
        """Called when a request leaves; a request that has all its tokens does not come back."""
        if row.is_full:
            self._failed.pop(row.rid, None)

    def take_failures(self) -> tuple[DrafterFailure, ...]:
        """Failures since the last call."""
        failures, self._failures = tuple(self._failures), []
        return failures


def whole_number(value: object, most: int, what: str) -> int:
    """An answer that has to be a number from 0 to ``most``; raises TypeError or ValueError."""
    number = index(value)  # type: ignore[arg-type]  # raises TypeError for all that is no whole number
    if not 0 <= number <= most:
        raise ValueError(f"{what} is {number}, which is not in 0..{most}")
    return number
