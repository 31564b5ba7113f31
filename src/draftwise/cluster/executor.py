"""An executor whose ranks are processes of their own, on this machine or on others.

Every rank gets every plan and computes every step: what is drawn is keyed, so that all come to the same without
telling each other. Rank 0's result is the host's; of the others it gets a digest.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftwise.cluster.group import RankGroup
from draftwise.cluster.messages import Answer, Order
from draftwise.errors import EngineDeadError
from draftwise.models.lora.low_rank import LowRank
from draftwise.runner.executor import Executor
from draftwise.types import StepPlan, StepResult


class RanksExecutor(Executor):
    """Speaks to the ranks. They are built already (`RankGroup.first_answer`)."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    def execute(self, plan: StepPlan) -> StepResult:
        answers = self.ranks.ask(lambda number: Order(number, "execute", plan))
        self._check(plan, answers)
        result = answers[0].result
        assert result is not None, "rank 0 answers with it"
        return result

    def _check(self, plan: StepPlan, answers: list[Answer]) -> None:
        """Raise EngineDeadError if ranks came to different results."""
        apart = [rank for rank, answer in enumerate(answers) if answer.digest != answers[0].digest]
        if apart:
            names = ", ".join(map(str, apart))
            raise self.ranks.part(
                apart, f"rank {names} came to another result than rank 0 in step {plan.step}"
            )

    def forget(self) -> None:
        self.ranks.ask(lambda number: Order(number, "forget"))

    def check_adapter(self, adapter: Mapping[str, LowRank]) -> None:
        """All ranks look at the whole adapter's names and shapes, so that all say the same."""
        answers = self.ranks.ask(lambda number: Order(number, "check_adapter", adapter=adapter))
        refusal = answers[0].refusal
        if any((answer.refusal is None) != (refusal is None) for answer in answers):
            raise self.ranks.part(
                range(len(answers)), "ranks disagree on whether an adapter is for the model"
            )
        if refusal is not None:
            raise refusal

    def load_adapter(self, slot: int, adapter: Mapping[str, LowRank]) -> None:
        """Each rank takes its part of it."""
        self.ranks.ask(lambda number: Order(number, "load_adapter", slot=slot, adapter=adapter))

    def drop_adapter(self, slot: int) -> None:
        self.ranks.ask(lambda number: Order(number, "drop_adapter", slot=slot))

    @property
    def failure(self) -> EngineDeadError | None:
        return self.ranks.failure

    def forked(self) -> bool:
        self.ranks.forked()
        return False

    def close(self) -> None:
        self.ranks.close()
