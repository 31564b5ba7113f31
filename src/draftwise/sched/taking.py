"""Numbers of many requests in one native call (``csrc/books.cpp``): what they ask of a step, room in their blocks, and
what a step did to them.

The scheduler does the same request by request where the library was not built; `committing.commit_row` also does
everything that is out of the ordinary.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from draftwise.errors import ConfigError
from draftwise.kernels.cpu.library import NativeLibrary, native_library
from draftwise.kernels.cpu.records import check_record
from draftwise.kv.manager import KVManager, TableBook
from draftwise.names import method_number
from draftwise.sched.columns import RowColumns
from draftwise.sched.request import Request, RequestBook
from draftwise.types import RowResult, Speculation, chain_parents, new_record, tree_depth

_PTR, _I64 = ctypes.c_void_p, ctypes.c_int64
_NAMES_IN_C = {
    "tokens_at": "tokens",
    "stops_at": "stops",
    "taken_in": "last_token_time",
}
"""Fields of `RequestBook`."""


class Members:
    """Requests that run, side by side. They stay the same for many steps."""

    __slots__ = (
        "_facts",
        "_numbers",
        "facts_at",
        "numbers_at",
        "places",
        "places_at",
        "read_at_end",
        "requests",
        "rids",
        "sampled",
        "speculations",
        "tables_at",
        "watched",
    )

    def __init__(self, requests: list[Request], kv: KVManager) -> None:
        self.requests = requests
        self.rids = [request.rid for request in requests]
        self.places = array("Q", [request.at for request in requests])
        """[2 * R]: where `RequestBook` of each lies, then where `kv.manager.TableBook` of each does."""
        self.places.extend(kv.places(self.rids))
        self.speculations: Sequence[Speculation] = [request.speculation for request in requests]
        self.sampled = [speculation.rule != "greedy" for speculation in self.speculations]
        """Whether each draws at a temperature."""
        self.watched = any(request.sink is not None for request in requests)
        """Whether the text of some request may end it."""
        self.read_at_end = not self.watched and all(request.read_at_end for request in requests)
        """Whether nobody looks at their tokens before they have ended."""
        count = len(requests)
        self.places_at = self.places.buffer_info()[0]
        self.tables_at = self.places_at + 8 * count
        self._numbers, self._facts = array("i", bytes(8 * count)), array("q", bytes(24))
        self.numbers_at, self.facts_at = self._numbers.buffer_info()[0], self._facts.buffer_info()[0]
        """Where native calls write their answers, which are read before the next call."""

    def numbers(self, count: int) -> list[int]:
        """What the latest call wrote there, of at most 2 R numbers."""
        return self._numbers[:count].tolist()

    @property
    def facts(self) -> array[int]:
        """[3] what `Books.roots` counted."""
        return self._facts


class Roots(NamedTuple):
    """What requests that run ask of a step. ``missing`` [R]: known tokens to compute; ``proposed`` [R]: drafts that
    wait, of those that miss one token; ``decoding``: how many these are; ``context``: tokens that they have computed;
    ``lacking``: blocks that all known tokens still need."""

    missing: list[int]
    proposed: list[int]
    decoding: int
    context: int
    lacking: int


class Planned(NamedTuple):
    """The requests of a plan, side by side. They are written down while it is made, when all of it is at hand: behind a
    pass the caches are full of weights. ``num_new`` [R]: known tokens that each computes."""

    members: Members
    num_new: array[int]


class Books:
    """Reads and writes the books of many requests."""

    def __init__(self, library: NativeLibrary) -> None:
        """Raises ConfigError if the library lays the books out in another way."""
        check_record(library, "RequestBook", RequestBook, _NAMES_IN_C)
        check_record(library, "TableBook", TableBook)
        self._roots = library.function("dw_plan_roots", None, [_I64, _PTR, _PTR, _I64, _PTR, _PTR, _PTR])
        self._room = library.function("dw_plan_room", _I64, [_I64, _PTR, _I64, _PTR, _PTR])
        self._take_in = library.function(
            "dw_take_in", None, [_I64, _PTR, _PTR, _PTR, _PTR, _PTR, _I64, ctypes.c_double, _PTR]
        )

    def roots(self, members: Members, block_size: int) -> Roots:
        """What these requests ask of a step. No other is on its way for them. Where no block is lacking, all of it is
        reserved."""
        count, at = len(members.rids), members.numbers_at
        self._roots(
            count, members.places_at, members.tables_at, block_size, at, at + 4 * count, members.facts_at
        )
        numbers = members.numbers(2 * count)
        return new_record(Roots, (numbers[:count], numbers[count:], *members.facts))

    def room(self, members: Members, block_size: int, wanted: Sequence[int]) -> list[int]:
        """Reserve ``wanted`` [R] tokens past the committed ones, of those that have blocks for them: the places of the
        others, in their order."""
        asked = array("i", wanted)
        found = self._room(
            len(wanted), members.tables_at, block_size, asked.buffer_info()[0], members.numbers_at
        )
        return members.numbers(found) if found else []

    def take_in(
        self, planned: Planned, rows: Sequence[RowResult], now: float, kv: KVManager
    ) -> Sequence[int] | None:
        """Take in the rows of a plan, all of whose requests run; ``now``: seconds.

        Returns:
            Of each row how many tokens were taken, -1: nothing was done, somebody has to look at it. None: at all.
        """
        members = planned.members
        if rows.__class__ is RowColumns:
            rids, numbers, tokens = rows.rids, rows.numbers, rows.tokens
        elif rows:
            rids, numbers, tokens = _in_columns(rows)
        else:
            return None
        if list(rids) != members.rids:  # a request that had ended was passed over, say
            return None
        count = len(members.rids)
        self._take_in(
            count,
            members.places_at,
            members.tables_at,
            planned.num_new.buffer_info()[0],
            numbers.buffer_info()[0],
            tokens.buffer_info()[0],
            len(tokens),
            now,
            members.numbers_at,
        )
        taken = numbers[5 * count : 6 * count].tolist()
        answers = members.numbers(count)
        if answers.count(0) < count:
            for i, answer in enumerate(answers):
                if answer > 0:
                    kv.settle(rids[i], members.requests[i].tokens_np)
                elif answer:
                    taken[i] = -1
        return taken


def _in_columns(rows: Sequence[RowResult]) -> tuple[Sequence[int], array[int], array[int]]:
    """Of results one by one: requests, `RowColumns.numbers`, and tokens."""
    rids, tokens, drafted, accepted, _, _, parents, methods, proposed, _, of_prompt, params, errors = zip(
        *rows, strict=True
    )
    apart = [False] * len(rids)
    for unusual in (of_prompt, params, errors):
        if any(value is not None for value in unusual):
            apart = [one or value is not None for one, value in zip(apart, unusual, strict=True)]
    sizes = list(map(len, tokens))
    flat = array("i", [token for own in tokens for token in own])
    firsts: list[int] = []
    end = 0
    for size in sizes:
        firsts.append(end)
        end += size
    columns = array("i", drafted)
    columns.extend(accepted)
    columns.extend([len(own) if own is chain_parents(len(own)) else tree_depth(own) for own in parents])
    columns.extend(map(method_number, methods))
    columns.extend(proposed)
    columns.extend(sizes)
    columns.extend(firsts)
    columns.extend(apart)
    return rids, columns, flat


@functools.cache
def native_books() -> Books | None:
    """None where the native library was not built."""
    try:
        library = native_library()
    except ConfigError:  # built of other sources: users of its kernels report that
        return None
    return None if library is None else Books(library)
