"""What the executor remembers of each request between steps. Written by the executor alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftwise.kernels.cpu.attention import address
from draftwise.sampling.state import SamplingState
from draftwise.structured.cursor import Cursor
from draftwise.types import EMPTY_PROPOSAL, IntArray, Proposal, Speculation
from draftwise.verify.base import effective_rule


@dataclass(slots=True)
class DrafterFill:
    """How much of a request's K/V one drafter has: ``tokens`` leading committed tokens, and ``drafts`` tokens of
    the waiting proposal (a chain) behind them, valid as far as they are accepted."""

    tokens: int = 0
    drafts: int = 0


class BlockTables:
    """The block tables of all requests, a line each. Behind a request's blocks its line is 0."""

    def __init__(self) -> None:
        self._take(np.zeros((8, 8), np.int32))
        self._free = list(range(7, -1, -1))

    def _take(self, lines_np: IntArray) -> None:
        self._lines_np = lines_np
        self.width: int = lines_np.shape[1]
        self.ids_np: IntArray = lines_np.reshape(-1)
        """[lines * width] a view: the blocks of line i begin at i * width."""
        self.at = address(self.ids_np)
        """Where they lie in memory."""

    def open(self) -> int:
        """A line for a request that enters."""
        if not self._free:
            lines, width = self._lines_np.shape
            self._grow(2 * lines, width)
            self._free = list(range(2 * lines - 1, lines - 1, -1))
        return self._free.pop()

    def close(self, line: int) -> None:
        """The request of this line has left."""
        self._lines_np[line] = 0
        self._free.append(line)

    def line(self, line: int) -> IntArray:
        """[capacity] a view of what the line has now. Once lines grow it is written no more."""
        view: IntArray = self._lines_np[line]
        return view

    def write(self, line: int, start: int, block_ids: Sequence[int]) -> None:
        """Blocks ``start``, ``start + 1``, ... of a line."""
        end = start + len(block_ids)
        lines, width = self._lines_np.shape
        if end > width:
            self._grow(lines, max(end, 2 * width))
        self._lines_np[line, start:end] = block_ids

    def cut(self, line: int, end: int) -> None:
        """Only ``end`` blocks are left."""
        self._lines_np[line, end:] = 0

    def _grow(self, lines: int, width: int) -> None:
        grown = np.zeros((lines, width), np.int32)
        old_lines, old_width = self._lines_np.shape
        grown[:old_lines, :old_width] = self._lines_np
        self._take(grown)


_NO_BLOCKS: IntArray = np.empty(0, np.int32)


@dataclass(slots=True)
class Row:
    """One request in the executor. Blocks 0..num_blocks-1 of its line are the request's."""

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
    tables: BlockTables
    line: int
    num_blocks: int = 0
    blocks_np: IntArray = field(default_factory=lambda: _NO_BLOCKS)
    """[num_blocks] a view of the request's block ids. Other requests' lines may grow away from under it: what it shows
    stays as it is until the request's own blocks change, and then it is a new one."""
    adapter: int = 0
    grammar: Cursor | None = None
    proposal: Proposal = EMPTY_PROPOSAL
    drafting_failed: bool = False
    error: Exception | None = None
    """Why the request cannot go on, since it entered."""
    fill: dict[str, DrafterFill] = field(default_factory=dict)
    tokens_at: int = field(init=False)
    """Where `tokens_np` lies in memory, for native calls about many requests: asking numpy takes a microsecond."""
    blocks_at: int = 0
    """The same of `blocks_np`."""
    method: str = field(init=False)
    rule: str = field(init=False)
    """What decides it, see `effective_rule`."""

    def __post_init__(self) -> None:
        self.tokens_at = address(self.tokens_np)
        self.method = self.speculation.method
        self.rule = effective_rule(self.state, self.speculation.rule)

    @property
    def is_full(self) -> bool:
        """Whether the request has all its tokens, which the scheduler may not know yet."""
        return self.num_tokens >= self.max_total

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        self.tables.write(self.line, self.num_blocks, block_ids)
        self._has_blocks(self.num_blocks + len(block_ids))

    def trim(self, num_blocks: int) -> None:
        """Only ``num_blocks`` blocks are left."""
        self.tables.cut(self.line, num_blocks)
        self._has_blocks(num_blocks)

    def _has_blocks(self, count: int) -> None:
        self.num_blocks = count
        tables = self.tables
        self.blocks_np = tables.line(self.line)[:count]
        self.blocks_at = tables.at + self.line * tables.width * tables.ids_np.itemsize

    def append(self, token_ids: Sequence[int]) -> None:
        known, tokens_np = self.num_tokens, self.tokens_np
        end = known + len(token_ids)
        if end > len(tokens_np):
            # Accepted tokens past max_total are cut by the scheduler; until it has, they are kept here too.
            tokens_np = np.empty(end + 64, np.int32)
            tokens_np[:known] = self.tokens_np[:known]
            self.tokens_np, self.tokens_at = tokens_np, address(tokens_np)
        if len(token_ids) < 4:  # a store into a slice takes four times as long
            for i, token in enumerate(token_ids, known):
                tokens_np[i] = token
        else:
            tokens_np[known:end] = token_ids
        self.num_tokens = end
