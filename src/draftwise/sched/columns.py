"""Plans and results of steps in columns: a record per request is made only when somebody reads it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self, overload

from draftwise.names import method_name, method_number
from draftwise.types import RowPlan, RowResult, chain_parents, new_record, tree_depth

_NOT_FINITE = "RequestError: the model's logits are not finite"
_NO_BLOCKS: tuple[int, ...] = ()

NUMBERS = 8
"""Columns of `RowColumns.numbers`."""
_DRAFTED, _ACCEPTED, _DEPTH, _METHOD, PROPOSED, _SIZE, _FIRST, _LOOK = range(NUMBERS)


class PlanColumns(Sequence[RowPlan]):
    """The rows of a plan. ``num_new``, ``num_draft``, ``budgets`` [R] int32, as `RowPlan` has them; ``blocks``: new
    ones by place in the plan; ``resting``: places of those whose drafters are not told (`RowPlan.follow`)."""

    __slots__ = ("_by_rid", "blocks", "budgets", "num_draft", "num_new", "resting", "rids")

    def __init__(
        self,
        rids: Sequence[int],
        num_new: array[int],
        num_draft: array[int],
        budgets: array[int],
        blocks: Mapping[int, tuple[int, ...]],
        resting: frozenset[int] = frozenset(),
    ) -> None:
        self.rids = rids
        self.num_new = num_new
        self.num_draft = num_draft
        self.budgets = budgets
        self.blocks = blocks
        self.resting = resting
        self._by_rid: dict[int, RowPlan] | None = None

    @classmethod
    def of(cls, rows: Sequence[RowPlan]) -> Self:
        """These rows; themselves if they are in columns."""
        if isinstance(rows, cls):
            return rows
        return cls(
            [row.rid for row in rows],
            array("i", [row.num_new for row in rows]),
            array("i", [row.num_draft for row in rows]),
            array("i", [row.draft_budget for row in rows]),
            {i: row.new_block_ids for i, row in enumerate(rows) if row.new_block_ids},
            frozenset([i for i, row in enumerate(rows) if not row.follow]),
        )

    @property
    def by_rid(self) -> Mapping[int, RowPlan]:
        """The rows by request."""
        if self._by_rid is None:
            self._by_rid = dict(zip(self.rids, self, strict=True))
        return self._by_rid

    def __len__(self) -> int:
        return len(self.rids)

    @overload
    def __getitem__(self, place: int) -> RowPlan: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RowPlan]: ...
    def __getitem__(self, place: int | slice) -> RowPlan | Sequence[RowPlan]:
        if isinstance(place, slice):
            return tuple(self)[place]
        i = range(len(self.rids))[place]
        return new_record(
            RowPlan,
            (
                self.rids[i],
                self.num_new[i],
                self.num_draft[i],
                self.budgets[i],
                self.blocks.get(i, _NO_BLOCKS),
                i not in self.resting,
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PlanColumns, (
            self.rids,
            self.num_new,
            self.num_draft,
            self.budgets,
            self.blocks,
            self.resting,
        )


EMPTY_PLAN = PlanColumns((), array("i"), array("i"), array("i"), {})


class RowColumns(Sequence[RowResult]):
    """The results of R requests, D of which were decided in columns, with N nodes.

    ``numbers`` [8, R] int32: drafts verified, those accepted, depth of what was verified, number of the method that
    drafted it (`names.method_number`), drafts that wait now, tokens of the step, where they begin in ``tokens``, and
    whether somebody has to look at the request (`sched.taking`). ``nodes`` [2, N]: tokens and parents of what was
    verified, one request of the D after the other; ``paths`` [N]: the accepted nodes, at the same places. ``others``:
    by place the results of requests that were decided one by one.
    """

    __slots__ = ("_firsts", "nodes", "numbers", "others", "paths", "rids", "tokens")

    def __init__(
        self,
        rids: Sequence[int],
        numbers: array[int],
        tokens: array[int],
        nodes: array[int],
        paths: array[int],
        others: Mapping[int, RowResult],
    ) -> None:
        self.rids = rids
        self.numbers = numbers
        self.tokens = tokens
        self.nodes = nodes
        self.paths = paths
        self.others = others
        self._firsts: list[int] | None = None

    def take(self, others: Mapping[int, RowResult]) -> None:
        """The results of the others, written into ``numbers`` and ``tokens``, too."""
        self.others, count = others, len(self.rids)
        numbers = self.numbers
        for i, row in others.items():
            drafted, looked_at = row.num_drafted, (row.prompt_logprobs, row.kv_transfer_params, row.error)
            own = (
                drafted,
                row.num_accepted,
                tree_depth(row.draft_parents) if drafted else 0,
                method_number(row.method),
                row.num_proposed,
                len(row.token_ids),
                len(self.tokens),
                any(value is not None for value in looked_at),
            )
            for k, value in enumerate(own):
                numbers[k * count + i] = value
            self.tokens.extend(row.token_ids)

    def __len__(self) -> int:
        return len(self.rids)

    @overload
    def __getitem__(self, place: int) -> RowResult: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RowResult]: ...
    def __getitem__(self, place: int | slice) -> RowResult | Sequence[RowResult]:
        if isinstance(place, slice):
            return tuple(self)[place]
        count = len(self.rids)
        i = range(count)[place]
        if i in self.others:
            return self.others[i]
        drafted, accepted, _, method, proposed, size, first, _ = self.numbers[i::count]
        rid = self.rids[i]
        if not size:
            return RowResult(rid, error=_NOT_FINITE)
        path: tuple[int, ...] = ()
        drafts: tuple[int, ...] = ()
        parents: tuple[int, ...] = ()
        if drafted:
            node, total = self._node(i), len(self.paths)
            path = tuple(self.paths[node : node + accepted])
            drafts = tuple(self.nodes[node : node + drafted])
            parents = tuple(self.nodes[total + node : total + node + drafted])
            chain = chain_parents(drafted)
            if parents == chain:
                parents = chain  # always the same object for a length
        return new_record(
            RowResult,
            (
                rid,
                tuple(self.tokens[first : first + size]),
                drafted,
                accepted,
                path,
                drafts,
                parents,
                method_name(method) if drafted else "none",
                proposed,
                None,
                None,
                None,
                None,
            ),
        )

    def outcomes(self) -> Iterable[tuple[int, int, int, int, int, int]]:
        """What a controller learns from (`adapt.outcomes.Outcome`), without making a record for each request."""
        n, numbers = len(self.rids), self.numbers
        return zip(
            self.rids,
            numbers[:n],
            numbers[n : 2 * n],
            numbers[2 * n : 3 * n],
            numbers[4 * n : 5 * n],
            numbers[5 * n : 6 * n],
            strict=True,
        )

    def _node(self, place: int) -> int:
        """The first node of a request that was decided in columns."""
        if self._firsts is None:
            drafted = self.numbers[: len(self.rids)].tolist()
            for i in self.others:
                drafted[i] = 0
            self._firsts = [0, *accumulate(drafted)]
        return self._firsts[place]

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # another process numbers methods in its own way
