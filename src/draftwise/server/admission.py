"""Admission of requests: limits on requests in progress and on the engine's queue; none is admitted while the server
drains."""

from __future__ import annotations

import math
import os

from draftwise.server.config import ServerConfig
from draftwise.server.engine import ServedEngine
from draftwise.server.errors import APIError, engine_dead, shutting_down


class Ticket:
    """One admitted request. It is released once, however often `release` is called."""

    __slots__ = ("_admission", "_samples")

    def __init__(self, admission: Admission, samples: int) -> None:
        self._admission: Admission | None = admission
        self._samples = samples

    def release(self) -> None:
        if self._admission is not None:
            self._admission._leave(self._samples)
            self._admission = None


class Admission:
    """Counts requests being answered. Used from one event loop only."""

    def __init__(self, engine: ServedEngine, config: ServerConfig, max_num_seqs: int) -> None:
        self._engine = engine
        self._config = config
        self._max_num_seqs = max_num_seqs
        self._process = os.getpid()
        self.draining = False
        self.num_requests = 0
        self.num_samples = 0

    def check_alive(self) -> None:
        """Raises APIError (503) if the engine is dead."""
        if not self._engine.is_alive:
            raise engine_dead(forked=os.getpid() != self._process)

    def enter(self, samples: int) -> Ticket:
        """Admit a request with this many samples. Raises APIError: 503 when the server ends, 429 when it is full."""
        self.check_alive()
        if self.draining:
            raise shutting_down()
        if samples > self._config.max_samples:
            raise APIError(
                400,
                f"{samples} samples (prompts times n) in one request; at most {self._config.max_samples}",
                param="n",
            )
        if self.num_requests >= self._config.max_concurrent:
            raise self._full(f"{self.num_requests} requests are being answered")
        waiting = self.num_samples - self._max_num_seqs
        if waiting + samples > self._config.max_queue and self.num_samples:
            raise self._full(f"{max(waiting, 0)} samples are waiting")
        self.num_requests += 1
        self.num_samples += samples
        return Ticket(self, samples)

    def _leave(self, samples: int) -> None:
        self.num_requests -= 1
        self.num_samples -= samples

    def _full(self, why: str) -> APIError:
        # A guess that spreads clients out: longer the more batches stand in line.
        seconds = min(60, max(1, math.ceil(self.num_samples / self._max_num_seqs)))
        return APIError(
            429,
            f"the server is full: {why}; try again later",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )
