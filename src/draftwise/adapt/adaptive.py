"""The controller that drafts only where it pays (docs/algorithms/adaptive.md)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from draftwise.adapt.acceptance import is_chain
from draftwise.adapt.choice import Drafter, Group, Option, Prices, choose, pays_at_best
from draftwise.adapt.controller import (
    Controller,
    ControlStats,
    GroupControl,
    StepShape,
    Tables,
    most_nodes,
)
from draftwise.adapt.explore import Explorer
from draftwise.adapt.performance import PerformanceModel, bucket
from draftwise.types import RowResult, Speculation, StepResult

_DEEPEST_LOSS = 4.0
"""Plain steps below which the account never falls."""
_HOPELESS_DRAFTS = 8
_HOPELESS_ACCEPTED = 0.3
"""So many proposals of which less than so many drafts were accepted on average end a trial before its time."""


@dataclass(frozen=True, slots=True)
class AdaptiveSettings:
    """Constants of the controller; times in plain steps, shares of the time that passes.

    ``explore_share``: time that may be spent on learning what is not in use (probes, pauses, looks beyond the cap).
    ``loss_share``: time that speculation as a whole may lose against plain decoding before it is suspended, and
    ``loss_steps`` the reserve it starts with and never exceeds. The two shares, and what the controller itself
    takes, are the 2 % of the promise.
    """

    explore_share: float = 0.004
    explore_steps: float = 8.0
    loss_share: float = 0.01
    loss_steps: float = 24.0
    trial_steps: int = (
        24  # drafting steps of a new group before times decide about it: the first ones say little
    )
    trial_loss: float = 5.0  # plain steps lost that end every trial
    first_steps: int = 12  # choose every step
    warm_steps: int = 48  # choose often
    warm_interval: int = 4
    interval: int = 16
    idle_interval: int = 128  # when nobody drafts


class AdaptiveController(Controller):
    """Measures what drafting and verifying cost and what they gain, and chooses per group and request.

    It begins with what the requests ask for, and learns. A choice stands for some steps, so that a step costs
    microseconds. What is not in use is tried again by an `Explorer`.
    """

    def __init__(
        self,
        tables: Tables | None = None,
        evident: Collection[str] = (),
        *,
        model: PerformanceModel | None = None,
        settings: AdaptiveSettings | None = None,
    ) -> None:
        """``evident``: methods whose proposals' sizes follow from committed tokens (`Proposer.evident`).
        ``model``: one that has learned on this engine before."""
        self.model = model or PerformanceModel()
        self.settings = settings or AdaptiveSettings()
        self._tables = dict(tables or {})
        self._evident = frozenset(evident)
        self._groups: dict[object, Group] = {}
        self._drafters: dict[int, Drafter | None] = {}  # rid -> None: decodes plainly
        self._ended: list[int] = []
        self._step = 0
        self._batch = 0
        self._batch_bucket = 0
        self._decide_at = 0
        self._mean_context = 0
        self._sampled = False
        self._prices: Prices | None = None
        self._plain_known = False  # `_prices.plain` was measured, not guessed
        self._rate_gain = 1.0  # promised rate over the plain one
        self._explorer = Explorer(self.model, self.settings.explore_share, self.settings.explore_steps)
        self._balance = self.settings.loss_steps  # plain steps that speculation may still lose
        self._suspended = False
        self._drafting: dict[Group, list[int]] = {}  # of the step planned: requests, nodes, catch-up tokens
        self._num_decisions = self._num_suspended = 0

    # ------------------------------------------------------------------------------------------- planning

    def begin(self, batch_size: int) -> None:
        self._step += 1
        if self._ended:
            for rid in self._ended:
                self._drafters.pop(rid, None)
            self._ended.clear()
        self._batch = batch_size
        self._explorer.begin(self._step)
        if self._drafting:
            self._drafting = {}
        if not self._groups:
            return
        if self._step >= self._decide_at or bucket(batch_size) != self._batch_bucket:
            self._decide()
        if self._suspended:
            self._num_suspended += 1
        elif self._explorer.is_due() and self._prices is not None:
            self._explorer.look(self._prices, self._rate_gain, self._plain_known, self._active)

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        drafter = self._drafters.get(rid, _NEW)
        if drafter is _NEW:
            drafter = self._enter(rid, speculation)
        if drafter is None:
            return 0
        step = self._step
        drafter.seen = step
        if self._explorer.pausing or self._suspended:
            return 0
        nodes = drafter.budget
        drafter.probing = False
        if not nodes:
            # A probe waits for its outcome before it goes on.
            if not drafter.probe or (drafter.waiting and not drafter.streak):
                return 0
            nodes = drafter.probe
            drafter.probing = True
        elif drafter.group is self._explorer.deep:
            nodes = min(2 * nodes, drafter.most)
            drafter.probing = True
        lag = step - 1 - drafter.drafted
        drafter.drafted = step
        group = self._drafting.get(drafter.group)
        if group is None:
            drafter.group.num_steps += 1
            self._drafting[drafter.group] = [1, nodes, lag]
        else:
            group[0] += 1
            group[1] = max(group[1], nodes)
            group[2] += lag
        return nodes

    def nodes_to_verify(self, rid: int, num_proposed: int) -> int:
        drafter = self._drafters.get(rid)
        if drafter is None:
            return num_proposed
        drafter.verified = num_proposed
        if drafter.probing:
            return num_proposed
        cut = drafter.cuts.get(drafter.group.class_of(num_proposed), num_proposed)
        return min(cut, num_proposed)

    def _enter(self, rid: int, speculation: Speculation) -> Drafter | None:
        asked = most_nodes(speculation, 0, {})
        drafter = None
        if asked:
            key = (speculation.method, speculation.rule, speculation.tree, speculation.dynamic)
            group = self._groups.get(key)
            if group is None:
                evident = speculation.method in self._evident
                group = self._groups[key] = Group(speculation.method, speculation.rule, evident)
                self._decide_at = 0
            most = self._limit(group, asked)
            budget = most if group.cap is None else min(most, group.cap)
            drafter = Drafter(group, asked, most, budget, drafted=self._step - 1)
        self._drafters[rid] = drafter
        return drafter

    def _limit(self, group: Group, asked: int) -> int:
        """Nodes a request may draft in a batch of this size."""
        for low, high, limit in self._tables.get(group.method, ()):
            if low <= self._batch <= high:
                return min(asked, limit)
        return asked

    # ------------------------------------------------------------------------------------------- observing

    def observe(self, result: StepResult, shape: StepShape, seconds: float) -> None:
        step = self._step
        if not self._groups:
            # Plain decoding only. What it takes is soon well known.
            if step < 64 or step % 8 == 0:
                self.model.observe_target(shape, seconds - result.draft_time)
            return
        tokens = 0
        for row in result.rows:
            tokens += len(row.token_ids)
            drafter = self._drafters.get(row.rid)
            if drafter is not None:
                self._observe_row(drafter, row)
        plain = shape.rows == shape.requests and not self._drafting
        if plain and step % 4 and self._decide_at > step + 8:
            self._earn(seconds)  # nobody drafts and nothing is due: a sample in four is enough
            return
        decoding = shape.requests > 0 and not shape.prompt_rows
        pure = shape.rows == shape.requests
        weight = 1
        if decoding and not pure and step > self.settings.warm_steps and self._decide_at > step + 2:
            weight = (
                3  # one step in three stands for all: taking it in costs as much as everything else together
            )
            if step % 3:
                self._earn(seconds)
                return
        usual = self.model.observe_target(shape, seconds - result.draft_time)
        if self._drafting:
            usual += self._observe_drafting(result.draft_time, shape)
        if decoding:
            self._mean_context = shape.context // shape.requests
            self._sampled = shape.sampled
            if pure:
                self._explorer.saw_plain(shape.requests)
            if not plain:
                self._account(shape, tokens, min(max(seconds, 0.8 * usual), 1.25 * usual), weight)
        self._earn(seconds)

    def _observe_row(self, drafter: Drafter, row: RowResult) -> None:
        group, drafted = drafter.group, row.num_drafted
        if drafted:
            group.num_drafts += 1
            group.num_accepted += row.num_accepted
            if group.trees or not is_chain(row.draft_parents):
                group.trees = True
                group.acceptance.counts.add_tree(drafted, row.accepted_nodes)
                drafter.history.counts.add_tree(drafted, row.accepted_nodes)
            else:
                kind = group.class_of(drafter.verified)
                group.acceptance.counts.add_chain(kind, drafted, row.num_accepted)
                drafter.history.counts.add_chain(kind, drafted, row.num_accepted)
            explorer, accepted = self._explorer, row.num_accepted
            if drafter.probe and explorer.take_outcome(drafter, drafted, accepted, self._prices):
                self._decide_at = min(self._decide_at, self._step + 2)
        proposed = drafter.waiting = row.num_proposed
        if drafter.drafted != self._step or not row.token_ids:
            return
        if group.evident:
            group.acceptance.add_size(proposed)
        if drafter.probe:
            self._explorer.take_proposal(drafter, proposed)

    def _observe_drafting(self, seconds: float, shape: StepShape) -> float:
        """Share the time of all drafters among the groups as the model predicts it; answers the prediction."""
        drafting = self._drafting.items()
        guesses = [
            self.model.draft_time(group.method, n, nodes, lag, group.sampled)
            for group, (n, nodes, lag) in drafting
        ]
        total = sum(guesses)
        if shape.prompt_rows or seconds <= 0:  # behind a prompt, the drafter catches up on it
            return total
        for (group, (n, nodes, lag)), guess in zip(drafting, guesses, strict=True):
            part = seconds * (guess / total if total > 0 else 1.0 / len(guesses))
            self.model.observe_draft(group.method, n, nodes, lag, group.sampled, part)
        return total or seconds

    def _account(self, shape: StepShape, tokens: int, seconds: float, weight: int) -> None:
        """Keep the book of what speculation gains or loses against plain decoding, in plain steps; ``weight``: steps
        that this one stands for.

        Example: 3 tokens for one request in 1.5 times the time of a plain step: 3 - 1.5 = 1.5 steps gained.
        """
        prices = self._prices
        if prices is None or not self._plain_known:
            return
        if shape.requests != prices.requests or shape.sampled != prices.sampled:
            return
        gain = tokens / shape.requests - seconds / prices.plain
        self._balance = min(self._balance + weight * gain, self.settings.loss_steps)
        # One wild measurement must not keep drafting out for long.
        self._balance = max(self._balance, -_DEEPEST_LOSS)
        if self._balance < 0:
            self._suspended = True

    def _earn(self, seconds: float) -> None:
        """Time that passes pays for learning, and for losses."""
        prices = self._prices
        if prices is None:
            return
        self._explorer.earn(seconds, prices)
        self._balance += self.settings.loss_share * seconds / prices.plain
        if self._suspended and self._balance > 1.0:
            self._suspended = False

    def forget(self, rid: int) -> None:
        if rid in self._drafters:
            self._ended.append(rid)  # its last row may be still to come

    # ------------------------------------------------------------------------------------------- deciding

    def _active(self) -> list[tuple[Group, list[Drafter]]]:
        """Groups with the requests that were planned lately."""
        found: dict[int, tuple[Group, list[Drafter]]] = {}
        since = self._step - 3
        for drafter in self._drafters.values():
            if drafter is not None and drafter.seen >= since and drafter.most:
                found.setdefault(id(drafter.group), (drafter.group, []))[1].append(drafter)
        return list(found.values())

    def _decide(self) -> None:
        settings = self.settings
        self._batch_bucket = bucket(self._batch)
        self._decide_at = self._step + 1
        if self._tables:
            for drafter in self._drafters.values():
                if drafter is not None:
                    drafter.most = self._limit(drafter.group, drafter.asked)
                    drafter.budget = min(drafter.budget, drafter.most)
        groups = self._active()
        if not groups:
            return
        n = max(1, self._batch)
        context, sampled = self._mean_context * n, self._sampled
        plain = self.model.target_time(n, n, context, sampled)
        if plain <= 0:
            return  # no step of pure decoding was measured yet
        self._num_decisions += 1
        prices = self._prices = Prices(n, context, sampled, plain)
        self._plain_known = self.model.times_measured(n, n, context, sampled) >= 3
        options, rate = choose(groups, prices, self.model)
        self._rate_gain = rate * plain / n
        for (group, members), option in zip(groups, options, strict=True):
            if not self._on_trial(group):
                self._carry_out(group, members, option)
        if self._step < settings.first_steps:
            interval = 1
        elif any(option.cap for option in options):
            interval = settings.warm_interval if self._step < settings.warm_steps else settings.interval
        else:
            interval = settings.idle_interval
        self._decide_at = self._step + interval

    def _on_trial(self, group: Group) -> bool:
        """Whether the group goes on drafting what it was asked for, whatever its first times look like: a machine that
        is busy at that moment must not decide. Nearly no draft accepted is reason enough to stop."""
        settings = self.settings
        if self._batch > 2 or group.cap is not None or group.num_steps >= settings.trial_steps:
            return False
        if self._balance < settings.loss_steps - settings.trial_loss:
            return False
        few = group.num_accepted < _HOPELESS_ACCEPTED * group.num_drafts
        return not (few and group.num_drafts >= _HOPELESS_DRAFTS)

    def _carry_out(self, group: Group, members: list[Drafter], option: Option) -> None:
        group.cap = option.cap
        group.gain = self._rate_gain
        group.hopeful = True
        if option.cap:
            group.last_cap = option.cap
        drafting = sum(on for _, on, _ in option.members)
        group.accepted = option.tokens / drafting if drafting else None
        if not option.cap:
            assert self._prices is not None
            group.hopeful = pays_at_best(group, members, self._prices, self.model)
            for member in members:
                member.budget = 0
            return
        for member, on, cuts in option.members:
            member.budget = min(option.cap, member.most) if on else 0
            member.cuts = cuts
            if member.budget:
                member.probe = 0

    # --------------------------------------------------------------------------------------------- reports

    def stats(self) -> ControlStats:
        groups = tuple(
            GroupControl(
                method=group.method,
                rule=group.rule,
                num_requests=len(members),
                num_drafting=sum(bool(m.budget) for m in members) if not self._suspended else 0,
                cap=group.cap if group.cap is not None else max(m.most for m in members),
                gain=group.gain,
                accepted=group.accepted,
            )
            for group, members in self._active()
        )
        return ControlStats(
            "adaptive",
            groups,
            self._num_decisions,
            self._explorer.num_probes,
            self._explorer.num_pauses,
            self._num_suspended,
        )


_NEW = Drafter(Group("", "", False), 0, 0, 0)
