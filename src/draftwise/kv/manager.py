"""Slots for tokens: reserve before a step, commit what became real, give back the rest. Host only."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwise.kv.block_pool import BlockPool
from draftwise.kv.events import CacheEvent, CacheLog
from draftwise.kv.prefix_cache import PrefixCache, PrefixMatch, block_digests, root_digest

if TYPE_CHECKING:
    from draftwise.types import IntArray


READ_TOGETHER = 256
"""Keys that attention reads together, though a row may see a part of them alone: partitions of the
native kernels (``csrc/attention.h``)."""


@dataclass(frozen=True, slots=True)
class KVStats:
    """Blocks now (``used + free == total``), and prefix-cache totals in tokens since the start."""

    total_blocks: int
    free_blocks: int  # cached ones included: they are evicted when needed
    used_blocks: int
    cached_blocks: int  # findable by a prefix, in use or not
    prefix_queries: int  # tokens of admitted requests that asked the cache
    prefix_hits: int  # of these, tokens that need not be computed


class TableBook(ctypes.Structure):
    """The numbers of a request, where native code finds them, too (``dw::TableBook`` of ``csrc/books.h``)."""

    _fields_ = (
        ("committed", ctypes.c_int64),
        ("reserved", ctypes.c_int64),
        ("due", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
    )

    __slots__ = ()

    committed: int
    reserved: int
    due: int
    """So many committed tokens fill a block to be hashed, or leave one behind: `KVManager.settle` has to look."""
    num_blocks: int
    """Entries of the block table."""


_NEVER = 1 << 62


class _Table(TableBook):
    """One request. ``committed <= committed + reserved <= len(blocks) * block_size`` at all times."""

    __slots__ = ("at", "blocks", "digest", "gone", "hashed", "queried", "salt")

    def __init__(
        self, blocks: list[int], committed: int, digest: bytes, queried: int, salt: str | None
    ) -> None:
        super().__init__()
        self.at = ctypes.addressof(self)
        self.blocks = blocks
        self.num_blocks = len(blocks)
        self.committed = committed  # tokens whose K/V is written and final
        self.reserved = 0  # tokens past `committed` that may be committed
        self.digest = digest  # of block `hashed - 1`
        self.hashed = len(blocks)  # leading blocks whose digest is known
        self.gone = 0  # leading blocks that were given back: no row will read them
        self.salt = salt
        self.queried = queried  # tokens asked of the prefix cache, not yet counted; -1: nothing to count


class KVManager:
    """Block tables of all requests, over one pool, with a prefix cache.

    The life of a request (block size 4; ``#`` committed, ``r`` reserved, ``.`` room nobody asked for)::

        open(7, [10 tokens])      |####|                  prefix hit: 4 tokens; 6 to compute
        reserve(7, 6 + 2)         |####|rrrr|rrrr|        6 known tokens and 2 draft nodes: two new blocks
        commit(7, 7, tokens)      |####|####|###r|        one draft accepted; block 1 is hashed
        reserve(7, 3)             |####|####|###r|rr..|   root + 2 nodes: one block more
        commit(7, 1, tokens)      |####|####|####|rr..|   nothing accepted; block 2 is hashed
        trim(7)                   |####|####|####|        the surplus block goes back
        release(7)                                        all back, the last block first

    Only committed tokens are ever hashed, a block when its last slot is committed. Not thread-safe.

    Where every layer has a ``window``, rows read no more than so many tokens, themselves included. Blocks behind it are
    given back, in whole partitions of what attention reads together. They keep their places in the table, and stay
    findable by their prefix until they are evicted. Example: window 100, block size 16, 400 tokens committed. The next
    row reads tokens 301 to 400, attention from 256 on: the first 16 blocks are given back.
    Methods that take a ``rid`` raise KeyError for one that is not open.
    """

    __slots__ = (
        "_cache",
        "_hits",
        "_log",
        "_pool",
        "_queries",
        "_tables",
        "_window",
        "block_size",
        "enable_prefix_caching",
        "num_blocks",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        window: int | None = None,
    ) -> None:
        """``window``: tokens that a row reads at most, in every layer of everybody who keeps keys; None: all."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self._window = window
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(block_size)
        self._tables: dict[int, _Table] = {}
        self._queries = 0
        self._hits = 0
        self._log: CacheLog | None = None  # events were not asked for

    # ------------------------------------------------------------------------------------ a request's life

    def match_prefix(self, token_ids_np: IntArray, *, salt: str | None = None) -> int:
        """Tokens of ``token_ids_np`` [n] that `open` would find cached; changes nothing.

        A multiple of the block size, and at least one token is left to compute.
        """
        return len(self.match(token_ids_np, salt=salt).blocks) * self.block_size

    def match(
        self, token_ids_np: IntArray, *, salt: str | None = None, use_cache: bool = True
    ) -> PrefixMatch:
        """The prefix of ``token_ids_np`` [n] that `open` would find cached; changes nothing."""
        if not self.enable_prefix_caching or not use_cache:
            return PrefixMatch([], root_digest(salt))
        return self._cache.match(token_ids_np, salt)

    def num_idle(self, prefix: PrefixMatch) -> int:
        """Blocks of the prefix without a holder: they count as free until they are taken."""
        refs = self._pool.ref_counts
        return sum(refs[block] == 0 for block in prefix.blocks)

    def is_cached(self, digest: bytes) -> bool:
        """Whether the block that the digest names (`PrefixMatch.missing`) can be found."""
        return self._cache.holds(digest)

    def open(
        self,
        rid: int,
        token_ids_np: IntArray,
        *,
        salt: str | None = None,
        use_cache: bool = True,
        prefix: PrefixMatch | None = None,
    ) -> tuple[int, tuple[int, ...]]:
        """Start (or resume) a request with ``token_ids_np`` [n] known tokens, n >= 1.

        Takes a reference on every cached block of its prefix, which cannot fail: no block is allocated.
        ``use_cache=False`` computes everything anew (prompt log-probabilities need it); what it computes is
        still registered for others. Returns (num_computed, block_ids); ValueError if ``rid`` is open already.
        """
        if rid in self._tables:
            raise ValueError(f"request {rid} is open already")
        if len(token_ids_np) == 0:
            raise ValueError(f"request {rid} has no tokens")
        found = prefix or self.match(token_ids_np, salt=salt, use_cache=use_cache)
        blocks = list(found.blocks)
        for block in blocks:
            self._pool.acquire(block)
        queried = len(token_ids_np) if self.enable_prefix_caching and use_cache else -1
        committed = len(blocks) * self.block_size
        table = self._tables[rid] = _Table(blocks, committed, found.digest, queried, salt)
        # Of a long prefix some may stand behind the window already.
        table.due = 0 if self._window is not None else self._due(table)
        return committed, tuple(blocks)

    def reserve(self, rid: int, n: int) -> tuple[int, ...] | None:
        """Make room for n tokens past the committed ones: known tokens, draft nodes, the drafter's lookahead.

        Returns the ids of blocks appended to the request's table (none if it has the room already), or None
        if there are too few free blocks; then nothing changed. What an earlier call reserved stays reserved:
        the room is the larger of the two.
        """
        table = self._tables[rid]
        if n <= table.reserved:
            return ()
        short = -(-(table.committed + n) // self.block_size) - len(table.blocks)
        added: tuple[int, ...] = ()
        if short > 0:
            if short > self._pool.num_free:
                return None
            added = tuple(self._pool.allocate(short))
            removed = [self._cache.forget(block) for block in added]
            if self._log is not None:
                self._log.removed([digest for digest in removed if digest is not None])
            table.blocks += added
            table.num_blocks += short
        table.reserved = n
        if table.queried >= 0:
            # Counted here and not in `open`: an admission that found no room is tried again, and counts once.
            self._queries += table.queried
            self._hits += table.committed
            table.queried = -1
        return added

    def commit(self, rid: int, n: int, token_ids_np: IntArray, known: int | None = None) -> None:
        """The first n reserved tokens are real: their K/V is written and they will not be taken back.

        ``token_ids_np``: all known tokens of the request, at least ``num_committed + n``; the first ``known`` of it, if
        that is given. Blocks that became full are hashed. ValueError if n tokens were not reserved (nothing changes).
        What was reserved beyond n stays reserved.
        """
        table = self._tables[rid]
        committed = table.committed + n
        if not 0 <= n <= table.reserved:
            raise ValueError(f"request {rid}: commit({n}) with {table.reserved} tokens reserved")
        if known is None:
            known = len(token_ids_np)
        if committed > known:
            raise ValueError(f"request {rid}: {committed} tokens committed of {known} known ones")
        table.committed = committed
        table.reserved -= n
        if committed >= table.due:
            self._settle(table, token_ids_np)

    def places(self, rids: Iterable[int]) -> list[int]:
        """Where the `TableBook` of each of these requests lies in memory, as long as it is open. Who commits there does
        what `commit` does, and calls `settle` where that is due."""
        tables = self._tables
        return [tables[rid].at for rid in rids]

    def settle(self, rid: int, token_ids_np: IntArray) -> None:
        """Do what follows from the tokens that were committed; ``token_ids_np``: at least these."""
        self._settle(self._tables[rid], token_ids_np)

    def _settle(self, table: _Table, token_ids_np: IntArray) -> None:
        """Hash blocks that became full, and give back those behind the window."""
        committed, hashed, size = table.committed, table.hashed, self.block_size
        if committed >= (hashed + 1) * size and self.enable_prefix_caching:
            full = committed // size
            digests = block_digests(table.digest, token_ids_np, size, hashed, full)
            new = list(map(self._cache.register, digests, table.blocks[hashed:full]))
            if self._log is not None:
                ids_np = token_ids_np[hashed * size : full * size]
                parent = table.digest if hashed else None
                self._log.stored(digests, new, parent, ids_np, table.salt)
            table.hashed = full
            table.digest = digests[-1]
        if self._window is not None and committed >= self._window:
            self._leave_behind(table, committed + 1 - self._window)
        table.due = self._due(table)

    def _due(self, table: _Table) -> int:
        """See `TableBook.due`.

        Example: blocks of 16, 40 tokens committed, two blocks hashed: 48. With a window of 100: 99 + 256 in any case,
        whose next row reads tokens from 256 on.
        """
        due = (table.hashed + 1) * self.block_size if self.enable_prefix_caching else _NEVER
        if self._window is not None:
            first = max(table.committed + 1 - self._window, 0)
            due = min(due, self._window - 1 + (first // READ_TOGETHER + 1) * READ_TOGETHER)
        return due

    def _leave_behind(self, table: _Table, first: int) -> None:
        """No row will read a token before ``first``."""
        behind = first // READ_TOGETHER * READ_TOGETHER // self.block_size
        for block in table.blocks[table.gone : behind]:
            self._pool.release(block, retain=block in self._cache)
        table.gone = max(table.gone, behind)

    def surplus(self, rid: int, keep: int = 0) -> int:
        """Blocks that ``trim(rid, keep)`` would give back."""
        table = self._tables[rid]
        return max(0, len(table.blocks) - -(-(table.committed + keep) // self.block_size))

    def trim(self, rid: int, keep: int = 0) -> int:
        """Give back blocks beyond those that committed tokens touch, and the ``keep`` tokens behind them. Returns how
        many are left."""
        table = self._tables[rid]
        keep = min(-(-(table.committed + keep) // self.block_size), len(table.blocks))
        while len(table.blocks) > keep:
            self._pool.release(table.blocks.pop(), retain=False)  # never hashed: nothing in it is committed
        table.num_blocks = len(table.blocks)
        table.reserved = min(table.reserved, keep * self.block_size - table.committed)
        return keep

    def release(self, rid: int) -> None:
        """Give everything back. Hashed blocks stay findable until they are evicted.

        The last block first: of one request's blocks the end is evicted before the beginning, which more
        requests share and without which the end cannot be found.
        """
        table = self._tables.pop(rid)
        for block in reversed(table.blocks[table.gone :]):
            self._pool.release(block, retain=block in self._cache)

    # ------------------------------------------------------------------------------------------- questions

    def num_committed(self, rid: int) -> int:
        return self._tables[rid].committed

    def num_reserved(self, rid: int) -> int:
        """Tokens past the committed ones that `commit` would take now."""
        return self._tables[rid].reserved

    def block_ids(self, rid: int) -> tuple[int, ...]:
        """The request's block table: token t stands in block ``ids[t // block_size]``, at ``t % block_size``. The first
        ones may be others' by now (`num_behind`)."""
        return tuple(self._tables[rid].blocks)

    def num_behind(self, rid: int) -> int:
        """Leading blocks that were given back, since no row will read them."""
        return self._tables[rid].gone

    def is_open(self, rid: int) -> bool:
        return rid in self._tables

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, unused cached ones included."""
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._pool.num_free

    def stats(self) -> KVStats:
        free = self._pool.num_free
        return KVStats(
            self.num_blocks, free, self.num_blocks - free, len(self._cache), self._queries, self._hits
        )

    # ------------------------------------------------------------------------------------------ the engine

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes (the weights changed, say).

        False, and nothing is forgotten, while any request is open: its blocks would go on being valid for
        it but not for others, and it would hash new ones on top of them.
        """
        if self._tables:
            return False
        self._cache.clear()
        self._pool.drop_retained()
        if self._log is not None:
            self._log.cleared()
        return True

    def log_events(self) -> bool:
        """Record changes of cached blocks from now on, for `take_events`. False: there is no prefix cache."""
        if self.enable_prefix_caching and self._log is None:
            self._log = CacheLog()
        return self._log is not None

    def take_events(self) -> list[CacheEvent]:
        """Changes of cached blocks since the last call."""
        return [] if self._log is None else self._log.take()

    def check_integrity(self) -> None:
        """AssertionError that names what is wrong with counts, free lists, tables or hashes."""
        for rid, table in self._tables.items():
            assert table.num_blocks == len(table.blocks), f"request {rid}: {table.num_blocks} blocks counted"
            room = len(table.blocks) * self.block_size
            assert 0 <= table.committed <= table.committed + table.reserved <= room, (
                f"request {rid}: {table.committed} committed + {table.reserved} reserved in {room} slots"
            )
            full = table.committed // self.block_size
            assert not self.enable_prefix_caching or table.hashed == full, (
                f"request {rid}: {table.hashed} blocks hashed, {full} are full"
            )
            for block in table.blocks[table.hashed :]:
                assert block not in self._cache, f"request {rid}: block {block} is hashed but not full"
        self._pool.check_integrity(table.blocks[table.gone :] for table in self._tables.values())
        self._cache.check_integrity(set(self._pool.retained()), self._pool.ref_counts)
