"""Which requests may have seats on the device (`graphs.seats`), and how they decode there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from draftwise.graphs.loop import KINDS, LoopKind
from draftwise.graphs.plans import TreePlan, distribution_rows
from draftwise.graphs.seats.drafter import Place
from draftwise.graphs.seats.lookup import LookUp
from draftwise.graphs.seats.shaping import wants
from draftwise.propose.base import Proposer
from draftwise.runner.guard import Guard
from draftwise.runner.rows import Row
from draftwise.runner.seated import Seated
from draftwise.types import DrawKind, Proposal, RowPlan, Speculation
from draftwise.verify.base import FORCED
from draftwise.verify.rates import SyntheticAcceptance


class Way(NamedTuple):
    """How a request decodes: with which drafter ("none": plainly), by which rule (`graphs.seats.memory.RULES`), how its
    drafts are drawn, and what shapes its distributions (`graphs.seats.shaping`)."""

    method: str
    rule: str
    kind: LoopKind
    shaped: frozenset[str]


class Seating:
    """Tells ways of requests. ``drafters``: those that can draft for seats, by method; ``look_ups``: those whose drafts
    the device finds in the text. A method may have both: what is found goes before what is drafted."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        guard: Guard,
        synthetic: SyntheticAcceptance | None,
        forced: SyntheticAcceptance | None,
        captured: Callable[[int], bool],
        adapter_place: Callable[[int], int | None] = lambda _: None,
    ) -> None:
        """``forced``: what stands for rule greedy, in benchmarks. ``captured``: whether there are passes of so many
        rows per request; a drafter whose drafts need others takes no part. ``adapter_place``: where captured passes
        find an adapter; None: they cannot add it."""
        found = {name: Seated.of(name, guard) for name in proposers}
        found = {name: _fitting(d, captured) for name, d in found.items() if d is not None}
        self.drafters: dict[str, Seated] = {n: d for n, d in found.items() if isinstance(d, Seated)}
        self.look_ups: dict[str, LookUp] = {n: d for n, d in found.items() if isinstance(d, LookUp)}
        self.look_ups |= {n: d.joined.look for n, d in self.drafters.items() if d.joined is not None}
        self._numbers = {name: number for number, name in enumerate(self.drafters, 1)}
        self._looking = {name: number for number, name in enumerate(self.look_ups, 1)}
        self._observers = {n for n, p in proposers.items() if p.capture_layers or p.observes}
        self._forced = forced is not None
        self._adapter_place = adapter_place
        self._synthetic = synthetic is not None and forced is None
        rates = forced or synthetic
        self.rates = rates.rates if rates is not None else ()

    def adapter_of(self, row: Row) -> int:
        """The place of a request's adapter, 0: it has none."""
        return (self._adapter_place(row.adapter) or 0) if row.adapter else 0

    def number_of(self, method: str) -> int:
        """The number of a drafter, from 1 on; 0: plain decoding, or a look-up."""
        return self._numbers.get(method, 0)

    def loop_of(self, method: str, kind: LoopKind) -> int:
        """Number of a drafter's loops of a kind, from 1 on; 0: plain decoding, or a look-up."""
        number = self.number_of(method)
        return (number - 1) * len(KINDS) + KINDS.index(kind) + 1 if number else 0

    def look_of(self, method: str) -> int:
        """The number of a look-up, from 1 on; 0: another method."""
        return self._looking.get(method, 0)

    def _may_draft(self, method: str, budget: int) -> bool:
        """Whether a plan for so many drafts can be carried out. A look-up that has fewer is given what fits."""
        return budget >= 1 and (method in self._looking or budget <= self.steps_of(method))

    def steps_of(self, method: str) -> int:
        """Most drafts of a method; 0: plain decoding."""
        drafter = self.drafters.get(method) or self.look_ups.get(method)
        return 0 if drafter is None else drafter.steps

    def plan_of(self, method: str) -> TreePlan | None:
        """The tree that a method drafts; None: chains, or nothing."""
        drafter = self.drafters.get(method)
        return None if drafter is None else drafter.plan

    def parents_of(self, method: str) -> tuple[int, ...] | None:
        """Of all drafts that a request may have; None: its trees differ."""
        plan = self.plan_of(method)
        if plan is None:
            return tuple(range(-1, self.steps_of(method) - 1))
        return None if plan.shape is None else plan.shape.parents

    def name_of(self, method: str, looked_up: bool) -> str:
        """The method that is said to have made drafts; ``looked_up``: they were found in the text."""
        drafter = self.drafters.get(method)
        if drafter is None or drafter.joined is None:
            return method
        return drafter.joined.looked_up if looked_up else drafter.joined.drafted

    def proposal_of(
        self, way: Way, drafts: tuple[int, ...], parents: tuple[int, ...], looked_up: bool, q: Tensor | None
    ) -> Proposal:
        """What waits of a request that leaves its seat; ``q`` [draws, V]: as `SeatedSteps.q_of`."""
        method = way.method
        name = self.name_of(method, looked_up)
        if q is None:
            return Proposal(drafts, parents, name)
        draw: DrawKind = "independent" if self.plan_of(method) is None else "without_replacement"
        return Proposal(drafts, parents, name, draw, q, self._rows_of_q(method)[: len(drafts)])

    def distributions_of(self, method: str, proposal: Proposal) -> dict[int, Tensor]:
        """What the drafts of a request that takes a seat were drawn from, by row there."""
        assert proposal.q is not None
        rows = self._rows_of_q(method)
        return {row: proposal.q[at] for row, at in zip(rows, proposal.q_rows, strict=False)}

    def _rows_of_q(self, method: str) -> tuple[int, ...]:
        plan = self.plan_of(method)
        if plan is None or plan.shape is None:
            return tuple(range(self.steps_of(method)))
        return tuple(distribution_rows(plan.shape))

    def of(self, row: Row, planned: RowPlan) -> Way | None:
        """How the request decodes behind its last known token, if the plan reaches it, and the device can do so."""
        speculation, proposal = row.speculation, row.proposal
        if row.num_computed + planned.num_new != row.num_tokens or row.num_tokens < 2 or row.is_full:
            return None
        if row.grammar is not None or row.error is not None:
            return None
        if row.adapter and self._adapter_place(row.adapter) is None:
            return None
        if row.prompt_logprobs is not None and row.num_computed < row.num_prompt - 1:
            return None
        rule = self._rule(row)
        shaped = wants(row.state)
        if rule is None or shaped is None:
            return None
        if not proposal.tokens and self.decodes_plainly(row, planned):
            return Way("none", rule, "argmax", shaped)
        steps = self.steps_of(speculation.method)
        if row.drafting_failed or not steps or not self._may_draft(speculation.method, planned.draft_budget):
            return None
        drafter = self.drafters.get(speculation.method)
        plan = self.plan_of(speculation.method)
        if not _drafts(plan, speculation):
            return None
        kind: LoopKind | None = "argmax"
        if drafter is not None:
            kind = drafter.kind(row)
        if kind is None or (kind == "draft" and plan is not None and row.state.steers):
            # siblings that are drawn without replacement must end where nothing is left that is not excluded
            return None
        if proposal.tokens:
            parents = self.parents_of(speculation.method)
            same = parents is None or proposal.parents == parents[: len(proposal)]
            names = [self.name_of(speculation.method, looked_up) for looked_up in (False, True)]
            drawn = kind == "draft" and proposal.method == names[0]
            if (
                proposal.method not in names
                or not same
                or len(proposal) > steps
                or (proposal.q is not None) != drawn
            ):
                return None
        return Way(speculation.method, rule, kind, shaped)

    def goes_on(self, way: Way, row: Row, planned: RowPlan) -> bool:
        """Whether a request in a seat may go on there with a plan."""
        if planned.num_new != 1:
            return False
        if way.method == "none":
            return self.decodes_plainly(row, planned)
        return not row.drafting_failed and self._may_draft(way.method, planned.draft_budget)

    def _rule(self, row: Row) -> str | None:
        name, greedy = row.speculation.rule, row.state.is_greedy
        if name in FORCED:
            known = self._synthetic or name != "synthetic"
            return None if not known else name if greedy else f"{name}_sampled"
        if greedy:
            return "synthetic" if self._forced else "greedy"
        return name if name in ("coupled", "rejection", "block") else None

    def decodes_plainly(self, row: Row, planned: RowPlan) -> bool:
        """Whether no drafter drafts for the request or is told of the step."""
        if row.drafting_failed:
            return True
        return not planned.draft_budget and (
            not planned.follow or row.speculation.method not in self._observers
        )

    def place_of(self, method: str, row: Row) -> Place | None:
        """A drafter's state of a request; None: it cannot have a seat yet."""
        seated = self.drafters.get(method)
        if seated is None:
            return Place(row.num_tokens, 0, 0)
        return seated.place(row)


def _fitting(drafter: Seated | LookUp, captured: Callable[[int], bool]) -> Seated | LookUp | None:
    """A drafter as the captured passes allow. Look-ups that nobody configured, but which a request may name all the
    same, have no passes of their own: theirs are those of another drafter, with fewer drafts.

    Example: suffix with 16 drafts beside a configured head of 4: it has 4.
    """
    if captured(1 + drafter.steps):
        return drafter
    if not isinstance(drafter, LookUp):
        return None
    steps = next((n for n in range(drafter.steps - 1, 0, -1) if captured(1 + n)), 0)
    return drafter._replace(steps=steps) if steps else None


def _drafts(plan: TreePlan | None, speculation: Speculation) -> bool:
    """Whether what a request wants, a chain or a tree, is what a drafter's loops draft."""
    dynamic = speculation.dynamic
    wanted = speculation.tree, speculation.tree_ranks
    if dynamic is not None:
        if plan is None or plan.shape is not None:
            return False
        return (dynamic.top_k, dynamic.depth) == (plan.top_k, plan.asked or plan.depth)
    if plan is None:
        return wanted == (None, None)
    return plan.shape is not None and wanted == (plan.shape.parents, plan.shape.ranks)
