"""One replica of a fleet: its process, its streams, and what it is made of."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftwise.config import EngineConfig
from draftwise.config.registry import third_party_methods
from draftwise.cpus import default_threads
from draftwise.engine.outputs import EngineStats
from draftwise.errors import ConfigError
from draftwise.fleet.child import ReplicaProcess
from draftwise.fleet.pulse import Pulse
from draftwise.fleet.router import Router, Ticket
from draftwise.fleet.stream import FleetStream
from draftwise.fleet.wire import Channel, Hello, Start
from draftwise.metrics.latencies import Histograms


class Replica:
    """Written by the fleet alone, in its event loop."""

    def __init__(self, process: ReplicaProcess, hello: Hello, slot: int, pulse: Pulse) -> None:
        """``slot``: its share of the machine's devices, see `plan`."""
        self.process = process
        self.hello = hello
        self.slot = slot
        self.pulse = pulse
        self.since = time.monotonic()  # it serves
        self.streams: dict[int, FleetStream] = {}
        self.retired = False  # gets no new requests, and ends when it has none left
        self.books: tuple[EngineStats, Histograms] | None = None  # when it told them last
        self._tickets: dict[int, Ticket] = {}
        self._channel: Channel | None = None

    @property
    def number(self) -> int:
        return self.process.number

    def connect(self, receive: Callable[[list[Any]], None], lost: Callable[[], None]) -> None:
        """In the event loop that it is to belong to."""
        self._channel = Channel(self.process.streams, receive, lost)

    def post(self, message: Any) -> None:
        """Send it with what else this turn of the event loop has for this replica."""
        assert self._channel is not None, "connected with the first request"
        self._channel.post(message)

    def enter(self, stream: FleetStream, ticket: Ticket) -> None:
        """A request comes."""
        self.streams[stream.number] = stream
        self._tickets[stream.number] = ticket

    def leave(self, router: Router, stream: FleetStream, num_output: int | None) -> None:
        """The request ended after this many tokens (None: its full length is unknown)."""
        self.streams.pop(stream.number, None)
        if (ticket := self._tickets.pop(stream.number, None)) is not None:
            router.end(ticket, num_output)

    def close(self) -> None:
        """Nothing more is sent or read."""
        if self._channel is not None:
            self._channel.close()


def plan(
    config: EngineConfig, number: int, max_chunk_rate: float | None, *, slot: int, count: int
) -> tuple[Start, dict[str, str]]:
    """The first message to the replica of this number, and its environment: a share of the cores, and devices of its
    own.

    Args:
        slot: which share of the devices it has; no two that live have the same.
        count: among how many the machine is divided.

    Example: 2 ranks each on devices 0 to 5: slot 1 has devices 2 and 3. A lost replica's slot is the next one's.

    Raises ConfigError if there are too few CUDA devices.
    """
    environment: dict[str, str] = {}
    changes: dict[str, Any] = {
        "data_parallel_rank": config.data_parallel_rank + number,
        "data_parallel_size": count,
    }
    if config.num_threads is None:
        changes["num_threads"] = max(1, default_threads(torch.get_num_threads()) // count)
    if torch.device(config.device).type != "cpu":
        if config.device != "cuda":
            raise ConfigError(f"device: {config.device} is one device; replicas take their own, say cuda")
        own = config.tensor_parallel_size
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = (
            [d for d in visible.split(",") if d]
            if visible
            else list(map(str, range(torch.cuda.device_count())))
        )
        needed = max(count, slot + 1)
        if len(devices) < needed * own:
            raise ConfigError(
                f"data_parallel_size: {needed} replicas of {own} on {len(devices)} CUDA devices"
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices[slot * own : (slot + 1) * own])
    level = logging.getLogger("draftwise").getEffectiveLevel()
    rate = None if max_chunk_rate is None else max_chunk_rate / count
    start = Start(number, replace(config, **changes), rate, level, third_party_methods())
    return start, environment
