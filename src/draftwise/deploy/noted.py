"""A front's knowledge about replicas: the cached blocks that each reported, and the requests sent there.

Ray makes the router itself (`deploy.routing`) and hands it nothing, so that a front and its router, in threads of one
process, meet here: `HERE` is the process's own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from draftwise.fleet.router import Route, Router, Ticket
from draftwise.types import IntArray

Changes = Sequence[tuple[str, Sequence[bytes]]]
"""Changes of blocks, in the form of `fleet.wire.Cache`."""

_MOST_ROUTES = 4096
"""Requests that wait to be sent; what more there is was given up on its way."""
_MOST_OVER = 256
"""Requests of a replica that are over, and of whose blocks no news came yet."""


class Noted:
    """A `Router` that several threads use."""

    def __init__(self, block_size: int = 16, *, kinship: bool = False) -> None:
        """See `Router`."""
        self._lock = threading.RLock()
        self.begin(block_size, kinship=kinship)

    def begin(self, block_size: int, *, kinship: bool = False) -> None:
        """Know nothing yet, of replicas with these settings."""
        with self._lock:
            self._router = Router(block_size, kinship=kinship)
            self._routes: OrderedDict[str, Route] = OrderedDict()
            self._tickets: dict[str, Ticket] = {}
            self._over: dict[str, tuple[list[Ticket], list[Ticket]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The replicas."""
        with self._lock:
            return tuple(map(str, self._router.names))

    def update(self, names: Iterable[str]) -> None:
        """These replicas there are now."""
        wanted = set(names)
        with self._lock:
            known = set(self.names)
            for name in known - wanted:
                self._router.remove(name)
                self._over.pop(name, None)
            for name in wanted - known:
                self._router.add(name)

    def changed(self, name: str, changes: Changes) -> None:
        """A replica reported changes of its blocks, or that there were none."""
        with self._lock:
            self._router.changed(name, changes)
            # What was over before the news before these is in one of them, or was never cached.
            older, newer = self._over.get(name, ([], []))
            self._over[name] = (newer, [])
            for ticket in older:
                self._router.forget(ticket)

    def order(self, request: str, prompt_ids_np: IntArray, among: Iterable[str]) -> list[str]:
        """Replicas for a request, the best first."""
        with self._lock:
            route = self._router.route(prompt_ids_np, among=among)
            self._routes[request] = route
            if len(self._routes) > _MOST_ROUTES:
                self._routes.popitem(last=False)
            return [str(name) for name in route.names]

    def sent(self, request: str, name: str) -> None:
        """It went there."""
        with self._lock:
            route = self._routes.pop(request, None)
            if route is not None and name in self._router.names:
                self._tickets[request] = self._router.begin(route, name)

    def ended(self, request: str) -> None:
        """It is over."""
        with self._lock:
            ticket = self._tickets.pop(request, None)
            if ticket is None:
                return
            self._router.end(ticket, keep=True)
            _, newer = self._over.setdefault(str(ticket.name), ([], []))
            newer.append(ticket)
            if len(newer) > _MOST_OVER:  # nobody tells news, as where there is one replica
                self._router.forget(newer.pop(0))

    def num_requests(self, name: str) -> int:
        """That are at a replica."""
        with self._lock:
            return self._router.num_requests(name)


HERE = Noted()
