"""Reports a fleet's requests to a planner as they come and end."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from draftwise.engine.outputs import EngineStats, RequestMetrics
from draftwise.plan.operating import Sla
from draftwise.plan.ticks import ENGINES, Observation


@dataclass(slots=True)
class _Window:
    """Sums over one interval; of samples, of which a prompt may have several."""

    arrived: int = 0
    isl: int = 0
    ended: int = 0
    good: int = 0
    timed: int = 0
    osl: float = 0.0
    ttft: float = 0.0
    num_ttft: int = 0
    itl: float = 0.0
    num_itl: int = 0
    proposals: int = 0
    drafts: int = 0
    accepted: int = 0


_NO_LIMITS = Sla()


class RequestWatch:
    """Told in the fleet's event loop, and asked (`take`) in the planner's thread."""

    def __init__(self, sla: Sla = _NO_LIMITS) -> None:
        """``sla``: the limits that requests are held to."""
        self._sla = sla
        self._lock = threading.Lock()
        self._window = _Window()

    def arrived(self, num_prompt: int, samples: int) -> None:
        """A request of so many prompt tokens came."""
        with self._lock:
            self._window.arrived += samples
            self._window.isl += num_prompt * samples

    def ended(self, num_output: int, samples: int, metrics: RequestMetrics | None) -> None:
        """One is over, after so many tokens of all samples. ``metrics``: its times; None: it was given up."""
        with self._lock:
            window = self._window
            window.ended += samples
            window.osl += num_output
            if metrics is None:
                return
            window.timed += 1
            window.good += self._sla.met(metrics.ttft, metrics.itl)
            if metrics.ttft is not None:
                window.ttft += metrics.ttft
                window.num_ttft += 1
            if metrics.itl is not None:
                window.itl += metrics.itl
                window.num_itl += 1
            window.proposals += metrics.speculation.num_drafts
            window.drafts += metrics.speculation.num_draft_tokens
            window.accepted += metrics.speculation.num_accepted_tokens

    def take(self, now: float, stats: EngineStats, ready: int, warming: int) -> Observation:
        """The interval that ends ``now``, of so many replicas, of which some have just begun to serve."""
        with self._lock:
            window, self._window = self._window, _Window()
        return Observation(
            time=now,
            requests=float(window.arrived),
            isl=_mean(window.isl, window.arrived),
            osl=_mean(window.osl, window.ended),
            ttft=_mean(window.ttft, window.num_ttft),
            itl=_mean(window.itl, window.num_itl),
            queue=float(stats.num_waiting),
            kv_usage=_mean(stats.num_used_blocks, stats.num_blocks),
            accepted_length=1 + window.accepted / window.proposals if window.proposals else None,
            draft_length=_mean(window.drafts, window.proposals),
            ready={ENGINES: ready},
            warming=warming,
            attained=_mean(window.good, window.timed),
        )


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None
