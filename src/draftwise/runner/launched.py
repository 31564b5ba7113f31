"""A step that was begun, and may not have ended."""

from __future__ import annotations

from collections.abc import Callable

from draftwise.types import StepResult


class Launched:
    """A step that was begun."""

    def __init__(
        self, result: StepResult | None = None, finish: Callable[[], StepResult] | None = None
    ) -> None:
        """One of the two is given."""
        self._result = result
        self._finish = finish

    def finish(self) -> StepResult:
        """Wait for the step's results."""
        if self._result is None:
            assert self._finish is not None
            self._result = self._finish()
        return self._result

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._result is not None
