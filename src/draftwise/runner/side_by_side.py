"""A step in columns, while it is computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.runner.batch import StepBatch
from draftwise.runner.outcome import Outcome, committed_rows, drafting
from draftwise.runner.rows import Row, method_name
from draftwise.types import RowResult, StepInput, chain_parents, new_record

_NOT_FINITE = "RequestError: the model's logits are not finite"


@dataclass(slots=True)
class Decided:
    """D requests that are decided in columns, with N nodes to verify. ``at``: which ones of the step they are, None:
    all; ``places``: where their books lie; ``own`` [D]: nodes of each. Of the answer: ``sizes`` [D] tokens of each, 0:
    there was none; ``goes_on`` [D]: whether it has not ended; ``tokens``: of all, side by side; ``paths`` [D]: the
    accepted nodes."""

    at: Sequence[int] | None
    rows: list[Row]
    places: array[int]
    own: array[int]
    methods: list[int]
    draws: bytearray
    numbers: array[int]
    given: array[int]
    q_at: array[int] | None
    sizes: list[int]
    goes_on: list[int]
    tokens: list[int]
    paths: list[tuple[int, ...]]

    @property
    def num_nodes(self) -> int:
        """N"""
        return len(self.given) // 3

    def of(self, column: Sequence[int]) -> Sequence[int]:
        """Their entries of a column that has one for every request of the step."""
        return column if self.at is None else [column[i] for i in self.at]


@dataclass(slots=True)
class OrdinaryStep:
    """A step of R requests. ``starts`` [R + 1]: first row of each; ``contexts`` [R]: tokens that were computed before;
    ``num_new`` [R]: known tokens that are computed now; ``trees``: whether some proposal is no chain; ``logit_rows``:
    rows with logits, None: all; ``num_logits``: how many.

    ``decided``: who is decided in columns. ``apart``: the others, in the batch of all: `StepBatch.steps`, ``starts``,
    ``owners`` and what belongs to them have entries for these alone, and are numbers of rows in the whole step;
    ``apart_at``: which ones of the step they are.
    """

    rows: list[Row]
    rids: Sequence[int]
    num_new: Sequence[int]
    budgets: Sequence[int]
    follow: Sequence[bool]
    input: StepInput
    starts: list[int]
    contexts: list[int]
    trees: bool
    logit_rows: list[int] | None
    num_logits: int
    decided: Decided
    apart: StepBatch | None
    apart_at: Sequence[int]

    def read(
        self, of_others: Sequence[tuple[Row, int, Sequence[int]]]
    ) -> Sequence[tuple[Row, int, Sequence[int]]]:
        """The committed tokens for drafters that follow, see `Drafting.committed`. ``of_others``: of those apart."""
        decided = self.decided
        found: list[tuple[Row, int, Sequence[int]]] = []
        columns = zip(
            decided.rows,
            decided.of(self.contexts),
            decided.of(self.starts),
            decided.of(self.num_new),
            decided.sizes,
            decided.paths,
            decided.of(self.follow),
            strict=False,
        )
        for row, context, start, fresh, size, path, follows in columns:
            if follows and size:
                found.append((row, context, committed_rows(start, fresh, path)))
        if not of_others:
            return found
        found += of_others
        order = self._order()
        return sorted(found, key=lambda told: order[told[0].rid])

    def drafting(self, outcomes: Sequence[Outcome]) -> list[tuple[Row, int]]:
        """The requests that draft after this step, and how much. ``outcomes``: of those apart."""
        decided = self.decided
        columns = zip(decided.rows, decided.of(self.budgets), decided.goes_on, strict=True)
        found = [(row, budget) for row, budget, goes_on in columns if budget and goes_on]
        others = [] if self.apart is None else drafting(self.apart.steps, outcomes)
        if not others:
            return found
        order = self._order()
        return sorted([*found, *others], key=lambda wish: order[wish[0].rid])

    def results(self, of_others: Sequence[RowResult]) -> tuple[RowResult, ...]:
        """The results for the scheduler, once the requests have drafted. ``of_others``: of those apart."""
        own = self._results()
        if self.decided.at is None:
            return tuple(own)
        found = dict(zip(self.decided.at, own, strict=True))
        found.update(zip(self.apart_at, of_others, strict=True))
        return tuple([found[i] for i in range(len(self.rows))])

    def _order(self) -> dict[int, int]:
        return {rid: i for i, rid in enumerate(self.rids)}

    def _results(self) -> list[RowResult]:
        decided = self.decided
        total, tokens, given = decided.num_nodes, decided.tokens, decided.given.tolist()
        waiting = [row.num_waiting for row in decided.rows]
        results = []
        first = node = 0
        for rid, size, n, path, method, proposed in zip(
            decided.of(self.rids),
            decided.sizes,
            decided.own.tolist(),
            decided.paths,
            decided.methods,
            waiting,
            strict=True,
        ):
            if not size:
                results.append(RowResult(rid, error=_NOT_FINITE))
                node += n
                continue
            drafts: tuple[int, ...] = ()
            parents: tuple[int, ...] = ()
            name = "none"
            if n:
                drafts = tuple(given[node : node + n])
                parents = tuple(given[total + node : total + node + n]) if self.trees else chain_parents(n)
                name = method_name(method)
            results.append(
                new_record(
                    RowResult,
                    (
                        rid,
                        tuple(tokens[first : first + size]),
                        n,
                        size - 1,
                        path,
                        drafts,
                        parents,
                        name,
                        proposed,
                        None,
                        None,
                        None,
                        None,
                    ),
                )
            )
            first += size
            node += n
        return results
