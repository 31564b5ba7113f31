"""Sends changes of each replica's cached blocks to a front, as long as there are several replicas."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable

from draftwise.deploy.front import ReplicaGone
from draftwise.deploy.noted import Changes, Noted

logger = logging.getLogger("draftwise.deploy")

Ask = Callable[[str, int | None], Awaitable[tuple[int, Changes]]]
"""From a replica and the last change that is known of it to what came behind. Raises `ReplicaGone`."""

_PATIENCE = 10.0
"""Seconds in which a replica answers."""
_PAUSE = 1.0
"""Seconds after a failure."""


class Followers:
    """One task for each replica. Used in one event loop."""

    def __init__(self, noted: Noted, ask: Ask) -> None:
        self._noted = noted
        self._ask = ask
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Follow those that came. Cheap: it is called with every request, when it is known which replicas there are
        where it matters."""
        names = self._noted.names
        if len(names) < 2:  # there is nothing to choose
            return
        for name in names:
            if name not in self._tasks:
                # In a context of its own: Ray ends what was begun in a request's with that request.
                self._tasks[name] = asyncio.get_running_loop().create_task(
                    self._follow(name), context=contextvars.Context()
                )

    async def _follow(self, name: str) -> None:
        number: int | None = None
        try:
            while name in (names := self._noted.names) and len(names) > 1:
                try:
                    async with asyncio.timeout(_PATIENCE):
                        number, changes = await self._ask(name, number)
                    self._noted.changed(name, changes)
                except (ReplicaGone, TimeoutError) as error:
                    logger.debug("replica %s tells nothing of its cache: %s", name, error)
                    await asyncio.sleep(_PAUSE)
                except Exception:
                    logger.exception("replica %s tells nothing of its cache", name)
                    await asyncio.sleep(_PAUSE)
        finally:
            del self._tasks[name]
