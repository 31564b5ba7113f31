"""The controller that drafts only where it pays (docs/algorithms/adaptive.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

from draftwise.adapt.choice import Drafter, Group, Prices
from draftwise.adapt.controller import Controller, ControlStats, GroupControl, StepShape, Tables
from draftwise.adapt.decisions import Decisions
from draftwise.adapt.drafting_time import DraftingTime
from draftwise.adapt.explore import PAUSE_ROUNDS, Explorer
from draftwise.adapt.following import Following
from draftwise.adapt.ledger import Ledger
from draftwise.adapt.outcomes import outcomes
from draftwise.adapt.performance import PerformanceModel, bucket
from draftwise.adapt.roster import Planned, Roster, record
from draftwise.adapt.round_times import RoundTimes
from draftwise.adapt.settings import AdaptiveSettings
from draftwise.types import CUT_BYTES, RoundCuts, RowResult, Speculation, StepResult

_PROMISING = 1.1
"""Promised rate over the plain one from which on suspended speculation is tried again before it has paid."""


class AdaptiveController(Controller):
    """Measures what drafting and verifying cost and what they gain, and chooses per group and request.

    It begins with what the requests ask for, and learns. A choice stands for some steps, so that a step costs
    microseconds. What is not in use is tried again by an `Explorer`; a `Ledger` suspends speculation that loses; where
    nobody drafts for long, drafters need not see what is decoded (`Following`).
    """

    def __init__(
        self,
        tables: Tables | None = None,
        evident: Collection[str] = (),
        observing: Collection[str] = (),
        *,
        ahead: bool = False,
        seated: bool = False,
        model: PerformanceModel | None = None,
        settings: AdaptiveSettings | None = None,
    ) -> None:
        """``evident``: methods whose proposals' sizes follow from committed tokens (`Proposer.evident`). ``observing``:
        those whose drafters look at what the target computes (`Proposer.observes`). ``ahead``: a step is planned before
        the one before it is observed. ``seated``: steps stay on a device (`runner.seats`), and whoever neither drafts
        nor decodes plainly is computed apart. ``model``: one that has learned on this engine before; of a device, what
        its passes take (`PerformanceModel.teach_passes`), for requests that draft there make no plain step."""
        self.model = model or PerformanceModel()
        self.settings = settings or AdaptiveSettings()
        self._roster = Roster(tables or {}, evident, observing, ahead=ahead)
        self._drafters = self._roster.drafters
        self._groups = self._roster.groups
        self._ahead = ahead
        self._seated = seated
        self._ended: list[int] = []
        self._step = 0
        self._explorer = Explorer(
            self.model, self.settings.explore_share, self.settings.explore_steps, pauses=not seated
        )
        self._ledger = Ledger(self.settings.loss_share, self.settings.loss_steps)
        self._following = Following(self.model, apart=seated)
        self._decisions = Decisions(
            self.model, self.settings, self._roster, self._ledger, self._following, together=seated
        )
        self._drafting_time = DraftingTime(self.model, self._explorer)
        self.resting = self._following.resting
        self._planned = Planned(0)  # the newest step
        self._num_suspended = 0
        self._rounds = RoundTimes(self._explorer, self._decisions)
        self._unbooked: deque[tuple[int, int, int]] = deque(maxlen=8)
        """Requests, accepted drafts and rounds of the steps that were passed over since the last one in the account;
        few, unless steps that count have prompts in them."""

    # ------------------------------------------------------------------------------------------- planning

    @property
    def settled(self) -> bool:
        if not self._groups or self._ledger.suspended:  # nobody drafts
            return True
        return self._rounds.seen > self.settings.warm_steps and not self._decisions.guessed

    def begin(self, batch_size: int) -> Planned:
        self._step += 1
        planned = self._planned = Planned(self._step)
        if self._ended:
            for rid in self._ended:
                gone = self._drafters.pop(rid, None)
                if gone is not None:
                    self._following.forget(gone)
            self._ended.clear()
        self._roster.batch = batch_size
        self._explorer.begin(self._step)
        if not self._groups:
            return planned
        decisions = self._decisions
        if decisions.is_due(self._step):
            decisions.decide(self._step)
        if self._ledger.suspended:
            self._num_suspended += 1
        elif decisions.prices is None:
            self._explorer.pause_if_untimed()
        elif self._explorer.is_due():
            active = partial(self._roster.active, self._step)
            self._explorer.look(decisions.prices, decisions.rate_gain, decisions.plain_known, active)
            if self._explorer.pausing:  # what a choice takes is no part of a plain step
                decisions.put_off(self._step + self._explorer.pause_steps + 1)
            self._look_for_samples(decisions.prices)
        return planned

    def _look_for_samples(self, prices: Prices) -> None:
        for group, members in self._roster.active(self._step):
            if group.resting:
                self._following.renew(group, members, self._step, self._explorer.funds, prices)

    def admit(self, rid: int, speculation: Speculation, missing: int, remaining: int) -> None:
        drafter = self._drafters.get(rid, _NEW)
        if drafter is _NEW:
            drafter = self._enter(rid, speculation)
        if drafter is None:
            return
        drafter.behind, drafter.drafted = max(missing - 1, 0), self._step - 1
        drafter.waiting = drafter.probe = 0
        drafter.remaining = remaining
        if drafter.group.follows:
            self._following.admit(drafter, missing, self._explorer.funds, self._decisions.prices)

    def draft_budget(self, rid: int, speculation: Speculation, batch_size: int) -> int:
        drafter = self._drafters.get(rid, _NEW)
        if drafter is _NEW:
            drafter = self._enter(rid, speculation)
        if drafter is None:
            return 0
        step = self._step
        drafter.seen = step
        if drafter.glances:
            self._following.look_away(drafter)
        if self._explorer.pausing or self._ledger.suspended:
            return 0
        nodes = drafter.budget if drafter.ready <= step else 0
        drafter.probing = False
        if not nodes:
            # A probe waits for its outcome before it goes on.
            if not drafter.probe or (drafter.waiting and not drafter.streak):
                return 0
            nodes = drafter.probe
            drafter.probing = True
            if drafter.ready > step:
                self._following.glance(drafter)
        elif drafter.group is self._explorer.deep:
            nodes = min(2 * nodes, drafter.most)
            drafter.probing = True
        return nodes

    def granted(self, rid: int, nodes: int) -> None:
        drafter = self._drafters[rid]
        assert drafter is not None, "a request that decodes plainly is to draft"
        step = self._step
        lag = drafter.lag(step)
        drafter.drafted, drafter.behind = step, 0
        drafter.waiting = nodes  # until the outcome says how many
        planned = self._planned
        planned.asked.add(rid)
        group = planned.drafting.get(drafter.group)
        if group is None:
            drafter.group.num_rounds += 1
            planned.drafting[drafter.group] = [1, nodes, lag]
        else:
            group[0] += 1
            group[1] = max(group[1], nodes)
            group[2] += lag

    def _enter(self, rid: int, speculation: Speculation) -> Drafter | None:
        known = self._roster.num_made
        drafter = self._roster.enter(rid, speculation, self._step)
        if self._roster.num_made > known:
            self._decisions.decide_by(0)
            self._ledger.lend(self.settings.trial_loss)
        return drafter

    def forget(self, rid: int) -> None:
        if rid in self._drafters:
            self._ended.append(rid)  # its last row may be still to come

    def nodes_to_verify(self, rid: int, num_proposed: int) -> int:
        drafter = self._drafters.get(rid)
        if drafter is None:
            return num_proposed
        drafter.verified = num_proposed
        if drafter.before is not None:
            self._planned.before[rid] = drafter.before
        if drafter.probing or not drafter.group.cuts:
            return num_proposed
        cut = drafter.cut(num_proposed)
        if not cut:  # the next one is looked at without regard to this
            drafter.before = None
        return cut

    def rounds(self, rids: Sequence[int], most: int, usual: int = 0) -> tuple[int, RoundCuts | None]:
        planned = self._planned
        planned.most_rounds, planned.usual_rounds = most, max(most, usual)
        if not self._groups:
            return most, None
        if self._explorer.deep is not None:
            return 1, None
        plain = not planned.drafting and self._nothing_waits(rids)
        if self._explorer.pausing:
            return min(most, PAUSE_ROUNDS) if plain and self._explorer.several else 1, None
        if plain:
            return most, None
        if any(lag for _, _, lag in planned.drafting.values()):
            return 1, None  # the first of them takes longer
        tables, outcomes, once = bytearray(), bytearray(), bytearray()
        for rid in rids:
            drafter = self._drafters.get(rid)
            probing = drafter is not None and drafter.probing and rid in planned.asked
            if drafter is None or probing:
                if drafter is not None and not drafter.group.evident:
                    return 1, None  # a probe waits for its outcome
                tables += _WHOLE
            else:
                tables += drafter.cut_table()
            outcomes.append(_UNKNOWN if drafter is None or drafter.before is None else drafter.before)
            once.append(probing)
            if probing:
                planned.once.add(rid)
        return most, RoundCuts(bytes(tables), bytes(outcomes), bytes(once) if planned.once else b"")

    def _nothing_waits(self, rids: Sequence[int]) -> bool:
        """Whether all rounds of a step that drafts nothing are plain."""
        return not any(d is not None and d.waiting for d in map(self._drafters.get, rids))

    # ------------------------------------------------------------------------------------------- observing

    def observe(self, result: StepResult, shape: StepShape, seconds: float | None) -> None:
        planned = shape.note if isinstance(shape.note, Planned) else self._planned
        step = planned.step
        if not self._groups:
            # Plain decoding only. What it takes is soon well known.
            if seconds is not None and (step < 64 or step % 8 == 0):
                self.model.observe_target(shape, (seconds - result.draft_time) / result.num_rounds)
            return
        rounds = result.num_rounds
        if not shape.prompt_rows:
            self._rounds.saw(rounds)
        for group in planned.drafting:
            group.num_rounds += rounds - 1  # the first was counted when it was planned
        accepted, drafted, apart = self._observe_rounds(result, planned)
        if seconds is None:
            return
        undrafted = not (planned.drafting or drafted)
        whole, seconds = seconds, self._rounds.of_one(result, planned, seconds, plain=undrafted)
        if rounds > 1:
            shape.rows = shape.requests + (drafted and max(round(drafted / rounds), 1))
        if apart:  # a pass more than steps have whose requests all draft, or decode plainly
            self._earn(whole)
            return
        if self._ahead and not shape.prompt_rows:  # what was planned is the most that could be
            shape.requests = len(result.rows)
            shape.rows = shape.requests + drafted
        drafting, draft_time = planned.drafting, result.draft_time / rounds
        untimed = bool(drafting) and draft_time <= 0 and result.forward_time <= 0
        if untimed:
            self._explorer.pause_steps = 2
            draft_time = self._drafting_time.guess(shape, seconds)
        elif draft_time > 0 and not drafting:
            self._charge_following(draft_time, shape)
        plain = shape.rows == shape.requests and not drafting
        if plain and step % 4 and self._decisions.next_step > step + 8:
            self._earn(whole)  # no request drafts and nothing is due: a sample in four is enough
            return
        decoding = shape.requests > 0 and not shape.prompt_rows
        pure = shape.rows == shape.requests
        warm = step > self.settings.warm_steps and self._decisions.next_step > step + 2
        if decoding and not pure and warm and step % self._decisions.stride:
            # To take one in costs as much as everything else together: the next one stands for those before it, too.
            self._unbooked.append((shape.requests, accepted, rounds))
            self._earn(whole)
            return
        usual = seconds - draft_time
        unlike = rounds == 1 and decoding and self._is_unlike(shape)
        if unlike:
            usual = self.model.target_time(shape.requests, shape.rows, shape.context, shape.sampled)
        elif not untimed:  # what was guessed by the target's part says nothing of that
            usual = self.model.observe_target(shape, usual, self._rounds.samples(result) if undrafted else 1)
        if drafting:
            usual += self._drafting_time.observe(draft_time, shape, planned)
        if drafting and shape.prompt_rows:
            self._book_beside(draft_time, drafted, accepted)
        if decoding:
            self._decisions.saw_decoding(shape.context // shape.requests, shape.sampled)
            if pure and not (untimed or unlike):
                self._explorer.saw_plain(shape.requests)
            if not plain:
                self._account(shape, accepted, min(seconds, 1.25 * usual), rounds)
        self._earn(whole)

    def _is_unlike(self, shape: StepShape) -> bool:
        """Whether a step of one round says little, because such steps have several: its caches are colder. The first
        says more than a guess."""
        known = self.model.times_measured
        return self._explorer.several and known(shape.requests, shape.rows, shape.context, shape.sampled) >= 1

    def _observe_rounds(self, result: StepResult, planned: Planned) -> tuple[int, int, bool]:
        """`_observe_rows` of all rounds."""
        kept, total, apart = self._observe_rows((*result.earlier, result.rows)[0], planned)
        planned.asked -= planned.once
        for rows in (*result.earlier, result.rows)[1:]:
            for rid, drafted, _, _, _, _ in outcomes(rows):
                drafter = self._drafters.get(rid)
                if drafter is not None and drafter.waiting:
                    drafter.verified = drafter.waiting
                    if not drafted:
                        drafter.before = None
                    if drafter.before is None:
                        planned.before.pop(rid, None)
                    else:
                        planned.before[rid] = drafter.before
            more = self._observe_rows(rows, planned)
            kept, total, apart = kept + more[0], total + more[1], apart or more[2]
        return kept, total, apart

    def _observe_rows(self, rows: Sequence[RowResult], planned: Planned) -> tuple[int, int, bool]:
        """Take in what became of every request's proposal. Answers how many drafts were accepted, and how many
        verified, and whether some request had no seat because its drafter was told of tokens and did not draft."""
        kept = total = 0
        apart = False
        drafters, asked, before = self._drafters, planned.asked, planned.before
        for place, (rid, drafted, accepted, depth, proposed, size) in enumerate(outcomes(rows)):
            drafter = drafters.get(rid)
            if drafted and size:  # without tokens: the request failed
                total += drafted
                kept += accepted
                if drafter is not None:
                    # A group that once drafted trees counts by the nodes of paths.
                    trees = depth != drafted or drafter.group.trees
                    path = rows[place].accepted_nodes if trees else None
                    self._judge(drafter, drafted, accepted, before.get(rid), path, planned.step)
            if drafter is None:
                continue
            drafter.waiting = proposed
            drafter.remaining -= size
            if self._seated and drafter.group.follows and rid not in asked and rid not in self.resting:
                apart = True
            if rid in asked and size:
                if drafter.group.evident:
                    drafter.group.acceptance.add_size(proposed)
                if drafter.probe:
                    self._explorer.take_proposal(drafter, proposed)
        return kept, total, apart

    def _judge(
        self,
        drafter: Drafter,
        drafted: int,
        accepted: int,
        before: int | None,
        path: Sequence[int] | None,
        step: int,
    ) -> None:
        """A proposal of a request was verified (`record`)."""
        if drafter.ready > step:
            drafter.probe = drafter.streak = (
                0  # drafted to see what it takes: its drafter had seen next to nothing
            )
            return
        record(drafter, drafted, accepted, before, path)
        if drafter.probe and self._explorer.take_outcome(drafter, drafted, accepted, self._decisions.prices):
            self._decisions.decide_by(self._step + 2)

    def _book_beside(self, seconds: float, verified: int = 0, accepted: int = 0) -> None:
        """Drafters have read what others decoded, or prompts. Beside a prompt, whose time hides what the rest of a step
        takes, drafts were ``verified`` and ``accepted``."""
        prices = self._decisions.prices
        if prices is None or not self._decisions.plain_known:
            return
        n, plain = self._roster.batch or prices.requests, prices.plain
        context = prices.context // prices.requests * n
        # Those of the newest choice may have ended, while others come all at once.
        if bucket(n) != bucket(prices.requests):
            plain = self.model.target_time(n, n, context, prices.sampled)
        if verified:
            seconds += max(self.model.target_time(n, n + verified, context, prices.sampled) - plain, 0.0)
        self._ledger.book(accepted / n - seconds / plain, n)

    def _charge_following(self, seconds: float, shape: StepShape) -> None:
        """Drafters have spent time in a step in which none of them drafted."""
        prices = self._decisions.prices
        if prices is None:
            return
        if any(group.follows and not group.resting for group in self._groups):
            self._book_beside(seconds)
            return
        self._explorer.spend(seconds)  # for a sample
        if self._explorer.funds < 0:
            for group in self._groups:
                self._following.drop(group)

    def _account(self, shape: StepShape, accepted: int, seconds: float, rounds: int) -> None:
        """Book what speculation gains or loses against plain decoding, in plain steps. ``seconds``: of a round. The
        step stands for those that were passed over before it and had as many requests: their rounds took as long, and
        what they accepted was counted.

        Example: 2 drafts of one request in 1.5 times the time of a plain step: 2 + 1 - 1.5 = 1.5 steps gained.
        """
        alike = [(many, of) for requests, many, of in self._unbooked if requests == shape.requests]
        self._unbooked.clear()
        steps, total = rounds + sum(of for _, of in alike), accepted + sum(many for many, _ in alike)
        prices = self._decisions.prices
        if prices is None or not self._decisions.plain_known:
            return
        if bucket(shape.requests) != bucket(prices.requests) or shape.sampled != prices.sampled:
            return
        gain = total / shape.requests + steps * (1 - seconds / prices.plain)
        self._ledger.book(gain, shape.requests)

    def _earn(self, seconds: float) -> None:
        """Time that passes pays for learning, and for losses."""
        prices = self._decisions.prices
        if prices is not None:
            self._explorer.earn(seconds, prices)
            self._ledger.earn(seconds / prices.plain, self._decisions.rate_gain > _PROMISING)

    # --------------------------------------------------------------------------------------------- reports

    def stats(self) -> ControlStats:
        groups = tuple(
            GroupControl(
                method=group.method,
                rule=group.rule,
                num_requests=len(members),
                num_drafting=sum(bool(m.budget) for m in members) if not self._ledger.suspended else 0,
                cap=group.cap if group.cap is not None else max(m.most for m in members),
                gain=group.gain,
                accepted=group.accepted,
            )
            for group, members in self._roster.active(self._step)
        )
        return ControlStats(
            "adaptive",
            groups,
            self._decisions.num_decisions,
            self._explorer.num_probes,
            self._explorer.num_pauses,
            self._num_suspended,
        )


_NEW = Drafter(Group("", "", False), 0, 0, 0)
_WHOLE, _UNKNOWN = 4 * bytes(range(CUT_BYTES // 4)), 3
"""A table that cuts nothing, and the last kind of outcome of `RoundCuts`."""
