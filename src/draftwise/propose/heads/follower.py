"""What a head on the target's hidden states has been told of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from draftwise.models.heads.base import HeadModel
from draftwise.propose.base import Committed, DraftRow, Proposer
from draftwise.propose.columns import ColumnFollower, ReadColumns
from draftwise.propose.heads.passes import Fill, HeadPasses
from draftwise.propose.heads.state import MANY_FEATURES, Features, HeadState
from draftwise.propose.heads.steady import SteadyHeads
from draftwise.types import IntArray, StepInput, TargetOutput

_PENDING_ROWS = 32
"""A request with so many rows to come is filled at once: many steps without drafting. It bounds the memory of waiting
features."""
_FEW_ROWS = 16
"""Rows per request, on average, of which it does not matter how long those of the others are kept."""


class HeadFollower(Proposer, ColumnFollower):
    """Keeps what the target computed for committed tokens until the head reads it.

    It waits (`FeatureSource`) until the head drafts, or until there is much of it, and becomes features then. Nothing
    is kept of a step that the head is not told of (`RowPlan.follow`); the head goes on behind a gap.

    The feature of the last token of every full block is kept beside the block, so that a prefix-cache hit whose blocks
    are filled continues as if it had never left; see `HeadState` for one whose blocks are not.
    """

    has_storage: ClassVar[bool] = True
    observes: ClassVar[bool] = True

    def __init__(self, head: HeadModel, block_size: int) -> None:
        self._block_size = block_size
        self._passes = HeadPasses(head, block_size)
        self._known: dict[int, HeadState] = {}  # of all requests, see `_states`
        self._steady: SteadyHeads | None = None
        """The requests of the latest drafts in columns, whose states it has."""
        self._output: TargetOutput | None = None  # of the step's target pass, until `committed`
        self.capture_layers = head.feature_layers or ()

    @property
    def _states(self) -> dict[int, HeadState]:
        """By request; what is kept of many side by side is written into them."""
        steady, self._steady = self._steady, None
        if steady is not None:
            steady.write()
        return self._known

    @property
    def reads_columns(self) -> bool:
        return self._steady is not None

    def observe(self, rids: Sequence[int], batch: StepInput, output: TargetOutput) -> None:
        self._output = output

    def committed(self, parts: Sequence[Committed]) -> Sequence[int] | None:
        output, self._output = self._output, None
        assert output is not None, "observe comes before committed"
        passes, source, states = self._passes, self._passes.source, self._states
        size = self._block_size
        total = sum([len(part.rows) for part in parts])
        # A prompt among them: what the others keep of the step must not keep all of it.
        crowd = len(parts) > 1 and total > max(MANY_FEATURES, _FEW_ROWS * len(parts))
        features = source.expected()
        rows: list[int] = []
        told: list[HeadState] = []
        ends: list[tuple[int, int]] = []
        copies: list[tuple[Features, int, int]] = []
        many: list[Fill] = []
        for part in parts:
            first_token, first, count = part.first_token, len(rows), len(part.rows)
            state = states.get(part.rid)
            if state is None:
                state = states[part.rid] = passes.open(first_token, part.filled, part.block_table_np)
            elif state.tracks[0].queue.end != first_token:
                state = states[part.rid] = state.skipped(first_token)
            told.append(state)
            rows += part.rows
            if -(first_token + 1) % size < count:
                ends += [
                    (first + i, block) for i, block in passes.ends(first_token, count, part.block_table_np)
                ]
            if crowd:
                own = Features()
                copies.append((own, first, first + count))
                state.tracks[0].queue.append(own, 0, count)
            else:
                state.tracks[0].queue.append(features, first, first + count)
            read = first_token + count
            # A chunk of a prompt is filled at once, too: the next request may share it before this one drafts.
            if state.pending >= _PENDING_ROWS or read + 1 < part.num_tokens:
                # not the row of the first token that was not read: its slot need not be the request's yet
                many.append(Fill(state, part.token_ids_np, part.block_table_np, read))
        ends_np = np.array([[row for row, _ in ends], [block for _, block in ends]], np.int64)
        source.wait(output, np.array(rows, np.int64), ends_np, features)
        for own, first, stop in copies:
            own.give(features.value[first:stop].clone())
        source.bound()
        if not many:
            return None
        self._passes.fill(many)
        self.forward_time += self._passes.take_time()
        return [state.filled for state in told]

    def read_columns(self, read: ReadColumns) -> bool:
        steady, output = self._steady, self._output
        if steady is None or output is None or not steady.follows(read.rids, read.first_tokens_np):
            return False
        if read.most >= _PENDING_ROWS or len(read.rows_np) > max(MANY_FEATURES, _FEW_ROWS * len(read.rids)):
            return False
        self._output = None
        source = self._passes.source
        steady.came(source.wait(output, read.rows_np, read.ends_np), read.counts)
        source.bound()
        return True

    def trimmed(self, rid: int, num_tokens: int) -> None:
        state = self._states.get(rid)
        if state is not None:
            state.trimmed(num_tokens)

    def settle(self, rid: int, token_ids_np: IntArray, block_table_np: IntArray) -> int:
        state = self._states.get(rid)
        if state is None:
            return 0
        full = len(token_ids_np) - len(token_ids_np) % self._block_size
        if state.gap is None and state.filled < full <= state.seen + 1:  # all that is missing can be computed
            self._passes.fill([Fill(state, token_ids_np, block_table_np, full)])
            self.forward_time += self._passes.take_time()
        return min(state.filled, len(token_ids_np))

    def remove(self, rid: int) -> None:
        self._states.pop(rid, None)

    def filled_after(self, row: DraftRow) -> int:
        state = self._states.get(row.rid)
        return row.filled if state is None else state.filled
