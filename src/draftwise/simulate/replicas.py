"""Replicas of a simulated cluster, and the routing of requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from draftwise.errors import ConfigError
from draftwise.fleet.choice import Candidate, ranked
from draftwise.sched.request import Request, RequestUpdate
from draftwise.simulate.engine import SimulatedEngine
from draftwise.types import IntArray

State = Literal["starting", "ready", "draining", "failed", "gone"]


@dataclass(slots=True)
class Work:
    """A request on its way through the cluster. ``done``: output tokens that its user has."""

    index: int
    isl: int
    osl: int
    arrived: float
    blocks: tuple[int, ...] = ()
    kind: str = ""
    done: int = 0
    first_token: float | None = None
    moved: int = 0  # times it began again elsewhere


@dataclass(slots=True)
class Replica:
    """One engine of a pool. ``epoch`` changes when it fails, so that what was under way is not believed."""

    number: int
    pool: str
    engine: SimulatedEngine
    state: State
    since: float  # when it began to cost
    served_since: float = 0.0
    until: float | None = None
    epoch: int = 0
    busy: bool = False
    pending: list[RequestUpdate] = field(default_factory=list)  # of the step that runs
    live: dict[int, tuple[Work, Request]] = field(default_factory=dict)
    inbox: list[tuple[Work, IntArray]] = field(default_factory=list)  # K/V arrived, no room for it yet
    load: int = 0  # tokens of its requests
    seen: OrderedDict[int, None] = field(
        default_factory=OrderedDict
    )  # names of blocks that it may have cached
    most_seen: int = 0

    @property
    def num_requests(self) -> int:
        """The requests of this replica, running or waiting."""
        return len(self.live) + len(self.inbox)

    def remember(self, blocks: Sequence[int]) -> None:
        """It has read a prompt of these blocks."""
        for name in blocks:
            self.seen[name] = None
            self.seen.move_to_end(name)
        while len(self.seen) > self.most_seen:
            self.seen.popitem(last=False)


class Router(Protocol):
    """Chooses among replicas, of which there is at least one."""

    def __call__(self, replicas: Sequence[Replica], work: Work) -> Replica: ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, replicas: Sequence[Replica], work: Work) -> Replica:
        self._next += 1
        return replicas[self._next % len(replicas)]


class LeastLoaded:
    """To the one with the fewest requests, then the fewest tokens."""

    def __call__(self, replicas: Sequence[Replica], work: Work) -> Replica:
        return min(replicas, key=lambda r: (len(r.live) + len(r.inbox), r.load, r.number))


class PrefixAware:
    """As a fleet routes: `fleet.choice`. Blocks of traces have 512 tokens."""

    def __call__(self, replicas: Sequence[Replica], work: Work) -> Replica:
        candidates = []
        for index, replica in enumerate(replicas):
            hits = 0
            for name in work.blocks:
                if name not in replica.seen:
                    break
                hits += 1
            candidates.append(Candidate(index, 512 * hits, replica.load, turn=replica.number))
        return replicas[ranked(candidates, work.isl)[0].name]


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "load": LeastLoaded,
    "prefix": PrefixAware,
}


def router(name: str) -> Router:
    """A fresh router. Raises ConfigError for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"router: unknown {name!r} (known: {', '.join(ROUTERS)})")
    return ROUTERS[name]()
