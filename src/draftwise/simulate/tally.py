"""What a simulated run comes to: times of requests, counts of engines, and the counters between two moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from draftwise.plan.operating import Sla
from draftwise.plan.traces import Trace
from draftwise.sched.request import SpeculationCounts
from draftwise.simulate.engine import SimulatedEngine
from draftwise.simulate.outcome import Moment, Outcome
from draftwise.simulate.replicas import Work
from draftwise.simulate.settings import Window

_TOLD = 4096
"""Requests that end between two reports of progress."""


class Tally:
    """Told of each event of one run. ``window``: the counters since the last moment; ``left``: requests that neither
    ended nor were refused."""

    def __init__(self, trace: Trace, sla: Sla, advance: Callable[[float], None]) -> None:
        """``advance``: told the share of requests that have ended, now and then."""
        self._trace, self._sla, self._advance = trace, sla, advance
        n = len(trace)
        self._ttft_np, self._itl_np, self._e2e_np = (np.full(n, np.nan) for _ in range(3))
        self.left = n
        self.window = Window()
        self._last_end = 0.0
        self._moved = self._refused = self._proposals = self._drafts = self._accepted = 0
        self._refusal: str | None = None
        self._steps = self._rows = self._num_outside = self._preemptions = 0  # of engines that are no more
        self._outside: str | None = None

    def arrived(self, work: Work) -> None:
        """A request came."""
        self.window.arrived += 1
        self.window.isl += work.isl

    def refused(self, why: str) -> None:
        """A request can be served nowhere."""
        self._refused += 1
        self._refusal = self._refusal or why
        self.left -= 1

    def moved(self, work: Work) -> None:
        """A request begins again elsewhere."""
        work.moved += 1
        self._moved += 1

    def first(self, work: Work, now: float) -> None:
        """Its first token is there."""
        work.first_token = now
        waited = now - work.arrived
        self._ttft_np[work.index] = waited
        self.window.ttft += waited
        self.window.num_ttft += 1

    def drafted(self, counts: SpeculationCounts) -> None:
        """What one engine drafted for a request."""
        window = self.window
        self._proposals += counts.num_drafts
        self._drafts += counts.num_draft_tokens
        self._accepted += counts.num_accepted_tokens
        window.proposals += counts.num_drafts
        window.drafts += counts.num_draft_tokens
        window.accepted += counts.num_accepted_tokens

    def ended(self, work: Work, now: float) -> None:
        """It has all its tokens."""
        assert work.first_token is not None and work.done == work.osl
        window = self.window
        self._e2e_np[work.index] = now - work.arrived
        itl = None
        if work.osl > 1:
            itl = (now - work.first_token) / (work.osl - 1)
            self._itl_np[work.index] = itl
            window.itl += itl
            window.num_itl += 1
        window.ended += 1
        window.osl += work.osl
        window.good += self._sla.met(work.first_token - work.arrived, itl)
        self._last_end = now
        self.left -= 1
        if self.left % _TOLD == 0:
            self._advance(1 - self.left / len(self._trace))

    def engine_ended(self, engine: SimulatedEngine) -> None:
        """An engine is no more: keep its counts."""
        executor = engine.executor
        self._steps += executor.num_steps
        self._rows += executor.num_rows
        self._num_outside += executor.num_outside
        self._preemptions += engine.scheduler.num_preemptions
        self._outside = self._outside or executor.outside

    def outcome(self, policy: str, device_seconds: float, moments: Sequence[Moment]) -> Outcome:
        """The whole run, after the last engine has ended."""
        return Outcome(
            policy=policy,
            arrived_np=self._trace.times_np,
            ttft_np=self._ttft_np,
            itl_np=self._itl_np,
            e2e_np=self._e2e_np,
            osl_np=self._trace.osl_np,
            seconds=self._last_end,
            device_seconds=device_seconds,
            sla=self._sla,
            num_steps=self._steps,
            num_rows=self._rows,
            num_outside=self._num_outside,
            outside=self._outside,
            num_drafts=self._drafts,
            num_accepted=self._accepted,
            num_proposals=self._proposals,
            num_preemptions=self._preemptions,
            num_moved=self._moved,
            num_refused=self._refused,
            refused=self._refusal,
            moments=tuple(moments),
        )
