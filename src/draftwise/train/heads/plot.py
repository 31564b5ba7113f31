"""Draws a run: loss and acceptance over steps, as an SVG file without any library, or a PNG where matplotlib is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from draftwise.charts import write_svg

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Name -> points (x, y)."""

_COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 420, 240, 52, 34, 40


def draw_history(history: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Draw `HeadState.history` into `folder`: `training.png` with matplotlib, else `training.svg`; returns the path."""
    panels = panels_of(history)
    if find_spec("matplotlib") is not None:
        return _draw_png(panels, folder / "training.png")
    path = folder / "training.svg"
    write_svg(svg(panels), path, "training")
    return path


def panels_of(history: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Return what is drawn: cross-entropy of the first draft, tokens per step greedy and at temperature 1."""
    titles = {
        "loss": "cross-entropy of the first draft (nats)",
        "greedy_length": "tokens per step, greedy",
        "sampled_length": "tokens per step, temperature 1",
    }
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {title: {} for title in titles.values()}
    for point in history:
        for data, heads in point.items():
            if not isinstance(heads, Mapping):
                continue
            for head, numbers in heads.items():
                for key, title in titles.items():
                    line = panels[title].setdefault(f"{head}, {data}", [])
                    line.append((float(point["step"]), float(numbers[key])))
    return dict(panels)


def svg(panels: Mapping[str, Series]) -> str:
    """Return panels side by side as SVG text."""
    width = len(panels) * (_WIDTH + _LEFT + _GAP)
    height = _TOP + _HEIGHT + 2 * _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, (title, series) in enumerate(panels.items()):
        parts += _panel(title, series, i * (_WIDTH + _LEFT + _GAP) + _LEFT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that span [low, high]. Example: 0.13 .. 0.92 -> 0.0, 0.2, 0.4, 0.6, 0.8, 1.0."""
    span = max(high - low, 1e-9)
    raw = span / count
    size = 10.0
    while size > raw:
        size /= 10
    while size * 10 <= raw:
        size *= 10
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= raw - 1e-12)
    first = int(low // step)
    out = [first * step]
    while out[-1] < high - 1e-9 * span:
        out.append((first + len(out)) * step)
    return [round(value, 10) for value in out]


def _panel(title: str, series: Series, left: float) -> list[str]:
    points = [point for line in series.values() for point in line]
    xs, ys = [p[0] for p in points] or [0.0, 1.0], [p[1] for p in points] or [0.0, 1.0]
    x_ticks, y_ticks = ticks(min(0.0, *xs), max(xs)), ticks(min(ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_ticks[0]) / max(1e-9, x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / max(1e-9, y_ticks[-1] - y_ticks[0])
        return round(left + across * _WIDTH, 1), round(_TOP + (1 - up) * _HEIGHT, 1)

    parts = [f'<text x="{left}" y="{_TOP - 14}" font-size="13">{escape(title)}</text>']
    for value in y_ticks:
        _, y = place(x_ticks[0], value)
        parts.append(f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y}" y2="{y}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for value in x_ticks:
        x, _ = place(value, y_ticks[0])
        parts.append(f'<text x="{x}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{value:g}</text>')
    for i, (name, line) in enumerate(series.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        y = _TOP + _HEIGHT + 34 + 14 * (i // 3)
        x = left + (i % 3) * _WIDTH / 3
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{escape(name)}</text>')
    return parts


def _draw_png(panels: Mapping[str, Series], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False)
    for axis, (title, series) in zip(axes[0], panels.items(), strict=True):
        axis.set_title(title)
        axis.set_xlabel("steps")
        for name, line in series.items():
            axis.plot([p[0] for p in line], [p[1] for p in line], label=name)
        if series:
            axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
