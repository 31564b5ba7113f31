"""Writes a step's results into the books of its requests in one native call (``csrc/books.cpp``).

`Scheduler._commit_row` does the same for one request, and everything that is out of the ordinary.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.library import NativeLibrary, native_library
from draftwise.kernels.cpu.records import check_record
from draftwise.kv.manager import KVManager, TableBook
from draftwise.sched.request import Request, RequestBook, method_number
from draftwise.types import RowPlan, RowResult, chain_parents, tree_depth

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64
_NAMES_IN_C = {
    "tokens_at": "tokens",
    "stops_at": "stops",
    "own_method": "method",
    "taken_in": "last_token_time",
}
"""Fields of `RequestBook`."""


class Planned(NamedTuple):
    """The rows of a plan, side by side. They are written down while it is made, when all of it is at hand: behind a
    pass the caches are full of weights."""

    rids: list[int]
    requests: list[Request]
    places: array[int]
    """[2 * R]: where `RequestBook` of each lies, and `kv.manager.TableBook`."""
    num_new: list[int]

    @classmethod
    def of(cls, requests: list[Request], plans: Mapping[int, RowPlan], kv: KVManager) -> Planned:
        """For a plan with a row for each of these requests, in their order."""
        rids = list(plans)
        places = array("Q", [request.at for request in requests])
        places.extend(kv.places(rids))
        return cls(rids, requests, places, [plan.num_new for plan in plans.values()])


class Books:
    """Writes into the books of many requests."""

    def __init__(self, library: NativeLibrary) -> None:
        """Raises ConfigError if the library lays the books out in another way."""
        check_record(library, "RequestBook", RequestBook, _NAMES_IN_C)
        check_record(library, "TableBook", TableBook)
        self._take_in = library.function(
            "dw_take_in", None, [_I64, _PTR, _PTR, _PTR, _PTR, _I64, ctypes.c_double, _PTR]
        )

    def take_in(
        self, planned: Planned, rows: Sequence[RowResult], now: float, kv: KVManager
    ) -> Sequence[int] | None:
        """Take in the rows of a plan, all of whose requests run; ``now``: seconds.

        Returns:
            Of each row how many tokens were taken, -1: nothing was done, somebody has to look at it. None: at all.
        """
        count = len(rows)
        if not count or count != len(planned.rids):
            return None  # a request that had ended was passed over
        rids, tokens, drafted, accepted, _, _, parents, methods, proposed, _, of_prompt, params, errors = zip(
            *rows, strict=True
        )
        if list(rids) != planned.rids:
            return None
        apart = [0] * count
        for unusual in (of_prompt, params, errors):
            if any(value is not None for value in unusual):
                apart = [one or value is not None for one, value in zip(apart, unusual, strict=True)]
        columns = array("i", planned.num_new)
        columns.extend(drafted)
        columns.extend(accepted)
        columns.extend([len(own) if own is chain_parents(len(own)) else tree_depth(own) for own in parents])
        columns.extend(map(method_number, methods))
        columns.extend(proposed)
        columns.extend(map(len, tokens))
        columns.extend(apart)
        flat = array("i", [token for own in tokens for token in own])
        answers = array("i", bytes(4 * count))
        at = planned.places.buffer_info()[0]
        self._take_in(
            count,
            at,
            at + 8 * count,
            columns.buffer_info()[0],
            flat.buffer_info()[0],
            len(flat),
            now,
            answers.buffer_info()[0],
        )
        taken = list(map(len, tokens))
        for i, answer in enumerate(answers.tolist()):
            if answer > 0:
                kv.settle(rids[i], planned.requests[i].tokens_np)
            elif answer:
                taken[i] = -1
        return taken


@functools.cache
def native_books() -> Books | None:
    """None where the native library was not built."""
    try:
        library = native_library()
    except ConfigError:  # built of other sources: users of its kernels report that
        return None
    return None if library is None else Books(library)
