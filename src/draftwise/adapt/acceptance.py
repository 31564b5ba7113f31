"""How many drafts will be accepted, estimated per request, method and position from what was.

Chains keep the chance that position j is accepted given that j - 1 was, so that the estimate for a position which was
not drafted lately follows those before it; trees keep the chance of each node in the order of the proposal. Both forget
by halving their counts when a window is full. A request's estimate starts from its group's (the requests of the same
method, rule and shape), and the group's from a guess.

Acceptance comes in runs: behind a proposal that was accepted whole the next one fares better than behind one of which
nothing was. Chains are therefore counted a second time by what came of the request's proposal before (`after`), which
was known before the present one was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

TREE = -1
"""The size class of proposals that are not chains."""
ANY = 0
"""The size class of chains whose size says nothing about how good they are."""

NOTHING, SOME, ALL = 0, 1, 2
"""The outcome of a proposal."""
_AFTER = 16
"""Size classes `_AFTER` + one of those: chains behind a proposal of which so much was accepted."""
_AFTER_WEIGHT = 8.0
"""Trials that the estimate without regard to the proposal before counts as."""
_AFTER_LEAST = 8.0
"""Trials of the first position from which on the proposal before says something."""

GROUP_WINDOW = 256.0
REQUEST_WINDOW = 32.0
_FIRST_GUESS = 0.7
_GUESS_WEIGHT = 2.0
"""Trials that the guess for a position counts as; position j's guess is the estimate for position j - 1."""
_GROUP_WEIGHT = 4.0
"""Trials that the group's estimate counts as for one of its requests."""
_NODE_GUESS = 0.3


def size_class(n: int) -> int:
    """Class of an evident proposal (one whose size follows from the strength of the match): 1-2 -> 1, 3-6 -> 2,
    7-14 -> 3, 15-30 -> 4, 31-62 -> 5."""
    return (n + 1).bit_length() - 1


def outcome(verified: int, accepted: int) -> int:
    """The outcome of a proposal of which ``verified`` nodes, at least one, were verified. 4 of 4: `ALL`; 0:
    `NOTHING`."""
    if not accepted:
        return NOTHING
    return ALL if accepted >= verified else SOME


def after(before: int) -> int:
    """The size class of chains behind a proposal of which this came."""
    return _AFTER + before


class Counts:
    """Trials and hits by size class and position, with a window. Taking one in costs next to nothing; it is added up
    when somebody asks."""

    __slots__ = ("_chains", "_fresh", "_hits", "_paths", "_trials", "_window")

    def __init__(self, window: float) -> None:
        self._window = window
        self._trials: dict[int, list[float]] = {}
        self._hits: dict[int, list[float]] = {}
        self._fresh: set[int] = set()  # classes with news since they were asked for
        self._chains: dict[tuple[int, int, int], int] = {}  # (class, verified, accepted) -> not added up yet
        self._paths: list[tuple[int, Sequence[int]]] = []  # trees: (verified, path)

    def add_chain(self, kind: int, verified: int, accepted: int) -> None:
        """A chain of ``verified`` nodes: positions 0..accepted-1 hit, position ``accepted`` missed if it was there.

        Example: 4 verified, 2 accepted: trials of positions 0, 1, 2; hits of 0 and 1.
        """
        key = (kind, verified, accepted)
        self._chains[key] = self._chains.get(key, 0) + 1

    def add_tree(self, verified: int, path: Sequence[int]) -> None:
        """A tree of ``verified`` nodes of which those on ``path`` were accepted: every node was tried."""
        self._paths.append((verified, path))

    def get(self, kind: int) -> tuple[Sequence[float], Sequence[float], bool]:
        """(trials, hits, whether they changed since the last call) of a class by position."""
        if self._chains or self._paths:
            self._add_up()
        fresh = kind in self._fresh
        self._fresh.discard(kind)
        return self._trials.get(kind, ()), self._hits.get(kind, ()), fresh

    def _add_up(self) -> None:
        for (kind, verified, accepted), many in self._chains.items():
            trials, hits = self._room(kind, verified)
            for j in range(accepted):
                trials[j] += many
                hits[j] += many
            if accepted < verified:
                trials[accepted] += many
        self._chains.clear()
        for verified, path in self._paths:
            trials, hits = self._room(TREE, verified)
            for j in range(verified):
                trials[j] += 1.0
            for j in path:
                hits[j] += 1.0
        self._paths.clear()

    def _room(self, kind: int, n: int) -> tuple[list[float], list[float]]:
        trials = self._trials.get(kind)
        if trials is None:
            trials, hits = self._trials[kind], self._hits[kind] = [], []
        else:
            hits = self._hits[kind]
        if len(trials) < n:
            trials.extend([0.0] * (n - len(trials)))
            hits.extend([0.0] * (n - len(hits)))
        if trials[0] >= self._window:
            trials[:] = [x * 0.5 for x in trials]
            hits[:] = [x * 0.5 for x in hits]
        self._fresh.add(kind)
        return trials, hits

    def fade(self, factor: float) -> None:
        """Let everything count for less."""
        self._add_up()
        for kind, trials in self._trials.items():
            trials[:] = [x * factor for x in trials]
            hits = self._hits[kind]
            hits[:] = [x * factor for x in hits]
            self._fresh.add(kind)


def expected(rates: Sequence[float], kind: int) -> list[float]:
    """Expected accepted drafts if the first 0, 1, ..., n nodes are verified.

    Example: a chain with rates 0.5, 0.5: 0, 0.5, 0.75. A tree with the same: 0, 0.5, 1.0.
    """
    out = [0.0]
    total, reach = 0.0, 1.0
    if kind == TREE:
        for rate in rates:
            total += rate
            out.append(total)
        return out
    for rate in rates:
        reach *= rate
        total += reach
        out.append(total)
    return out


class GroupAcceptance:
    """The history of all requests with one method, rule and shape."""

    def __init__(self) -> None:
        self.counts = Counts(GROUP_WINDOW)
        self._rates: dict[int, list[float]] = {}
        self._expected: dict[int, list[float]] = {}
        self.sizes: dict[
            int, tuple[float, float]
        ] = {}  # class of a proposal (0: empty) -> how many, nodes in all

    def add_size(self, n: int) -> None:
        """An evident drafter was asked and proposed ``n`` nodes."""
        kind = size_class(n) if n else 0
        many, nodes = self.sizes.get(kind, (0.0, 0.0))
        if many >= GROUP_WINDOW:
            self.sizes = {k: (a * 0.5, b * 0.5) for k, (a, b) in self.sizes.items()}
            many, nodes = self.sizes[kind]
        self.sizes[kind] = (many + 1.0, nodes + n)

    def rates(self, kind: int, n: int) -> list[float]:
        """Chance of each of at least n positions."""
        cached = self._rates.get(kind)
        trials, hits, fresh = self.counts.get(kind)
        if cached is not None and len(cached) >= n and not fresh:
            return cached
        out: list[float] = []
        before = _NODE_GUESS if kind == TREE else _FIRST_GUESS
        for j in range(max(n, len(trials), len(cached or ()))):
            if j < len(trials):
                before = (hits[j] + _GUESS_WEIGHT * before) / (trials[j] + _GUESS_WEIGHT)
            out.append(before)
        self._rates[kind] = out
        self._expected[kind] = expected(out, kind)
        return out

    def expected(self, kind: int, n: int) -> list[float]:
        """Expected accepted drafts by number of nodes verified, at least up to n."""
        self.rates(kind, n)
        return self._expected[kind]

    def lifts(self, before: int, n: int) -> list[float] | None:
        """Factors on the chances of the first n positions, from the outcome of the proposal before. None: too little
        is known.

        Example: position 0 is accepted in 60 % of all chains, in 30 % of those behind nothing: 0.5.
        """
        trials, hits, _ = self.counts.get(after(before))
        if not trials or trials[0] < _AFTER_LEAST:
            return None
        rates = self.rates(ANY, n)
        return [
            1.0
            if j >= len(trials) or not rate
            else (hits[j] + _AFTER_WEIGHT * rate) / (trials[j] + _AFTER_WEIGHT) / rate
            for j, rate in enumerate(rates[:n])
        ]


class RequestAcceptance:
    """One request's own history."""

    __slots__ = ("_expected", "counts")

    def __init__(self) -> None:
        self.counts = Counts(REQUEST_WINDOW)
        self._expected: dict[int, list[float]] = {}

    def expected(self, group: GroupAcceptance, kind: int, n: int) -> list[float]:
        """Expected accepted drafts by number of nodes verified, at least up to n. A request without a history of its
        own is like its group."""
        trials, hits, fresh = self.counts.get(kind)
        if not trials:
            return group.expected(kind, n)
        cached = self._expected.get(kind)
        if cached is not None and len(cached) > n and not fresh:
            return cached
        rates = group.rates(kind, n)[: max(n, len(trials))]
        own = [
            (hits[j] + _GROUP_WEIGHT * rate) / (trials[j] + _GROUP_WEIGHT) if j < len(trials) else rate
            for j, rate in enumerate(rates)
        ]
        out = self._expected[kind] = expected(own, kind)
        return out

    def expected_after(self, group: GroupAcceptance, before: int, n: int) -> list[float] | None:
        """`expected` of chains behind a proposal of which ``before`` came; None: that says nothing yet."""
        lifts = group.lifts(before, n)
        if lifts is None:
            return None
        curve = self.expected(group, ANY, n)
        reach, chances = 1.0, []
        for gain in (b - a for a, b in pairwise(curve[: n + 1])):
            chances.append(min(gain / reach, 1.0) if reach > 0 else 0.0)
            reach = gain
        return expected([min(c * lift, 1.0) for c, lift in zip(chances, lifts, strict=True)], ANY)
