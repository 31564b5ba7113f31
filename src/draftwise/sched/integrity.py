"""Whether the scheduler's books agree with the cache's."""

from __future__ import annotations

from collections.abc import Mapping

from draftwise.kv.manager import KVManager
from draftwise.sched.order import Ordered, Waiting
from draftwise.sched.request import Request, RequestStatus


def check_books(kv: KVManager, requests: Mapping[int, Request], running: Ordered, waiting: Waiting) -> None:
    """Raise AssertionError, naming what is wrong, if the books do not agree. ``requests``: all that are here."""
    kv.check_integrity()
    for name, queue in (("running", running), ("waiting", waiting)):
        orders = [request.order for request in queue]
        assert orders == sorted(orders), f"{name} requests out of order"
    assert all(len(queue) for queue in waiting.by_adapter.values()), "an adapter's queue is empty"
    by_adapter = sorted(request.order for queue in waiting.by_adapter.values() for request in queue)
    assert by_adapter == orders, "who waits and who waits for each adapter are not the same"
    for request in running:
        assert request.status is RequestStatus.RUNNING, f"request {request.rid} runs as {request.status}"
        assert requests.get(request.rid) is request, f"request {request.rid} runs but is unknown"
        committed = kv.num_committed(request.rid)
        assert committed == request.num_computed, (
            f"request {request.rid}: cache has {committed} tokens, scheduler {request.num_computed}"
        )
        assert request.num_computed < request.num_tokens, f"request {request.rid} has nothing to compute"
    found = sorted(r.rid for r in waiting if r.status is RequestStatus.WAITING)
    expected = sorted(set(requests) - {r.rid for r in running})
    assert found == expected, f"waiting {found} but expected {expected}"
    if not running:
        assert kv.num_used == 0, f"{kv.num_used} blocks are held by nobody"
