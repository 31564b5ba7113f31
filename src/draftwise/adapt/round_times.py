"""Steps of several rounds, as the controller sees them: what one of them takes, and how many there are."""

from __future__ import annotations

from draftwise.adapt.decisions import Decisions
from draftwise.adapt.explore import Explorer
from draftwise.adapt.roster import Planned
from draftwise.types import StepResult

_WARM_ROUNDS = 4
"""Rounds of a plain step whose later half has warm caches."""
_SAMPLES = 3
"""So many steps say as much as the later half of such a step."""
_SHARE = 0.25
"""The weight of the newest step in what is said of steps lately."""


class RoundTimes:
    """Tells the explorer and the decisions how many rounds a step has, and takes a step's time apart."""

    def __init__(self, explorer: Explorer, decisions: Decisions) -> None:
        self._explorer = explorer
        self._decisions = decisions
        self.seen = 0  # of steps without prompts
        self._several = False  # the newest step that drafted had several

    def saw(self, rounds: int) -> None:
        """A step that decoded had so many: what is due after a number of steps is due after as many rounds."""
        self.seen += rounds
        usual = self._explorer.rounds
        if rounds != usual:
            self._explorer.rounds = self._decisions.rounds = usual + _SHARE * (rounds - usual)

    def samples(self, result: StepResult) -> int:
        """As much as so many steps is said by this one, if it is plain."""
        return _SAMPLES if result.num_rounds >= _WARM_ROUNDS and result.steady_round_time else 1

    def of_one(self, result: StepResult, planned: Planned, seconds: float, *, plain: bool = False) -> float:
        """What a round of the step took, of ``seconds``. ``plain``: nothing was drafted in it, or verified.

        Planning and the like are shared by all rounds of a step. A step that had fewer than others, such as a plain
        one to learn from, or one in which a request ended, took more of it than what it stands for would: that is
        taken off.
        Example: a step of 0.7 ms, 0.3 of them for what is shared, where four rounds are usual: 0.475 ms.

        Plain rounds behind drafts are slower at first, until the drafter's weights have left the caches. That is
        shared, too: a plain round takes what those of the later half take, and what is left as seldom as in steps of
        those who decode plainly for long.
        Example: eight rounds of 1.3, 1.1, 1.0, 0.9, 0.8, 0.8, 0.8, 0.8 ms, where 32 are usual: 0.8 ms and 1.1 / 32.
        """
        rounds, most = result.num_rounds, planned.most_rounds
        if rounds > 1 or most == 1:
            self._several = rounds > 1
        elif planned.drafting and not self._explorer.pausing:
            self._several = False
        if not self._several:
            return seconds / rounds
        if plain and self.samples(result) > 1:
            rest = max(seconds - rounds * result.steady_round_time, 0.0)
            known = self._explorer.step_price
            self._explorer.step_price = known + _SHARE * (rest - known) if known else rest
            return result.steady_round_time + rest / max(rounds, planned.usual_rounds)
        own = result.forward_time + result.verify_time + result.draft_time
        shared = max(seconds - own, 0.0) if own else 0.0
        return (seconds - shared) / rounds + shared / most
