"""What the executor remembers of each request between steps. Written by the executor alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwise.sampling.state import SamplingState
from draftwise.structured.cursor import Cursor
from draftwise.types import EMPTY_PROPOSAL, IntArray, Proposal, Speculation


@dataclass(slots=True)
class DrafterFill:
    """How much of a request's K/V one drafter has: ``tokens`` leading committed tokens, and ``drafts`` tokens of
    the waiting proposal (a chain) behind them, valid as far as they are accepted."""

    tokens: int = 0
    drafts: int = 0


@dataclass(slots=True)
class Row:
    """One request in the executor. Blocks 0..num_blocks-1 of ``block_table_np`` are the request's."""

    rid: int
    tokens_np: IntArray  # [capacity]
    num_tokens: int
    num_prompt: int
    max_total: int
    num_computed: int
    state: SamplingState
    speculation: Speculation
    stop_token_ids: frozenset[int]
    prompt_logprobs: int | None
    block_table_np: IntArray  # [capacity]
    num_blocks: int = 0
    grammar: Cursor | None = None
    proposal: Proposal = EMPTY_PROPOSAL
    drafting_failed: bool = False
    fill: dict[str, DrafterFill] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether the request has all its tokens, which the scheduler may not know yet."""
        return self.num_tokens >= self.max_total

    @property
    def blocks_np(self) -> IntArray:
        """[num_blocks] view of the request's block ids."""
        return self.block_table_np[: self.num_blocks]

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        end = self.num_blocks + len(block_ids)
        if end > len(self.block_table_np):
            grown = np.zeros(max(end, 2 * len(self.block_table_np)), np.int32)
            grown[: self.num_blocks] = self.blocks_np
            self.block_table_np = grown
        self.block_table_np[self.num_blocks : end] = block_ids
        self.num_blocks = end

    def append(self, token_ids: Sequence[int]) -> None:
        end = self.num_tokens + len(token_ids)
        if end > len(self.tokens_np):
            # Accepted tokens past max_total are cut by the scheduler; until it has, they are kept here too.
            grown = np.empty(end + 64, np.int32)
            grown[: self.num_tokens] = self.tokens_np[: self.num_tokens]
            self.tokens_np = grown
        if len(token_ids) == 1:  # a store into a slice takes ten times as long
            self.tokens_np[self.num_tokens] = token_ids[0]
        else:
            self.tokens_np[self.num_tokens : end] = token_ids
        self.num_tokens = end
