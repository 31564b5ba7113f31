"""Which requests may take part in a run of steps that stay on the device, and together with whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from draftwise.graphs.loop import LoopKind
from draftwise.kernels.resident import ResidentRule
from draftwise.propose.base import Proposer
from draftwise.propose.resident import Place
from draftwise.runner.guard import Guard
from draftwise.runner.rows import Row
from draftwise.runner.seated import Seated
from draftwise.types import RowPlan
from draftwise.verify.rates import SyntheticAcceptance


class Family(NamedTuple):
    """What all requests of a run have in common."""

    method: str
    rule: ResidentRule
    kind: LoopKind


class Families:
    """Tells families of requests. ``drafters``: those that can take part, by method."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        guard: Guard,
        synthetic: SyntheticAcceptance | None,
        forced: SyntheticAcceptance | None,
    ) -> None:
        """``forced``: what stands for rule greedy, in benchmarks."""
        found = {name: Seated.of(name, guard) for name in proposers}
        self.drafters: dict[str, Seated] = {n: d for n, d in found.items() if d is not None}
        self._observers = {n for n, p in proposers.items() if p.capture_layers or p.observes}
        self._synthetic = synthetic
        self._forced = forced

    def of(self, row: Row, planned: RowPlan) -> Family | None:
        """How the request decodes, if it may do so on the device."""
        state, speculation, proposal = row.state, row.speculation, row.proposal
        if planned.num_new != 1 or row.num_computed + 1 != row.num_tokens or row.num_tokens < 2:
            return None
        if state.needs_processing or row.grammar is not None or state.params.logprobs is not None:
            return None
        if row.error is not None:
            return None
        if row.prompt_logprobs is not None and row.num_computed < row.num_prompt - 1:
            return None
        rule = self._rule(row)
        if rule is None:
            return None
        if not proposal.tokens and self.decodes_plainly(row, planned):
            return Family("none", rule, "argmax")
        drafter = self.drafters.get(speculation.method)
        if drafter is None or row.drafting_failed or not 1 <= planned.draft_budget <= drafter.steps:
            return None
        if speculation.tree is not None or speculation.dynamic is not None:
            return None
        kind = drafter.kind(row)
        if kind is None:
            return None
        if proposal.tokens:
            same = proposal.method == speculation.method and proposal.is_chain
            if not same or len(proposal) > drafter.steps or (proposal.q is not None) != (kind == "draft"):
                return None
        return Family(speculation.method, rule, kind)

    def _rule(self, row: Row) -> ResidentRule | None:
        name, greedy = row.speculation.rule, row.state.is_greedy
        if name == "synthetic":
            return None if self._synthetic is None else ResidentRule(name, self._synthetic.rates, not greedy)
        if name == "typical":
            return None
        if greedy:
            forced = self._forced
            return ResidentRule("greedy") if forced is None else ResidentRule("synthetic", forced.rates)
        if name == "coupled" or name == "rejection" or name == "block":
            return ResidentRule(name)
        return None

    def decodes_plainly(self, row: Row, planned: RowPlan) -> bool:
        """Whether nobody drafts for the request, or wants to be told of the step."""
        if row.drafting_failed:
            return True
        return not planned.draft_budget and (
            not planned.follow or row.speculation.method not in self._observers
        )

    def place_of(self, method: str, row: Row) -> Place | None:
        """Where a request stands in a family of this method; None: it cannot board yet."""
        seated = self.drafters.get(method)
        if seated is None:
            return Place(row.num_tokens, 0, 0)
        return seated.place(row)
