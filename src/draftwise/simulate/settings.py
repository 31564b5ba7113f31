"""The settings of a simulated cluster, and its counters between two observations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from draftwise.errors import ConfigError
from draftwise.plan.operating import Sla
from draftwise.plan.ticks import Observation


@dataclass(frozen=True, slots=True)
class Failure:
    """Replica ``number`` (as they were started, from 0) stops at ``time`` and begins again ``down`` seconds later."""

    time: float
    number: int
    down: float = 60.0


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """``replicas``: whole engines; or ``prefill`` and ``decode`` of two pools. ``startup``: seconds from asking for a
    replica until it serves (those of the beginning serve at once). ``bandwidth``: bytes/s of K/V from a prefill replica
    to one that decodes, ``latency`` seconds before it, ``kv_bytes`` per token. ``devices``: of one replica."""

    replicas: int = 1
    prefill: int = 0
    decode: int = 0
    router: str = "load"
    startup: float = 60.0
    bandwidth: float = 25e9
    latency: float = 0.002
    kv_bytes: float = 131_072.0
    devices: int = 1
    failures: tuple[Failure, ...] = ()
    sla: Sla = field(default_factory=Sla)

    def __post_init__(self) -> None:
        if (self.prefill > 0) != (self.decode > 0):
            raise ConfigError("prefill and decode: pools need replicas of both kinds")
        if min(self.replicas, self.devices) < 1 or min(self.prefill, self.decode) < 0:
            raise ConfigError("replicas, devices: expected at least 1")
        numbers = (self.startup, self.latency, self.kv_bytes, *(f.down for f in self.failures))
        if not all(math.isfinite(x) and x >= 0 for x in numbers) or not self.bandwidth > 0:
            raise ConfigError("startup, latency, kv_bytes: expected numbers >= 0, and a bandwidth above 0")
        if any(not math.isfinite(f.time) or f.time < 0 or f.number < 0 for f in self.failures):
            raise ConfigError("failures: expected times and numbers of replicas from 0 on")

    @property
    def pooled(self) -> bool:
        return self.prefill > 0


@dataclass(slots=True)
class Window:
    """The counters between two moments."""

    arrived: int = 0
    isl: int = 0
    ended: int = 0
    good: int = 0
    osl: int = 0
    ttft: float = 0.0
    num_ttft: int = 0
    itl: float = 0.0
    num_itl: int = 0
    proposals: int = 0
    drafts: int = 0
    accepted: int = 0

    def observation(
        self, now: float, queue: int, kv_usage: float | None, ready: Mapping[str, int], warming: int
    ) -> Observation:
        """A planner's observation at its end."""
        return Observation(
            time=now,
            requests=float(self.arrived),
            isl=self.isl / self.arrived if self.arrived else None,
            osl=self.osl / self.ended if self.ended else None,
            ttft=self.ttft / self.num_ttft if self.num_ttft else None,
            itl=self.itl / self.num_itl if self.num_itl else None,
            queue=float(queue),
            kv_usage=kv_usage,
            accepted_length=1 + self.accepted / self.proposals if self.proposals else None,
            draft_length=self.drafts / self.proposals if self.proposals else None,
            ready=ready,
            warming=warming,
            attained=self.good / self.ended if self.ended else None,
        )
