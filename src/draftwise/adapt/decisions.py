"""Decisions about drafting, and when they are made again."""

from __future__ import annotations

from draftwise.adapt.choice import Drafter, Group, Option, Prices, choose, cuts_of, pays_at_best
from draftwise.adapt.following import Following
from draftwise.adapt.ledger import Ledger
from draftwise.adapt.performance import PerformanceModel, bucket, class_of_batch
from draftwise.adapt.roster import Roster
from draftwise.adapt.settings import AdaptiveSettings

_STRIDE = 3
"""One drafting step of so many is taken in, once the engine is warm."""
_QUICK = 0.002
_MOST_QUICK = 2.0
"""Seconds of a plain step below which the controller looks more rarely, up to so many times: what it takes is the same
for a small model, and more of its steps."""
_CHOICE_SECONDS = 0.2
"""A choice stands for about so long where steps have several rounds, but for `AdaptiveSettings.interval` rounds."""
_SAMPLES = 5
"""Drafting steps that are taken in between two choices, if there are so many."""
_HOPELESS_DRAFTS = 8
_HOPELESS_ACCEPTED = 0.3
"""So many proposals of which less than so many drafts were accepted on average end a trial before its time."""


class Decisions:
    """The newest choice, what it was made of, and the step at which the next one is made.

    ``prices``: what the newest decision reckoned with; None: none was made. ``plain_known``: its plain step was
    measured, not guessed. ``guessed``: the choice is a trial's, or what its steps take was not measured. ``rate_gain``:
    the rate that it promises over the plain one. ``stride``: one step in so many is taken in. ``rounds``: of a step,
    lately; a choice that nobody drafts stands for a number of rounds, not steps.
    """

    def __init__(
        self,
        model: PerformanceModel,
        settings: AdaptiveSettings,
        roster: Roster,
        ledger: Ledger,
        following: Following,
        *,
        together: bool = False,
    ) -> None:
        """``together``: see `Prices`."""
        self.prices: Prices | None = None
        self.plain_known = False
        self.rate_gain = 1.0
        self.num_decisions = 0
        self.rounds = 1.0
        self.guessed = True
        self.next_step = 0
        self.stride = _STRIDE
        self._model = model
        self._settings = settings
        self._roster = roster
        self._ledger = ledger
        self._following = following
        self._together = together
        self._batch_bucket = 0
        self._mean_context = 0
        self._sampled = False

    def is_due(self, step: int) -> bool:
        """Whether to decide before this step is planned: it is time, or the batch has another size."""
        return step >= self.next_step or bucket(self._roster.batch) != self._batch_bucket

    def decide_by(self, step: int) -> None:
        """Not later than at this step."""
        self.next_step = min(self.next_step, step)

    def put_off(self, step: int) -> None:
        """Not before this step, unless the batch changes."""
        self.next_step = max(self.next_step, step)

    def saw_decoding(self, context: int, sampled: bool) -> None:
        """The newest step that decoded: tokens before a row, on average, and whether tokens were drawn."""
        self._mean_context, self._sampled = context, sampled
        self._ledger.turn_to(sampled=sampled)

    def decide(self, step: int) -> None:
        """Choose for all groups that were planned lately, and when to choose again."""
        settings = self._settings
        self._batch_bucket = bucket(self._roster.batch)
        self.next_step = step + 1
        self._roster.keep_to_tables()
        for group in self._roster.groups:
            if group.cap is not None and 2 * group.chosen_for < self._roster.batch:
                self._recall(group)
        groups = [(group, self._able(group, members, step)) for group, members in self._roster.active(step)]
        if not groups:
            return
        n = max(1, self._roster.batch)
        context, sampled = self._mean_context * n, self._sampled
        plain = self._model.target_time(n, n, context, sampled)
        if plain <= 0:
            return  # no step of pure decoding was measured yet
        self.num_decisions += 1
        prices = self.prices = Prices(n, context, sampled, plain, step, self._together)
        self.plain_known = self._model.times_measured(n, n, context, sampled) >= 3
        options, rate = choose(groups, prices, self._model)
        self.rate_gain = rate * plain / n
        quick = min(max(_QUICK / plain, 1.0), _MOST_QUICK)
        usual = max(settings.interval, _CHOICE_SECONDS / plain) / self.rounds
        usual = max(min(round(usual), round(settings.interval * quick)), 1)
        interval = max(round(settings.idle_interval / self.rounds), min(settings.interval, usual))
        soon = max(round(settings.warm_interval / self.rounds), 1)
        self.guessed = False
        for (group, members), option in zip(groups, options, strict=True):
            trial = self._on_trial(group)
            if trial:
                self.guessed = True
                interval = min(interval, soon)
            else:
                self._carry_out(group, members, option)
            drafts = trial or (option.cap > 0 and not self._ledger.suspended)
            self._following.tidy(group, self._roster.members(group), n, step, drafts)
            if not drafts:
                interval = min(interval, self._following.next_look(group, n, step))
        if any(option.cap for option in options):
            # What was chosen by a guess is looked at again when it was measured, and not before.
            rows = round(n + sum(option.rows for option in options))
            guessed = self._model.times_measured(n, rows, context, sampled) < 3
            self.guessed = self.guessed or guessed
            early = guessed or step < settings.warm_steps
            self.stride = max(min(round(_STRIDE * quick), usual // _SAMPLES), 1)
            interval = min(interval, soon if early else usual)
            if step < settings.first_steps and not guessed:
                interval = 1
        elif step < settings.first_steps:
            interval = 1
        self.next_step = step + interval

    def _able(self, group: Group, members: list[Drafter], step: int) -> list[Drafter]:
        """The requests to decide about: those whose drafters have seen enough to draft well; all, if none has or the
        group rests."""
        if not group.follows or group.resting:
            return members
        return [m for m in members if m.ready <= step] or members

    def _recall(self, group: Group) -> None:
        """The batch has grown much: begin with what was chosen when it was of this size, if it was."""
        cap = group.chosen.get(class_of_batch(self._roster.batch))
        if cap is None:
            return
        group.cap, group.chosen_for = cap, self._roster.batch
        members = self._roster.members(group)
        for member in members:
            member.budget = min(cap, member.most)
        if not cap:
            self._following.rest(group, members)

    def _on_trial(self, group: Group) -> bool:
        """Whether the group goes on drafting what it was asked for, whatever its first times look like: a machine that
        is busy at that moment must not decide. Nearly no draft accepted is reason enough to stop."""
        settings = self._settings
        if self._roster.batch > 2 or group.cap is not None or group.num_rounds >= settings.trial_rounds:
            return False
        if group.num_rounds < 2:  # what others lost before says nothing of this group
            group.trial_floor = self._ledger.balance - settings.trial_loss
        if self._ledger.balance < group.trial_floor:
            return False
        few = group.num_accepted < _HOPELESS_ACCEPTED * group.num_drafts
        return not (few and group.num_drafts >= _HOPELESS_DRAFTS)

    def _carry_out(self, group: Group, members: list[Drafter], option: Option) -> None:
        assert self.prices is not None
        group.cap = option.cap
        group.chosen_for, group.entered = self._roster.batch, 0
        group.chosen[class_of_batch(self._roster.batch)] = 0 if self._ledger.suspended else option.cap
        group.gain = self.rate_gain
        group.hopeful = True
        if option.cap:
            group.last_cap = option.cap
        drafting = sum(on for _, on in option.members)
        group.accepted = option.tokens / drafting if drafting else None
        if not option.cap:
            group.hopeful = pays_at_best(group, members, self.prices, self._model)
            for member in members:
                member.budget = 0
            return
        for member, on in option.members:
            member.budget = min(option.cap, member.most) if on else 0
            member.cuts = cuts_of(group, member, min(option.cap, member.most), option.row_price)
            if member.budget:
                member.probe = 0
