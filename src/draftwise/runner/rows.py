"""The executor's state of each request between steps. Only the executor writes it."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from draftwise.kernels.cpu.attention import address
from draftwise.names import LOOK_UP_METHODS, MAX_TREE_NODES, method_name
from draftwise.sampling.draw import draws_from_q
from draftwise.sampling.state import DRAW, SamplingState
from draftwise.structured.cursor import Cursor
from draftwise.types import EMPTY_PROPOSAL, IntArray, Proposal, Speculation, chain_parents
from draftwise.verify.base import effective_rule


class DrafterFill(ctypes.Structure):
    """How much of a request's K/V one drafter has: ``tokens`` leading committed tokens, and ``drafts`` tokens of
    the waiting proposal (a chain) behind them, valid as far as they are accepted. ``dw::FillBook`` of ``csrc/steps.h``.
    """

    _fields_ = (("tokens", ctypes.c_int64), ("drafts", ctypes.c_int64))

    __slots__ = ()

    tokens: int
    drafts: int


class BlockTables:
    """The block tables of all requests, a line each. Behind a request's blocks its line is 0."""

    def __init__(self) -> None:
        self._take(np.zeros((8, 8), np.int32))
        self._free = list(range(7, -1, -1))

    def _take(self, lines_np: IntArray) -> None:
        self._lines_np = lines_np
        self.width: int = lines_np.shape[1]
        self.line_bytes = lines_np.strides[0]
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
        if end > self.width:
            self._grow(len(self._lines_np), max(end, 2 * self.width))
        if end == start + 1:  # a store into a slice takes four times as long
            self._lines_np[line, start] = block_ids[0]
        else:
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


class RowBook(ctypes.Structure):
    """The numbers of a `Row`, where native code finds them, too (``dw::RowBook`` of ``csrc/steps.h``)."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_computed", ctypes.c_int64),
        ("max_total", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("tokens_at", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("blocks_at", ctypes.c_int64),
        ("stops_at", ctypes.c_int64),
        ("num_stops", ctypes.c_int64),
        ("native_rule", ctypes.c_int64),
        ("num_waiting", ctypes.c_int64),
        ("placed", ctypes.c_int64),
        ("draw", ctypes.c_int64),
        ("q_at", ctypes.c_int64),
        ("method_number", ctypes.c_int64),
        ("fill_at", ctypes.c_int64),
        ("marks_at", ctypes.c_int64),
        ("num_prompt", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("drafting_failed", ctypes.c_bool),
        ("draws", ctypes.c_uint64 * (DRAW.size // 8)),
        ("drafts", ctypes.c_int32 * MAX_TREE_NODES),
        ("parents", ctypes.c_int32 * MAX_TREE_NODES),
        ("q_rows", ctypes.c_int32 * MAX_TREE_NODES),
    )

    __slots__ = ()
    __hash__ = object.__hash__  # a structure has none

    num_tokens: int
    num_computed: int
    max_total: int
    capacity: int
    tokens_at: int
    """Where `Row.tokens_np` lies in memory, for native calls about many requests: asking numpy takes a microsecond."""
    num_blocks: int
    blocks_at: int
    """The same of `Row.blocks_np`."""
    stops_at: int
    num_stops: int
    native_rule: int
    """See `runner.ordinary`; -1: the request is decided apart from columns."""
    num_waiting: int
    placed: int
    """Whether all that verification wants to know of drafts that wait stands in the book (0: tokens and parents do); 2:
    there alone."""
    draw: int
    method_number: int
    drafts: ctypes.Array[ctypes.c_int32]
    parents: ctypes.Array[ctypes.c_int32]
    q_rows: ctypes.Array[ctypes.c_int32]
    num_prompt: int
    kind: int
    """See `kind_of`."""
    drafting_failed: bool
    fill_at: int
    marks_at: int
    """Addresses for the request's own drafter, if it has storage: its `DrafterFill`, and its marks of blocks."""


_KINDS: dict[object, int] = {}


def kind_of(state: SamplingState, speculation: Speculation) -> int:
    """Requests of one number want chains, or trees of one shape, that are drawn alike (`DraftColumns`); 0: one by
    one."""
    tree, dynamic = speculation.tree, speculation.dynamic
    if speculation.method in LOOK_UP_METHODS and tree is None and dynamic is None:
        # they draw nothing, and what one request says may be what the next one looks up: all go in their order
        return _KINDS.setdefault(speculation.method, len(_KINDS) + 1)
    sampled = draws_from_q(state, speculation.rule)
    if state.steers or (tree is not None and sampled):
        return 0
    # rules that draw alike, such as "rejection" and "block", go together
    shared = not state.is_greedy and speculation.rule == "coupled"
    key = speculation.method, state.is_greedy, sampled, shared, tree, speculation.tree_ranks, dynamic
    return _KINDS.setdefault(key, len(_KINDS) + 1)


_DRAWS = RowBook.draws.offset


class Row(RowBook):
    """One request in the executor. Blocks 0..num_blocks-1 of its line are the request's."""

    __slots__ = (
        "_line_np",
        "_proposal",
        "_stops",
        "_waiting_q",
        "adapter",
        "at",
        "error",
        "fill",
        "grammar",
        "line",
        "method",
        "prompt_logprobs",
        "rid",
        "rule",
        "speculation",
        "state",
        "stop_token_ids",
        "tables",
        "tokens_np",
    )

    def __init__(
        self,
        rid: int,
        tokens_np: IntArray,  # [capacity]
        num_tokens: int,
        num_prompt: int,
        max_total: int,
        num_computed: int,
        state: SamplingState,
        speculation: Speculation,
        stop_token_ids: frozenset[int],
        prompt_logprobs: int | None,
        tables: BlockTables,
        line: int,
        adapter: int = 0,
    ) -> None:
        super().__init__()
        self.at = ctypes.addressof(self)
        """Where the `RowBook` lies."""
        self.rid = rid
        self.num_tokens = num_tokens
        self.num_prompt = num_prompt
        self.max_total = max_total
        self.num_computed = num_computed
        self.state = state
        self.speculation = speculation
        self.stop_token_ids = stop_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.tables = tables
        self.line = line
        self.adapter = adapter
        self._line_np = _NO_BLOCKS
        """The request's line where it was when its blocks changed last. Other requests' lines may grow away from under
        it: what it shows stays as it is until then."""
        self.grammar: Cursor | None = None
        self.kind = kind_of(state, speculation)
        self.error: Exception | None = None
        """Why the request cannot go on, since it entered."""
        self.fill: dict[str, DrafterFill] = {}
        self.method = speculation.method
        self.rule = effective_rule(state, speculation.rule)
        """The rule that decides the request, see `effective_rule`."""
        self._proposal = EMPTY_PROPOSAL
        self._waiting_q: torch.Tensor | None = None
        self._has_tokens(tokens_np)
        self._stops = array("i", sorted(token for token in stop_token_ids if 0 <= token < 1 << 31))
        self.stops_at, self.num_stops = self._stops.buffer_info()
        self.native_rule = -1
        ctypes.memmove(self.at + _DRAWS, state.draw_bytes, DRAW.size)

    @property
    def proposal(self) -> Proposal:
        """The proposal that waits to be verified."""
        n = self.num_waiting
        if not n:
            return EMPTY_PROPOSAL
        if self.placed == 2:
            q, tokens, parents = self._waiting_q, tuple(self.drafts[:n]), tuple(self.parents[:n])
            name = method_name(self.method_number)
            if parents == chain_parents(n):
                parents = chain_parents(n)  # always the same object for a length
            if not self.draw or q is None:
                return Proposal(tokens, parents, name)
            return Proposal(tokens, parents, name, "independent", q, tuple(self.q_rows[:n]))
        return self._proposal

    @proposal.setter
    def proposal(self, proposal: Proposal) -> None:
        self._proposal = proposal
        count = len(proposal.tokens)
        self.num_waiting, self.placed = count, 0
        if count:
            self.drafts[:count] = list(proposal.tokens)
            self.parents[:count] = list(proposal.parents)

    def keep(self, proposal: Proposal) -> None:
        """The waiting proposal, whose numbers stand in the book."""
        self._proposal = proposal

    def keep_q(self, q: torch.Tensor | None) -> None:
        """The distributions of the drafts that wait in the book."""
        self._waiting_q = q

    def _has_tokens(self, tokens_np: IntArray) -> None:
        self.tokens_np = tokens_np
        self.tokens_at, self.capacity = address(tokens_np), len(tokens_np)

    @property
    def is_full(self) -> bool:
        """Whether the request has all its tokens, which the scheduler may not know yet."""
        return self.num_tokens >= self.max_total

    @property
    def blocks_np(self) -> IntArray:
        """[num_blocks] a view of the request's block ids."""
        return self._line_np[: self.num_blocks]

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
        at = tables.at + self.line * tables.line_bytes
        if at != self.blocks_at:
            self._line_np, self.blocks_at = tables.line(self.line), at

    def append(self, token_ids: Sequence[int]) -> None:
        known, tokens_np = self.num_tokens, self.tokens_np
        end = known + len(token_ids)
        if end > len(tokens_np):
            # Accepted tokens past max_total are cut by the scheduler; until it has, they are kept here too.
            tokens_np = np.empty(end + 64, np.int32)
            tokens_np[:known] = self.tokens_np[:known]
            self._has_tokens(tokens_np)
        if len(token_ids) < 4:  # a store into a slice takes four times as long
            for i, token in enumerate(token_ids, known):
                tokens_np[i] = token
        else:
            tokens_np[known:end] = token_ids
        self.num_tokens = end
