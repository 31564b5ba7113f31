"""How far each drafter's storage is filled: per request, and per block."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from draftwise.kernels.cpu.attention import address
from draftwise.propose.base import DraftRow, Proposer
from draftwise.runner.guard import Guard, whole_number
from draftwise.runner.rows import DrafterFill, Row
from draftwise.types import Proposal


class Fills:
    """The books of drafters' per-token state.

    Per (block, drafter) a mark says that the whole block is filled for that drafter: a prefix-cache hit may then rely
    on it. A block that is handed out anew loses its marks. Marks are made of answers that were checked; a call that
    fails makes none.
    """

    def __init__(self, names: Iterable[str], num_blocks: int, block_size: int) -> None:
        """``names``: of the drafters with storage."""
        self._block_size = block_size
        self.marks: dict[str, npt.NDArray[np.bool_]] = {
            name: np.zeros(num_blocks, np.bool_) for name in names
        }

    def admitted(self, row: Row) -> None:
        """A request entered with ``row.num_computed`` cached tokens: how many of them has each drafter?"""
        blocks = row.blocks_np[: row.num_computed // self._block_size]
        for name, marks in self.marks.items():
            unfilled = np.flatnonzero(~marks[blocks])
            leading = int(unfilled[0]) if len(unfilled) else len(blocks)
            fill = row.fill[name] = DrafterFill(tokens=leading * self._block_size)
            if name == row.method:
                row.fill_at, row.marks_at = ctypes.addressof(fill), address(marks)

    def fresh_blocks(self, block_ids: Sequence[int]) -> None:
        """These blocks were handed out anew."""
        for marks in self.marks.values():
            marks[list(block_ids)] = False

    def has(self, name: str, row: Row, tokens: int, drafts: int | None = None) -> None:
        """The drafter has the first ``tokens`` tokens of the request now, and ``drafts`` behind it; None: as before."""
        fill = row.fill[name]
        before = fill.tokens // self._block_size
        fill.tokens = tokens
        after = tokens // self._block_size
        if after > before:
            self.marks[name][row.blocks_np[before:after]] = True
        if drafts is not None:
            fill.drafts = drafts

    def accepted(self, row: Row, count: int, base: int) -> None:
        """``count`` nodes of the proposal became tokens base, base + 1, ... (``base``: tokens with K/V before them):
        what a drafter wrote for its own chain is valid so far."""
        for name, fill in row.fill.items():
            if fill.drafts and fill.tokens == base:
                self.has(name, row, base + min(count, fill.drafts))
            fill.drafts = 0

    def leading(self, row: Row, answer: object) -> int:
        """An answer that has to be a number of leading tokens of the request, which has blocks for them. Raises
        TypeError or ValueError."""
        return whole_number(answer, min(row.num_tokens, row.num_blocks * self._block_size), "what is filled")

    def proposed(
        self,
        guard: Guard,
        proposer: Proposer,
        members: Sequence[tuple[Row, DraftRow]],
        proposals: Sequence[Proposal],
        together: tuple[Sequence[int], Sequence[int]] | None,
    ) -> None:
        """The drafter's stored state of its requests after it proposed; ``together``: what it said of all at once. Of
        its drafts that counts which is still proposed: a grammar may have put others in their place. Who cannot tell of
        one request fails for that one."""
        name = members[0][0].method
        filled_after, drafts_stored = proposer.filled_after, proposer.drafts_stored
        size = self._block_size
        for i, ((row, draft_row), proposed) in enumerate(zip(members, proposals, strict=True)):
            if row.drafting_failed:  # just now
                continue
            hook = "filled_after"
            stored = 0
            try:
                tokens = filled_after(draft_row) if together is None else together[0][i]
                if tokens.__class__ is not int or not 0 <= tokens <= row.num_tokens <= row.num_blocks * size:
                    tokens = self.leading(row, tokens)
                hook = "drafts_stored"
                drafts = drafts_stored(draft_row) if together is None else together[1][i]
                if drafts.__class__ is not int or drafts:
                    most = len(proposed) if proposed.is_chain else 0
                    stored = whole_number(drafts, most, "the number of stored drafts")
            except Exception as error:
                guard.failed(name, hook, [row], error)
                if hook == "filled_after":
                    continue
            fill = row.fill[name]
            if tokens // size > fill.tokens // size:
                self.has(name, row, tokens)
            fill.tokens = tokens
            if stored and row.proposal is not proposed:
                kept = row.proposal.tokens if row.proposal.is_chain else ()
                same = [ours == theirs for ours, theirs in zip(proposed.tokens, kept, strict=False)]
                stored = min(stored, [*same, False].index(False))
            fill.drafts = stored
