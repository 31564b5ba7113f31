"""Low-rank additions to linear layers, of several adapters, within one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Up(NamedTuple):
    """The second product of a part of a layer."""

    part: int  # number of the layer of the checkpoint, within the site, to which it belongs
    low: slice  # columns of the first product that it reads
    outputs: slice  # columns of the layer's result that it adds to
    weight: Tensor  # [outputs, r]


@dataclass(frozen=True, slots=True)
class Addition:
    """What an adapter adds at a linear layer: ``down`` [sum of r, inputs] of all parts, then one of ``ups`` each."""

    down: Tensor
    ups: tuple[Up, ...]


@dataclass(frozen=True, slots=True)
class AdditionSite:
    """A linear layer that may be added to. ``parts``: of each of `Up.outputs` that there may be, its `Up.part`.
    ``summed``: ranks have parts of its inputs, and the result of ``down`` is summed over them."""

    inputs: int
    outputs: int
    parts: tuple[tuple[int, slice], ...]
    summed: bool = False


class Additions(ABC):
    """The adapters of a model as kernels want them, by number. Made by `Ops.pack_additions`, read by
    `Ops.add_low_rank`."""

    @abstractmethod
    def put(self, number: int, additions: Sequence[Addition | None]) -> None:
        """Keep an adapter under a number over 0 that no other has; between two passes.

        Args:
            additions: what it adds at each site; None: nothing.
        """

    @abstractmethod
    def drop(self, number: int) -> None:
        """Let go of an adapter, between two passes."""
