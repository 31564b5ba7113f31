"""Requests that decode on the device (`graphs.seats`): who takes a seat there, what a plan tells them, and what the
host writes down of what came of it.

A request takes a seat when it has computed its prompt and is of a kind that the device can go on with, and leaves it
when it ends, or a plan wants of it what the device cannot do. Its neighbours are not concerned. Steps are launched one
behind the other: the rows of a step are made of what the one before it left on the device, and the host reads that
later. Requests without a seat take part in the same plans, in the ordinary way (`runner.local`).

Late writes do no harm. A request that has ended, or was cancelled, may take part in one more step before a plan says
so. What that step writes for it goes to keys from its newest root on, behind all tokens that the scheduler ever counts
as computed; so never to a block that was hashed for others to find. Blocks that were not are handed out by a later plan
only, and whoever gets them writes, later on the same stream, every slot before reading it. In a later step the seat is
nobody's, or another one's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from draftwise.graphs.buffers import PassSeats
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.loop import KINDS, LoopKind
from draftwise.graphs.seats import memory as at
from draftwise.graphs.seats.entering import Entering
from draftwise.graphs.seats.features import SeatedLoop
from draftwise.graphs.seats.lookup import LookUp
from draftwise.graphs.seats.memory import Limits, SeatMemory
from draftwise.graphs.seats.shaping import LOGPROBS
from draftwise.graphs.seats.step import SeatedSteps
from draftwise.graphs.seats.texts import PAST, output_of
from draftwise.propose.base import Proposer
from draftwise.runner.drafting import Drafting
from draftwise.runner.rows import Row
from draftwise.runner.seat_entry import Scratch, entering
from draftwise.runner.seat_results import Flight, Member, record
from draftwise.runner.seating import Seating
from draftwise.types import EMPTY_PROPOSAL, IntArray, RowPlan, RowResult, StepPlan
from draftwise.verify.rates import SyntheticAcceptance

logger = logging.getLogger("draftwise")


class Seats:
    """The seats of one executor."""

    def __init__(
        self,
        target: GraphedDecoder,
        proposers: Mapping[str, Proposer],
        drafting: Drafting,
        rows: Mapping[int, Row],
        *,
        block_size: int,
        synthetic: SyntheticAcceptance | None = None,
        forced: SyntheticAcceptance | None = None,
        spare_block: int,
    ) -> None:
        """``rows``: the executor's, by request. ``forced``: what stands for rule greedy, in benchmarks.
        ``spare_block``: of every storage, nobody's."""
        self._drafting = drafting
        self._rows = rows
        self._seating = seating = Seating(
            proposers,
            drafting.guard,
            synthetic,
            forced,
            lambda rows: bool(target.pass_seats(rows)),
            target.place_of,
        )
        # requests that draft less than others, or not at all, have padding rows
        widths = {1, *(1 + seating.steps_of(method) for method in proposers)}
        self._passes = {
            (width, adapted): target.pass_seats(width, adapted=adapted)
            for width in widths
            for adapted in (False, True)
        }
        widest = self._passes[max(widths), False]
        self._count = max((seats.rows.shape.requests for seats in widest), default=0)
        if not self._count:
            return
        longest = max((seats.rows.tables.width for seats in widest), default=0)
        limits = Limits(
            self._count,
            max(widths) - 1,
            longest,
            block_size,
            target.config.vocab_size,
            loops=len(KINDS) * len(seating.drafters),
            texts=bool(seating.look_ups),
            past=PAST if any(look.past for look in seating.look_ups.values()) else 0,
        )
        memory = SeatMemory(limits, target.backend.device)
        for method, drafter in seating.drafters.items():
            plan = drafter.plan
            for kind in () if plan is None else KINDS:
                memory.set_form(seating.loop_of(method, kind), None if plan is None else plan.shape)
        self._steps = SeatedSteps(
            memory,
            target.backend,
            rates=seating.rates,
            num_sources=len(seating.drafters),
        )
        self._scratch = Scratch(spare_block, seating.drafters)
        self._members: dict[int, Member] = {}
        self._free = list(range(self._count - 1, -1, -1))
        self._fresh: dict[int, int] = {}  # numbers of the first pages that the coming plan adds, by request
        self._without: set[tuple[str, LoopKind]] = set()  # ways for which nothing is captured
        self._flights: deque[Flight] = deque()
        self._outputs: list[IntArray] = []  # of requests that have ended, for look-ups
        # seats that take no part get page 0 with its present content
        self._nothing_np: npt.NDArray[np.int64] = np.zeros(tuple(memory.told.shape), np.int64)
        self.num_steps = 0
        self.num_entered = 0

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._count > 0

    @property
    def num_captured(self) -> int:
        """Graphs of steps that were captured, at the start or when they were needed."""
        return self._steps.num_captured

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture steps of one request under the usual rules, so that all kernels are compiled; those for more are
        captured when they are needed, which takes milliseconds. False, and a warning: the device refuses it."""
        try:
            for method in dict.fromkeys(("none", *self._seating.look_ups, *self._seating.drafters)):
                drafter = self._seating.drafters.get(method)
                for rule in ("greedy", "coupled", "rejection"):
                    kind: LoopKind = (
                        "argmax" if drafter is None else drafter.usual_kind(rule == "greedy", rule)
                    )
                    self._capture(method, kind, rule)
        except Exception as error:
            logger.warning(
                "no step will stay on the device, for none could be captured: %s", error, exc_info=True
            )
            return False
        return True

    def _capture(self, method: str, kind: LoopKind, rule: str) -> None:
        found = self._shape({(method, kind): []}, 1, 0)
        if found is not None:
            self._steps.capture(*found[:2], [rule], look_ups=found[2])

    # ------------------------------------------------------------------------------- who has a seat

    def leave(self, plan: StepPlan) -> None:
        """Let those go of whom a plan, which was not applied yet, wants what the device cannot do. Then, and only then,
        steps are waited for."""
        going: list[Member] = []
        for planned in plan.rows:
            member = self._members.get(planned.rid)
            if member is not None and not self._goes_on(member, planned):
                going.append(member)
        if going:
            self._give_back(going)
        rows = self._rows
        self._fresh = {p.rid: rows[p.rid].num_blocks for p in plan.rows if p.rid in self._members}

    def _goes_on(self, member: Member, planned: RowPlan) -> bool:
        if len(planned.new_block_ids) > self._steps.memory.pages:
            return False
        return self._seating.goes_on(member.way, member.row, planned)

    def end(self) -> None:
        """Wait for running steps, and return all requests to the ordinary way."""
        self._give_back(list(self._members.values()))

    def _give_back(self, going: Sequence[Member]) -> None:
        """These go on in the ordinary way, from where they stand."""
        while self._flights:
            self._land(self._flights.popleft())
        for member in going:
            row = member.row
            self._free_seat(row.rid)
            if self._rows.get(row.rid) is not row or member.failed or row.is_full:
                continue
            count, way = len(member.drafts), member.way
            if member.before is not None:
                row.proposal = member.before
                continue
            if count:
                q = self._steps.q_of(member.seat, 0 if member.looked_up else member.source)
                row.proposal = self._seating.proposal_of(
                    way, member.drafts, member.parents, member.looked_up, q
                )
            seated = self._seating.drafters.get(way.method)
            if seated is not None and not row.drafting_failed:
                number = self._seating.number_of(way.method)
                feature = self._steps.features.of(member.seat, number, member.accepted)
                seated.left(row, member.fed, feature)

    def _free_seat(self, rid: int) -> None:
        member = self._members.pop(rid)
        self._free.append(member.seat)
        self._scratch.give_back(member.way.method, member.scratch)

    def arriving(self, plan: StepPlan) -> list[RowPlan]:
        """Free the seats of requests that are gone. Returns the requests at the end of a prompt, which take a seat
        once all but its last token are computed. The plan was applied. A seat's step then computes that token, so
        that nobody waits for
        what follows on it."""
        for rid in plan.removed:
            member = self._members.get(rid)
            if member is not None:
                self._free_seat(rid)
                self._keep_output(member)
        found: list[RowPlan] = []
        for planned in plan.rows:
            row = self._rows[planned.rid]
            if planned.rid in self._members or row.proposal.tokens or len(found) >= len(self._free):
                continue
            way = self._seating.of(row, planned)
            if way is not None and (way.method, way.kind) not in self._without:
                found.append(planned)
        return found

    def _keep_output(self, member: Member) -> None:
        """What a request has said may be looked up by others with its method."""
        look = self._seating.look_ups.get(member.way.method)
        row = member.row
        if look is not None and look.past and row.num_tokens > row.num_prompt:
            self._outputs.append(output_of(row.tokens_np[: row.num_tokens], row.num_prompt))

    def forget(self) -> None:
        """Drop what was kept of past requests."""
        self._outputs = []
        self._steps.texts.forget()

    def caught_up(self, arriving: Sequence[RowPlan]) -> None:
        """All but their last tokens are computed: let their drafters read them."""
        for planned in arriving:
            row = self._rows[planned.rid]
            method = row.speculation.method
            seated = self._seating.drafters.get(method)
            if seated is None or row.drafting_failed or not planned.draft_budget:
                continue
            filled = seated.catch_up(row)
            if filled is not None:
                self._drafting.fills.has(method, row, filled, 0)

    def take(self, plan: StepPlan) -> list[RowPlan]:
        """The requests with a seat in the coming step; call it after `arriving`. Others take seats now, if they
        can."""
        coming: list[tuple[int, Entering]] = []
        taking: list[RowPlan] = []
        for planned in plan.rows:
            member = self._members.get(planned.rid)
            if member is None:
                member = self._enter(planned, coming)
            if member is not None:
                taking.append(planned)
        self._close_up()
        if taking:  # a launch follows
            self._steps.enter([(self._members[rid].seat, new) for rid, new in coming], self._outputs)
            self._outputs = []
        return taking

    def _enter(self, planned: RowPlan, coming: list[tuple[int, Entering]]) -> Member | None:
        row, seating = self._rows[planned.rid], self._seating
        way = seating.of(row, planned) if self._free and planned.num_new == 1 else None
        if way is None or (way.method, way.kind) in self._without or not self._scratch.has(way.method):
            return None
        place = seating.place_of(way.method, row)
        seated = seating.drafters.get(way.method)
        if place is None or (seated is not None and not seated.prepare([row])):
            return None
        proposal, row.proposal = row.proposal, EMPTY_PROPOSAL
        source = seating.number_of(way.method) if way.kind == "draft" else 0
        if source and seated is not None:
            self._steps.open_source(source, seated.draws)
        self._free.sort(reverse=True)
        member = Member(
            row=row,
            seat=self._free.pop(),
            way=way,
            drafts=proposal.tokens,
            parents=proposal.parents,
            source=source,
            fed=place.fed,
            before=proposal,
            scratch=self._scratch.take(way.method),
            looked_up=proposal.method != seating.name_of(way.method, False),
        )
        self._members[row.rid] = member
        coming.append((row.rid, entering(member, proposal, place, seating)))
        self.num_entered += 1
        return member

    def _close_up(self) -> None:
        """When fewer than half of the seats up to the last one are taken, those at the end move to free ones: a step
        computes rows for every seat before the last that is taken."""
        members = sorted(self._members.values(), key=lambda member: member.seat)
        if not members or 2 * len(members) >= members[-1].seat + 1:
            return
        free = sorted(self._free)
        for member in reversed(members):
            if not free or free[0] > member.seat:
                break
            seat = free.pop(0)
            self._steps.move(member.seat, seat)
            free.append(member.seat)
            member.seat = seat
        self._free = free

    # ---------------------------------------------------------------------------------------- a step

    def launch(self, taking: Sequence[RowPlan]) -> Flight | None:
        """Start a step of those who have seats, as `take` said. None: nothing is captured for them; they were given
        back."""
        while len(self._flights) > 1:  # their buffers are needed
            self._land(self._flights.popleft())
        members = [self._members[planned.rid] for planned in taking]
        ways: dict[tuple[str, LoopKind], list[Row]] = {}
        for member in members:
            ways.setdefault((member.way.method, member.way.kind), []).append(member.row)
        shaped: frozenset[str] = frozenset().union(*(member.way.shaped for member in members))
        rules = sorted({member.way.rule for member in members}, key=at.RULES.index)
        drafts = max((self._seating.steps_of(method) for method, _ in ways), default=0)
        reach = max(min(m.row.num_tokens + 3 * (drafts + 1), m.row.max_total + drafts) + 1 for m in members)
        wanted = 1 + max(member.seat for member in members)
        found = self._shape(ways, wanted, reach)
        if found is None:
            if not any(member.row.drafting_failed for member in members):
                self._without |= self._uncaptured(ways, wanted, reach)
            self.end()
            return None
        for member in members:
            member.before = None
        told_np = self._steps.told()
        told_np[:] = self._nothing_np
        pages = self._steps.memory.pages
        for member, planned in zip(members, taking, strict=True):
            row, way = member.row, member.way
            row_np = told_np[member.seat]
            number, look = self._seating.loop_of(way.method, way.kind), self._seating.look_of(way.method)
            if number or look:
                row_np[: at.TOLD] = (
                    row.max_total,
                    planned.num_draft,
                    planned.draft_budget,
                    number,
                    look,
                )
            else:  # the scheduler may not know that its drafter failed
                row_np[: at.TOLD] = (row.max_total, 0, 0, 0, 0)
            # no new block is said by the first page, as it is
            row_np[at.TOLD + pages :] = row.blocks_np[0]
            first = self._fresh.get(planned.rid)  # a new request has its whole table
            if first is not None:
                for i, block in enumerate(planned.new_block_ids):
                    row_np[at.TOLD + i], row_np[at.TOLD + pages + i] = first + i, block
        landing = self._steps.launch(*found[:2], rules, shaped, found[2])
        flight = Flight(landing, [(member, member.seat) for member in members])
        self._flights.append(flight)
        self.num_steps += 1
        return flight

    def _shape(
        self, ways: Mapping[tuple[str, LoopKind], Sequence[Row]], seats: int, keys: int
    ) -> tuple[PassSeats, list[SeatedLoop], list[tuple[int, LookUp]]] | None:
        """The smallest pass, and loops and look-ups beside it, for so many seats whose contexts reach so far."""
        seating = self._seating
        width = 1 + max((seating.steps_of(method) for method, _ in ways), default=0)
        drafting = [way for way in ways if way[0] in seating.drafters]
        looking = [
            (seating.look_of(method), seating.look_ups[method])
            for method in dict.fromkeys(method for method, _ in ways)
            if method in seating.look_ups
        ]
        adapted = any(row.adapter for rows in ways.values() for row in rows)
        for found in self._passes[width, adapted]:
            shape = found.rows.shape
            if shape.requests < seats or shape.keys < keys or shape.requests > self._count:
                continue
            loops: list[SeatedLoop] = []
            for method, kind in drafting:
                seated = seating.drafters[method]
                drafter = seated.seats(ways[method, kind], shape.requests, keys, kind)
                if drafter is not None:
                    number = seating.number_of(method)
                    loops.append(SeatedLoop(seating.loop_of(method, kind), number, drafter))
                    if kind == "draft":
                        self._steps.open_source(number, seated.draws)
            if len(loops) == len(drafting):
                return found, loops, looking
        return None

    def _uncaptured(
        self, ways: Mapping[tuple[str, LoopKind], Sequence[Row]], seats: int, keys: int
    ) -> set[tuple[str, LoopKind]]:
        """Those of some ways on whose account `_shape` finds nothing: it does not even for one of them alone. Where it
        does for each, their passes or loops differ; all that draft then, so that others keep their seats."""
        alone = {way for way, rows in ways.items() if self._shape({way: rows}, seats, keys) is None}
        return alone or {way for way in ways if way[0] != "none"}

    def finish(self, flight: Flight) -> list[RowResult]:
        """Wait for a step and those before it, and record its results."""
        while not flight.landed:
            self._land(self._flights.popleft())
        return flight.rows

    def _land(self, flight: Flight) -> None:
        answer = flight.landing.wait().tolist()
        for member, seat in flight.members:
            row = member.row
            words = answer[seat]
            if self._rows.get(row.rid) is not row or member.failed or not words[at.RAN]:
                continue
            report_np = flight.landing.report_np
            if report_np is not None:
                report_np = report_np[seat] if LOGPROBS in member.way.shaped else None
            drafts = self._steps.memory.drafts
            flight.rows.append(record(member, words, drafts, report_np, self._seating, self._drafting))
        flight.landed = True
