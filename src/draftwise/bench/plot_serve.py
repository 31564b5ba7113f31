"""Lines over load of what `draftwise bench serve` measured, as SVG without any library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from draftwise.bench.plot import COLOURS
from draftwise.bench.serve import ServeReport
from draftwise.errors import ConfigError

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 180, 64, 110, 34, 36
_SHOWN = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load and what came of it: ``load`` in requests per second, or clients."""

    load: float
    report: ServeReport


Line = tuple[str, list[tuple[float, float]]]


def check_serve_plot(path: Path) -> None:
    """Raise ConfigError for a file that cannot be drawn; before anything is measured."""
    if path.suffix != ".svg":
        raise ConfigError(f"--plot {path}: expected a name that ends in .svg")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def draw_serve(points: Sequence[LoadPoint], path: Path, load: str) -> None:
    """Write the chart. ``load``: what the horizontal axis is. Raises ConfigError."""
    check_serve_plot(path)
    try:
        path.write_text(serve_svg(points, load), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from None


def serve_svg(points: Sequence[LoadPoint], load: str) -> str:
    """Panels one above the other: time to first token, per token, whole requests, requests per second.

    Loads without a number (all failed, no token after the first) have no point. An infinite load stands at the
    right, as one step more than the largest finite one.
    """
    xs = _places([point.load for point in points])
    panels = [
        (title, _percentiles(points, xs, name))
        for title, name in (
            ("time to first token, ms", "ttft"),
            ("time per token after the first, ms", "tpot"),
            ("whole request, ms", "e2e"),
        )
    ]
    rates: list[Line] = [
        ("answered", [(x, p.report.request_rate) for x, p in zip(xs, points, strict=True)]),
        (
            "within SLA",
            [(x, g) for x, p in zip(xs, points, strict=True) if (g := p.report.goodput) is not None],
        ),
    ]
    panels.append(("requests per second", rates))
    tall = _TOP + _HEIGHT + _BOTTOM
    width, height = _LEFT + _WIDTH + _RIGHT, tall * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    most = max([*xs, 0.0]) or 1.0
    labels = [
        (x, "all at once" if math.isinf(p.load) else f"{p.load:g}") for x, p in zip(xs, points, strict=True)
    ]
    for i, (title, lines) in enumerate(panels):
        parts += _panel(i * tall + _TOP, title, [line for line in lines if line[1]], most, labels, load)
    return "\n".join([*parts, "</svg>"]) + "\n"


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


def ticks(most: float) -> list[float]:
    """Up to six round numbers from 0 to at least ``most``. Example: 7.3 is 0, 2, 4, 6, 8."""
    if most <= 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(most / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * 5 >= most)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def _panel(
    top: float, title: str, lines: Sequence[Line], most: float, labels: Sequence[tuple[float, str]], load: str
) -> list[str]:
    heights = ticks(max((y for _, line in lines for _, y in line), default=0.0))
    bottom = top + _HEIGHT

    def across(x: float) -> float:
        return round(_LEFT + _WIDTH * x / most, 1)

    def up(y: float) -> float:
        return round(bottom - _HEIGHT * y / heights[-1], 1)

    parts = [f'<text x="{_LEFT}" y="{top - 12}" font-size="13">{escape(title)}</text>']
    for tick in heights:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{up(tick)}" y2="{up(tick)}" stroke="#e5e7eb"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{up(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for x, word in labels:
        parts.append(f'<text x="{across(x)}" y="{bottom + 14}" text-anchor="middle">{escape(word)}</text>')
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{bottom + 28}" text-anchor="end">{escape(load)}</text>')
    named: list[float] = []
    # From the lowest end up: names of lines that end close together are moved apart.
    for colour, (name, line) in sorted(zip(COLOURS, lines, strict=False), key=lambda pair: pair[1][1][-1][1]):
        ordered = sorted(line)
        path = " ".join(f"{across(x)},{up(y)}" for x, y in ordered)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for x, y in ordered:
            parts.append(
                f'<circle cx="{across(x)}" cy="{up(y)}" r="3" fill="{colour}">'
                f"<title>{escape(name)}: {y:.4g} at {x:g}</title></circle>"
            )
        place = min([up(ordered[-1][1]) + 4, *(other - 13 for other in named[-1:])])
        named.append(place)
        parts.append(
            f'<text x="{across(ordered[-1][0]) + 8}" y="{place}" fill="{colour}">{escape(name)}</text>'
        )
    return parts
