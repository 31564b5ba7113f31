"""Steps of several rounds, as the controller sees them: what one of them takes, and how many there are."""

from __future__ import annotations

from draftwise.adapt.decisions import Decisions
from draftwise.adapt.explore import Explorer
from draftwise.adapt.roster import Planned
from draftwise.types import StepResult

_SHARE = 0.25
"""The weight of the newest step in the number of rounds that steps have lately."""


class RoundTimes:
    """Tells the explorer and the decisions how many rounds a step has, and takes a step's time apart."""

    def __init__(self, explorer: Explorer, decisions: Decisions) -> None:
        self._explorer = explorer
        self._decisions = decisions
        self._several = False  # the newest step that drafted had several

    def saw(self, rounds: int) -> None:
        """A step that decoded had so many: what is due after a number of steps is due after as many rounds."""
        usual = self._explorer.rounds
        if rounds != usual:
            self._explorer.rounds = self._decisions.rounds = usual + _SHARE * (rounds - usual)

    def of_one(self, result: StepResult, planned: Planned, seconds: float) -> float:
        """What a round of the step took, of ``seconds``.

        Planning and the like are shared by all rounds of a step. A step that had fewer than others, such as a plain
        one to learn from, or one in which a request ended, took more of it than what it stands for would: that is
        taken off.
        Example: a step of 0.7 ms, 0.3 of them for what is shared, where four rounds are usual: 0.475 ms.
        """
        rounds, most = result.num_rounds, planned.most_rounds
        if rounds > 1 or most == 1:
            self._several = rounds > 1
        elif planned.drafting and not self._explorer.pausing:
            self._several = False
        if not self._several:
            return seconds / rounds
        own = result.forward_time + result.verify_time + result.draft_time
        shared = max(seconds - own, 0.0) if own else 0.0
        return (seconds - shared) / rounds + shared / most
