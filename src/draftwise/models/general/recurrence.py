"""Modules with a state, in one pass: which rows are computed together, from which state, and which states are kept.

What a request cannot take back is computed in one call, if the module can. Every row that it may take back is a call of
its own, together with a row of each other request, and leaves a snapshot. Plain decoding and drafts go the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftwise.kv.states import Begun, StateStore
from draftwise.models.general.carried import Unit, first_rows, map_rows, rows_shape
from draftwise.models.general.hoisting import Hoisted
from draftwise.types import StepInput


@dataclass(frozen=True, slots=True)
class Call:
    """Rows of a pass that a module computes in one call: n tokens of each of B requests.

    ``rows`` [B * n] of the pass, a request's side by side; ``source`` [B] places of their states, None: from none;
    ``target`` [B] places for the states behind the last token of each.
    """

    rows: Tensor
    count: int  # B
    source: Tensor | None
    target: Tensor


class Recurrence:
    """A pass over R requests."""

    def __init__(self, batch: StepInput, store: StateStore) -> None:
        """Raises StateLost if a request goes on where nothing was kept."""
        assert batch.states is not None, "models with recurrent state need to know who may take back what"
        assert batch.attention.ancestors_np is None, "no trees are verified with recurrent state"
        self._store = store
        self._device = batch.token_ids.device
        self._begun: list[tuple[int, int, Begun]] = []  # rows start .. end - 1 of the batch
        starts = batch.attention.query_start_np.tolist()
        contexts = batch.attention.context_len_np.tolist()
        for r, (slot, revocable) in enumerate(zip(*batch.states, strict=True)):
            start, end = starts[r], starts[r + 1]
            after = contexts[r] + end - start
            self._begun.append((start, end, store.begin(slot, contexts[r], after - revocable, after)))

    def part(self, rows: Tensor | None) -> PartRunner:
        """The runner of the modules in one call of the model, which has rows ``rows`` [B * n] of the batch, all that
        a
        request has side by side; None: all rows of the batch, in order."""
        if rows is None:
            return PartRunner(self._store, self._begun, self._device)
        places = {row: place for place, row in enumerate(rows.tolist())}
        own = [
            (places[start], places[start] + end - start, begun)
            for start, end, begun in self._begun
            if start in places
        ]
        return PartRunner(self._store, own, self._device)


class PartRunner:
    """See `carried.Runner`."""

    def __init__(
        self, store: StateStore, begun: Sequence[tuple[int, int, Begun]], device: torch.device
    ) -> None:
        self._store = store
        self._begun = begun
        self._device = device
        self._calls: dict[tuple[bool, bool], list[Call]] = {}

    def run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        able = unit.chunks, unit.batches
        calls = self._calls.get(able)
        if calls is None:
            calls = self._calls[able] = self._planned(*able)
        args, kwargs = unit.needed(args, kwargs)
        if len(calls) == 1 and calls[0].count == 1:
            return unit.answer(self._computed(unit, calls[0], args, kwargs))
        hoisted = Hoisted.of(unit.module, unit.ends) if len(calls) > 1 else None
        if hoisted is None:
            return unit.answer(self._gathered(unit, calls, args, kwargs, None))
        try:
            hoisted.begin(first_rows(args, kwargs).flatten(0, 1))
            rows = self._gathered(unit, calls, args, kwargs, hoisted)
        finally:
            hoisted.end()
        return unit.answer([hoisted.finished(rows[0]), *rows[1:]])

    def _gathered(
        self,
        unit: Unit,
        calls: Sequence[Call],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hoisted: Hoisted | None,
    ) -> list[Tensor]:
        """The module's results in these calls, put together: tensors [B, n, ...] of all rows."""
        shape = rows_shape(args, kwargs)
        whole: list[Tensor] = []
        for call in calls:
            own_args, own_kwargs = map_rows((args, kwargs), shape, partial(_taken, call))
            if hoisted is not None:
                hoisted.take(call.rows, call.count)
            answer = self._computed(unit, call, own_args, own_kwargs)
            if not whole:
                whole = [x.new_empty((*shape, *x.shape[2:])) for x in answer]
            for target, part in zip(whole, answer, strict=True):
                target.view(-1, *part.shape[2:]).index_copy_(0, call.rows, part.flatten(0, 1))
        return whole

    def _computed(
        self, unit: Unit, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """One call, from the states in the store to those behind it."""
        stores = self._store.tensors[unit.first : unit.first + len(unit.tensors)]
        source = call.source
        states = None if source is None else [tensor.index_select(0, source) for tensor in stores]
        answer, after = unit.call(args, kwargs, states)
        for tensor, state in zip(stores, after, strict=True):
            tensor.index_copy_(0, call.target, state.to(tensor.dtype))
        return answer

    def _planned(self, chunks: bool, batches: bool) -> list[Call]:
        """The calls of a module in order; ``chunks``: it can compute several tokens behind a state; ``batches``: tokens
        of several requests.

        Example: request 0 computes rows 0 1 2 of a prompt; request 1 rows 3 4 5, a root and two drafts, from place 4 to
        places 4 5 6; request 2 its root, row 6, in place 8. Calls: rows 0 1 2; rows 3 6 from places 4 8 to 4 8; row 4
        from 4 to 5; row 5 from 5 to 6.
        """
        calls: list[Call] = []
        steps: list[list[tuple[int, int, int]]] = []  # row, source, target
        for start, end, (source, made) in self._begun:
            head = end - len(made) + 1  # rows before it end in made[0]
            row, place = start, source
            if source is None or (chunks and head - start > 1):
                calls.append(self._call(range(start, head), 1, source, made[:1]))
                row, place = head, made[0]
            for step, i in enumerate(range(row, end)):
                assert place is not None
                target = made[max(i - head + 1, 0)]
                if step == len(steps):
                    steps.append([])
                steps[step].append((i, place, target))
                place = target
        if not batches:
            steps = [[one] for members in steps for one in members]
        for members in steps:
            rows, sources, targets = zip(*members, strict=True)
            calls.append(self._call(rows, len(rows), sources, targets))
        return calls

    def _call(self, rows: Any, count: int, source: Any, target: Any) -> Call:
        if isinstance(source, int):
            source = [source]
        return Call(
            self._index(rows), count, None if source is None else self._index(source), self._index(target)
        )

    def _index(self, values: Any) -> Tensor:
        return torch.tensor([*values], dtype=torch.int64, device=self._device)


def _taken(call: Call, x: Tensor) -> Tensor:
    """Rows [T, ...] -> [B, n, ...]."""
    return x.index_select(0, call.rows).view(call.count, -1, *x.shape[1:])
