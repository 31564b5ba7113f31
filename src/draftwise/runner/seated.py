"""A drafter as steps of seats call it: through the guard, and with its answers checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from torch import Tensor

from draftwise.graphs.loop import LoopKind
from draftwise.graphs.seats.drafter import Place, SeatedDrafter
from draftwise.graphs.seats.features import DrafterSeats
from draftwise.graphs.seats.lookup import LookUp
from draftwise.propose.base import Proposer
from draftwise.runner.guard import Guard, whole_number
from draftwise.runner.rows import Row


class Seated:
    """See `SeatedDrafter`. Where it fails, the answer is None, and the requests concerned decode plainly from then
    on."""

    def __init__(self, method: str, drafter: SeatedDrafter, guard: Guard) -> None:
        self._method = method
        self._drafter = drafter
        self._guard = guard
        self.steps = drafter.steps
        self.draws = drafter.draws
        self.plan = drafter.plan
        self.scratch = drafter.scratch
        self.joined = drafter.joined

    @classmethod
    def of(cls, method: str, guard: Guard) -> Seated | LookUp | None:
        """The proposer of this name, if it can take part."""

        def call(proposer: Proposer) -> Seated | LookUp | None:
            drafter = proposer.seated()
            return cls(method, drafter, guard) if isinstance(drafter, SeatedDrafter) else drafter

        return guard.ask(method, "seated", (), call, None)

    def usual_kind(self, greedy: bool, rule: str) -> LoopKind:
        """`SeatedDrafter.kind` without a request. Raises its errors."""
        answer = self._drafter.kind(greedy, rule)
        if answer not in get_args(LoopKind):
            raise ValueError(f"{answer!r} is not a kind of draws")
        return answer

    def kind(self, row: Row) -> LoopKind | None:
        """How drafts of a request are drawn."""
        greedy, rule = row.state.is_greedy, row.speculation.rule
        return self._guard.ask(
            self._method, "seated_kind", [row], lambda _: self.usual_kind(greedy, rule), None
        )

    def catch_up(self, row: Row) -> int | None:
        """Let the drafter read what the target has read of a request's prompt: the tokens that it has then; None: it
        failed, or has no storage."""
        fill = row.fill.get(self._method)
        if fill is None:
            return None
        known, filled = row.num_tokens, fill.tokens
        known_np = row.tokens_np[:known]

        def call(_: Proposer) -> int:
            answer = self._drafter.catch_up(row.rid, known_np, row.blocks_np, filled)
            return whole_number(answer, known, "what is filled")

        return self._guard.ask(self._method, "seated_catch_up", [row], call, None)

    def place(self, row: Row) -> Place | None:
        """Where a request stands; None: it cannot have a seat yet."""
        known, waiting = row.num_tokens, len(row.proposal)
        fill = row.fill.get(self._method)
        if fill is None:  # it has no storage
            return Place(known, 0, 0)

        def call(_: Proposer) -> Place | None:
            place = self._drafter.place(row.rid, known, fill.tokens, fill.drafts, waiting)
            if place is None:
                return None
            fed, stored, first_key, *rest = place
            return Place(
                whole_number(fed, known, "what is filled"),
                whole_number(stored, waiting, "the number of stored drafts"),
                whole_number(first_key, known, "the first key"),
                *rest,
            )

        return self._guard.ask(self._method, "seated_place", [row], call, None)

    def seats(self, rows: Sequence[Row], requests: int, keys: int, kind: LoopKind) -> DrafterSeats | None:
        """The smallest loop for exactly so many requests of up to ``keys`` keys; ``rows`` want it."""
        return self._guard.ask(
            self._method,
            "seated_seats",
            rows,
            lambda _: self._drafter.seats(requests, keys, kind),
            None,
        )

    def prepare(self, rows: Sequence[Row]) -> bool:
        """These requests are about to take seats; False: they cannot."""

        def call(_: Proposer) -> bool:
            self._drafter.prepare()
            return True

        return self._guard.ask(self._method, "seated_prepare", rows, call, False)

    def went_on(self, row: Row, fed: int, waiting: int) -> tuple[int, int] | None:
        """A step was read: the tokens and the drafts behind them that the drafter has now; None: it failed, or has no
        storage."""
        if self._method not in row.fill:
            return None

        def call(_: Proposer) -> tuple[int, int]:
            tokens, drafts = self._drafter.went_on(row.rid, fed, waiting)
            return (
                whole_number(tokens, row.num_tokens, "what is filled"),
                whole_number(drafts, waiting, "the number of stored drafts"),
            )

        return self._guard.ask(self._method, "seated_went_on", [row], call, None)

    def left(self, row: Row, fed: int, feature: Tensor | None) -> None:
        """The request goes on in the ordinary way."""
        self._guard.ask(
            self._method,
            "seated_left",
            [row],
            lambda _: self._drafter.left(row.rid, row.num_tokens, fed, feature),
            None,
        )
