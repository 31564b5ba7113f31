"""Which tensor of a checkpoint goes where: declared by a model, filled by the loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The place of one checkpoint tensor: ``dest`` has its shape and is a view of a (maybe packed) parameter."""

    dest: Tensor


class WeightPlan:
    """Collects a model's parameters. Each starts uninitialised; the loader fills every target exactly once.

    Example: q, k and v of 8, 4 and 4 rows packed into one parameter::

        packed = plan.packed([("q.weight", 8), ("k.weight", 4), ("v.weight", 4)], 16)   # [16, 16]
        # targets: q.weight -> packed[0:8], k.weight -> packed[8:12], v.weight -> packed[12:16]
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.targets: dict[str, WeightTarget] = {}
        self.ignored: set[str] = set()  # names that may be in a checkpoint and are not needed
        self.num_bytes = 0

    def tensor(self, name: str, shape: Sequence[int]) -> Tensor:
        """A parameter of its own."""
        value = self._empty(tuple(shape))
        self._add(name, value)
        return value

    def packed(self, parts: Sequence[tuple[str, int]], columns: int | None) -> Tensor:
        """Parameters stacked row by row: ``parts`` are (name, rows); ``columns`` None for vectors (biases)."""
        total = sum(rows for _, rows in parts)
        value = self._empty((total,) if columns is None else (total, columns))
        start = 0
        for name, rows in parts:
            self._add(name, value[start : start + rows])
            start += rows
        return value

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        value = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.num_bytes += value.numel() * value.element_size()
        return value

    def _add(self, name: str, dest: Tensor) -> None:
        assert name not in self.targets, f"{name} is declared twice"
        self.targets[name] = WeightTarget(dest)
