"""Drafts for many requests that want the same kind of chain, without a record for each."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar, NamedTuple, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from draftwise.kernels.cpu.trees import DraftedForest
from draftwise.names import MAX_TREE_NODES
from draftwise.propose.base import Proposer
from draftwise.sampling.state import SamplingState
from draftwise.types import DraftedTree, IntArray, Speculation

T = TypeVar("T")

ANY_LENGTH = 1 << 30
"""Most tokens that a drafter can draft in a row which does not know a limit."""


@dataclass(slots=True)
class ReadColumns:
    """What a step made final of R requests, all of which reached their last known token; see `Committed`.

    ``rids``; ``first_tokens_np`` [R]; ``counts_np`` [R]: rows of each, at least one; ``rows_np`` [n]: these rows of the
    batch, one request after the other; ``blocks_np``: the block table of request i.
    """

    rids: Sequence[int]
    first_tokens_np: IntArray
    counts_np: IntArray
    rows_np: IntArray
    blocks_np: Callable[[int], IntArray]


class ColumnFollower(ABC):
    """A proposer that can be told in columns what steps committed."""

    @property
    def reads_columns(self) -> bool:
        """Whether `read_columns` may do something now."""
        return True

    @abstractmethod
    def read_columns(self, read: ReadColumns) -> bool:
        """`Proposer.committed` of these requests, whose storage stays as it is. False: nothing was done, call that."""


@dataclass(slots=True)
class DraftColumns:
    """R requests in columns; see `DraftRow` for their meaning. None has a grammar or forced tokens, nothing steers its
    draws, and all have one rule and one shape, a chain or a tree; ``sampling``: of each, or empty where all are
    greedy."""

    speculation: Speculation  # of one of them; its number of tokens need not be that of the others
    sampling: Sequence[SamplingState]
    rids: list[int]
    known: list[int]
    num_prompt: list[int]
    budgets: list[int]
    max_depths: list[int]
    filled: list[int]
    num_blocks: list[int]
    tokens_at: list[int]
    blocks_at: list[int]

    states: Callable[[], list[SamplingState]]
    """Of all of them."""
    kept: object = None
    """What the blocks lie in, if they are not the requests' own."""

    def chosen(self, own: Sequence[int], most: int) -> DraftColumns:
        """Some of the requests, with budgets of ``most`` tokens at most."""

        def some(of: Sequence[T]) -> list[T]:
            return [of[i] for i in own]

        return DraftColumns(
            self.speculation,
            some(self.sampling) if self.sampling else (),
            some(self.rids),
            some(self.known),
            some(self.num_prompt),
            [min(budget, most) for budget in some(self.budgets)],
            some(self.max_depths),
            some(self.filled),
            some(self.num_blocks),
            some(self.tokens_at),
            some(self.blocks_at),
            lambda: some(self.states()),
            self.kept,
        )

    def part(self, own: slice) -> DraftColumns:
        """Some of the requests."""
        if own == slice(0, len(self.rids)):
            return self
        return DraftColumns(
            self.speculation,
            self.sampling[own],
            self.rids[own],
            self.known[own],
            self.num_prompt[own],
            self.budgets[own],
            self.max_depths[own],
            self.filled[own],
            self.num_blocks[own],
            self.tokens_at[own],
            self.blocks_at[own],
            lambda: self.states()[own],
            self.kept,
        )

    @property
    def is_tree(self) -> bool:
        """Whether they want trees, all of one shape."""
        return self.speculation.tree is not None or self.speculation.dynamic is not None

    def depths(self, max_len: int, block_size: int, most: int = ANY_LENGTH) -> list[int]:
        """Of each the tokens that can be drafted in a row (`chains.longest_chain`), ``most`` at most."""
        longest = [max_len + 1 - known for known in self.known]
        room = [
            blocks * block_size + 1 - known for blocks, known in zip(self.num_blocks, self.known, strict=True)
        ]
        return list(map(min, self.budgets, self.max_depths, longest, room, repeat(most)))

    def chain_length(self, max_len: int, block_size: int, most: int = ANY_LENGTH) -> int:
        """As `chains.one_loop`: tokens that all of them draft; 0: not all the same number, or none."""
        found = set(self.depths(max_len, block_size, most))
        length = found.pop() if found else 0
        return 0 if found or length < 1 or self.is_tree else length


@dataclass(slots=True)
class DraftBlock:
    """Chains or trees of R requests. ``sizes`` None: all of K tokens. ``parents``: of their nodes; None: chains.
    ``q``: what they were drawn from, row i * K + j for token j of request i; None: point masses. ``filled``,
    ``stored``: as `Proposer.stored_after`; None: as before, and nothing."""

    tokens: npt.NDArray[np.int32]  # [R, K], contiguous
    sizes: Sequence[int] | None = None
    q: torch.Tensor | None = None  # [R * K, V] float32, contiguous
    filled: Sequence[int] | None = None
    stored: int = 0
    parents: npt.NDArray[np.int32] | None = None  # [R, K], contiguous


class DraftPart(NamedTuple):
    """What one of several drafters made: ``members``: for which of the requests, by their places; ``method``: its
    name; ``columns``: what it was asked."""

    members: Sequence[int]
    method: str
    columns: DraftColumns
    block: DraftBlock


class ColumnDrafter(ABC):
    """A proposer that can draft in columns. A subclass that overrides `Proposer.propose` is called through that."""

    one_length: ClassVar[bool] = True
    """Whether all chains of a call have to be of one length."""

    @abstractmethod
    def draft_columns(self, columns: DraftColumns) -> DraftBlock | Sequence[DraftPart] | None:
        """The drafts that `Proposer.propose` would make; None: not possible here and nothing has changed, call
        `propose`. The same goes for requests that are in none of several parts."""


@functools.cache
def _keeps(kind: type, contract: type) -> bool:
    """Whether objects of a class keep a contract: an abstract class takes longer to say so."""
    return issubclass(kind, contract)


def follows_columns(proposer: Any) -> TypeGuard[ColumnFollower]:
    """Whether it is a `ColumnFollower`."""
    return _keeps(proposer.__class__, ColumnFollower)


def drafts_columns(proposer: Any) -> TypeGuard[ColumnDrafter]:
    """Whether it is a `ColumnDrafter`."""
    return _keeps(proposer.__class__, ColumnDrafter)


class ColumnLookUp(ABC):
    """A look-up that tells in columns how long the matches are that its drafts follow."""

    @abstractmethod
    def look_up_columns(self, columns: DraftColumns) -> tuple[DraftBlock, Sequence[int]] | None:
        """Chains, and tokens of each match (0: none); None: not possible here."""


def says_itself(proposer: Proposer, propose: object) -> bool:
    """Whether ``propose`` of a proposer is another than that of the class that asks."""
    return getattr(proposer.propose, "__func__", None) is not propose


def block_of(trees: Sequence[DraftedTree], filled: Sequence[int] | None = None) -> DraftBlock:
    """Trees of fixed children of R requests. ``filled``: as `DraftBlock.filled`."""
    if isinstance(trees, DraftedForest):
        counts_np, tokens_np, parents_np = trees.counts_np, trees.tokens_np, trees.parents_np
        width = min(int(counts_np.max()), MAX_TREE_NODES)
        return DraftBlock(
            np.ascontiguousarray(tokens_np[:, :width]),
            counts_np.tolist(),
            filled=filled,
            parents=np.ascontiguousarray(parents_np[:, :width]),
        )
    sizes = [len(tree.tokens) for tree in trees]
    tokens = np.zeros((len(trees), max(sizes)), np.int32)
    parents = np.zeros_like(tokens)
    for i, tree in enumerate(trees):
        tokens[i, : sizes[i]], parents[i, : sizes[i]] = tree.tokens, tree.parents
    return DraftBlock(tokens, sizes, filled=filled, parents=parents)


def joined_blocks(blocks: Sequence[DraftBlock], filled: Sequence[int] | None) -> DraftBlock:
    """Trees of several calls as those of one. ``filled``: of all requests."""
    if len(blocks) == 1:
        blocks[0].filled = filled
        return blocks[0]
    width = max(block.tokens.shape[1] for block in blocks)
    rows = sum(block.tokens.shape[0] for block in blocks)
    tokens_np, parents_np = np.zeros((2, rows, width), np.int32)
    sizes: list[int] = []
    for block in blocks:
        own = slice(len(sizes), len(sizes) + block.tokens.shape[0])
        assert block.parents is not None and block.sizes is not None, "trees"
        tokens_np[own, : block.tokens.shape[1]] = block.tokens
        parents_np[own, : block.tokens.shape[1]] = block.parents
        sizes += block.sizes
    return DraftBlock(tokens_np, sizes, filled=filled, parents=parents_np)
