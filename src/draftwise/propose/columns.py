"""Drafts for many requests that want the same kind of chain, without a record for each."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from draftwise.kernels.cpu.book_drafts import ANY_LENGTH, InBooks
from draftwise.kernels.cpu.rounds import RoundDrafts, RoundFeatures
from draftwise.names import MAX_TREE_NODES
from draftwise.propose.base import Proposer
from draftwise.sampling.state import SamplingState
from draftwise.types import IntArray, Speculation


class ReadColumns(NamedTuple):
    """What a step made final of R requests, all of which reached their last known token; see `Committed`.

    ``rids``; ``first_tokens_np`` [R]; ``counts`` [R] int32: rows of each, at least one; ``most``: the largest of these;
    ``rows_np`` int64 [n]: these rows of the batch, one request after the other; ``ends_np`` int64 [2, m]: which of the
    n are of tokens that are the last of their blocks, and the blocks.
    """

    rids: Sequence[int]
    first_tokens_np: IntArray
    counts: array[int]
    most: int
    rows_np: npt.NDArray[np.int64]
    ends_np: npt.NDArray[np.int64]


class ColumnFollower(ABC):
    """A proposer that can be told in columns what steps committed."""

    @property
    def reads_columns(self) -> bool:
        """Whether `read_columns` may do something now."""
        return True

    @abstractmethod
    def read_columns(self, read: ReadColumns) -> bool:
        """`Proposer.committed` of these requests, whose storage stays as it is. False: nothing was done, call that."""


class Facts(NamedTuple):
    """What the books of R requests say: ``kinds``: numbers of the kinds of chains or trees that they want, -1: one
    cannot draft; ``known``: tokens, of which ``num_prompt`` are the prompt's; ``max_depths``; where tokens lie."""

    kinds: list[int]
    known: list[int]
    num_prompt: list[int]
    max_depths: list[int]
    tokens_at: list[int]


class DraftColumns:
    """R requests in columns; see `DraftRow` for their meaning. None has a grammar or forced tokens, nothing steers its
    draws, and all have one rule and one shape, a chain or a tree.

    ``speculation``: of one of them; its number of tokens need not be that of the others; ``greedy``: whether they are;
    ``rids`` [R]; ``places`` [R] uint64: where their books lie (``csrc/steps.h``); ``asked`` [R] int32: drafts of each,
    at most. What the books say is read when somebody wants to know it; native code reads them by itself.
    """

    __slots__ = (
        "_facts", "_read", "asked", "first_state", "greedy", "places", "rids", "speculation", "states"
    )  # fmt: skip

    def __init__(
        self,
        speculation: Speculation,
        greedy: bool,
        rids: list[int],
        places: array[int],
        asked: array[int],
        first_state: SamplingState,
        states: Callable[[], list[SamplingState]],
        read: Callable[[array[int]], list[int]],
    ) -> None:
        """``first_state``: of the first of them; ``states``: of all; ``read``: what the books at some places say,
        the columns of `Facts` one behind the other."""
        self.speculation = speculation
        self.greedy = greedy
        self.rids = rids
        self.places = places
        self.asked = asked
        self.first_state = first_state
        self.states = states
        self._read = read
        self._facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        """What the books say, read once."""
        if self._facts is None:
            count, found = len(self.rids), self._read(self.places)
            self._facts = Facts._make([found[i : i + count] for i in range(0, len(found), count)])
        return self._facts

    @property
    def budgets(self) -> list[int]:
        return [budget if budget < MAX_TREE_NODES else MAX_TREE_NODES for budget in self.asked]

    @property
    def sampling(self) -> Sequence[SamplingState]:
        """Of each; empty where all are greedy."""
        return () if self.greedy else self.states()

    def chosen(self, own: Sequence[int], most: int = ANY_LENGTH) -> DraftColumns:
        """Some of the requests, by their places among them, with budgets of ``most`` tokens at most."""

        def states() -> list[SamplingState]:
            of_all = self.states()
            return [of_all[i] for i in own]

        return DraftColumns(
            self.speculation,
            self.greedy,
            [self.rids[i] for i in own],
            array("Q", [self.places[i] for i in own]),
            array("i", [min(self.asked[i], most) for i in own]),
            self.first_state,  # of one that draws alike
            states,
            self._read,
        )

    @property
    def is_tree(self) -> bool:
        """Whether they want trees, all of one shape."""
        return self.speculation.tree is not None or self.speculation.dynamic is not None


@dataclass(slots=True)
class DraftBlock:
    """Chains or trees of R requests. ``sizes`` None: all of K tokens. ``parents``: of their nodes; None: chains.
    ``q``: what they were drawn from, row i * K + j for token j of request i; None: point masses. Its drafter has no
    storage."""

    tokens: npt.NDArray[np.int32]  # [R, K], contiguous
    sizes: Sequence[int] | None = None
    q: torch.Tensor | None = None  # [R * K, V] float32, contiguous
    parents: npt.NDArray[np.int32] | None = None  # [R, K], contiguous


class DraftPart(NamedTuple):
    """What one of several drafters made: ``members``: for which of the requests, by their places; ``method``: its
    name; ``columns``: what it was asked."""

    members: Sequence[int]
    method: str
    columns: DraftColumns
    block: DraftBlock | InBooks


class ColumnDrafter(ABC):
    """A proposer that can draft in columns. A subclass that overrides `Proposer.propose` is called through that."""

    reads_books: ClassVar[bool] = False
    """Whether it passes over requests that cannot draft (`Facts.kinds`): they need not be left out."""

    @abstractmethod
    def draft_columns(self, columns: DraftColumns) -> DraftBlock | InBooks | Sequence[DraftPart] | None:
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


class RoundAnswer(NamedTuple):
    """``done``: rounds that were computed, at least one; ``drafted``: whether drafts wait behind the last one."""

    done: int
    drafted: bool


class RoundDrafter(ABC):
    """A proposer whose drafts native code makes by itself, several times in a row (``csrc/rounds.h``). A subclass that
    overrides `Proposer.propose` is called through that."""

    @property
    def in_rounds(self) -> bool:
        """Whether it ever does."""
        return True

    @property
    def reads_every_step(self) -> bool:
        """Whether it has to be shown steps behind which it drafts for nobody, if it observes."""
        return True

    @abstractmethod
    def round_drafts(
        self, columns: DraftColumns, rounds: int, rows: int
    ) -> tuple[RoundDrafts, RoundFeatures | None] | None:
        """How it drafts for these requests behind each of the next ``rounds`` rounds, and what it reads of the target
        then; what it has stored and read is written down by the call. ``rows``: of the target's pass of a round, at
        most. None: not here, and nothing has changed."""

    def after_rounds(self, answer: RoundAnswer) -> None:  # noqa: B027
        """The rounds of the latest `round_drafts` were computed. Where no drafts wait, they are asked for next."""


def drafts_rounds(proposer: Any) -> TypeGuard[RoundDrafter]:
    """Whether it is a `RoundDrafter`."""
    return _keeps(proposer.__class__, RoundDrafter)


class ColumnLookUp(ABC):
    """A look-up that tells in columns how long the matches are that its drafts follow."""

    @abstractmethod
    def look_up_columns(self, columns: DraftColumns) -> tuple[DraftBlock, Sequence[int]] | None:
        """Chains, and tokens of each match (0: none); None: not possible here."""


def says_itself(proposer: Proposer, propose: object) -> bool:
    """Whether ``propose`` of a proposer is another than that of the class that asks."""
    return getattr(proposer.propose, "__func__", None) is not propose
