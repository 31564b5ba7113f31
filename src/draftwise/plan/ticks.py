"""A planner's observation of an interval, and its decision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENGINES, PREFILL, DECODE = "engines", "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval. None or NaN: not known, which is something else than zero.

    ``requests``: that arrived; ``isl``, ``osl``: their mean lengths; ``ttft``, ``itl``: means of those who got tokens,
    seconds; ``queue``: requests that wait at its end; ``accepted_length``: tokens per step that drafted, of
    ``draft_length`` drafts on average (None: as many as there may be); ``ready``: replicas that serve, by pool;
    ``warming``: replicas that have served for less than an interval, whose times say little;
    ``attained``: share of the requests that ended which were within the limits.
    """

    time: float
    requests: float | None = None
    isl: float | None = None
    osl: float | None = None
    ttft: float | None = None
    itl: float | None = None
    queue: float | None = None
    kv_usage: float | None = None
    accepted_length: float | None = None
    draft_length: float | None = None
    ready: Mapping[str, int] = field(default_factory=dict)
    warming: int = 0
    attained: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """``replicas``: wanted, by pool; ``reasons``: why, in words; ``changed``: whether it differs from the one
    before."""

    time: float
    replicas: Mapping[str, int]
    method: str = "none"
    drafts: int = 0
    reasons: tuple[str, ...] = ()
    changed: bool = False
    rate: float | None = None
    """Requests per second that it was made for; None: no traffic was ever seen."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "time": self.time,
            "replicas": dict(self.replicas),
            "method": self.method,
            "drafts": self.drafts,
            "reasons": list(self.reasons),
            "changed": self.changed,
            "rate": self.rate,
        }


class Reason(str):
    """A reason in words, and its ``kind`` in one: what is counted."""

    kind: str

    def __new__(cls, kind: str, text: str) -> Reason:
        made = super().__new__(cls, text)
        made.kind = kind
        return made


def kind_of(reason: str) -> str:
    """The kind of a reason; "restored" if it comes from a file."""
    return reason.kind if isinstance(reason, Reason) else "restored"


def counted(replicas: Mapping[str, int]) -> str:
    """Replicas by pool in words. Example: "1 engine", "2 prefill, 3 decode"."""
    return ", ".join(
        f"{n} {pool[:-1] if n == 1 and pool == ENGINES else pool}" for pool, n in replicas.items()
    )


def known(value: float | None) -> bool:
    """Whether a number was observed."""
    return value is not None and math.isfinite(value)
