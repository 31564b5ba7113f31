"""Writes drafts into the books of their requests in one native call (``csrc/steps.cpp``)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.book_drafts import InBooks
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.names import method_number
from draftwise.propose.columns import DraftColumns, DraftPart, Facts
from draftwise.runner.rows import Row
from draftwise.types import Proposal
from draftwise.verify.native import DRAWS

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64
_FACTS = len(Facts._fields)


class Wanted(NamedTuple):
    """R requests that want drafts. ``budgets`` [R] int32: nodes at most; ``places`` [R] uint64: where books lie."""

    rows: Sequence[Row]
    budgets: array[int]
    places: array[int]

    @classmethod
    def of(cls, wishes: Sequence[tuple[Row, int]]) -> Wanted:
        """These requests with these budgets."""
        return cls(
            [row for row, _ in wishes],
            array("i", [budget for _, budget in wishes]),
            array("Q", [row.at for row, _ in wishes]),
        )

    def chosen(self, own: Sequence[int]) -> Wanted:
        """Some of them, by their places among them."""
        return Wanted(
            [self.rows[i] for i in own],
            array("i", [self.budgets[i] for i in own]),
            array("Q", [self.places[i] for i in own]),
        )


NOBODY = Wanted.of(())


class Placing:
    """Writes into the books of many requests."""

    def __init__(self, library: NativeLibrary, block_size: int) -> None:
        self._block_size = block_size
        self._columns = library.function("dw_draft_columns", None, [_I64, _PTR, _PTR])
        self._chains = library.function(
            "dw_place_chains", _I64, [_I64, _PTR, _I64, _I64, _PTR, _PTR, _PTR, _I64, _PTR, _I64]
        )
        self._place = library.function("dw_place_drafts", _I64, [_I64, _PTR, _I64, _PTR, _I64, _PTR, _PTR])

    def place(
        self,
        rows: Sequence[Row],
        proposals: Sequence[Proposal],
        stored: tuple[Sequence[int], Sequence[int]] | None,
    ) -> bool:
        """Write down the proposal of each of these requests, which has been checked. Its owner keeps it (`Row.keep`).

        Args:
            stored: what the drafter has of each (`Proposer.stored_after`); None: as before.

        Returns:
            Whether the numbers in ``stored`` can be. If not, what was written has to be written again, one by one.
        """
        count = len(rows)
        tokens: list[int] = []
        parents: list[int] = []
        q_rows: list[int] = []
        sizes: list[int] = []
        draws: list[int] = []
        methods: list[int] = []
        placed: list[int] = []
        q_at: list[int] = []
        last_q: torch.Tensor | None = None
        last_q_at = 0
        sampled = False
        for proposal in proposals:
            own, q = proposal.tokens, proposal.q
            tokens += own
            parents += proposal.parents
            sizes.append(len(own))
            methods.append(method_number(proposal.method))
            if q is None or proposal.draw == "fixed":
                q_rows += proposal.parents  # not read
                draws.append(0)
                q_at.append(0)
                placed.append(1)
                continue
            sampled = True
            if q is not last_q:  # requests that were drafted together share it
                last_q, last_q_at = q, q.data_ptr()
            q_rows += proposal.q_rows
            draws.append(DRAWS[proposal.draw])
            q_at.append(last_q_at)
            placed.append(q.is_contiguous() and q.is_cpu and q.dtype is torch.float32)
        columns = array("i", [*sizes, *draws, *methods, *placed])
        if stored is None:
            columns.extend([-1] * (2 * count))
        else:
            try:
                columns.extend(stored[0])
                columns.extend(stored[1])
            except (TypeError, OverflowError):  # no whole numbers, or enormous ones
                return False
            if min(stored[0], default=0) < 0:
                return False
        places = array("Q", [row.at for row in rows])
        given = array("i", tokens + parents + q_rows)
        q_places = array("Q", q_at) if sampled else None
        bad = self._place(
            count,
            places.buffer_info()[0],
            self._block_size,
            columns.buffer_info()[0],
            len(tokens),
            given.buffer_info()[0],
            None if q_places is None else q_places.buffer_info()[0],
        )
        return bool(bad < 0)

    def facts(self, places: array[int]) -> list[int]:
        """What ``dw_draft_columns`` writes of the books at these places: the columns of `Facts`."""
        count = len(places)
        facts = array("q", bytes(8 * _FACTS * count))
        self._columns(count, places.buffer_info()[0], facts.buffer_info()[0])
        return facts.tolist()

    def columns(self, wanted: Wanted) -> DraftColumns:
        """What a drafter has to know of requests that all want chains, or trees, of one kind."""
        rows = wanted.rows
        first = rows[0]
        return DraftColumns(
            first.speculation,
            first.state.is_greedy,
            [row.rid for row in rows],
            wanted.places,
            wanted.budgets,
            first.state,
            lambda: [row.state for row in rows],
            self.facts,
        )

    def place_chains(self, wanted: Wanted, part: DraftPart, vocab_size: int) -> bool:
        """Write down what was drafted for some of these requests. False: something about it cannot be, and nothing was
        written."""
        rows, places, block = wanted.rows, wanted.places, part.block
        if len(part.members) < len(rows):
            own = wanted.chosen(part.members)
            rows, places = own.rows, own.places
        if isinstance(block, InBooks):
            if block.q is not None:
                for row in rows:
                    row.keep_q(block.q)
            return True
        count, tokens, q = len(rows), block.tokens, block.q
        if tokens.shape[0] != count or tokens.dtype != np.int32 or not tokens.flags.c_contiguous:
            return False
        width, parents = tokens.shape[1], block.parents
        if parents is not None and not (
            parents.shape == tokens.shape and parents.dtype == np.int32 and parents.flags.c_contiguous
        ):
            return False
        if q is not None:
            if q.shape != (count * width, vocab_size) or q.dtype is not torch.float32:
                return False
            if not q.is_contiguous():
                q = q.contiguous()
        numbers = array("i", [*(block.sizes or [width] * count), *part.columns.asked, *([-1] * count)])
        if len(numbers) != 3 * count:
            return False
        bad = self._chains(
            count,
            places.buffer_info()[0],
            self._block_size,
            width,
            address(tokens),
            None if parents is None else address(parents),
            numbers.buffer_info()[0],
            vocab_size,
            None if q is None else q.data_ptr(),
            method_number(part.method),
        )
        if bad >= 0:
            return False
        if q is not None:
            for row in rows:
                row.keep_q(q)
        return True
