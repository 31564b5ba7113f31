"""What was drafted, written into the books of its requests in one native call (``csrc/steps.cpp``)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from draftwise.kernels.cpu.library import NativeLibrary
from draftwise.runner.rows import Row
from draftwise.types import Proposal
from draftwise.verify.native import DRAWS

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64
_NAMES: list[str] = ["none"]
_NUMBERS: dict[str, int] = {"none": 0}


def method_name(number: int) -> str:
    """The method that `Placing` has given this number."""
    return _NAMES[number]


def _number_of(name: str) -> int:
    number = _NUMBERS.get(name)
    if number is None:
        number = _NUMBERS[name] = len(_NAMES)
        _NAMES.append(name)
    return number


class Placing:
    """Writes into the books of many requests."""

    def __init__(self, library: NativeLibrary, block_size: int) -> None:
        self._block_size = block_size
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
            methods.append(_number_of(proposal.method))
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
