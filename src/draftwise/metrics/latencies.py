"""Durations of requests, taken from what every step changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftwise.metrics.histogram import Histogram
from draftwise.sched.request import Request, RequestUpdate

_TTFT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
         20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
          5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
_REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0,
            50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip


class Histograms(NamedTuple):
    """Latencies of one engine, in seconds. See `Latencies`."""

    time_to_first_token: Histogram
    inter_token: Histogram
    per_output_token: Histogram
    e2e: Histogram
    queue: Histogram
    prefill: Histogram
    decode: Histogram


class Latencies:
    """Histograms in seconds. `observe` is called in the engine's thread after every step.

    A step that gives a request several tokens after a pause of t counts as that many tokens t / n apart: the sum of
    ``inter_token`` is the time spent decoding, its count the tokens after the first step's.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_TTFT)
        self.inter_token = Histogram(_TOKEN)
        self.per_output_token = Histogram(_TOKEN)
        self.e2e = Histogram(_REQUEST)
        self.queue = Histogram(_REQUEST)
        self.prefill = Histogram(_REQUEST)
        self.decode = Histogram(_REQUEST)
        self._last: dict[int, float] = {}  # rid -> time of its last tokens, of running requests

    def histograms(self) -> Histograms:
        """As they are now."""
        return Histograms(*(histogram.copy() for histogram in (
            self.time_to_first_token, self.inter_token, self.per_output_token, self.e2e, self.queue, self.prefill,
            self.decode,
        )))  # fmt: skip

    def observe(self, updates: Sequence[RequestUpdate]) -> None:
        """Take in what a step changed."""
        last = self._last
        for update in updates:
            request, new = update.request, update.num_new
            if new:
                now = request.last_token_time
                assert now is not None
                before = last.get(request.rid)
                if before is None:
                    self.time_to_first_token.observe(now - request.arrival_time)
                else:
                    self.inter_token.observe((now - before) / new, new)
                last[request.rid] = now
            if update.finished:
                last.pop(request.rid, None)
                if request.finish_reason in ("stop", "length"):
                    self._finished(request)

    def _finished(self, request: Request) -> None:
        first, end, scheduled = request.first_token_time, request.finished_time, request.scheduled_time
        assert first is not None and end is not None and scheduled is not None
        self.e2e.observe(end - request.arrival_time)
        self.queue.observe(scheduled - request.arrival_time)
        self.prefill.observe(first - scheduled)
        self.decode.observe(end - first)
        if request.num_output > 1:
            self.per_output_token.observe((end - first) / (request.num_output - 1))
