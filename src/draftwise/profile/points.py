"""The sizes to measure, the most informative first: a run that stops early has the corners and the middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptPoint:
    """The time to the first token of a prompt, and what a method's drafter takes to read it."""

    tokens: int
    method: str = "none"
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPoint:
    """Steps of ``requests`` requests with ``context`` tokens each that draft ``drafts`` nodes with a method."""

    method: str
    drafts: int
    requests: int
    context: int


@dataclass(frozen=True, slots=True)
class AcceptPoint:
    """A method's acceptance on a kind of text, behind prompts of so many tokens; None: as long as they are."""

    method: str
    kind: str
    context: int | None = None


@dataclass(frozen=True, slots=True)
class RestPoint:
    """By how much longer a request takes on an engine that did nothing for ``pause`` seconds."""

    pause: float


Point = PromptPoint | StepPoint | AcceptPoint | RestPoint


_READ = 4
"""Lengths of prompts, the most telling ones, at which it is measured how long drafters read them: a drafter's passes
grow evenly."""


def telling(values: Sequence[int]) -> list[int]:
    """The same values: both ends, the middle, the middles between those, ...

    Example: 1, 2, 4, 8, 16 is 1, 16, 4, 2, 8.
    """
    ordered = sorted(set(values))
    if len(ordered) < 3:
        return ordered
    out = [ordered[0], ordered[-1]]
    gaps = [(0, len(ordered) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle in (low, high):
            continue
        out.append(ordered[middle])
        gaps += [(low, middle), (middle, high)]
    return out


def plan_points(
    methods: Sequence[str],
    drafts: Sequence[int],
    requests: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    kinds: Sequence[str],
    kv_tokens: int,
    max_len: int,
    pause: float = 0.0,
    own: Sequence[str] = (),
) -> list[Point]:
    """All points for which there is room, in the order in which they are to be measured.

    A point comes the later, the further behind its sizes stand in their `telling` orders, summed up; plain decoding
    comes before drafting, since all else is compared with it. ``kinds``: of text whose prompts are made at every length
    of ``contexts``; ``own``: with prompts that are as long as they are. ``pause``: of the rest that is measured;
    0: none.
    """
    ranked: list[tuple[int, int, Point]] = []

    def add(rank: int, point: Point) -> None:
        ranked.append((rank, len(ranked), point))

    for i, tokens in enumerate(telling(prompts)):
        add(i, PromptPoint(tokens))
        for method in methods if i < _READ else ():
            add(1 + i, PromptPoint(tokens, method, min(drafts)))
    ks = telling(drafts)
    for i, n in enumerate(telling(requests)):
        for j, context in enumerate(telling(contexts)):
            if n * (context + 96) > kv_tokens or context + 64 > max_len:
                continue
            add(i + j, StepPoint("none", 0, n, context))
            for method in methods:
                for k, number in enumerate(ks):
                    add(1 + i + j + k, StepPoint(method, number, n, context))
    if pause:
        add(2, RestPoint(pause))
    for i, kind in enumerate(own):
        for method in methods:
            add(1 + i, AcceptPoint(method, kind))
    for i, kind in enumerate(kinds):
        for j, context in enumerate(telling([c for c in contexts if c + 64 <= max_len])):
            for method in methods:
                add(1 + i + j, AcceptPoint(method, kind, context))
    return [point for _, _, point in sorted(ranked, key=lambda entry: entry[:2])]
