"""Low-rank additions of captured passes: which adapter a row has is read on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.kernels.additions import Addition, Additions, AdditionSite

SMALLEST_RANK = 16
"""Products on tensor cores have no smaller inner size."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What all adapters add at one site. What an adapter lacks is zero.

    ``down`` [places, groups * r, inputs]: first products, the layers of the checkpoint one below the other, each with
    the highest rank r. ``up`` [places, outputs, r]: second products. ``parts`` [P, 3] int32: of each part of the
    outputs its first and last column (behind it), and number of its r columns of the first product.

    Example: q, k and v of 8, 4 and 4 outputs and rank 16: ``down`` has 48 rows, ``parts`` is (0, 8, 0), (8, 12, 1),
    (12, 16, 2).
    """

    down: Tensor
    up: Tensor
    parts: Tensor
    bounds: tuple[tuple[int, int, int], ...]  # ``parts``, on the host


class StackedAdditions(Additions):
    """Adapters in places 1, 2, ...: tensors that stay where they are, for graphs are captured on them.

    ``places`` and ``rows``: those of the captured pass, see `for_pass`.
    """

    def __init__(
        self, sites: Sequence[AdditionSite], count: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``count``: places; ``rank``: the highest of an adapter."""
        self.rank = 1 << (max(rank, SMALLEST_RANK) - 1).bit_length()
        self.stacks = [self._stack(site, count, dtype, device) for site in sites]
        self._place: dict[int, int] = {}
        self._free = list(range(count, 0, -1))
        self.places: Tensor
        self.rows = 0

    def _stack(self, site: AdditionSite, count: int, dtype: torch.dtype, device: torch.device) -> Stack:
        groups = 1 + max(group for group, _ in site.parts)
        bounds = tuple((outputs.start, outputs.stop, group) for group, outputs in site.parts)
        return Stack(
            torch.zeros((count, groups * self.rank, site.inputs), dtype=dtype, device=device),
            torch.zeros((count, site.outputs, self.rank), dtype=dtype, device=device),
            torch.tensor(bounds, dtype=torch.int32, device=device),
            bounds,
        )

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return sum(t.numel() * t.element_size() for s in self.stacks for t in (s.down, s.up, s.parts))

    def for_pass(self, places: Tensor, rows: int) -> None:
        """A pass is about to be captured: ``places`` [R] int32 of its requests' adapters, 0: none, of ``rows`` rows
        each."""
        self.places, self.rows = places, rows

    def place_of(self, number: int) -> int | None:
        """Where an adapter stands; None: nowhere, all places were taken when it came."""
        return self._place.get(number)

    def put(self, number: int, additions: Sequence[Addition | None]) -> None:
        """See `Additions.put`. An adapter that finds no place is not kept."""
        if not self._free:
            return
        place = self._place[number] = self._free.pop()
        for stack, addition in zip(self.stacks, additions, strict=True):
            down, up = stack.down[place - 1], stack.up[place - 1]
            down.zero_()
            up.zero_()
            for one in addition.ups if addition is not None else ():
                assert addition is not None
                rank, first = one.weight.shape[1], one.part * self.rank
                down[first : first + rank].copy_(addition.down[one.low])
                up[one.outputs, :rank].copy_(one.weight)

    def drop(self, number: int) -> None:
        place = self._place.pop(number, None)
        if place is not None:
            self._free.append(place)

    def add(self, x: Tensor, out: Tensor, site: int) -> None:
        """`Ops.add_low_rank` in plain torch: every adapter for all rows, of which most are thrown away."""
        stack = self.stacks[site]
        own = self.places[:, None].expand(-1, self.rows).reshape(-1, 1)  # [T, 1]
        for place, (down, up) in enumerate(zip(stack.down, stack.up, strict=True), 1):
            low = x @ down.t()
            for start, stop, group in stack.bounds:
                added = low[:, group * self.rank : (group + 1) * self.rank] @ up[start:stop].t()
                part = out[:, start:stop]
                part.copy_(torch.where(own == place, part + added, part))
