"""From timed samples to medians, ratios and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Samples:
    """What was measured: engine -> cell -> one value per round, in the order of first arrival.

    ``notes``: engine -> cell -> why there is no value.
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, engine: str, cell: str, value: float) -> None:
        self.values.setdefault(engine, {}).setdefault(cell, []).append(value)

    def note(self, engine: str, cell: str, why: str) -> None:
        self.notes.setdefault(engine, {})[cell] = why

    def median(self, engine: str, cell: str) -> float | None:
        found = self.values.get(engine, {}).get(cell)
        return statistics.median(found) if found else None

    @property
    def cells(self) -> list[str]:
        """Every cell that some engine has a value or a note for."""
        out: dict[str, None] = {}
        for source in (self.values, self.notes):
            for cells in source.values():
                out.update(dict.fromkeys(cells))
        return list(out)

    @property
    def engines(self) -> list[str]:
        return list(dict.fromkeys([*self.values, *self.notes]))


@dataclass(frozen=True, slots=True)
class Best:
    """The best engine of some, by its median in one cell."""

    engine: str
    value: float


def best(samples: Samples, engines: Sequence[str], cell: str, *, lower: bool) -> Best | None:
    """The lowest or highest median; None if no engine has one."""
    found = [(value, name) for name in engines if (value := samples.median(name, cell)) is not None]
    if not found:
        return None
    value, name = min(found) if lower else max(found)
    return Best(name, value)


def advantage(ours: float, theirs: float, *, lower: bool) -> float:
    """How many times better ours is: above 1 we lead. ``lower``: whether less is better."""
    return theirs / ours if lower else ours / theirs


def compare(samples: Samples, own: Sequence[str], *, lower: bool) -> dict[str, dict[str, Any]]:
    """Per cell: our best, the best peer, and the ratio, where both have a value."""
    peers = [name for name in samples.engines if name not in own]
    out: dict[str, dict[str, Any]] = {}
    for cell in samples.cells:
        ours = best(samples, own, cell, lower=lower)
        theirs = best(samples, peers, cell, lower=lower)
        if ours is None or theirs is None:
            continue
        out[cell] = {
            "ours": ours.engine,
            "peer": theirs.engine,
            "ratio": advantage(ours.value, theirs.value, lower=lower),
        }
    return out


def table(samples: Samples, own: Sequence[str], *, lower: bool, unit: str, scale: float = 1.0) -> str:
    """A Markdown table: engines below each other, cells beside each other, and a last row of ratios.

    Args:
        scale: What medians are multiplied with before they are printed, e.g. 1000 for milliseconds.
    """
    cells = samples.cells
    lines = [f"| {unit} | " + " | ".join(cells) + " |", "|---|" + "---|" * len(cells)]
    for engine in samples.engines:
        row = [_number(samples.median(engine, cell), scale) for cell in cells]
        lines.append(f"| {engine} | " + " | ".join(row) + " |")
    found = compare(samples, own, lower=lower)
    if found:
        row = [
            f"{found[cell]['ratio']:.2f} ({found[cell]['peer']})" if cell in found else "" for cell in cells
        ]
        lines.append("| best of ours against the best peer | " + " | ".join(row) + " |")
    for engine, notes in samples.notes.items():
        for why in dict.fromkeys(notes.values()):
            missing = [cell for cell, reason in notes.items() if reason == why]
            lines.append(f"\n{engine}: {', '.join(missing)}: {why}")
    return "\n".join(lines)


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return "–"
    value *= scale
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def idle_shares(used: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds that each worker used while others were measured, per second of that time."""
    return {name: used[name] / seconds[name] for name in used if seconds.get(name)}
