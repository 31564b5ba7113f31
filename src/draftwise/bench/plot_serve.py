"""Lines over load of what `draftwise bench serve` measured, as SVG without any library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwise.bench.serve import ServeReport
from draftwise.charts import Line, lines_svg, write_svg

_SHOWN = (50, 90, 99)
_TIMES = (
    ("time to first token, ms", "ttft"),
    ("time per token after the first, ms", "tpot"),
    ("whole request, ms", "e2e"),
)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load and its results: ``load`` in requests per second, or clients."""

    load: float
    report: ServeReport


def draw_serve(points: Sequence[LoadPoint], path: Path, load: str, heads: Sequence[str] = ()) -> None:
    """Write the chart. ``load``: what the horizontal axis is; ``heads``: lines above it. Raises ConfigError."""
    write_svg(serve_svg(points, load, heads), path)


def serve_svg(points: Sequence[LoadPoint], load: str, heads: Sequence[str] = ()) -> str:
    """Panels one above the other: time to first token, per token, whole requests, requests per second.

    Loads without a number (all failed, no token after the first) have no point. An infinite load stands at the
    right, as one step more than the largest finite one. Where the SLA limits a time, a dashed line stands at the
    limit.
    """
    xs = _places([point.load for point in points])
    panels = [(title, _percentiles(points, xs, name)) for title, name in _TIMES]
    sla = points[0].report.sla if points else {}
    limits = {
        title: (f"SLA {1000 * sla[name]:g} ms", 1000 * sla[name]) for title, name in _TIMES if name in sla
    }
    rates: list[Line] = [
        ("answered", [(x, p.report.request_rate) for x, p in zip(xs, points, strict=True)]),
        (
            "within SLA",
            [(x, g) for x, p in zip(xs, points, strict=True) if (g := p.report.goodput) is not None],
        ),
    ]
    panels.append(("requests per second", rates))
    labels = [
        (x, "all at once" if math.isinf(p.load) else f"{p.load:g}") for x, p in zip(xs, points, strict=True)
    ]
    return lines_svg(panels, load, labels, heads=heads, limits=limits)


def _places(loads: Sequence[float]) -> list[float]:
    """Example: 1, 4, inf is 1, 4, 7: an infinite load stands as far behind the last one as that from the one before."""
    finite = sorted({load for load in loads if math.isfinite(load)})
    step = finite[-1] - finite[-2] if len(finite) > 1 else (finite[-1] if finite else 1.0)
    beyond = (finite[-1] if finite else 0.0) + step
    return [load if math.isfinite(load) else beyond for load in loads]


def _percentiles(points: Sequence[LoadPoint], xs: Sequence[float], name: str) -> list[Line]:
    found = [
        (x, value) for x, p in zip(xs, points, strict=True) if (value := getattr(p.report, name)) is not None
    ]
    return [(f"p{p}", [(x, 1000 * value.percentiles[p]) for x, value in found]) for p in _SHOWN]
