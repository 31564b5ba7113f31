"""Where recurrent state lives: of every request a few snapshots, each the state behind a known number of its tokens.

A layer with recurrent state (Mamba, gated delta nets, short convolutions) keeps of all past tokens one state of fixed
size. Dropping a slot takes no token back, as it does with keys and values. So the state behind each token that may
be taken back is kept, and who goes on says how many tokens stand before: the snapshot of that number is taken up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A model's state of one request besides keys and values: shape and dtype of each tensor."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one snapshot."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.tensors)


class Begun(NamedTuple):
    """Places of one request in a pass: ``source`` of the state behind its first ``context`` tokens (None: there is no
    token yet); ``made`` of the states that the pass keeps, behind its last tokens, ``made[-1]`` behind them all."""

    source: int | None
    made: tuple[int, ...]


class StateLost(RuntimeError):
    """A pass goes on behind a number of tokens whose state is not kept."""


class StateStore:
    """Snapshots of all requests of one model.

    A request has a number, ``slot``, of its own while it runs, and at most ``snapshots`` places. The life of a request
    (``n:p``: the state behind n tokens stands in place p)::

        begin(0, context=0, final=8, end=8)      8:0                     a prompt of 8 tokens
        begin(0, context=8, final=9, end=11)     9:0 10:1 11:2           a root and two drafts; one stays, so
        begin(0, context=10, final=11, end=11)   11:0                    goes on behind 10; 11:2 was another token's

    A drafter reads its own drafts one by one, each in a pass of its own, so ``final`` may lie before ``context``::

        begin(1, context=0, final=8, end=8)      8:0                     the prompt
        begin(1, context=8, final=8, end=9)      8:0 9:1                 its first draft
        begin(1, context=9, final=8, end=10)     8:0 9:1 10:2            its second; all were rejected, so
        begin(1, context=8, final=9, end=9)      9:0                     goes on behind 8 with another token

    States before ``final`` are dropped: nobody goes on there. A request that begins (context 0) takes over the slot
    from whoever had it. Not thread-safe.
    """

    def __init__(self, spec: StateSpec, slots: int, snapshots: int, device: torch.device) -> None:
        assert slots > 0 and snapshots > 0
        self.spec = spec
        self.slots = slots
        self.snapshots = snapshots
        places = slots * snapshots
        self.tensors: tuple[Tensor, ...] = tuple(
            torch.zeros((places, *shape), dtype=dtype, device=device) for shape, dtype in spec.tensors
        )
        self._kept: list[dict[int, int]] = [{} for _ in range(slots)]  # tokens before -> place

    @staticmethod
    def bytes_of(spec: StateSpec, slots: int, snapshots: int) -> int:
        """Bytes that a store takes."""
        return spec.num_bytes * slots * snapshots

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.bytes_of(self.spec, self.slots, self.snapshots)

    def holds(self, slot: int, tokens: int) -> bool:
        """Whether a pass of the request can begin behind so many tokens."""
        return not tokens or tokens in self._kept[slot]

    def leave(self, slot: int) -> None:
        """Whoever had the slot is gone: its states are nobody's."""
        self._kept[slot] = {}

    def begin(self, slot: int, context: int, final: int, end: int) -> Begun:
        """A pass computes tokens ``context .. end - 1`` of a request. Tokens before ``final`` stay, the rest may be
        taken back. Until the pass has written them, the states that it keeps are undefined.

        Raises:
            StateLost: the state behind ``context`` tokens is not kept, or more may be taken back than there is room
                for. Nothing has changed.
        """
        assert context < end and final <= end
        held = self._kept[slot]
        source = held.get(context) if context else None
        if context and source is None:
            raise StateLost(f"no state behind {context} tokens is kept, only behind {sorted(held) or 'none'}")
        kept = {n: place for n, place in held.items() if final <= n <= context} if context else {}
        new = range(max(context + 1, final), end + 1)
        first, used = slot * self.snapshots, set(kept.values())
        # The source's place may be among them if it is not kept: whoever computes reads before it writes.
        free = [place for place in range(first, first + self.snapshots) if place not in used]
        if len(free) < len(new):
            raise StateLost(
                f"{end - final} tokens may be taken back; there is room for {self.snapshots - 1} of them"
            )
        made = tuple(free[: len(new)])
        self._kept[slot] = kept | dict(zip(new, made, strict=True))
        return Begun(source, made)


def most_sequences(spec: StateSpec, snapshots: int, memory: int, wanted: int) -> int:
    """How many requests' states fit in ``memory`` bytes: at least 1, at most ``wanted``."""
    return max(1, min(wanted, memory // (spec.num_bytes * snapshots)))
