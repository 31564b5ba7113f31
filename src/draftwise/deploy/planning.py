"""A planner on Ray Serve: one replica of a deployment of its own looks at all engines, and says how many there are.

Nobody else says it: Ray's own autoscaling is off (`external_scaler_enabled`, which makes Ray refuse it), and the number
is changed by the call behind Ray's address ``/scale``. Ray starts and drains replicas, and replaces those it loses.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from draftwise.errors import EngineDeadError
from draftwise.metrics.export import SourceMetrics
from draftwise.plan.live import PlannerService, Work, observed
from draftwise.plan.ticks import ENGINES, Decision, Observation
from draftwise.profile.beside import checked_planner, scales, state_path

logger = logging.getLogger("draftwise.planner")


_LOADING = 1800.0
"""Seconds in which the first replica serves."""


class Engines(Protocol):
    """A planner's way to the replicas. Its methods are called in the planner's thread."""

    def works(self) -> Mapping[str, Work]:
        """What each did since the last call; those that do not answer are left out."""
        ...

    def scale(self, count: int) -> None:
        """Have so many, in a while."""
        ...


class Watched:
    """Observations of replicas that come and go."""

    def __init__(self, engines: Engines, interval: float) -> None:
        """``interval``: seconds for which a replica's times say little."""
        self._engines = engines
        self._interval = interval
        self._since: dict[str, float] = {}  # replica -> when it was first seen

    def observe(self, now: float) -> Observation:
        """The interval that ends ``now``. Raises EngineDeadError if no replica answers."""
        works = self._engines.works()
        if not works:
            raise EngineDeadError("no replica says what it did")
        first = not self._since
        for name in works:
            self._since.setdefault(name, float("-inf") if first else now)
        for name in self._since.keys() - works.keys():
            del self._since[name]
        warming = sum(now - since < self._interval for since in self._since.values())
        return observed(list(works.values()), now, {ENGINES: len(works)}, warming)


class Planning:
    """What the deployment runs; `Scaling` in `application` is Ray's side of it."""

    def __init__(self, plan: Any, engines: Engines) -> None:
        """``plan``: of the application. Raises ConfigError: the profile or the state cannot be used."""
        config = plan.server_config
        planner = checked_planner(config, plan.engine_config)

        def carry_out(decision: Decision) -> None:
            engines.scale(decision.replicas[ENGINES])

        self.service = PlannerService(
            planner,
            Watched(engines, config.planner_interval).observe,
            carry_out=carry_out if scales(config) else None,
            state=state_path(config),
        )
        self._metrics = SourceMetrics(self.service, config.model_names[0], config.metrics_prefix)

    def start(self) -> None:
        """Decide every interval."""
        self.service.start()

    def about(self) -> bytes:
        """Its decisions and reasons, as JSON: reasons are more than texts, and cannot be pickled."""
        return json.dumps(self.service.as_dict()).encode()

    def metrics(self) -> bytes:
        """A part of the text that ``/metrics`` answers."""
        return self._metrics.exposition()

    def close(self) -> None:
        """Decide nothing more."""
        self.service.close()


class RayEngines:
    """`Engines` over a handle of Ray."""

    def __init__(
        self,
        handle: Any,
        names: Callable[[], tuple[str, ...]],
        set_count: Callable[[int], None],
        seconds: float = 5.0,
    ) -> None:
        """
        Args:
            handle: of the deployment of engines.
            names: the replicas that its router knows, once something was asked.
            set_count: tells Ray how many there shall be.
            seconds: in which a replica answers.
        """
        self._handle, self._names, self._set_count, self._seconds = handle, names, set_count, seconds
        self._lock = threading.Lock()
        self._wanted: int | None = None

    def works(self) -> Mapping[str, Work]:
        """See `Engines`."""
        if not self._names():  # any of them makes the others known; the first one may still load its model
            self._handle.ping.remote().result(timeout_s=_LOADING)
        asked = {name: self._handle.work.remote(only=name) for name in self._names()}
        found: dict[str, Work] = {}
        for name, answer in asked.items():
            try:
                found[name] = answer.result(timeout_s=self._seconds)
            except Exception as error:  # it is lost, or drains: Ray has many names for it
                logger.warning("replica %s does not say what it did: %s", name, str(error).partition("\n")[0])
        return found

    def scale(self, count: int) -> None:
        """See `Engines`."""
        with self._lock:
            if count == self._wanted:  # Ray keeps to it, and replaces replicas that it loses
                return
            self._set_count(count)
            if self._wanted is not None:
                logger.info("replicas: %d -> %d", self._wanted, count)
            self._wanted = count
