"""The results of a simulated run: times of requests, and the cluster's state over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwise.plan.operating import Sla

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moment:
    """The cluster at a time. ``arrived``: requests since the moment before; ``drafts``: K per request that decodes;
    ``replicas``: that serve, by pool; ``wanted``: by the planner; ``why``: its reasons."""

    time: float
    arrived: int
    ended: int
    running: int
    waiting: int
    drafts: float
    replicas: Mapping[str, int]
    wanted: Mapping[str, int] = field(default_factory=dict)
    attained: float | None = None  # share of the requests ended since then within the SLA
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        out = {name: getattr(self, name) for name in self.__slots__}
        return out | {"replicas": dict(self.replicas), "wanted": dict(self.wanted)}


@dataclass(frozen=True)
class Outcome:
    """The results of one run under one policy. Arrays [n] per request of the trace; NaN: did not happen.

    ``ttft_np``: arrival to first token; ``itl_np``: mean time between tokens after the first; ``e2e_np``: arrival to
    end. ``seconds``: until the last request ended. ``device_seconds``: of all replicas while they cost.
    """

    policy: str
    arrived_np: Floats
    ttft_np: Floats
    itl_np: Floats
    e2e_np: Floats
    osl_np: npt.NDArray[np.int32]
    seconds: float
    device_seconds: float
    sla: Sla
    num_steps: int
    num_rows: int
    num_outside: int
    outside: str | None
    num_drafts: int
    num_accepted: int
    num_proposals: int
    num_preemptions: int
    num_moved: int
    num_refused: int
    refused: str | None
    moments: tuple[Moment, ...] = ()

    @property
    def num_ended(self) -> int:
        """Requests that were answered."""
        return int(np.isfinite(self.e2e_np).sum())

    @property
    def tokens(self) -> int:
        """Output tokens of those."""
        return int(self.osl_np[np.isfinite(self.e2e_np)].sum())

    @property
    def good_np(self) -> npt.NDArray[np.bool_]:
        """[n] whether a request was answered within the limits."""
        good_np = np.isfinite(self.e2e_np)
        if self.sla.ttft is not None:
            good_np &= ~(self.ttft_np > self.sla.ttft)
        if self.sla.itl is not None:
            good_np &= ~(self.itl_np > self.sla.itl)
        return good_np

    @property
    def attainment(self) -> float:
        """Share of all requests of the trace."""
        return float(self.good_np.mean())

    @property
    def accepted_length(self) -> float | None:
        """Tokens per step that verified drafts."""
        return 1 + self.num_accepted / self.num_proposals if self.num_proposals else None

    def percentile(self, values_np: Floats, percent: float) -> float | None:
        """Of those that happened, seconds."""
        found_np = values_np[np.isfinite(values_np)]
        return float(np.percentile(found_np, percent)) if len(found_np) else None

    def mean(self, values_np: Floats) -> float | None:
        """Of those that happened, seconds."""
        found_np = values_np[np.isfinite(values_np)]
        return float(found_np.mean()) if len(found_np) else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        out: dict[str, Any] = {
            "policy": self.policy,
            "requests": len(self.arrived_np),
            "answered": self.num_ended,
        }
        for name, values_np in (("ttft", self.ttft_np), ("itl", self.itl_np), ("e2e", self.e2e_np)):
            out[name] = {
                "mean": self.mean(values_np),
                **{f"p{p}": self.percentile(values_np, p) for p in (50, 95, 99)},
            }
        seconds = max(self.seconds, 1e-9)
        out |= {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / seconds,
            "requests_per_second": self.num_ended / seconds,
            "goodput": float(self.good_np.sum()) / seconds,
            "attainment": self.attainment,
            "device_hours": self.device_seconds / 3600,
            "accepted_length": self.accepted_length,
            "drafts_per_step": self.num_drafts / self.num_proposals if self.num_proposals else 0.0,
            "preemptions": self.num_preemptions,
            "moved": self.num_moved,
            "refused": self.num_refused,
            "steps": self.num_steps,
            "rows": self.num_rows,
            "steps_outside_of_model": self.num_outside,
            "outside": self.outside,
            "timeline": [moment.as_dict() for moment in self.moments],
        }
        return out
