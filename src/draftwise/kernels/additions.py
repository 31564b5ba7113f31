"""Low-rank additions to linear layers, of several adapters, within one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from draftwise.kernels.handles import Linear


@dataclass(frozen=True, slots=True)
class Addition:
    """What an adapter adds at a linear layer: ``down`` [sum of r, inputs] of all its parts, then one ``up`` each."""

    down: Linear
    ups: tuple[tuple[slice, slice, Linear], ...]  # rows of down's result, outputs, [outputs, r]


@dataclass(frozen=True, slots=True)
class AdditionSite:
    """A linear layer that may be added to. ``summed``: ranks have parts of its inputs, and the result of ``down`` is
    summed over them."""

    inputs: int
    outputs: int
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
