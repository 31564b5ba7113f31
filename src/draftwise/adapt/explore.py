"""Learning what is not in use: probes, trials of whole groups, looks beyond the cap and plain steps.

Each costs time, which an account pays for: a small share of all time that passes. See docs/algorithms/adaptive.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftwise.adapt.choice import Drafter, Group, Prices, make_option
from draftwise.adapt.performance import PerformanceModel, class_of_batch

_LONGEST_STREAK = 6
"""Proposals in a row of a probe that succeeds: by then the next choice knows."""
_TRIAL = 2
"""Nodes drafted in a trial of a group that never drafted."""
_DEAREST = 2.0
"""A probe that needs so many full purses to catch up on what was not drafted for is not made."""
_HOPELESS = 4.0
"""Where not even perfect drafts would pay, by what is believed of their costs, so many times fewer probes are made."""
_LEAST_REMAINING = 16
"""A request that ends before so many tokens is not probed: it would catch up on all of its tokens for one draft or two.
"""
PAUSE_ROUNDS = 8
"""The most of the plain step of a pause: of more, it would cost more than can be saved up, and never be made."""
_PAUSE_STEPS = 3
"""Steps of a pause where others have several rounds: one that verifies what waits, the plain one, and one that drafts
again, since who catches up does so in a step of one round."""
_LONGEST_WAIT = 1000
"""Rounds between pauses, at most, though they are dear."""
_SURE = 9
"""Samples of a plain step that are enough."""


class Explorer:
    """Tries settings that are not in use, rarely and for one step: requests that do not draft are probed with a
    draft,
    longer while it succeeds; requests that draft make a plain step.

    ``pausing``: nobody drafts in this step. ``deep``: the group that drafts up to twice its cap in this step.
    """

    def __init__(
        self, model: PerformanceModel, share: float, most_steps: float, *, pauses: bool = True
    ) -> None:
        """``share`` of the time that passes may be spent; ``most_steps``: plain steps that may be saved up. ``pauses``:
        whether requests that draft may make a plain step; where that is no plain step like others, the times of plain
        ones have to be known already."""
        self._pauses = pauses
        self.pausing = False
        self.deep: Group | None = None
        self.num_probes = self.num_pauses = 0
        self._model = model
        self._share = share
        self._most_steps = most_steps
        self.pause_steps = 1  # 2: the drafting part of steps is not measured
        """Steps of a pause. In the first one, proposals may still be verified; the next one is all plain, but for its
        drafting, unless that pauses, too."""
        self.rounds = 1.0
        """Of a step, lately. Waits are meant in rounds."""
        self.step_price = 0.0
        """Seconds of a step of several rounds that it would not take if its rounds were part of another."""
        self._step = self._pause_until = 0
        self._next_look = 0  # step
        self._funds = 0.0  # seconds that may be spent
        self._row_cost = 0.0  # seconds per row of a probe
        self._plain_seen: dict[int, int] = {}  # class of the batch -> step of the last plain measurement
        self._unseen = 0  # pauses on the house since then

    def begin(self, step: int) -> None:
        """A step begins: nothing is tried in it yet."""
        self._step = step
        self.pausing = step < self._pause_until
        self.deep = None

    @property
    def several(self) -> bool:
        """Whether steps have several rounds. The first one of a step meets cold caches and a thread that sleeps, so a
        plain step to learn from has several, too, behind one that verifies what waits."""
        return self.rounds > 1.2

    def pause_if_untimed(self) -> None:
        """Nothing is known of plain steps, and steps with drafting say nothing about them: make some."""
        if self.pause_steps > 1 and self._pauses:
            self.pausing = True
            self._pause_until = max(self._pause_until, self._step + 1)

    def is_due(self) -> bool:
        """Whether to look in this step for something to try. Not in a pause: what it finds out has to be looked at
        first, and with many rounds in a step the next pause would begin before that, for ever."""
        return not self.pausing and self._funds > 0 and self._step >= self._next_look

    @property
    def funds(self) -> float:
        """Seconds that may be spent."""
        return self._funds

    def spend(self, seconds: float) -> None:
        """Something was tried that cost so much: catching up, following a sample. There may be debts."""
        self._funds -= seconds

    def earn(self, seconds: float, prices: Prices) -> None:
        """Time that passes pays for learning."""
        most = self._most_steps * prices.plain
        # One wild measurement must not stop learning for long.
        self._funds = min(max(self._funds, -most) + self._share * seconds, most)

    def saw_plain(self, requests: int) -> None:
        """A plain step with this many requests was measured."""
        self._plain_seen[class_of_batch(requests)] = self._step
        self._unseen = 0

    # -------------------------------------------------------------------------------------- outcomes of probes

    def take_outcome(self, drafter: Drafter, drafted: int, accepted: int, prices: Prices | None) -> bool:
        """A probe of ``drafted`` nodes was verified. Answers whether it succeeded and goes on, longer. What it brought
        pays for it, or savings do."""
        if prices is not None:
            gained = accepted * prices.plain / prices.requests
            self._funds += gained
            if drafter.group.hopeful and 2 * accepted > drafted and drafter.streak < _LONGEST_STREAK:
                nodes = min(2 * drafted, drafter.most)
                price = self._price(drafter.group, 1, nodes, prices)
                if price <= max(self._funds, gained):
                    self._funds -= price
                    drafter.streak += 1
                    drafter.probe = nodes
                    return True
        drafter.probe = drafter.streak = 0
        return False

    def _price(self, group: Group, count: int, nodes: int, prices: Prices) -> float:
        """Seconds that it takes if so many requests more draft ``nodes`` nodes: their drafts, and their rows unless
        `take_proposal` pays for these."""
        seconds = self._model.draft_time(group.method, count, nodes, sampled=group.sampled)
        return seconds if group.evident else seconds + self._rows_price(count * nodes, prices)

    def _rows_price(self, rows: int, prices: Prices) -> float:
        n = prices.requests
        return max(self._model.target_time(n, n + rows, prices.context, prices.sampled) - prices.plain, 0.0)

    def take_proposal(self, drafter: Drafter, proposed: int) -> None:
        """A probe has led to a proposal of this many nodes."""
        if not proposed:
            drafter.probe = drafter.streak = 0
        elif drafter.group.evident:  # the price of its rows; that of drafting was paid in `_probe`
            self._funds -= self._row_cost * proposed

    # -------------------------------------------------------------------------------------------- what to try

    def look(
        self,
        prices: Prices,
        rate_gain: float,
        plain_known: bool,
        active: Callable[[], Sequence[tuple[Group, list[Drafter]]]],
    ) -> None:
        """Spend what may be spent on what is due, and note when to look again.

        ``rate_gain``: promised rate over the plain one; ``plain_known``: `Prices.plain` was measured, not guessed;
        ``active``: finds the groups with the requests that were planned lately.
        """
        self._next_look = self._step + self._steps(8)
        if not self._pause(prices, rate_gain, plain_known):
            self._try_drafts(active(), prices, rate_gain)

    def _pause(self, prices: Prices, rate_gain: float, plain_known: bool) -> bool:
        """Whether a plain step is due and can be paid, to measure what it takes; then nobody drafts in this step."""
        step = self._step
        if rate_gain <= 1.0 or not self._pauses:
            return False
        seen = self._plain_seen.get(class_of_batch(prices.requests))
        steps = rounds = self.pause_steps
        if self.several:
            steps, rounds = 2, 1 + min(round(self.rounds), PAUSE_ROUNDS)
        cost = rounds * prices.plain * (1 - 1 / rate_gain)
        if self.several:
            cost = min(cost + _PAUSE_STEPS * self.step_price, self._most_steps * prices.plain)
        # Never measured at this size, and every comparison rests on it; and the first few samples are on the house.
        # Where none comes of it, since all steps have prompts in them, it is tried again after 16, 32, ... rounds.
        if seen is None or (not plain_known and step >= seen + max(self._steps(8), 3 * steps)):
            if self._unseen and step < self._pause_until + self._steps(8 << min(self._unseen, 8)):
                return False
            self._unseen += 1
            cost = 0.0
        elif not plain_known or step < seen + self._pause_interval(prices, cost) or self._funds < cost:
            return False
        self.pausing = True
        self._pause_until = step + steps
        self._funds -= cost
        self.num_pauses += 1
        return True

    def _pause_interval(self, prices: Prices, cost: float) -> int:
        """Steps between plain ones, such that they take 0.2 % of the time: a wrong belief must be
        found out. The first samples, of a machine that is not warm yet, are soon followed by others.

        Example: at a gain of 1.1 a plain step loses 0.09 steps every 96 steps; at 2 it loses half a one,
        every 250. Where one of eight rounds loses 6, 1000 rounds are between them.
        """
        n = prices.requests
        if self._model.times_measured(n, n, prices.context, prices.sampled) < _SURE:
            return self._steps(32)
        return self._steps(min(max(96, round(500 * cost / prices.plain)), _LONGEST_WAIT))

    def _steps(self, rounds: int) -> int:
        """Steps that so many rounds take, at least one."""
        return max(round(rounds / self.rounds), 1)

    def _try_drafts(
        self, groups: Sequence[tuple[Group, list[Drafter]]], prices: Prices, rate_gain: float
    ) -> None:
        """Let requests draft whose turn it is and whose drafts can be paid."""
        step = self._step
        need = float("inf")
        for group, members in groups:
            idle = [m for m in members if not (m.budget or m.probe or m.remaining < _LEAST_REMAINING)]
            if idle:
                self._next_look = step + self._steps(4)
                ready = [m for m in idle if m.ready <= step]
                price = float("inf")
                if not group.cap and group.hopeful and step - group.last_deep > self._steps(256):
                    price = self._try_all(group, idle, len(ready), prices)
                if ready and price > self._most_steps * prices.plain:  # more than can be saved up
                    price = self._probe(group, ready, prices)
                need = min(need, price)
            elif group.cap and step - group.last_deep > self._steps(64):
                self._look_deeper(group, members, prices)
        if need < float("inf") and rate_gain <= 1.0:
            # No request drafts: wait until there is enough for the cheapest probe.
            wait = (need - self._funds) / (self._share * prices.plain)
            self._next_look = step + self._steps(min(max(int(wait), 4), 512))

    def _probe(self, group: Group, idle: list[Drafter], prices: Prices) -> float:
        """Let some of those who do not draft make one draft, those first who never did or whose turn it is; short,
        unless drafting costs nothing to speak of. Answers its price in seconds; 0: done."""
        count = max(1, len(idle) // 16)
        idle.sort(key=lambda m: m.last_probe)
        chosen = idle[:count]
        nodes = max(m.most for m in chosen) if group.evident else 1
        rows = count * min(nodes, 4)
        self._row_cost = self._rows_price(rows, prices) / rows
        # What seems dearer is tried too: the belief may be wrong.
        cost = min(self._price(group, count, nodes, prices), prices.plain)
        if not group.hopeful:
            cost *= _HOPELESS
        cost += self._alone(group)
        late = self._catch_up(group, chosen, nodes)
        if late > _DEAREST * self._most_steps * prices.plain:
            return float("inf")
        need = cost + min(late, prices.plain)  # what it really takes is paid later, see `spend`
        if need > self._funds:
            return need
        self._funds -= cost
        self.num_probes += count
        for member in chosen:
            member.probe = min(nodes, member.most)
            member.streak = 0
            member.last_probe = self._step
            member.history.counts.fade(0.5)
        return 0.0

    def _alone(self, group: Group) -> float:
        """Seconds that a probe of a model takes more because its step has one round, where others have several. A probe
        of a look-up is a part of any step."""
        return 0.0 if group.evident else self.step_price

    def _catch_up(self, group: Group, members: Sequence[Drafter], nodes: int) -> float:
        """Seconds it takes until the drafter has seen what these requests committed without it."""
        lag = sum(m.lag(self._step) for m in members)
        return self._model.catch_up_time(group.method, len(members), nodes, lag, group.sampled)

    def _try_all(self, group: Group, idle: list[Drafter], ready: int, prices: Prices) -> float:
        """Let the whole group draft once: what it costs together is not seen by probes of a few. Answers the price in
        seconds; 0: done. ``ready``: how many of them may draft well."""
        nodes = min(group.last_cap or _TRIAL, max(m.most for m in idle))
        if group.evident:
            nodes = max(m.most for m in idle)
        option = make_option(group, idle, nodes, prices, 0.0, self._model)
        n, model = prices.requests, self._model
        more = model.target_time(n, round(n + option.rows), prices.context, prices.sampled) - prices.plain
        seconds = max(more, 0.0) + option.draft_time
        gained = option.tokens * ready / len(idle) * prices.plain / n
        cost = max(seconds - gained, 0.2 * seconds)
        # As in `_probe`: the belief may be wrong. Where passes were timed at the start, it is not.
        if self._pauses:
            cost = min(cost, 0.5 * self._most_steps * prices.plain)
        cost += self._alone(group)
        need = cost + self._catch_up(group, idle, nodes)
        if need > self._funds:
            return need
        self._funds -= cost
        self.num_probes += len(idle)
        group.last_deep = self._step
        self._row_cost = 0.0
        for member in idle:
            member.probe, member.streak = min(nodes, member.most), _LONGEST_STREAK
            member.last_probe = self._step
        return 0.0

    def _look_deeper(self, group: Group, members: list[Drafter], prices: Prices) -> None:
        """Draft up to twice the cap for one step: positions beyond it are not seen otherwise."""
        assert group.cap is not None
        n, model = prices.requests, self._model
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
        cost = min(max(cost, 0.0) + self.step_price, self._most_steps * prices.plain)
        if cost > self._funds:
            return
        self._funds -= cost
        group.last_deep = self._step
        self.deep = group
        self.num_probes += count
