"""The host's side of requests that take seats: what is copied to the device of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftwise.graphs.backend import GraphBackend
from draftwise.graphs.seats.memory import RULES, STATE, SeatMemory, form_of
from draftwise.graphs.seats.shaping import numbers_of
from draftwise.sampling.noise import signed_word
from draftwise.sampling.state import SamplingState
from draftwise.types import IntArray


@dataclass(frozen=True, slots=True)
class Entering:
    """A request that takes a seat; see `memory` for the words.

    ``scratch``: blocks that stand behind its own in its table, one after the other and again from the first one on.
    What a drafter writes behind the blocks that a plan gave goes there: drafts ahead of the next plan, and nodes of
    dynamic trees that are fed and not verified.
    """

    known: int
    root: int
    drafts: Sequence[int]
    parents: Sequence[int]  # of the drafts
    fed: int
    stored: int
    first_key: int
    rule: str
    sampling: SamplingState
    blocks_np: IntArray
    scratch: range
    source: int
    q: Mapping[int, Tensor] | None  # [V] float32 each, over the target's vocabulary, by row of the source
    drafter: int = 0  # number of its drafter
    carried: Tensor | None = None  # see `SeatFeatures`
    adapter: int = 0  # its place in `StackedAdditions`, 0: none
    text_np: IntArray | None = None  # [known] all tokens, of whoever looks up in them


class Entries:
    """Copies requests to the rows of their seats. ``turns``: steps that may be on their way."""

    def __init__(self, memory: SeatMemory, backend: GraphBackend, turns: int) -> None:
        self._memory = memory
        self._sizes = [STATE + memory.drafts, memory.forms[0].numel(), (memory.limits.table_width + 1) // 2]
        words = sum(self._sizes)
        self._buffers = [backend.host_buffer(memory.seats * words) for _ in range(turns)]
        self._entered = torch.zeros((memory.seats, words), dtype=torch.int64, device=memory.device)

    def take_in(self, turn: int, entering: Sequence[tuple[int, Entering]]) -> None:
        """Once before the step of this turn: requests, with their seats."""
        memory, sizes = self._memory, self._sizes
        buffer = self._buffers[turn]
        rows_np = buffer.numpy().reshape(memory.seats, -1)
        for row_np, (_, new) in zip(rows_np, entering, strict=False):
            state_np, form_np, table_np = np.split(row_np, np.cumsum(sizes)[:2])
            state = new.sampling
            state_np[:STATE] = (
                new.known,
                new.root,
                len(new.drafts),
                new.fed,
                new.stored,
                signed_word(state.seed & ((1 << 64) - 1)),
                state.sample_index,
                np.float64(state.temperature).view(np.int64),
                RULES.index(new.rule),
                new.first_key,
                *numbers_of(state),
                new.source,
                new.adapter,
            )
            state_np[STATE:] = 0
            state_np[STATE : STATE + len(new.drafts)] = new.drafts
            form = form_of(new.parents, memory.drafts)
            form[3, 0] = 1
            form_np[:] = form.flatten().numpy()
            table_np = table_np.view(np.int32)
            table_np[:] = new.scratch.start + np.arange(len(table_np)) % len(new.scratch)
            table_np[: len(new.blocks_np)] = new.blocks_np
        width = rows_np.shape[1]
        entered = self._entered[: len(entering)]
        entered.view(-1).copy_(buffer[: len(entering) * width], non_blocking=True)
        for came, (seat, new) in zip(entered, entering, strict=True):
            words, own_form, table = torch.split(came, sizes)
            memory.state[seat].copy_(words)
            memory.own_forms[seat].view(-1).copy_(own_form)
            memory.tables[seat].copy_(table.view(torch.int32)[: memory.tables.shape[1]])
            for row, q in (new.q or {}).items():
                memory.q[new.source][seat, row].copy_(q)
