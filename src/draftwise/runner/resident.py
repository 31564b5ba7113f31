"""Runs of steps that stay on the device (`graphs.resident`): who may take part, what a plan tells them, and what the
host writes down of what came of it.

A run begins with a plan whose requests all decode in the same way, and goes on with every plan of the same requests, or
fewer. Its steps are launched one behind the other: the rows of a step are made of what the one before it left on the
device, and the host reads that later. Any other plan ends the run: what is under way is waited for, and the books are
as if every step had been an ordinary one.

Late writes do no harm. A request that has ended, or was cancelled, may take part in one more step before a plan says
so. What that step writes for it goes to keys from its newest root on, behind all tokens that the scheduler ever counts
as computed; so never to a block that was hashed for others to find. Blocks that were not are handed out by a later plan
only, and whoever gets them writes, later on the same stream, every slot before reading it. In a later step the slot is
nobody's, and its rows go to the spare slot.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.loop import LoopKind
from draftwise.graphs.resident import DrafterSeats, Landing, ResidentStep, SlotState
from draftwise.kernels import resident as at
from draftwise.kernels.resident import ResidentRule
from draftwise.propose.base import Proposer
from draftwise.runner.drafting import Drafting
from draftwise.runner.resident_families import Families, Family
from draftwise.runner.rows import Row
from draftwise.runner.seated import Seated
from draftwise.types import EMPTY_PROPOSAL, RowPlan, RowResult, StepPlan, StepResult, chain
from draftwise.verify.rates import SyntheticAcceptance

logger = logging.getLogger("draftwise")

_NOT_FINITE = "RequestError: the model's logits are not finite"


@dataclass(slots=True)
class _Member:
    """A request in its slot. ``drafts`` wait on the device, as far as the host knows."""

    row: Row
    slot: int
    drafts: tuple[int, ...]
    accepted: int = 0  # in the newest step that was read
    fed: int = 0
    failed: bool = False


@dataclass(slots=True)
class Flight:
    """A step on its way, or the answer that was read."""

    step: int
    landing: Landing | None
    members: list[_Member]
    result: StepResult | None = None


class ResidentRuns:
    """The runs of one executor, one at a time."""

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
    ) -> None:
        """``rows``: the executor's, by request. ``forced``: what stands for rule greedy, in benchmarks."""
        self._target = target
        self._drafting = drafting
        self._rows = rows
        self._block_size = block_size
        self._families = Families(proposers, drafting.guard, synthetic, forced)
        self._drafters = self._families.drafters
        self._made: dict[tuple[Family, int, int], ResidentStep] = {}
        self._q: dict[str, Tensor] = {}
        # the run
        self._family: Family | None = None
        self._step: ResidentStep
        self._nothing_np: npt.NDArray[np.int64]  # what a step is told of slots that do not take part
        self._members: dict[int, _Member] = {}
        self._flights: deque[Flight] = deque()
        self.num_steps = 0
        self.num_runs = 0

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture a step for one request under the usual rules, so that all kernels are compiled; steps for more are
        captured when a run needs them, which takes milliseconds. False, and a warning: the device refuses it."""
        try:
            self._capture_usual()
        except Exception as error:
            logger.warning(
                "no step will stay on the device, for none could be captured: %s", error, exc_info=True
            )
            return False
        return True

    def _capture_usual(self) -> None:
        for method in ("none", *self._drafters):
            seated = self._drafters.get(method)
            for rule in ("greedy", "coupled", "rejection"):
                kind: LoopKind = "argmax" if seated is None else seated.usual_kind(rule == "greedy", rule)
                step = self._find(Family(method, ResidentRule(rule), kind), [], 1)
                if step is not None:
                    step.capture()

    # ---------------------------------------------------------------------------------------- going on

    def continues(self, plan: StepPlan) -> bool:
        """Whether the run goes on with a plan that was not applied yet."""
        if self._family is None or plan.new or plan.trimmed:
            return False
        if self._family.method != "none" and any(m.row.drafting_failed for m in self._members.values()):
            return False
        planned = {p.rid for p in plan.rows}
        if not planned <= self._members.keys():
            return False
        gone = set(plan.removed)
        for rid, member in self._members.items():
            # somebody for whom there was no room; who surely ends with the step under way is not planned either
            if rid not in planned and rid not in gone and member.row.num_tokens + 1 < member.row.max_total:
                return False
        if plan.rows and self._smaller(len(plan.rows)):
            return False
        rows = [self._rows[rid] for rid in planned]
        return (
            all(self._goes_on(p) for p in plan.rows)
            and self._reach(self._family, rows) <= self._step.max_keys
        )

    def _goes_on(self, planned: RowPlan) -> bool:
        assert self._family is not None
        if planned.num_new != 1 or len(planned.new_block_ids) > self._step.memory.pages:
            return False
        if self._family.method == "none":
            return self._families.decodes_plainly(self._rows[planned.rid], planned)
        return 1 <= planned.draft_budget <= self._step.drafts

    def _smaller(self, requests: int) -> bool:
        """Whether fewer than half of the slots are taken, and there is a smaller step."""
        step = self._step
        if 2 * requests >= step.slots:
            return False
        found = self._target.pass_seats(requests, step.drafts + 1, step.max_keys)
        return found is not None and found.rows.shape.requests < step.slots

    def _reach(self, family: Family, rows: Sequence[Row]) -> int:
        """Keys that the coming steps may look at: two steps of the most accepted drafts, and the drafts behind them."""
        drafts = self._drafters[family.method].steps if family.method != "none" else 0
        return max(
            [min(row.num_tokens + 3 * (drafts + 1), row.max_total + drafts) + 1 for row in rows], default=0
        )

    # --------------------------------------------------------------------------------------- beginning

    def begin(self, plan: StepPlan) -> bool:
        """Begin a run with a plan that was applied; False: its rows are not of the kind."""
        assert self._family is None and not self._flights
        rows = [(self._rows[p.rid], p) for p in plan.rows]
        rows = [(row, p) for row, p in rows if not row.is_full]
        if not rows:
            return False
        family = self._families.of(*rows[0])
        if family is None or any(self._families.of(row, p) != family for row, p in rows[1:]):
            return False
        places = [self._families.place_of(family.method, row) for row, _ in rows]
        if any(place is None for place in places):
            return False
        members = [row for row, _ in rows]
        step = self._find(family, members, self._reach(family, members))
        seated = self._drafters.get(family.method)
        if step is None or (seated is not None and not seated.prepare(members)):
            return False
        self._family, self._step = family, step
        self._members = {}
        self._nothing_np = np.zeros(tuple(step.memory.told.shape), np.int64)
        boarding = []
        for slot, ((row, _), place) in enumerate(zip(rows, places, strict=True)):
            assert place is not None
            proposal, row.proposal = row.proposal, EMPTY_PROPOSAL
            self._members[row.rid] = _Member(row, slot, proposal.tokens, fed=place.fed)
            # no new block is said by the first page, as it is
            self._nothing_np[slot, at.TOLD + step.memory.pages :] = row.blocks_np[0]
            boarding.append(
                SlotState(
                    known=row.num_tokens,
                    root=int(row.tokens_np[row.num_tokens - 1]),
                    drafts=proposal.tokens,
                    fed=place.fed,
                    stored=place.stored,
                    seed=row.state.seed,
                    sample_index=row.state.sample_index,
                    temperature=row.state.temperature,
                    first_key=place.first_key,
                    blocks_np=row.blocks_np,
                    q=None if proposal.q is None else proposal.q[list(proposal.q_rows)],
                )
            )
        step.board(boarding)
        self.num_runs += 1
        return True

    def _find(self, family: Family, rows: Sequence[Row], keys: int) -> ResidentStep | None:
        """A step for these requests (none: for one, to come)."""
        seated = self._drafters.get(family.method)
        drafts = 0 if seated is None else seated.steps
        target = self._target.pass_seats(max(len(rows), 1), drafts + 1, keys)
        if target is None:
            return None
        shape = target.rows.shape
        step = self._made.get((family, shape.requests, shape.keys))
        if step is None:
            seats: DrafterSeats | None = None
            if seated is not None:
                seats = seated.seats(rows, shape.requests, shape.keys, family.kind)
                if seats is None:
                    return None
            vocab = self._target.config.vocab_size
            q = None
            if seated is not None and seats is not None and seats.own_q:
                q = self._q_of(family.method, seated, vocab)
            step = ResidentStep(target, seats, family.rule, vocab, self._block_size, self._target.backend, q)
            self._made[family, shape.requests, shape.keys] = step
        return step

    def _q_of(self, method: str, drafter: Seated, vocab: int) -> Tensor:
        """One memory for all steps of a drafter: large, and one run uses it at a time."""
        q = self._q.get(method)
        if q is None:
            shape = (drafter.most_requests, drafter.steps, vocab)
            q = self._q[method] = torch.zeros(shape, dtype=torch.float32, device=self._target.backend.device)
        return q

    # ---------------------------------------------------------------------------------------- a step

    def launch(self, plan: StepPlan, fresh: Mapping[int, int]) -> Flight:
        """Start a step of the run.

        Args:
            plan: applied already.
            fresh: by request, the number of the first page that the plan added; nothing of a plan that began the run.
        """
        if not plan.rows:
            for rid in plan.removed:
                self._members.pop(rid, None)
            failures = self._drafting.take_failures()
            return Flight(plan.step, None, [], StepResult(plan.step, (), drafter_failures=failures))
        while len(self._flights) > 1:  # their buffers are needed
            self._land(self._flights.popleft())
        step, drafts = self._step, self._step.drafts
        told_np = step.told()
        told_np[:] = self._nothing_np
        pages = step.memory.pages
        members: list[_Member] = []
        fields: list[tuple[int, int, int]] = []
        for planned in plan.rows:
            found = self._members.get(planned.rid)
            if found is None:
                continue  # it had all its tokens when the run began
            members.append(found)
            if drafts:
                fields.append((found.row.max_total, planned.num_draft, planned.draft_budget))
            else:  # the scheduler may not know that its drafter failed
                fields.append((found.row.max_total, 0, 0))
            first = fresh.get(planned.rid)
            if first is not None:
                row_np = told_np[found.slot]
                for i, block in enumerate(planned.new_block_ids):
                    row_np[at.TOLD + i], row_np[at.TOLD + pages + i] = first + i, block
        told_np[[member.slot for member in members], : at.TOLD] = fields
        for rid in plan.removed:
            self._members.pop(rid, None)
        flight = Flight(plan.step, step.launch(), members)
        self._flights.append(flight)
        self.num_steps += 1
        return flight

    def finish(self, flight: Flight) -> StepResult:
        """Wait for a step, and for those before it, and write down what came of it."""
        while flight.result is None:
            self._land(self._flights.popleft())
        return flight.result

    def _land(self, flight: Flight) -> None:
        assert flight.landing is not None
        answer = flight.landing.wait().tolist()
        results = []
        for member in flight.members:
            row = member.row
            words = answer[member.slot]
            if self._rows.get(row.rid) is not row or member.failed or not words[at.RAN]:
                continue
            results.append(self._take(member, words))
        flight.result = StepResult(
            flight.step, tuple(results), drafter_failures=self._drafting.take_failures()
        )

    def _take(self, member: _Member, words: list[int]) -> RowResult:
        row, drafts = member.row, self._step.drafts
        verified, accepted = words[at.VERIFIED], words[at.ACCEPTED]
        tokens = tuple(words[at.ANSWER : at.ANSWER + accepted + 1])
        if tokens[-1] < 0:
            member.failed = True
            return RowResult(row.rid, error=_NOT_FINITE)
        waiting = words[at.ANSWERED_WAITING]
        drafted, member.drafts = (
            member.drafts[:verified],
            tuple(words[at.ANSWER + drafts + 1 : at.ANSWER + drafts + 1 + waiting]),
        )
        row.num_computed += 1 + accepted
        row.append(tokens)
        row.state.commit(tokens)
        assert row.num_tokens == words[at.ANSWERED_KNOWN], "host and device count alike"
        member.accepted, member.fed = accepted, words[at.ANSWERED_FED]
        assert self._family is not None
        method = self._family.method
        seated = self._drafters.get(method)
        if seated is not None and not row.drafting_failed:  # who fails here leaves with the next plan
            filled = seated.went_on(row, member.fed, waiting)
            if filled is not None:
                self._drafting.filled(method, row, *filled)
        if not verified:
            return RowResult(row.rid, tokens, num_proposed=waiting)
        return RowResult(
            rid=row.rid,
            token_ids=tokens,
            num_drafted=verified,
            num_accepted=accepted,
            accepted_nodes=tuple(range(accepted)),
            draft_tokens=drafted,
            draft_parents=tuple(range(-1, verified - 1)),
            method=method,
            num_proposed=waiting,
        )

    # ------------------------------------------------------------------------------------------ the end

    def end(self) -> None:
        """Wait for what is under way, and give everybody back to the ordinary way."""
        while self._flights:
            self._land(self._flights.popleft())
        family, self._family = self._family, None
        members, self._members = self._members, {}
        if family is None:
            return
        seated = self._drafters.get(family.method)
        if seated is None:
            return
        for rid, member in members.items():
            row = member.row
            if self._rows.get(rid) is not row or member.failed or row.is_full:
                continue
            count = len(member.drafts)
            if count:
                row.proposal = chain(member.drafts, family.method, self._step.q_of(member.slot, count))
            if not row.drafting_failed:
                seated.left(row, member.fed, self._step.features_of(member.slot, member.accepted))
