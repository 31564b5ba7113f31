"""Blocks of the KV cache: held, free, and free ones whose content is worth keeping."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Reference counts and free lists of ``num_blocks`` blocks; every operation is O(1) per block.

    A block is in exactly one of three states::

        held      ref_counts[b] > 0: in that many block tables
        blank     free, contents worthless           (a stack: the block freed last is handed out first, warm)
        retained  free, contents may be asked for    (least recently released first: the order of eviction)

    `allocate` takes blank blocks while there are any and evicts retained ones after that. The pool knows
    nothing of hashes: whoever retains a block says so when releasing it.
    """

    __slots__ = ("_blank", "_retained", "num_blocks", "ref_counts")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # popped from the end: block 0 first
        self._retained: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, retained ones included."""
        return len(self._blank) + len(self._retained)

    def allocate(self, n: int) -> list[int]:
        """Hand out n blocks with one reference each. The caller has checked ``n <= num_free``."""
        assert 0 <= n <= self.num_free, f"allocate({n}) with {self.num_free} free blocks"
        blank, refs = self._blank, self.ref_counts
        out = []
        for _ in range(n):
            block = blank.pop() if blank else self._retained.popitem(last=False)[0]
            refs[block] = 1
            out.append(block)
        return out

    def acquire(self, block: int) -> None:
        """One more reference to a held or retained block (a prefix hit)."""
        if self.ref_counts[block] == 0:
            del self._retained[block]  # KeyError: a blank block has no contents to share
        self.ref_counts[block] += 1

    def release(self, block: int, *, retain: bool) -> None:
        """One reference less; at zero the block is free, as retained (most recent) or blank."""
        count = self.ref_counts[block] - 1
        assert count >= 0, f"block {block} released more often than acquired"
        self.ref_counts[block] = count
        if count == 0:
            if retain:
                self._retained[block] = None
            else:
                self._blank.append(block)

    def drop_retained(self) -> None:
        """All retained blocks become blank."""
        self._blank.extend(self._retained)
        self._retained.clear()

    def retained(self) -> tuple[int, ...]:
        """Retained blocks in the order in which they would be evicted."""
        return tuple(self._retained)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """AssertionError that names what is wrong, if states overlap or counts differ from ``tables``.

        ``tables``: the block table of everyone who holds blocks.
        """
        held: Counter[int] = Counter()
        for table in tables:
            seen: set[int] = set()
            for block in table:
                assert 0 <= block < self.num_blocks, f"block {block} in a table does not exist"
                assert block not in seen, f"block {block} stands twice in one table"
                seen.add(block)
            held.update(seen)
        counts, blank, retained = self.ref_counts, set(self._blank), self._retained.keys()
        # Of many thousands of blocks only those that are held are looked at one by one, unless something is wrong.
        counted = self.num_blocks - counts.count(0)
        if counted != len(held) or any(counts[block] != want for block, want in held.items()):
            for block, have in enumerate(counts):
                assert have == held[block], (
                    f"block {block} has {have} references but stands in {held[block]} tables"
                )
        assert len(blank) == len(self._blank), "a block stands twice in the free list"
        both = blank & retained
        assert not both, f"blocks {sorted(both)} are both blank and retained"
        some = blank.isdisjoint(held) and retained.isdisjoint(held)
        if not some or len(blank) + len(retained) + len(held) != self.num_blocks:
            for block in range(self.num_blocks):
                free = block in blank or block in retained
                assert free == (held[block] == 0), (
                    f"block {block} is {'free but held' if free else 'neither free nor held: leaked'}"
                )
            raise AssertionError("a free block does not exist")
