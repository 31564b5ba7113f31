"""Changes of blocks in the prefix cache, for routers and other indexes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from draftwise.types import IntArray


class BlocksStored(NamedTuple):
    """Consecutive blocks of a sequence can be found from now on.

    ``token_ids_np``: [len(digests) * block_size] of these blocks; ``parent``: the digest of the block before them, None
    if they begin the sequence; ``salt``: what the sequence is told apart by, if it is.
    """

    digests: tuple[bytes, ...]
    parent: bytes | None
    token_ids_np: IntArray
    salt: str | None = None


class BlocksRemoved(NamedTuple):
    """These cannot be found any more: something else is written there."""

    digests: tuple[bytes, ...]


class CacheCleared(NamedTuple):
    """All were forgotten."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class CacheLog:
    """Events since the last `take`, in order."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(
        self,
        digests: Sequence[bytes],
        new: Sequence[bool],
        parent: bytes | None,
        token_ids_np: IntArray,
        salt: str | None,
    ) -> None:
        """Blocks became full. ``new``: of each whether it can be found only now; the others were known before.

        Example: three blocks, of which the second one was known, are two events of one block each.
        """
        size = len(token_ids_np) // len(digests)
        first = 0
        while first < len(digests):
            last = first
            while last < len(digests) and new[last]:
                last += 1
            if last > first:
                before = digests[first - 1] if first else parent
                tokens_np = token_ids_np[first * size : last * size].copy()
                self._events.append(BlocksStored(tuple(digests[first:last]), before, tokens_np, salt))
            first = last + 1

    def removed(self, digests: Sequence[bytes]) -> None:
        """Blocks that could be found are written anew."""
        if digests:
            self._events.append(BlocksRemoved(tuple(digests)))

    def cleared(self) -> None:
        """None can be found any more."""
        self._events = [CacheCleared()]  # whatever was stored before is gone, too

    def take(self) -> list[CacheEvent]:
        """One event."""
        events, self._events = self._events, []
        return events
