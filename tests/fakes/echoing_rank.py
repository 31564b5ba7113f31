"""A rank that adds up its number with the others' in every step; ``python -m`` starts it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from draftwise.cluster.children import belong_to
from draftwise.cluster.ranking import run_rank
from draftwise.kernels.ranks import Ranks
from draftwise.runner.executor import Executor
from draftwise.types import RowResult, StepPlan, StepResult


class Echo(Executor):
    """Executes nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def total(self) -> float:
        return float(self._ranks.sum(torch.full((4,), self._ranks.part.rank + 1.0))[0])

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, (RowResult(1, (int(self.total()),)),))

    def close(self) -> None:
        pass


def work(setting: Any, ranks: Ranks) -> tuple[Executor, Any]:
    echo = Echo(ranks)
    return echo, [echo.total(), setting]


if __name__ == "__main__":
    belong_to(int(sys.argv[2]))
    sys.exit(run_rank(int(sys.argv[1]), work))
