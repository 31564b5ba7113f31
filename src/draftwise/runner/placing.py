"""Writes drafts into the books of their requests in one native call (``csrc/steps.cpp``)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from draftwise.kernels.cpu.attention import address
from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.names import MAX_TREE_NODES, method_number
from draftwise.propose.columns import DraftColumns, DraftPart
from draftwise.runner.rows import Row
from draftwise.types import Proposal
from draftwise.verify.native import DRAWS

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64
_FACTS = 8


class Asked(NamedTuple):
    """R requests that want drafts, and what their books say. ``places`` [R]: where these lie; ``everyone``: 0 to R - 1;
    ``facts`` [8 * R]: what ``dw_draft_columns`` writes."""

    rows: Sequence[Row]
    budgets: Sequence[int]
    places: array[int]
    everyone: range
    facts: list[int]

    @property
    def kinds(self) -> list[int]:
        """[R] the number of the kind of chain or tree that each wants, see `rows.kind_of`; 0: another proposal; -1: it
        cannot draft."""
        return self.facts[: len(self.rows)]


class Placing:
    """Writes into the books of many requests."""

    def __init__(self, library: NativeLibrary, block_size: int) -> None:
        self._block_size = block_size
        self._columns = library.function("dw_draft_columns", None, [_I64, _PTR, _PTR])
        self._chains = library.function(
            "dw_place_chains", _I64, [_I64, _PTR, _I64, _I64, _PTR, _PTR, _PTR, _I64, _I64, _PTR, _I64]
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

    def asked(self, rows: Sequence[Row], budgets: Sequence[int]) -> Asked:
        """Read the books of requests that want drafts, ``budgets`` [R] nodes at most."""
        count = len(rows)
        places = array("Q", [row.at for row in rows])
        facts = array("q", bytes(8 * _FACTS * count))
        self._columns(count, places.buffer_info()[0], facts.buffer_info()[0])
        return Asked(rows, budgets, places, range(count), facts.tolist())

    def columns(self, asked: Asked) -> DraftColumns:
        """What a drafter has to know of requests that all want chains, or trees, of one kind (`Asked.kinds`)."""
        rows, count, facts = asked.rows, len(asked.rows), asked.facts
        first = rows[0]
        return DraftColumns(
            first.speculation,
            () if first.state.is_greedy else [row.state for row in rows],
            [row.rid for row in rows],
            facts[count : 2 * count],
            facts[2 * count : 3 * count],
            [budget if budget < MAX_TREE_NODES else MAX_TREE_NODES for budget in asked.budgets],
            facts[3 * count : 4 * count],
            facts[4 * count : 5 * count],
            facts[5 * count : 6 * count],
            facts[6 * count : 7 * count],
            facts[7 * count :],
            lambda: [row.state for row in rows],
        )

    def place_chains(self, asked: Asked, part: DraftPart, vocab_size: int) -> bool:
        """Write down what was drafted for some of these requests. False: something about it cannot be, and nothing was
        written."""
        rows, places, block = asked.rows, asked.places, part.block
        if part.members is not asked.everyone:
            rows = [rows[i] for i in part.members]
            places = array("Q", [row.at for row in rows])
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
        unknown = [-1] * count
        numbers = array(
            "i", [*(block.sizes or [width] * count), *part.columns.budgets, *(block.filled or unknown)]
        )
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
            block.stored,
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
