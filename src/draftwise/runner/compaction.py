"""Where accepted paths of trees come to stand in the target's storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwise.kv.storage import KVStorage
from draftwise.runner.rows import Row


class Compaction:
    """The moves of one step, of the requests that are taken in one by one."""

    def __init__(self, storage: KVStorage, block_size: int, device: torch.device) -> None:
        """``storage``: of the target. ``device``: on which it lies."""
        self._storage = storage
        self._block_size = block_size
        self._device = device
        self._moves: tuple[list[int], list[int]] = ([], [])  # slots: from, to

    def move(self, row: Row, path: Sequence[int], base: int) -> None:
        """Nodes ``path``, parents first, become tokens base, base + 1, ...: `compact` will move what they stored.

        Node i stands in key base + i of the target's storage and must come to key base + k, k its place in the path. In
        drafters' storages nothing is moved: see `Proposer`.
        Example: base 10, path (1, 3): keys 11 -> 10 and 13 -> 11.
        """
        source, target = self._moves
        size = self._block_size
        table = row.blocks_np
        for k, node in enumerate(path):
            if node != k:
                src, dst = base + node, base + k
                source.append(int(table[src // size]) * size + src % size)
                target.append(int(table[dst // size]) * size + dst % size)

    def compact(self) -> None:
        """Carry out the moves of this step."""
        source, target = self._moves
        if source:
            self._storage.move(
                torch.tensor(source, device=self._device), torch.tensor(target, device=self._device)
            )
            self._moves = ([], [])
