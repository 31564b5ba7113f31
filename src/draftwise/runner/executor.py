"""The seam between the host side and the device side: one call per step, forward -> verify -> propose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

from draftwise.errors import ConfigError, EngineDeadError
from draftwise.models.lora.low_rank import LowRank
from draftwise.runner.launched import Launched
from draftwise.types import StepPlan, StepResult


class Executor(ABC):
    """The seam between the host side (scheduler) and the device side (models)."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the diff, run one step, answer what each row committed. Raises only if the engine is broken.

        A plan may have been made before the result of the step before it was looked at (`sched.ahead`): then
        ``num_draft`` is the most that may wait, and a row whose request has all its tokens is to be passed over.
        """

    def many_steps(self) -> AbstractContextManager[None]:
        """Around steps that this thread executes one after the other: what would be set for each of them is set once.
        Steps may be executed without it."""
        return nullcontext()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """`execute`, without waiting for it where that is possible; steps run in the order of the calls."""
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.execute(plan))
        except Exception as error:
            future.set_exception(error)
        return future

    def launch(self, plan: StepPlan) -> Launched:
        """`execute`, as far as it can be done without waiting for the device. At most two steps may be on their way."""
        return Launched(self.execute(plan))

    def check_adapter(self, adapter: Mapping[str, LowRank]) -> None:
        """Whether an adapter could be loaded; between two steps.

        Raises:
            ConfigError: the engine was built without adapters.
            ModelLoadError: it is for another model.
        """
        raise ConfigError("lora_request: this engine was started without enable_lora")

    def load_adapter(self, slot: int, adapter: Mapping[str, LowRank]) -> None:  # noqa: B027
        """Hold an adapter that was checked, under its number (`NewRequest.adapter`); between two steps."""

    def drop_adapter(self, slot: int) -> None:  # noqa: B027
        """Let go of one that no running request has; between two steps. It may be loaded again."""

    @property
    def num_captured(self) -> int:
        """How often something was made in the middle of a step that later steps find: such a step's time says nothing
        of theirs."""
        return 0

    def hurry(self, now: bool) -> None:  # noqa: B027
        """``now``: a step that is computed in another thread ends behind the round that it is in, because somebody
        waits for its end. Not ``now``: the next step need not, for it is about to be planned with all that wait."""

    @property
    def most_rounds(self) -> int:
        """Rounds that a step may have at most (`StepPlan.rounds`)."""
        return 1

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no step can be executed any more, where that shows without trying; None: nothing is known."""
        return None

    def forked(self) -> bool:
        """Called in a forked child: whether steps can be executed there."""
        return True

    def forget(self) -> None:  # noqa: B027
        """Let the drafters forget what they learned from past requests; between two steps."""

    @abstractmethod
    def close(self) -> None:
        """Release models and memory."""


class ClosedExecutor(Executor):
    """What is left of one that was closed."""

    def execute(self, plan: StepPlan) -> StepResult:
        raise EngineDeadError("the engine was closed")

    def check_adapter(self, adapter: Mapping[str, LowRank]) -> None:
        raise EngineDeadError("the engine was closed")

    def close(self) -> None:
        """Nothing is left to release."""
