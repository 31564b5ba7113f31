"""Which replica a request goes to: a pure function of what is known of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

Name = TypeVar("Name")


class Candidate(NamedTuple, Generic[Name]):
    """One replica, as it stands when a request comes. All sizes are tokens.

    ``turn`` is the number of the latest request that went there: among equals, the one that waited longest is next.
    """

    name: Name
    cached: int = 0  # leading tokens of the prompt that it need not compute
    load: float = 0.0  # prompts to be computed and outputs to be made, of the requests that are there
    kin: float = 0.0  # output tokens that its drafter saves, as it has seen requests like this one
    turn: int = 0


def cost(candidate: Candidate[Name], num_tokens: int) -> float:
    """Tokens that are computed before and for a prompt of ``num_tokens``: those that are not cached, and half of the
    load, of which about half is done by the time it matters.

    Example: a prompt of 1024 tokens costs 512 + 1500 at a replica that has 512 of them cached and works on 3000, and
    1024 + 500 at one that has none and works on 1000: it goes to the second one.
    """
    return max(num_tokens - candidate.cached, 0) + candidate.load / 2 - candidate.kin


def ranked(candidates: Sequence[Candidate[Name]], num_tokens: int) -> list[Candidate[Name]]:
    """Candidates for a prompt of ``num_tokens``, the best one first.

    A request leaves the replica that has its prefix if that one is busier than another by more than the prefix is
    worth, and for no other reason. So the load of a hot prefix spills over to other replicas, which then have it, too;
    and requests with other prefixes stay where theirs are, however uneven the load is among third replicas.
    """
    return sorted(candidates, key=lambda c: (cost(c, num_tokens), c.load, c.turn))
