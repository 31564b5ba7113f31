"""A step in columns, while it is computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwise.propose.columns import ReadColumns
from draftwise.runner.batch import StepBatch
from draftwise.runner.outcome import Outcome, drafting
from draftwise.runner.placing import NOBODY, Wanted
from draftwise.runner.rows import Row
from draftwise.sched.columns import PlanColumns, RowColumns
from draftwise.types import StepInput


class Read(NamedTuple):
    """Rows of D requests that became tokens.

    ``counts`` [D] int32 of each; ``facts``: how many of all, the most of a request, and how many blocks they fill;
    ``rows_np`` int64 [3, at least that many]: these rows, one request after the other; which of them are the last of
    their blocks; and these blocks.
    """

    counts: array[int]
    facts: array[int]
    rows_np: npt.NDArray[np.int64]


@dataclass(slots=True)
class Decided:
    """D requests that are decided in columns, with N nodes to verify.

    ``at``: which ones of the step they are, None: all; ``places``: where their books lie; ``own`` [D]: nodes of each;
    ``given`` [3 * N]: tokens, parents and rows of q of the nodes; ``inputs``: where draws, numbers, nodes, places of q
    (None: nobody samples) and methods lie for ``dw_verify``. The next step overwrites these two (`laying.Laid`).

    Of the answer: ``goes_on`` [D]: whether it has not ended; ``read``: the rows whose tokens are final now, if somebody
    asked for that.
    """

    at: array[int] | None
    rows: list[Row]
    places: array[int]
    own: array[int]
    given: array[int]
    inputs: tuple[int, int, int, int | None, int]
    goes_on: array[int] | None = None
    read: Read | None = None

    @property
    def num_nodes(self) -> int:
        """N"""
        return len(self.given) // 3

    def of(self, column: Sequence[int]) -> Sequence[int]:
        """Their entries of a column that has one for every request of the step."""
        return column if self.at is None else [column[i] for i in self.at]


@dataclass(slots=True)
class OrdinaryStep:
    """A step of R requests. ``places`` [R]: where their books lie; ``logit_rows``: rows with logits, None: all;
    ``num_logits``: how many.

    ``decided``: who is decided in columns. ``apart``: the others, in the batch of all: `StepBatch.steps`, ``starts``,
    ``owners`` and what belongs to them have entries for these alone, and are numbers of rows in the whole step;
    ``apart_at``: which ones of the step they are. ``method``: of all requests, None if they differ. ``results``: once
    it is decided.
    """

    plan: PlanColumns
    rows: list[Row]
    places: array[int]
    input: StepInput
    logit_rows: list[int] | None
    num_logits: int
    decided: Decided
    apart: StepBatch | None
    apart_at: Sequence[int]
    method: str | None
    results: RowColumns | None = None

    def read(
        self, of_others: Sequence[tuple[Row, int, Sequence[int]]]
    ) -> Sequence[tuple[Row, int, Sequence[int]]]:
        """The committed tokens for drafters that follow, see `Drafting.committed`. ``of_others``: of those apart."""
        decided = self.decided
        assert decided.read is not None, "somebody asked for it"
        counts, rows = decided.read.counts, decided.read.rows_np[0].tolist()
        places: Sequence[int] = range(len(self.rows)) if decided.at is None else decided.at
        resting = self.plan.resting
        found: list[tuple[Row, int, Sequence[int]]] = []
        first = 0
        contexts = decided.of(self.input.attention.context_len_np.tolist())
        for row, place, context, count in zip(decided.rows, places, contexts, counts, strict=True):
            if count and place not in resting:
                found.append((row, context, rows[first : first + count]))
            first += count
        if not of_others:
            return found
        found += of_others
        order = self._order()
        return sorted(found, key=lambda told: order[told[0].rid])

    def read_columns(self) -> ReadColumns | None:
        """`read` in columns, if drafters are told of all requests, and all of them have come to their last token."""
        read = self.decided.read
        if self.apart is not None or self.plan.resting or read is None or 0 in read.counts:
            return None
        rows_np = read.rows_np
        total, most, ends = read.facts
        contexts_np = self.input.attention.context_len_np
        return ReadColumns(
            self.plan.rids, contexts_np, read.counts, most, rows_np[0, :total], rows_np[1:, :ends]
        )

    def drafting(self, outcomes: Sequence[Outcome]) -> Wanted:
        """The requests that draft after this step, and how much. ``outcomes``: of those apart."""
        decided, budgets = self.decided, self.plan.budgets
        assert decided.goes_on is not None, "the step was decided"
        if self.apart is None and not any(budgets):
            return NOBODY
        if self.apart is None and 0 not in decided.goes_on and 0 not in budgets:
            return Wanted(decided.rows, budgets, decided.places)
        columns = zip(decided.rows, decided.of(budgets), decided.goes_on, strict=True)
        found = [(row, budget) for row, budget, goes_on in columns if budget and goes_on]
        others = [] if self.apart is None else drafting(self.apart.steps, outcomes)
        if others:
            order = self._order()
            found = sorted([*found, *others], key=lambda wish: order[wish[0].rid])
        return Wanted.of(found)

    def _order(self) -> dict[int, int]:
        return {rid: i for i, rid in enumerate(self.plan.rids)}
