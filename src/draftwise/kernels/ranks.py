"""Ranks: processes that each have a part of one model and run every pass together.

What travels between them is sums and gathered rows (and, where one rank drafts for all, its drafts). All ranks must
make the same calls in the same order.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a model a rank has: number ``rank`` of ``size`` equal ones."""

    rank: int = 0
    size: int = 1


WHOLE = Part()
"""The ranks of a model that is not shared."""


def vocabulary_step(total: int, size: int) -> int:
    """Rows of an embedding or output layer of ``total`` rows that each rank has; the last rank may have fewer.

    Example: 10 rows on 4 ranks: 3, so that they have rows 0-2, 3-5, 6-8 and 9.
    """
    return -(-total // size)


class Ranks(ABC):
    """One rank's way to the others."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.tables: dict[int, tuple[Tensor, int]] = {}
        """Address of a part of a table -> that part, and how many rows the whole has: a target lends its table to draft
        heads, which have operations of their own (`split.known_table`)."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """``x`` becomes the sum over all ranks, in place, and is returned; added up in the order of the ranks in
        float32 and rounded once, so that all ranks get the same bits in any batch."""

    @abstractmethod
    def gather(self, x: Tensor, total: int, out: Tensor | None = None) -> Tensor:
        """Rows of all ranks side by side: ``x`` [T, own columns] float32 -> [T, total]. Rank r has the columns from
        ``r * vocabulary_step(total, size)`` on."""

    @abstractmethod
    def share(self, data: bytes) -> list[bytes]:
        """The values of all ranks, in the order of the ranks."""

    def least(self, value: int) -> int:
        """The smallest of the ranks' numbers."""
        return min(int(one) for one in self.share(str(value).encode()))

    def told(self, value: Any) -> Any:
        """Rank 0's value on all ranks; the others' values are ignored. It is pickled."""
        data = self.share(pickle.dumps(value) if self.part.rank == 0 else b"")
        return value if self.part.rank == 0 else pickle.loads(data[0])


class TorchRanks(Ranks):
    """Over a torch.distributed process group: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, part: Part) -> None:
        """The default process group must have been made, see `join_torch`."""
        super().__init__(part)

    def sum(self, x: Tensor) -> Tensor:
        parts = self._all(x.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return x.copy_(total)

    def gather(self, x: Tensor, total: int, out: Tensor | None = None) -> Tensor:
        step = vocabulary_step(total, self.part.size)
        padded = x.new_zeros((x.shape[0], step))
        padded[:, : x.shape[1]] = x
        joined = torch.cat(self._all(padded), dim=1)[:, :total]
        return joined.contiguous() if out is None else out.copy_(joined)

    def share(self, data: bytes) -> list[bytes]:
        found: list[Any] = [None] * self.part.size
        torch.distributed.all_gather_object(found, data)
        return found

    def _all(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.part.size)]
        torch.distributed.all_gather(parts, x)
        return parts


def join_torch(part: Part, meeting: str, seconds: float, device: torch.device) -> TorchRanks:
    """Meet the other ranks through torch.distributed.

    Args:
        meeting: where, a URL as ``torch.distributed.init_process_group`` takes them (``file:///...``).
        seconds: that a rank waits for another.
    """
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=meeting,
        world_size=part.size,
        rank=part.rank,
        timeout=timedelta(seconds=seconds),
    )
    return TorchRanks(part)


def padded_bytes(data: bytes, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``data`` and zeros behind it, uint8 [size]."""
    found = np.zeros(size, np.uint8)
    found[: len(data)] = np.frombuffer(data, np.uint8)
    return found
