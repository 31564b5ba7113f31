"""The controller that drafts only where it pays (docs/algorithms/adaptive.md)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from draftwise.adapt.acceptance import is_chain
from draftwise.adapt.choice import Drafter, Group, Option, Prices, choose, make_option, pays_at_best
from draftwise.adapt.controller import (
    Controller,
    ControlStats,
    GroupControl,
    StepShape,
    Tables,
    most_nodes,
)
from draftwise.adapt.performance import PerformanceModel, bucket
from draftwise.types import RowResult, Speculation, StepResult

_LONGEST_STREAK = 6
"""Proposals in a row of a probe that succeeds: by then the next choice knows."""
_DEEPEST_LOSS = 4.0
"""Plain steps below which the account never falls."""
_TRIAL = 2
"""Nodes drafted in a trial of a group that never drafted."""
_HOPELESS = 4.0
"""Where not even perfect drafts would pay, by what is believed of their costs, so many times fewer probes are made."""


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
    first_steps: int = 12  # choose every step
    warm_steps: int = 48  # choose often
    warm_interval: int = 4
    interval: int = 16
    idle_interval: int = 128  # when nobody drafts


class AdaptiveController(Controller):
    """Measures what drafting and verifying cost and what they gain, and chooses per group and request.

    It begins with what the requests ask for, and learns. A choice stands for some steps, so that a step costs
    microseconds. What is not in use is tried again, rarely and for one step: requests that do not draft are probed with
    a draft, longer while it succeeds; requests that draft make a plain step.
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
        self._learn_at = 0
        self._mean_context = 0
        self._sampled = False
        self._prices: Prices | None = None
        self._plain_known = False  # `_prices.plain` was measured, not guessed
        self._rate_gain = 1.0  # promised rate over the plain one
        self._pausing = False
        self._deep: Group | None = None
        self._explore = 0.0  # seconds that may be spent on learning
        self._row_cost = self._probe_cost = 0.0  # seconds per row of a probe, and per node drafted
        self._balance = self.settings.loss_steps  # plain steps that speculation may still lose
        self._suspended = False
        self._plain_seen: dict[int, int] = {}  # bucket of requests -> step of the last plain measurement
        self._drafting: dict[Group, list[int]] = {}  # of the step planned: requests, nodes, catch-up tokens
        self._num_decisions = self._num_probes = self._num_pauses = self._num_suspended = 0

    # ------------------------------------------------------------------------------------------- planning

    def begin(self, batch_size: int) -> None:
        self._step += 1
        if self._ended:
            for rid in self._ended:
                self._drafters.pop(rid, None)
            self._ended.clear()
        self._batch = batch_size
        self._pausing = False
        self._deep = None
        if self._drafting:
            self._drafting = {}
        if not self._groups:
            return
        if self._step >= self._decide_at or bucket(batch_size) != self._batch_bucket:
            self._decide()
        if self._suspended:
            self._num_suspended += 1
        elif self._explore > 0 and self._step >= self._learn_at and self._prices is not None:
            self._learn_more(self._prices)

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        drafter = self._drafters.get(rid, _NEW)
        if drafter is _NEW:
            drafter = self._enter(rid, speculation)
        if drafter is None:
            return 0
        step = self._step
        drafter.seen = step
        if self._pausing or self._suspended:
            return 0
        nodes = drafter.budget
        drafter.probing = False
        if not nodes:
            # A probe waits for its outcome before it goes on.
            if not drafter.probe or (drafter.waiting and not drafter.streak):
                return 0
            nodes = drafter.probe
            drafter.probing = True
        elif drafter.group is self._deep:
            nodes = min(2 * nodes, drafter.most)
            drafter.probing = True
        lag = step - 1 - drafter.drafted
        drafter.drafted = step
        group = self._drafting.get(drafter.group)
        if group is None:
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
                self._plain_seen[bucket(shape.requests)] = step
            if not plain:
                self._account(shape, tokens, min(max(seconds, 0.8 * usual), 1.25 * usual), weight)
        self._earn(seconds)

    def _observe_row(self, drafter: Drafter, row: RowResult) -> None:
        group, drafted = drafter.group, row.num_drafted
        if drafted:
            if group.trees or not is_chain(row.draft_parents):
                group.trees = True
                group.acceptance.counts.add_tree(drafted, row.accepted_nodes)
                drafter.history.counts.add_tree(drafted, row.accepted_nodes)
            else:
                kind = group.class_of(drafter.verified)
                group.acceptance.counts.add_chain(kind, drafted, row.num_accepted)
                drafter.history.counts.add_chain(kind, drafted, row.num_accepted)
            if drafter.probe:
                if self._prices is not None:  # what it brought in pays for the next
                    self._explore += row.num_accepted * self._prices.plain / self._prices.requests
                if group.hopeful and 2 * row.num_accepted > drafted and drafter.streak < _LONGEST_STREAK:
                    drafter.streak += 1
                    drafter.probe = min(2 * drafted, drafter.most)
                    self._explore -= self._probe_cost * drafter.probe  # later probes wait for that
                    self._decide_at = min(self._decide_at, self._step + 2)
                else:
                    drafter.probe = drafter.streak = 0
        proposed = drafter.waiting = row.num_proposed
        if drafter.drafted != self._step or not row.token_ids:
            return
        if group.evident:
            group.acceptance.add_size(proposed)
        if drafter.probe:
            if not proposed:
                drafter.probe = drafter.streak = 0
            elif group.evident:  # the price of its rows; that of drafting was paid in `_probe`
                self._explore -= self._row_cost * proposed

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
        most = self.settings.explore_steps * prices.plain
        self._explore = min(self._explore + self.settings.explore_share * seconds, most)
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
            self._carry_out(group, members, option)
        if self._step < settings.first_steps:
            interval = 1
        elif any(option.cap for option in options):
            interval = settings.warm_interval if self._step < settings.warm_steps else settings.interval
        else:
            interval = settings.idle_interval
        self._decide_at = self._step + interval

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

    # -------------------------------------------------------------------------------------------- learning

    def _learn_more(self, prices: Prices) -> None:
        """Spend what may be spent on what is due, and note when to look again."""
        step = self._step
        self._learn_at = step + 8
        if self._rate_gain > 1.0:
            seen = self._plain_seen.get(bucket(prices.requests))
            cost = prices.plain * (1 - 1 / self._rate_gain)
            if seen is None:  # never measured at this size, and every comparison rests on it
                self._pause(0.0)
                return
            if not self._plain_known:  # a few samples at each size are on the house
                if step >= seen + 8:
                    self._pause(0.0)
                    return
            elif step >= seen + self._pause_interval() and self._explore >= cost:
                self._pause(cost)
                return
        need = float("inf")
        for group, members in self._active():
            idle = [m for m in members if not m.budget and not m.probe]
            if idle:
                self._learn_at = step + 4
                if not group.cap and group.hopeful and step - group.last_deep > 256:
                    need = min(need, self._try_all(group, idle, prices))
                else:
                    need = min(need, self._probe(group, idle, prices))
            elif group.cap and step - group.last_deep > 64:
                self._look_deeper(group, members, prices)
        if need < float("inf") and self._rate_gain <= 1.0:
            # Nobody drafts: not before there is enough for the cheapest probe.
            wait = (need - self._explore) / (self.settings.explore_share * prices.plain)
            self._learn_at = step + min(max(int(wait), 4), 512)

    def _pause_interval(self) -> int:
        """Plain steps are made the more often, the closer the choice is."""
        if self._rate_gain > 1.5:
            return 1024
        return 256 if self._rate_gain > 1.15 else 96

    def _pause(self, cost: float) -> None:
        """Draft nothing in this step: the next one is a plain one, and measured."""
        self._pausing = True
        self._explore -= cost
        self._num_pauses += 1

    def _probe(self, group: Group, idle: list[Drafter], prices: Prices) -> float:
        """Let some of those who do not draft make one draft, those first who never did or whose turn it is; short,
        unless drafting costs nothing to speak of. Answers its price in seconds; 0: done."""
        n, model = prices.requests, self.model
        count = max(1, len(idle) // 16)
        idle.sort(key=lambda m: m.last_probe)
        chosen = idle[:count]
        nodes = max(m.most for m in chosen) if group.evident else 1
        lag = sum(self._step - 1 - m.drafted for m in chosen)
        cost = model.draft_time(group.method, count, nodes, lag, group.sampled)
        rows = count * min(nodes, 4)
        more = model.target_time(n, n + rows, prices.context, prices.sampled) - prices.plain
        self._row_cost = max(more, 0.0) / rows
        if not group.evident:
            cost += max(more, 0.0)
        self._probe_cost = cost / nodes / count
        cost = min(cost, prices.plain)  # what seems dearer is tried too: the belief may be wrong
        if not group.hopeful:
            cost *= _HOPELESS
        if cost > self._explore:
            return cost
        self._explore -= cost
        self._num_probes += count
        for member in chosen:
            member.probe = min(nodes, member.most)
            member.streak = 0
            member.last_probe = self._step
            member.history.counts.fade(0.5)
        return 0.0

    def _try_all(self, group: Group, idle: list[Drafter], prices: Prices) -> float:
        """Let the whole group draft once: what it costs together is not seen by probes of a few. Answers the price in
        seconds; 0: done."""
        nodes = min(group.last_cap or _TRIAL, max(m.most for m in idle))
        if group.evident:
            nodes = max(m.most for m in idle)
        option = make_option(group, idle, nodes, prices, 0.0, self.model)
        n, model = prices.requests, self.model
        more = model.target_time(n, round(n + option.rows), prices.context, prices.sampled) - prices.plain
        seconds = max(more, 0.0) + option.draft_time
        cost = max(seconds - option.tokens * prices.plain / n, 0.2 * seconds)
        cost = min(cost, 0.5 * self.settings.explore_steps * prices.plain)  # as in `_probe`
        if cost > self._explore:
            return cost
        self._explore -= cost
        self._num_probes += len(idle)
        group.last_deep = self._step
        self._probe_cost = self._row_cost = 0.0
        for member in idle:
            member.probe, member.streak = min(nodes, member.most), _LONGEST_STREAK
            member.last_probe = self._step
        return 0.0

    def _look_deeper(self, group: Group, members: list[Drafter], prices: Prices) -> None:
        """Draft up to twice the cap for one step: positions beyond it are not seen otherwise."""
        assert group.cap is not None
        n, model = prices.requests, self.model
        cap = min(2 * group.cap, max(m.most for m in members))
        if cap <= group.cap:
            return
        count = len(members)
        cost = model.draft_time(group.method, count, cap, sampled=group.sampled) - model.draft_time(
            group.method, count, group.cap, sampled=group.sampled
        )
        cost += model.target_time(n, n + count * cap, prices.context, prices.sampled) - model.target_time(
            n, n + count * group.cap, prices.context, prices.sampled
        )
        if cost > self._explore:
            return
        self._explore -= max(cost, 0.0)
        group.last_deep = self._step
        self._deep = group
        self._num_probes += count

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
            "adaptive", groups, self._num_decisions, self._num_probes, self._num_pauses, self._num_suspended
        )


_NEW = Drafter(Group("", "", False), 0, 0, 0)
