"""Carries out a planner's decisions: only this sets the number of replicas of a fleet that a planner scales."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from draftwise.errors import EngineDeadError
from draftwise.plan.ticks import ENGINES, Decision

logger = logging.getLogger("draftwise.planner")


class Scaled(Protocol):
    """The fleet to scale: see `FleetEngine`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...
    @property
    def replicas(self) -> tuple[int, ...]: ...
    async def scale(self, count: int) -> None: ...


class Scaler:
    """`carry_out` returns at once, since starting a replica may take minutes: what is wanted meanwhile comes next, the
    last word first. Every decision is carried out, also one that says the same again: so a replica that was lost is
    replaced."""

    def __init__(self, fleet: Scaled, failed: Callable[[], None]) -> None:
        """``failed``: called, in the event loop, when a number could not be reached; the next decision tries again."""
        self._fleet = fleet
        self._failed = failed
        self._lock = threading.Lock()
        self._wanted = 0
        self._at_work = False

    def carry_out(self, decision: Decision) -> None:
        """Have as many replicas as it says, in a while. Raises EngineDeadError if the fleet does not serve yet."""
        loop = self._fleet.loop
        if loop is None or loop.is_closed():
            raise EngineDeadError("the fleet has no event loop to be scaled in")
        with self._lock:
            self._wanted = decision.replicas[ENGINES]
            if self._at_work:
                return
            self._at_work = True
        asyncio.run_coroutine_threadsafe(self._reach(), loop)

    async def _reach(self) -> None:
        while True:
            wanted, there = self._wanted, len(self._fleet.replicas)
            try:
                await self._fleet.scale(wanted)
                reached = True
                if there != wanted:
                    logger.info("replicas: %d -> %d", there, wanted)
            except Exception as error:
                reached = False
                logger.error("replicas: %d -> %d failed: %s", there, wanted, error)
                self._failed()
            with self._lock:
                self._at_work = reached and self._wanted != wanted
                if not self._at_work:
                    return
