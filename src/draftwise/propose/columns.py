"""Drafts for many requests that want the same kind of chain, without a record for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch

from draftwise.propose.base import Proposer
from draftwise.sampling.state import SamplingState
from draftwise.types import Speculation

ANY_LENGTH = 1 << 30
"""Most tokens that a drafter can draft in a row which does not know a limit."""


@dataclass(slots=True)
class DraftColumns:
    """R requests in columns; see `DraftRow` for their meaning. None has a grammar, forced tokens or a tree, nothing
    steers its draws, and all have one rule; ``sampling``: of each, or empty where all are greedy."""

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

    def chain_length(self, max_len: int, block_size: int, most: int = ANY_LENGTH) -> int:
        """As `chains.one_loop`: tokens that all of them draft; 0: not all the same number, or none."""
        longest = [max_len + 1 - known for known in self.known]
        room = [
            blocks * block_size + 1 - known for blocks, known in zip(self.num_blocks, self.known, strict=True)
        ]
        found = set(map(min, self.budgets, self.max_depths, longest, room, repeat(most)))
        length = found.pop() if found else 0
        return 0 if found or length < 1 else length


@dataclass(slots=True)
class DraftBlock:
    """Chains of R requests. ``sizes`` None: all of K tokens. ``q``: what they were drawn from, row i * K + j for token
    j of request i; None: point masses. ``filled``, ``stored``: as `Proposer.stored_after`; None: as before, and
    nothing."""

    tokens: npt.NDArray[np.int32]  # [R, K], contiguous
    sizes: Sequence[int] | None = None
    q: torch.Tensor | None = None  # [R * K, V] float32, contiguous
    filled: Sequence[int] | None = None
    stored: int = 0


class ColumnDrafter(ABC):
    """A proposer that can draft in columns. A subclass that overrides `Proposer.propose` is called through that."""

    @abstractmethod
    def draft_columns(self, columns: DraftColumns) -> DraftBlock | None:
        """The drafts that `Proposer.propose` would make; None: not possible here and nothing has changed, call
        `propose`."""


def says_itself(proposer: Proposer, propose: object) -> bool:
    """Whether ``propose`` of a proposer is another than that of the class that asks."""
    return getattr(proposer.propose, "__func__", None) is not propose
