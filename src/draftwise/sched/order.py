"""Requests in scheduling order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from draftwise.sched.request import Request

_order = attrgetter("order")


class Ordered:
    """Requests sorted by `Request.order`, which is unique and never changes.

    One that leaves is gone at once, wherever it stood: a search by halves finds it.
    """

    __slots__ = ("_requests", "version")

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.version = 0
        """Another number whenever requests have come or left."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    @property
    def first(self) -> Request:
        """The request that is served first. IndexError if there is none."""
        return self._requests[0]

    @property
    def last(self) -> Request:
        """The request that gives up its place first. IndexError if there is none."""
        return self._requests[-1]

    def copy(self) -> list[Request]:
        """The requests as they stand now, for a loop in which some may leave."""
        return self._requests.copy()

    def add(self, request: Request) -> None:
        self.version += 1
        requests = self._requests
        if requests and requests[-1].order > request.order:
            requests.insert(bisect_left(requests, request.order, key=_order), request)
        else:  # nearly always: later requests stand later
            requests.append(request)

    def remove(self, request: Request) -> None:
        self.version += 1
        index = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[index] is request, f"request {request.rid} is not where its order says"
        del self._requests[index]


class Waiting(Ordered):
    """Requests that wait, and those of each adapter by themselves."""

    __slots__ = ("by_adapter",)

    def __init__(self) -> None:
        super().__init__()
        self.by_adapter: dict[int, Ordered] = {}
        """None of them is empty. 0: requests without an adapter."""

    def add(self, request: Request) -> None:
        super().add(request)
        own = self.by_adapter.get(request.adapter)
        if own is None:
            own = self.by_adapter[request.adapter] = Ordered()
        own.add(request)

    def remove(self, request: Request) -> None:
        super().remove(request)
        own = self.by_adapter[request.adapter]
        own.remove(request)
        if not len(own):
            del self.by_adapter[request.adapter]
