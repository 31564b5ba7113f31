"""Which block holds which tokens: a map from the hash of a block and all that precedes it to a block id."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from draftwise.types import IntArray

DIGEST_BYTES = 16
_HASHER = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"draftwise.kv")
"""Copied for each digest, which takes half as long as making one: requests that decode fill blocks in every step."""
_INT32 = np.dtype(np.int32)


def root_digest(salt: str | None) -> bytes:
    """The value that the first block's hash is chained to. Requests with different salts share nothing.

    ``None`` and the empty string are different salts.
    """
    return _digest(b"" if salt is None else b"=" + salt.encode())


def _digest(data: bytes) -> bytes:
    hasher = _HASHER.copy()
    hasher.update(data)
    return hasher.digest()


def block_digests(
    parent: bytes, token_ids_np: IntArray, block_size: int, first: int, last: int
) -> list[bytes]:
    """Digests of blocks ``first..last - 1`` of a sequence, chained to the digest of block ``first - 1``.

    A digest covers everything up to the end of its block, so equal digests mean equal K/V. It is a
    128-bit BLAKE2b and not Python's hash: nobody can build a prompt that collides with another user's.

    Example (block_size 2, tokens 7 8 9 4 5): blocks 0 and 1 are full; digest 1 = H(H(root, 7 8), 9 4).
    """
    chunk = token_ids_np[first * block_size : last * block_size]
    if chunk.dtype is not _INT32:  # hash values, not the way they happen to be stored
        chunk = chunk.astype(np.int32)
    data = chunk.tobytes()
    if last == first + 1:  # the usual step
        return [_digest(parent + data)]
    stride = 4 * block_size
    out = []
    for start in range(0, len(data), stride):
        parent = _digest(parent + data[start : start + stride])
        out.append(parent)
    return out


class PrefixMatch(NamedTuple):
    """The longest cached prefix of some tokens.

    ``digest``: of its last block (the root's if there is none). ``missing``: digest of the block behind it, which is
    not cached; None if no further block could match.
    """

    blocks: list[int]
    digest: bytes
    missing: bytes | None = None


class PrefixCache:
    """Digest -> block, one to one.

    When two requests compute the same block, the first one to register it stays; the other's block is
    private and becomes blank when it is released. Blocks that follow it are still registered under their
    own digests, which name contents and not neighbours, so nothing downstream is lost.
    """

    __slots__ = ("_blocks", "_digests", "block_size")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def holds(self, digest: bytes) -> bool:
        """Whether some block holds what the digest names."""
        return digest in self._blocks

    def match(self, token_ids_np: IntArray, salt: str | None) -> PrefixMatch:
        """Find the longest cached prefix.

        At least one token is left to compute, because a step needs the logits of the last one: of 8 tokens
        in blocks of 4, only the first block can match.
        """
        limit = (len(token_ids_np) - 1) // self.block_size
        digest = root_digest(salt)
        found: list[int] = []
        # Chunks, so that a miss early in a long prompt does not pay for hashing all of it.
        while len(found) < limit:
            first = len(found)
            last = min(first + 16, limit)
            for candidate in block_digests(digest, token_ids_np, self.block_size, first, last):
                block = self._blocks.get(candidate)
                if block is None:
                    return PrefixMatch(found, digest, candidate)
                found.append(block)
                digest = candidate
        return PrefixMatch(found, digest)

    def register(self, digest: bytes, block: int) -> bool:
        """``block`` now holds what ``digest`` names. False, and nothing changed: another block does already."""
        assert block not in self._digests, f"block {block} is registered under another digest"
        if digest in self._blocks:
            return False
        self._blocks[digest] = block
        self._digests[block] = digest
        return True

    def forget(self, block: int) -> bytes | None:
        """The block's contents are about to be overwritten. What named them, if anything did."""
        digest = self._digests.pop(block, None)
        if digest is not None:
            del self._blocks[digest]
        return digest

    def clear(self) -> None:
        self._blocks.clear()
        self._digests.clear()

    def check_integrity(self, retained: Collection[int], ref_counts: list[int]) -> None:
        """AssertionError if the two maps disagree, or a registered block is free but not retained."""
        assert len(self._blocks) == len(self._digests), "the two directions of the hash map differ in size"
        for digest, block in self._blocks.items():
            assert self._digests.get(block) == digest, (
                f"block {block} is mapped under a digest it does not hold"
            )
            assert ref_counts[block] > 0 or block in retained, f"block {block} is hashed but blank"
        stray = [block for block in retained if block not in self._digests]
        assert not stray, f"blocks {stray} are retained without a hash"
