"""What a front notes of replicas: where prompts went, so that those with the same prefix follow them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from draftwise.fleet.router import Route, Router, Ticket
from draftwise.types import IntArray

_MOST_ROUTES = 4096
"""Requests that wait to be sent; what more there is was given up on its way."""


class Noted:
    """A `Router` that is told nothing by replicas: it takes what it sent for cached there, as many blocks as the cache
    has, the least recently used forgotten first, as the cache itself forgets them."""

    def __init__(self, block_size: int, *, kinship: bool = False) -> None:
        """See `Router`."""
        self._router = Router(block_size, kinship=kinship)
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}
        self._limits: dict[str, int] = {}
        self._routes: OrderedDict[str, Route] = OrderedDict()
        self._tickets: dict[str, Ticket] = {}

    def update(self, replicas: Mapping[str, int | None]) -> None:
        """These replicas there are now, and how many blocks the cache of each has (None: not known yet)."""
        for name in self._blocks.keys() - replicas.keys():
            self._router.remove(name)
            del self._blocks[name]
        for name, blocks in replicas.items():
            if name not in self._blocks:
                self._router.add(name)
                self._blocks[name] = OrderedDict()
            self._limits[name] = self._limits.get(name, 0) if blocks is None else blocks

    def order(self, request: str, prompt_ids_np: IntArray, among: Iterable[str]) -> list[str]:
        """Replicas for a request, the best first."""
        route = self._router.route(prompt_ids_np, among=among)
        self._routes[request] = route
        if len(self._routes) > _MOST_ROUTES:
            self._routes.popitem(last=False)
        return [str(name) for name in route.names]

    def sent(self, request: str, name: str) -> None:
        """It went there."""
        route = self._routes.pop(request, None)
        known = self._blocks.get(name)
        if route is None or known is None:
            return
        self._tickets[request] = self._router.begin(route, name)
        digests = route.digests.get(None, ())
        self._router.stored(name, digests)
        for digest in digests:
            known[digest] = None
            known.move_to_end(digest)
        gone = [known.popitem(last=False)[0] for _ in range(len(known) - (self._limits[name] or len(known)))]
        self._router.removed(name, gone)

    def ended(self, request: str) -> None:
        """It is over."""
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            self._router.end(ticket)

    def num_requests(self, name: str) -> int:
        """That are at a replica."""
        return self._router.num_requests(name)

    @property
    def names(self) -> Collection[str]:
        """The replicas."""
        return self._blocks.keys()
