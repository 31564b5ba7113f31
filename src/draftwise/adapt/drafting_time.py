"""The drafting time of a step, shared among its drafters."""

from __future__ import annotations

from draftwise.adapt.controller import StepShape
from draftwise.adapt.explore import Explorer
from draftwise.adapt.performance import PerformanceModel
from draftwise.adapt.roster import Planned


class DraftingTime:
    """Puts measurements of drafting into the model, also from steps whose drafting part was not measured."""

    def __init__(self, model: PerformanceModel, explorer: Explorer) -> None:
        self._model = model
        self._explorer = explorer

    def guess(self, shape: StepShape, seconds: float) -> float:
        """Seconds of a step that its drafters took, where nobody timed them: what the target's part is not believed to
        take. Steps of a pause, without drafting, tell what that is. 0 while nothing is known of it."""
        target = self._model.target_time(shape.requests, shape.rows, shape.context, shape.sampled)
        return max(seconds - target, 0.0) if target > 0 and not shape.prompt_rows else 0.0

    def observe(self, seconds: float, shape: StepShape, planned: Planned) -> float:
        """Share the time of all drafters among the groups as the model predicts it; answers the prediction."""
        drafting = planned.drafting.items()
        guesses = [
            self._model.draft_time(group.method, n, nodes, lag, group.sampled)
            for group, (n, nodes, lag) in drafting
        ]
        total = sum(guesses)
        if shape.prompt_rows or seconds <= 0:  # behind a prompt, the drafter catches up on it
            return total
        for (group, (n, nodes, lag)), guess in zip(drafting, guesses, strict=True):
            part = seconds * (guess / total if total > 0 else 1.0 / len(guesses))
            self._model.observe_draft(group.method, n, nodes, lag, group.sampled, part)
            if lag and not group.cap:
                usual = self._model.draft_time(group.method, n, nodes, sampled=group.sampled)
                self._explorer.spend(max(part - usual, 0.0))
        return total or seconds
