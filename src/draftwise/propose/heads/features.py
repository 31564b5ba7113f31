"""Features of tokens that the target has read, computed when a head needs them and not before.

In steps without drafting a head computes nothing. It keeps the few rows that it will need of the target's tensors,
and makes them into features for many steps at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.kernels.cpu.columns import row_copies
from draftwise.models.heads.base import HeadModel
from draftwise.propose.heads.state import Features
from draftwise.transfer import to_device
from draftwise.types import TargetOutput

_Ints = npt.NDArray[np.int64]
_WAITING_STEPS = 32
_WAITING_ROWS = 512
"""Steps, and rows of their passes, whose results may be kept: it bounds their memory. A pass of more rows is long, and
gathering from it at once costs little in comparison."""


@dataclass(slots=True)
class _Waiting:
    """One step, see `FeatureSource.wait`."""

    features: Features
    output: TargetOutput
    rows_np: _Ints
    ends_np: _Ints


class FeatureSource:
    """All waiting features of a head."""

    def __init__(self, head: HeadModel, block_features: Tensor) -> None:
        """``block_features`` [blocks, depths, F]: where those of blocks' last tokens are written, at depth 0."""
        self._head = head
        self._blocks = block_features
        self._waiting: list[_Waiting] = []
        self._rows = 0  # of the passes that wait
        self._copies = row_copies(block_features)
        self._compute = _weakly(self.compute)

    @property
    def waits(self) -> bool:
        """Whether rows wait."""
        return bool(self._waiting)

    @property
    def blocks(self) -> Tensor:
        """[blocks, depths, F] the features that are kept beside blocks."""
        return self._blocks

    def expected(self) -> Features:
        """Features that `wait` will be told of; `Features.value` computes them from then on."""
        return Features(self._compute)

    def wait(
        self,
        output: TargetOutput,
        rows_np: _Ints,
        ends_np: _Ints,
        features: Features | None = None,
    ) -> Features:
        """The features [n, F] of rows ``rows_np`` int64 [n] of a pass; `Features.value` computes them.

        Args:
            output: of the pass.
            rows_np: ascending.
            ends_np: int64 [2, m]: which of the n are of tokens that are the last of their blocks, and these blocks.
            features: what `expected` gave for them.
        """
        features = features or self.expected()
        self._waiting.append(_Waiting(features, output, rows_np, ends_np))
        self._rows += output.hidden.shape[0]
        return features

    def bound(self) -> None:
        """Compute the features if too many rows wait."""
        if len(self._waiting) >= _WAITING_STEPS or self._rows > _WAITING_ROWS:
            self.compute()

    def compute(self) -> None:
        """Drop all waiting rows."""
        waiting, self._waiting, self._rows = self._waiting, [], 0
        if not waiting:
            return
        if len(waiting) == 1:
            output, rows_np = waiting[0].output, waiting[0].rows_np
        else:
            output = _side_by_side(self._head, [step.output for step in waiting])
            first_np = np.cumsum([0, *(step.output.hidden.shape[0] for step in waiting[:-1])])
            rows_np = np.concatenate(
                [step.rows_np + first for step, first in zip(waiting, first_np, strict=True)]
            )
        features = self._head.combine(output, _index(rows_np, output.hidden))
        first = 0
        for step in waiting:
            count = len(step.rows_np)
            own = features if len(waiting) == 1 else features[first : first + count]
            step.features.give(own)
            if step.ends_np.shape[1]:  # a block that was handed on has its new owner's: later ones come last
                self._keep(own, step.ends_np[0], step.ends_np[1])
            first += count

    def _keep(self, features: Tensor, rows_np: _Ints, blocks_np: _Ints) -> None:
        """Write these rows of features beside these blocks."""
        if self._copies is not None:
            self._copies.copy(features, rows_np, blocks_np)
            return
        rows, blocks = to_device(np.stack((rows_np, blocks_np)), features.device)
        self._blocks[blocks, 0] = features.index_select(0, rows)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a bound method, and does not keep its object alive: the object holds the features that wait, which hold
    this. Else a closed engine's models would stay until the collector comes."""
    found = weakref.WeakMethod(method)

    def call() -> None:
        bound = found()
        assert bound is not None, "features are read after their source is gone"
        bound()

    return call


def _index(rows_np: _Ints, hidden: Tensor) -> Tensor | slice:
    """Rows of a pass, ascending, for `HeadModel.combine`; a slice if that is what they are, unless it would keep a long
    pass alive.

    Example: rows 5, 6 and 7 are 5:8.
    """
    first, stop = int(rows_np[0]), int(rows_np[-1]) + 1
    if stop - first == len(rows_np) and hidden.shape[0] <= _WAITING_ROWS:
        return slice(first, stop)
    return torch.from_numpy(rows_np) if hidden.is_cpu else to_device(rows_np, hidden.device)


def _side_by_side(head: HeadModel, outputs: list[TargetOutput]) -> TargetOutput:
    """The passes as one, as far as the head looks at it."""
    layers = head.feature_layers
    if layers is None:
        return TargetOutput(torch.cat([output.hidden for output in outputs]))
    captured = {layer: torch.cat([output.captured[layer] for output in outputs]) for layer in layers}
    return TargetOutput(captured[layers[0]], captured)  # the hidden states of the last norm are not looked at
