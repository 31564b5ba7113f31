"""A step between its planning and its results."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwise.adapt.controller import StepShape
from draftwise.sched.columns import EMPTY_PLAN, PlanColumns
from draftwise.sched.taking import Planned


@dataclass(slots=True)
class PlannedStep:
    """``plan``: empty once it was taken in. ``side_by_side``: its requests for native code, if none has left since.
    ``shape`` stays, for the controller learns from it afterwards."""

    plan: PlanColumns = field(default_factory=lambda: EMPTY_PLAN)
    side_by_side: Planned | None = None
    shape: StepShape = field(default_factory=StepShape)

    def take_in(self) -> tuple[PlanColumns, Planned | None]:
        """The plan, whose results have come, and its requests."""
        found = self.plan, self.side_by_side
        self.plan, self.side_by_side = EMPTY_PLAN, None
        return found
