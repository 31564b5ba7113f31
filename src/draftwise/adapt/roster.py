"""The running requests and the groups that they form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from draftwise.adapt.acceptance import after, outcome
from draftwise.adapt.choice import Drafter, Group
from draftwise.adapt.controller import Tables, most_nodes
from draftwise.types import Speculation

_CROWD = 8
_PIONEERS = 8
"""In a batch of more requests than `_CROWD` a group about which nothing is known for as many begins with one in
`_PIONEERS` of them: they say nearly as much, and the loss, if it is one, is that of a few."""


MAX_GROUPS = 64
"""Groups that are remembered. Trees come from requests, so that anybody can make up as many kinds as he likes; a
decision looks at all groups."""


@dataclass(slots=True)
class Planned:
    """A step's data until it is observed. When planning ahead, the next step is planned before that."""

    step: int
    drafting: dict[Group, list[int]] = field(default_factory=dict)  # requests, nodes, catch-up tokens
    asked: set[int] = field(default_factory=set)  # requests that draft
    once: set[int] = field(default_factory=set)  # those that draft behind the first round only
    most_rounds: int = 1  # that a step of this length may have
    usual_rounds: int = 1  # the same, once control has learned
    before: dict[int, int] = field(default_factory=dict)
    """Request -> what was known, when this step was planned, of its proposal before (`Drafter.before`)."""


class Roster:
    """``drafters``: request -> what is known of it; None: it decodes plainly. ``batch``: requests of the next step."""

    def __init__(
        self, tables: Tables, evident: Collection[str], observing: Collection[str], *, ahead: bool
    ) -> None:
        """See `AdaptiveController`."""
        self.groups: list[Group] = []
        self.drafters: dict[int, Drafter | None] = {}
        self.batch = 0
        self.num_made = 0  # groups, dropped ones included
        self._tables = dict(tables)
        self._evident = frozenset(evident)
        self._observing = frozenset(observing)
        self._ahead = ahead
        self._by_kind: dict[object, Group] = {}  # the one that was entered last stands last

    def enter(self, rid: int, speculation: Speculation, step: int) -> Drafter | None:
        """A new request."""
        asked = most_nodes(speculation, 0, {})
        drafter = None
        if asked:
            group = self._group_of(speculation)
            most = self._limit(group, asked)
            budget = most if group.cap is None else min(most, group.cap)
            known = group.cap is not None and 2 * group.chosen_for >= self.batch
            if self.batch > _CROWD and not known and not group.evident:
                if group.entered * _PIONEERS >= self.batch:
                    budget = 0
                group.entered += 1
            drafter = Drafter(group, asked, most, budget, drafted=step - 1, rid=rid)
        self.drafters[rid] = drafter
        return drafter

    def _group_of(self, speculation: Speculation) -> Group:
        method = speculation.method
        kind: object = (method, speculation.rule, speculation.tree, speculation.dynamic)
        group = self._by_kind.pop(kind, None)
        if group is None and len(self._by_kind) >= MAX_GROUPS and not self._drop_group():
            # More kinds at once than are told apart: what is left of them shares one history.
            kind = (method, speculation.rule)
            group = self._by_kind.pop(kind, None)
        if group is None:
            evident = method in self._evident
            cuts = not (evident and self._ahead)
            group = Group(method, speculation.rule, evident, cuts, follows=method in self._observing)
            self.groups.append(group)
            self.num_made += 1
        self._by_kind[kind] = group
        return group

    def _drop_group(self) -> bool:
        """Forget the kind that has been unused for longest; False if all kinds have requests."""
        used = {id(drafter.group) for drafter in self.drafters.values() if drafter is not None}
        for kind, group in self._by_kind.items():
            if id(group) not in used:
                del self._by_kind[kind]
                self.groups.remove(group)
                return True
        return False

    def _limit(self, group: Group, asked: int) -> int:
        """Nodes a request may draft in a batch of this size."""
        for low, high, limit in self._tables.get(group.method, ()):
            if low <= self.batch <= high:
                return min(asked, limit)
        return asked

    def keep_to_tables(self) -> None:
        """The batch has another size: the tables may allow less, or more."""
        if not self._tables:
            return
        for drafter in self.drafters.values():
            if drafter is not None:
                drafter.most = self._limit(drafter.group, drafter.asked)
                drafter.budget = min(drafter.budget, drafter.most)

    def members(self, group: Group) -> list[Drafter]:
        """All requests of a group."""
        return [d for d in self.drafters.values() if d is not None and d.group is group]

    def active(self, step: int) -> list[tuple[Group, list[Drafter]]]:
        """Groups with the requests that were planned lately."""
        found: dict[int, tuple[Group, list[Drafter]]] = {}
        since = step - 3
        for drafter in self.drafters.values():
            if drafter is not None and drafter.seen >= since and drafter.most:
                found.setdefault(id(drafter.group), (drafter.group, []))[1].append(drafter)
        return list(found.values())


def record(
    drafter: Drafter, drafted: int, accepted: int, before: int | None, path: Sequence[int] | None
) -> None:
    """Take in how much of a request's proposal was accepted. ``before``: `Planned.before`; ``path``: the accepted nodes
    of a tree, None for a chain."""
    group = drafter.group
    drafter.before = outcome(drafted, accepted)
    group.num_drafts += 1
    group.num_accepted += accepted
    for counts in (group.acceptance.counts, drafter.history.counts):
        if path is not None:
            group.trees = True
            counts.add_tree(drafted, path)
        else:
            kind = group.class_of(drafter.verified if group.cuts else drafted)
            counts.add_chain(kind, drafted, accepted)
    if before is not None and not group.trees and not group.evident:
        group.acceptance.counts.add_chain(after(before), drafted, accepted)
