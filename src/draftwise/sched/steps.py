"""A step between its planning and its results."""

from __future__ import annotations

from draftwise.adapt.controller import StepShape
from draftwise.sched.columns import EMPTY_PLAN, PlanColumns
from draftwise.sched.taking import Planned


class PlannedStep:
    """``plan``: empty once it was taken in. ``plain``: all decode, and nothing is drafted or verified.
    ``side_by_side``: its requests for native code, if none has left since. ``shape`` stays, for the controller learns
    from it afterwards."""

    __slots__ = ("plain", "plan", "shape", "side_by_side")

    def __init__(self, shape: StepShape) -> None:
        self.plan: PlanColumns = EMPTY_PLAN
        self.plain = False
        self.side_by_side: Planned | None = None
        self.shape = shape
