"""The choice itself: which requests draft how many nodes, given what acceptance and times are believed to be.

Maximises expected committed tokens per second of a step, tokens / (target's time + drafters' time) (the goodput of Liu
et al., 2406.14066), over k = 0..K per group of requests that draft together, and within a group over who takes part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftwise.adapt.acceptance import (
    ALL,
    ANY,
    NOTHING,
    SOME,
    TREE,
    GroupAcceptance,
    RequestAcceptance,
    after,
    size_class,
)
from draftwise.adapt.performance import PerformanceModel
from draftwise.names import MAX_TREE_NODES

SWITCH = 0.02
"""A choice is replaced by one that promises this much more."""
_PATIENCE = 0.75
"""A request among others stops drafting where its drafts bring less than this part of what they cost. It then waits for
the others' drafts with every token, and ends after them, in a small batch; and its own history is short."""
_WAKE = 0.05
"""The same for a resting group: its drafters missed the beginning of requests and draft worse for a while."""
_CATCH_UP_STEPS = 64
"""The most steps on which the price of catching up on what was not drafted for is laid; fewer, where a request ends
before."""
NEVER = 1 << 62
"""A step that does not come."""
_OWN_ROWS = 32
"""The most tokens that wait for a head to draft; beyond that it reads them at once."""


@dataclass(slots=True, eq=False)
class Group:
    """Requests with one method, rule and shape of proposals: they draft in one call and share a history.

    ``evident``: the size of a proposal tells how good it is (`Proposer.evident`). ``cuts``: that size is known when a
    step is planned. ``follows``: the drafter keeps something of all that the target reads, unless its requests rest
    (`Following`). ``cap``: nodes drafted now by those who draft; None before the first choice.
    """

    method: str
    rule: str
    evident: bool
    cuts: bool = True
    follows: bool = False
    acceptance: GroupAcceptance = field(default_factory=GroupAcceptance)
    cap: int | None = None
    trial_floor: float = 0.0  # of the account of gains and losses: below it the group's trial has ended
    trees: bool = False  # proposals that were no chains have been seen
    gain: float | None = None
    accepted: float | None = None
    hopeful: bool = True  # at this batch size, drafts that were all accepted would pay
    last_cap: int = 0  # the last one that was not 0
    last_deep: int = 0  # step of the last look beyond `cap`, or of the last trial of the whole group
    num_rounds: int = 0  # in which it drafted
    num_drafts: int = 0  # proposals verified
    num_accepted: int = 0  # drafts accepted of them
    chosen_for: int = 0  # requests in the batch when `cap` was chosen
    entered: int = 0  # requests that came since then
    chosen: dict[int, int] = field(default_factory=dict)  # class of the batch -> the last `cap` there
    idle_since: int = NEVER  # step since when no request drafts
    resting: bool = False
    sample: Drafter | None = None  # the one that does not rest

    @property
    def sampled(self) -> bool:
        return self.rule != "greedy"

    def class_of(self, proposed: int) -> int:
        """The size class under which a proposal of this size is counted."""
        if self.trees:
            return TREE
        return size_class(proposed) if self.evident else ANY


@dataclass(slots=True, eq=False)
class Drafter:
    """One request, as far as drafting goes.

    ``asked``: nodes it wants; ``most``: nodes it may draft in a batch of this size. ``budget``: nodes it drafts now.
    ``cuts``: size class -> nodes of a waiting proposal that are verified; a class that is missing is verified whole.
    ``before``: what came of its newest proposal that was verified (`acceptance.outcome`); None: of none, or the one
    behind it was not verified at all.
    """

    group: Group
    asked: int
    most: int
    budget: int
    history: RequestAcceptance = field(default_factory=RequestAcceptance)
    cuts: dict[int, int] = field(default_factory=dict)
    before: int | None = None
    waiting: int = 0  # nodes of the proposal that waits
    verified: int = 0  # size of the proposal that this step verifies, before the cut
    probe: int = 0  # nodes to draft although `budget` says 0
    streak: int = 0  # proposals of a probe that succeeded: it goes on every step until one fails
    probing: bool = False  # what waits was drafted as a probe, or to look deeper: verify it whole
    last_probe: int = -1  # step; -1: never
    drafted: int = 0  # last step in which it drafted, or the one before its first
    seen: int = 0  # last step in which it was planned
    rid: int = -1
    behind: int = 0  # tokens that the drafter has to see besides one for each step since `drafted`
    ready: int = 0  # step from which on its drafter has seen enough to draft well
    remaining: int = NEVER  # tokens to come, at most
    glances: bool = False  # see `Following.glance`
    _table: tuple[dict[int, int], bool, bytes] | None = None  # see `cut_table`

    def cut(self, proposed: int) -> int:
        """Nodes of a waiting proposal of this size to verify, as far as history goes: never by what was drawn."""
        kind = self.group.class_of(proposed)
        if kind == ANY and self.before is not None:
            kind = after(self.before) if after(self.before) in self.cuts else ANY
        return min(self.cuts.get(kind, proposed), proposed)

    def cut_table(self) -> bytes:
        """uint8 [4, 64] `cut` of proposals of all sizes, by what came of the one before (`RoundCuts`)."""
        group = self.group
        if self._table is None or self._table[0] is not self.cuts or self._table[1] != group.trees:
            cuts = tuple(self.cuts.items()) if group.cuts else ()
            self._table = self.cuts, group.trees, _cut_table(group.evident, group.trees, cuts)
        return self._table[2]

    def lag(self, step: int) -> int:
        """Tokens that the drafter has to see before it drafts in this step, beyond those of the step before."""
        if self.group.evident:
            return 0  # it looks things up
        if self.group.follows:
            return min(max(step - 1 - self.drafted, 0), _OWN_ROWS)
        return max(self.behind + step - 1 - self.drafted, 0)


_SIZES = bytes(range(MAX_TREE_NODES + 1))
_SIZE_CLASSES = [size_class(n) for n in _SIZES]


@functools.lru_cache(maxsize=1024)
def _cut_table(evident: bool, trees: bool, cuts: tuple[tuple[int, int], ...]) -> bytes:
    """`Drafter.cut_table` of these `Drafter.cuts`. Requests of a group, and later choices, often have the same."""
    limits = dict(cuts)
    if evident and not trees:
        return 4 * bytes([min(limits.get(kind, n), n) for n, kind in enumerate(_SIZE_CLASSES)])
    whole = limits.get(TREE if trees else ANY)
    behind = [after(before) for before in (NOTHING, SOME, ALL)]
    own = [whole if trees else limits.get(kind, whole) for kind in behind]
    return b"".join([_up_to(limit) for limit in (*own, whole)])


def _up_to(limit: int | None) -> bytes:
    """uint8 [64] of so many nodes how many are verified. ``limit`` 2: 0, 1, 2, 2, 2, ...; None: all of them."""
    return _SIZES if limit is None else _SIZES[:limit] + bytes([limit]) * (len(_SIZES) - limit)


@dataclass(slots=True)
class Option:
    """A group's gain and cost with a given cap: sums over its members, besides their plain step."""

    cap: int
    tokens: float = 0.0  # accepted drafts
    rows: float = 0.0
    draft_time: float = 0.0
    row_price: float = 0.0  # tokens
    members: list[tuple[Drafter, bool]] = field(default_factory=list)  # and who drafts


@dataclass(frozen=True, slots=True)
class Prices:
    """The state of a batch: requests, tokens in the cache, what a plain step takes (seconds), and the step's number.
    ``together``: a pass is as wide for all as for the widest, so that a request saves nothing by not drafting where
    others do."""

    requests: int
    context: int
    sampled: bool
    plain: float
    step: int = 0
    together: bool = False


def pays_at_best(group: Group, members: Sequence[Drafter], prices: Prices, model: PerformanceModel) -> bool:
    """Whether the group's drafting could gain anything in a batch of this size: if every draft were accepted."""
    count, most = len(members), max(m.most for m in members)
    for nodes in {1, most}:
        rows = count * nodes
        seconds = model.target_time(
            prices.requests, prices.requests + rows, prices.context, prices.sampled
        ) + model.draft_time(group.method, count, nodes, sampled=group.sampled)
        if (prices.requests + rows) * prices.plain > prices.requests * seconds:
            return True
    return False


def caps(most: int) -> list[int]:
    """The draft lengths that are looked at: all up to 8, then fewer."""
    out = [k for k in (*range(1, 9), 10, 12, 16, 24, 32, 48) if k < most]
    return [*out, most]


def make_option(
    group: Group,
    members: Sequence[Drafter],
    cap: int,
    prices: Prices,
    rate: float,
    model: PerformanceModel,
) -> Option:
    """The group with ``cap`` nodes per request, without those members who are not worth their rows and drafts at
    ``rate`` tokens per second.

    Every member is asked whether expected accepted drafts > price of its rows + price of its draft, prices in tokens:
    what the batch would commit in that time.
    """
    count = len(members)
    full = prices.requests + count * cap
    more = model.target_time(prices.requests, full, prices.context, prices.sampled) - prices.plain
    row_price = max(more, 0.0) / (count * cap) * rate
    whole = model.draft_time(group.method, count, cap, sampled=group.sampled)
    # Whether one request more drafts costs less than its share: the passes are there anyway.
    draft_price = 0.0
    if count > 1:
        half = model.draft_time(group.method, count // 2, cap, sampled=group.sampled)
        draft_price = max(whole - half, 0.0) / (count - count // 2) * rate
    lags = [member.lag(prices.step) for member in members]
    late = 0.0  # seconds per token that drafters have to catch up on, of requests that did not draft
    if sum(lags) > count:
        late = model.catch_up_time(group.method, count, cap, sum(lags), group.sampled) / sum(lags)
    option = Option(cap, row_price=row_price)
    drafting = 0
    for member, lag in zip(members, lags, strict=True):
        nodes = min(cap, member.most)
        tokens, rows = _expected(group, member, nodes, row_price)
        catch_up = late * lag / min(_CATCH_UP_STEPS, max(member.remaining / (1 + tokens), 1.0))
        # Alone, or where all do as one, the comparison of options says whether it pays; else each has to pay for
        # itself.
        cost = row_price * rows + draft_price + catch_up * rate
        on = count == 1 or prices.together or tokens > (_PATIENCE * cost if member.budget else cost + SWITCH)
        option.members.append((member, on))
        if on:
            drafting += 1
            option.tokens += tokens
            option.rows += rows
            option.draft_time += catch_up
    if not drafting:
        return Option(0)
    option.draft_time += (
        whole if drafting == count else model.draft_time(group.method, drafting, cap, sampled=group.sampled)
    )
    return option


def _expected(group: Group, member: Drafter, nodes: int, row_price: float) -> tuple[float, float]:
    """(expected accepted drafts, expected rows) of a request that drafts ``nodes`` nodes."""
    if not group.evident:
        kind = TREE if group.trees else ANY
        return member.history.expected(group.acceptance, kind, nodes)[nodes], float(nodes)
    tokens = rows = total = 0.0
    for kind, many, mean in _sizes(group, nodes):
        total += many
        if mean:
            curve = member.history.expected(group.acceptance, kind, nodes)
            verified = min(best_cut(curve, nodes, row_price) if group.cuts else nodes, mean)
            tokens += many * curve[verified]
            rows += many * verified
    return tokens / total, rows / total


def cuts_of(group: Group, member: Drafter, nodes: int, row_price: float) -> dict[int, int]:
    """`Drafter.cuts` of a request whose rows have this price. What waits when the next choice is made was paid for
    already: it is verified as far as its rows pay."""
    if group.evident:
        cuts: dict[int, int] = {}
        for kind, _, mean in _sizes(group, nodes):
            if mean:
                curve = member.history.expected(group.acceptance, kind, nodes)
                cut = best_cut(curve, nodes, row_price) if group.cuts else nodes
                cuts[kind] = max(cut, cuts.get(kind, 0))
        return cuts
    kind = TREE if group.trees else ANY
    curve = member.history.expected(group.acceptance, kind, nodes)
    cuts = {kind: best_cut(curve, member.most, row_price)}
    if kind == ANY:
        for before in (NOTHING, SOME, ALL):
            behind = member.history.expected_after(group.acceptance, before, nodes)
            if behind is not None:
                cuts[after(before)] = best_cut(behind, member.most, row_price)
    return cuts


def _sizes(group: Group, nodes: int) -> list[tuple[int, float, int]]:
    """The proposals of an evident drafter: (class under which they are counted, how many, their mean size), at most
    ``nodes``; 0: empty ones."""
    sizes = group.acceptance.sizes or {size_class(nodes): (1.0, float(nodes))}
    return [
        (TREE if group.trees else size, many, min(round(total / many), nodes) if size else 0)
        for size, (many, total) in sizes.items()
    ]


def best_cut(curve: Sequence[float], most: int, row_price: float) -> int:
    """The number of nodes n that maximises curve[n] - n * row_price, at most ``most``.

    Example: curve 0, 0.8, 1.4, 1.6 with a price of 0.3 per row: 0.5 for one node, 0.8 for two, 0.7 for three: 2.
    """
    best, value = 0, 0.0
    for n in range(1, min(most, len(curve) - 1) + 1):
        worth = curve[n] - n * row_price
        if worth > value:
            best, value = n, worth
    # Beyond what the curve knows there is nothing to say against more.
    return most if best == len(curve) - 1 < most else best


def choose(
    groups: Sequence[tuple[Group, Sequence[Drafter]]],
    prices: Prices,
    model: PerformanceModel,
) -> tuple[list[Option], float]:
    """For each group its best option (cap 0: nobody drafts), one group after the other, the others as they are; and the
    tokens per second that are promised.

    A group keeps its present cap unless another promises `SWITCH` more, or plain decoding anything more.
    """
    plain_rate = prices.requests / prices.plain
    chosen = [Option(0) for _ in groups]
    rate = plain_rate
    for _ in range(2 if len(groups) > 1 else 1):
        for i, (group, members) in enumerate(groups):
            others = [option for j, option in enumerate(chosen) if j != i]
            tokens = prices.requests + sum(o.tokens for o in others)
            rows = prices.requests + sum(o.rows for o in others)
            draft = sum(o.draft_time for o in others)
            most = max(member.most for member in members)
            best = Option(0)
            best_rate = tokens / (_target(model, prices, rows) + draft)
            kept, kept_rate = (best, best_rate) if group.cap == 0 else (None, 0.0)
            sizes = [most] if group.evident else caps(most)
            for cap in sizes:
                option = make_option(group, members, cap, prices, max(rate, best_rate), model)
                seconds = _target(model, prices, rows + option.rows) + draft + option.draft_time
                promised = (tokens + option.tokens) / seconds
                if group.cap == cap:
                    kept, kept_rate = option, promised
                if promised > best_rate:
                    best, best_rate = option, promised
            # Plain decoding needs no lead: it is what the promise is measured by.
            lead = _WAKE if group.resting else SWITCH
            if kept is not None and best_rate < kept_rate * (1 + lead if best.cap else 1):
                best, best_rate = kept, kept_rate
            chosen[i] = best
            rate = best_rate
    return chosen, rate


def _target(model: PerformanceModel, prices: Prices, rows: float) -> float:
    return model.target_time(prices.requests, round(rows), prices.context, prices.sampled)
