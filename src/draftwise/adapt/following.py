"""Chooses the requests whose drafters are told what the target reads.

A head on the target's hidden states keeps features of every token and reads every prompt, whether it drafts or not:
with many requests a tenth of the time of plain decoding. Where it does not draft for long, it is told nothing: its
requests rest. One of them may go on as a sample, so that there is somebody whose drafts say what drafting is worth.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.adapt.choice import NEVER, Drafter, Group, Prices
from draftwise.adapt.performance import PerformanceModel

_IDLE_TOKENS = 256
"""A group that has committed so many tokens without drafting rests."""
_WARM_STEPS = 64
"""A drafter that missed the beginning of a request drafts worse, and much worse with a few tokens to look at: the MTP
layer of the embedded model has 0.3 accepted drafts in the first 8 tokens behind a gap and 1.6 in the first 96, where it
has 1.3 and 2.2 without one."""
_GUESS = 0.1
"""The share of a plain step's time per request that following a token takes, before it is measured."""
_SAMPLE_ROWS = 32
"""Requests of a drafting pass by which the time per row is told."""


class Following:
    """``resting``: requests whose drafters are not told of steps."""

    def __init__(self, model: PerformanceModel, *, apart: bool = False) -> None:
        """``apart``: a request that does not draft and whose drafter is told of its tokens is computed apart from the
        others, in a second pass (one without a seat on a device). Then nobody is followed who does not draft: a group
        rests at once and has no sample, and one that wakes drafts at once, however little its drafters have seen."""
        self.resting: set[int] = set()
        self._model = model
        self._apart = apart

    def price(self, group: Group, prices: Prices | None, tokens: int) -> float:
        """Seconds that it takes to follow so many tokens of a request."""
        seconds = self._model.draft_time(group.method, _SAMPLE_ROWS, 1, sampled=group.sampled) / _SAMPLE_ROWS
        if seconds <= 0 and prices is not None:
            seconds = _GUESS * prices.plain / prices.requests
        return tokens * seconds

    # ------------------------------------------------------------------------------------------- requests

    def admit(self, drafter: Drafter, missing: int, funds: float, prices: Prices | None) -> None:
        """A request begins, or begins again. ``missing``: its tokens to read; ``funds``: seconds to spend."""
        group = drafter.group
        if group.resting and group.sample in (None, drafter) and not self._apart:
            group.sample = drafter if funds > self.price(group, prices, missing + _WARM_STEPS) else None
        if group.resting and group.sample is not drafter:
            self._leave(drafter)
        else:
            self.resting.discard(drafter.rid)
            drafter.ready = 0

    def forget(self, drafter: Drafter) -> None:
        """The request has ended."""
        self.resting.discard(drafter.rid)
        if drafter.group.sample is drafter:
            drafter.group.sample = None

    def glance(self, drafter: Drafter) -> None:
        """A request that rests drafts in this step, to see what it takes: its drafter sees one token."""
        self.resting.discard(drafter.rid)
        drafter.glances = True

    def look_away(self, drafter: Drafter) -> None:
        """The step of `glance` is over."""
        drafter.glances = False
        if drafter.ready == NEVER:
            self.resting.add(drafter.rid)

    def _leave(self, drafter: Drafter) -> None:
        self.resting.add(drafter.rid)
        drafter.ready = NEVER

    # --------------------------------------------------------------------------------------------- groups

    def tidy(self, group: Group, drafters: Sequence[Drafter], requests: int, step: int, drafts: bool) -> None:
        """After a choice, which was to draft or not: a group that has not drafted for long rests, one that is to draft
        rests no longer."""
        if not group.follows:
            return
        if drafts:
            group.idle_since = NEVER
            if group.resting:
                self._wake(group, drafters, step)
        elif self._apart:
            self.rest(group, drafters)
        elif group.idle_since == NEVER:
            group.idle_since = step
        elif not group.resting and (step - group.idle_since) * requests >= _IDLE_TOKENS:
            self.rest(group, drafters)

    def next_look(self, group: Group, requests: int, step: int) -> int:
        """Steps until `tidy` may have something to do for a group that does not draft."""
        if group.resting or not group.follows:
            return NEVER
        return max(1, -(-_IDLE_TOKENS // requests) - (step - min(group.idle_since, step)))

    def rest(self, group: Group, drafters: Sequence[Drafter]) -> None:
        """The group will not draft for long."""
        if group.resting or not group.follows:
            return
        group.resting = True
        for drafter in drafters:
            if group.sample is None and drafter.ready == 0 and not self._apart:
                group.sample = drafter  # it has seen everything: worth most
            else:
                self._leave(drafter)

    def _wake(self, group: Group, drafters: Sequence[Drafter], step: int) -> None:
        group.resting, group.sample = False, None
        for drafter in drafters:
            if drafter.ready == NEVER:
                drafter.ready = step if self._apart else step + _WARM_STEPS
                self.resting.discard(drafter.rid)

    # --------------------------------------------------------------------------------------------- samples

    def drop(self, group: Group) -> None:
        """The sample has cost what there was to spend."""
        if group.sample is not None:
            self._leave(group.sample)
            group.sample = None

    def renew(
        self, group: Group, members: Sequence[Drafter], step: int, funds: float, prices: Prices
    ) -> None:
        """Follow a request that has been there for long, if no new one came that could be a sample."""
        if self._apart:
            return
        if group.sample is None and funds > self.price(group, prices, 2 * _WARM_STEPS):
            group.sample = sample = min(members, key=lambda m: m.last_probe)
            sample.ready = step + _WARM_STEPS
            self.resting.discard(sample.rid)
