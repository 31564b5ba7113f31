"""`Router`: what is known of replicas, and where a request goes by it.

The contract, for whoever routes (the fleet of one server, Ray Serve):

- Replicas have names, any hashable ones. `add` and `remove` say which there are.
- A replica tells which blocks of its prefix cache can be found: `stored`, `removed`, `cleared`, with digests as
  ``kv.prefix_cache.block_digests`` makes them (16 bytes, chained, so that one digest names everything up to the end of
  its block). `kv.events` are where they come from. A router that is told nothing still knows what it sent.
- `route` answers where a prompt of token ids should go: all replicas that may be asked, the best first. It changes
  nothing. ``loads`` replaces what the router itself knows of the load, for callers who see more than one router does
  (queue lengths, say); the unit is tokens.
- `begin` says where it went, and returns a ticket; `end` that it is over. In between, its prompt counts as load, and as
  cached there: a second request with the same prefix follows it at once, and not when the first block is full.

Token ids and the block size must be the replicas' own. Nothing here waits, locks, or looks at a clock; one thread uses
a router at a time. How costs are weighed: `fleet.choice`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from draftwise.fleet.choice import Candidate, ranked
from draftwise.fleet.kinship import Kinship, shingles
from draftwise.kv.prefix_cache import block_digests, root_digest
from draftwise.types import IntArray

Name = Hashable

_CHUNK = 16
"""Blocks hashed at a time: a prompt that no replica has costs one chunk, and its entry as a running request."""
_NOTED = 64
"""Most blocks behind the cached ones that are noted as under way."""
_FIRST_GUESS = 128.0
"""Output tokens of a request, until some have ended."""
_KIN_GAIN = 0.5
"""Share of the output tokens that a drafter saves where all of a prompt was seen."""


@dataclass(slots=True)
class _Replica:
    """The router's knowledge about one replica."""

    cached: set[bytes] = field(default_factory=set)
    under_way: dict[bytes, int] = field(default_factory=dict)  # digest -> running requests that have it
    kinship: Kinship = field(default_factory=Kinship)
    load: float = 0.0
    num_requests: int = 0
    turn: int = 0


class Route(NamedTuple):
    """Where a prompt should go. ``names``: the best first; empty: there is no replica."""

    names: tuple[Name, ...]
    cached: Mapping[Name, int]  # tokens of the prompt that each has
    num_tokens: int
    num_output: float  # expected, of all samples
    digests: Mapping[str | None, Sequence[bytes]]  # by salt: of the prompt's blocks, as far as they were made
    windows: frozenset[int]  # see `fleet.kinship`


@dataclass(slots=True)
class Ticket:
    """A request that is at a replica."""

    name: Name
    load: float
    digests: Sequence[bytes]
    replica: _Replica  # whose books it stands in, even if another one has the name by now
    ended: bool = False
    forgotten: bool = False


class Router:
    """See the module's docstring."""

    def __init__(self, block_size: int, *, prefixes: bool = True, kinship: bool = False) -> None:
        """
        Args:
            block_size: of the replicas' prefix cache.
            prefixes: the replicas have one.
            kinship: their drafters learn from past requests (method ``suffix``).
        """
        self.block_size = block_size
        self._prefixes = prefixes
        self._kinship = kinship
        self._replicas: dict[Name, _Replica] = {}
        self._turn = 0
        self._mean_output = _FIRST_GUESS

    # ------------------------------------------------------------------------------------------ observations

    @property
    def names(self) -> tuple[Name, ...]:
        """The replicas that may be asked."""
        return tuple(self._replicas)

    def add(self, name: Name) -> None:
        """There is a replica, with an empty cache. KeyError if there was one of this name."""
        if name in self._replicas:
            raise KeyError(name)
        self._replicas[name] = _Replica()

    def remove(self, name: Name) -> None:
        """It is gone, or shall get no more. Asked twice, it is still gone."""
        self._replicas.pop(name, None)

    def stored(self, name: Name, digests: Iterable[bytes]) -> None:
        """These blocks can be found there. Of a replica that was removed, nothing is noted."""
        if (replica := self._replicas.get(name)) is not None:
            replica.cached.update(digests)

    def removed(self, name: Name, digests: Iterable[bytes]) -> None:
        """These cannot any more."""
        if (replica := self._replicas.get(name)) is not None:
            replica.cached.difference_update(digests)

    def cleared(self, name: Name) -> None:
        """None can."""
        if (replica := self._replicas.get(name)) is not None:
            replica.cached.clear()

    def changed(self, name: Name, changes: Iterable[tuple[str, Iterable[bytes]]]) -> None:
        """Changes of the replica's blocks, in order, in the form of `fleet.wire.Cache`."""
        for kind, digests in changes:
            if kind == "+":
                self.stored(name, digests)
            elif kind == "-":
                self.removed(name, digests)
            else:
                self.cleared(name)

    def load(self, name: Name) -> float:
        """Tokens that it works on, of what was sent by this router; 0 if there is no such replica."""
        replica = self._replicas.get(name)
        return 0.0 if replica is None else replica.load

    def num_requests(self, name: Name) -> int:
        """Requests that it has of this router."""
        replica = self._replicas.get(name)
        return 0 if replica is None else replica.num_requests

    # ---------------------------------------------------------------------------------------------- requests

    def route(
        self,
        token_ids_np: IntArray,
        *,
        max_tokens: int | None = None,
        samples: int = 1,
        salts: Mapping[Name, str | None] | None = None,
        among: Iterable[Name] | None = None,
        loads: Mapping[Name, float] | None = None,
    ) -> Route:
        """Where a prompt should go.

        Args:
            token_ids_np: [n] its token ids.
            max_tokens: most output tokens of a sample; None: any number.
            samples: of the prompt.
            salts: of the replicas' prefix caches for this request, where there are any (adapters).
            among: names that may be asked; None: all. Others than the router knows are left out.
            loads: in tokens, instead of the router's own books.
        """
        known = self._replicas
        asked = list(known) if among is None else [name for name in among if name in known]
        cached, digests = self._matches(token_ids_np, asked, salts)
        output = self._mean_output if max_tokens is None else min(max_tokens, self._mean_output)
        output *= samples
        windows = shingles(token_ids_np) if self._kinship else frozenset()
        candidates = [
            Candidate(
                name,
                cached[name],
                known[name].load if loads is None else loads.get(name, 0.0),
                _KIN_GAIN * output * known[name].kinship.share(windows) if windows else 0.0,
                known[name].turn,
            )
            for name in asked
        ]
        best = ranked(candidates, len(token_ids_np))
        return Route(tuple(c.name for c in best), cached, len(token_ids_np), output, digests, windows)

    def _matches(
        self, token_ids_np: IntArray, asked: Sequence[Name], salts: Mapping[Name, str | None] | None
    ) -> tuple[dict[Name, int], dict[str | None, list[bytes]]]:
        """Cached tokens by replica, and the digests by salt that were made to find them."""
        cached: dict[Name, int] = dict.fromkeys(asked, 0)
        digests: dict[str | None, list[bytes]] = {}
        if not self._prefixes:
            return cached, digests
        by_salt: dict[str | None, list[Name]] = {}
        for name in asked:
            by_salt.setdefault(None if salts is None else salts.get(name), []).append(name)
        full = len(token_ids_np) // self.block_size
        most = (len(token_ids_np) - 1) // self.block_size  # one token is left to compute
        for salt, names in by_salt.items():
            made = digests[salt] = []
            matching, hits = list(names), 0
            while len(made) < full and (matching or len(made) < hits + _NOTED):
                first = len(made)
                parent = made[-1] if made else root_digest(salt)
                new = block_digests(parent, token_ids_np, self.block_size, first, min(first + _CHUNK, full))
                made += new
                still = []
                for name in matching:
                    length = self._run(name, new)
                    cached[name] = min(first + length, most) * self.block_size
                    hits = max(hits, first + length)
                    if length == len(new):
                        still.append(name)
                matching = still
        return cached, digests

    def _run(self, name: Name, digests: Sequence[bytes]) -> int:
        """How many of these a replica has, or will have soon, from the first one on."""
        replica = self._replicas[name]
        for length, digest in enumerate(digests):
            if digest not in replica.cached and digest not in replica.under_way:
                return length
        return len(digests)

    def begin(self, route: Route, name: Name, salt: str | None = None) -> Ticket:
        """The prompt goes to this replica, one of ``route.names``; ``salt``: its there."""
        replica = self._replicas[name]
        load = route.num_tokens - route.cached.get(name, 0) + route.num_output
        digests = route.digests.get(salt, ())
        for digest in digests:
            replica.under_way[digest] = replica.under_way.get(digest, 0) + 1
        replica.load += load
        replica.num_requests += 1
        replica.kinship.learn(route.windows)
        self._turn += 1
        replica.turn = self._turn
        return Ticket(name, load, digests, replica)

    def end(self, ticket: Ticket, num_output: int | None = None, *, keep: bool = False) -> None:
        """The request ended after ``num_output`` tokens (None: unknown, or cut short). Only the first call counts.
        ``keep``: its prompt counts as cached there until `forget`, since news of its blocks may still be on the way."""
        if ticket.ended:
            return
        ticket.ended = True
        if num_output is not None:
            self._mean_output += (num_output - self._mean_output) / 16
        replica = ticket.replica
        replica.load -= ticket.load
        replica.num_requests -= 1
        if not replica.num_requests:
            replica.load = 0.0  # no error of rounding stays
        if not keep:
            self.forget(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Its prompt counts as cached there only if the replica said so. Once counts."""
        if ticket.forgotten:
            return
        ticket.forgotten = True
        replica = ticket.replica
        for digest in ticket.digests:
            left = replica.under_way[digest] - 1
            if left:
                replica.under_way[digest] = left
            else:
                del replica.under_way[digest]
