"""Lines over one axis, and surfaces as cells, panel below panel, as SVG text without any library."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from draftwise.errors import ConfigError

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#65a30d", "#be185d", "#475569")
Line = tuple[str, list[tuple[float, float]]]
"""A name and points (x, y), x and y from 0 on."""
Panel = tuple[str, Sequence[Line]]
"""A title and its lines; lines without a point are left out."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 520, 180, 64, 110, 34, 36
_HEAD = 18
_DOTS = 40
"""Points up to which each has a dot with its numbers."""


def check_svg(path: Path, flag: str = "--plot") -> None:
    """Raise ConfigError for a file that cannot be drawn; before anything is measured."""
    if path.suffix != ".svg":
        raise ConfigError(f"{flag} {path}: expected a name that ends in .svg")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")


def write_svg(text: str, path: Path, flag: str = "--plot") -> None:
    """Write it whole or not at all. Raises ConfigError."""
    check_svg(path, flag)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    finally:  # of Ctrl-C, or a full disk; it is gone where all went well
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def lines_svg(
    panels: Sequence[Panel],
    axis: str,
    labels: Sequence[tuple[float, str]] | None = None,
    *,
    heads: Sequence[str] = (),
    limits: Mapping[str, tuple[str, float]] | None = None,
) -> str:
    """The chart. ``axis``: what stands to the right below. ``labels``: (x, word) along the axis; None: round
    numbers. ``heads``: lines above all panels, the first one in bold. ``limits``: by the title of a panel a name and a
    height, drawn as a dashed line across it."""
    tall = _TOP + _HEIGHT + _BOTTOM
    head = _HEAD * len(heads) + (12 if heads else 0)
    width, height = _LEFT + _WIDTH + _RIGHT, head + tall * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, line in enumerate(heads):
        weight = ' font-size="14" font-weight="bold"' if i == 0 else ' fill="#4b5563"'
        parts.append(f'<text x="{_LEFT}" y="{_HEAD * (i + 1)}"{weight}>{escape(line)}</text>')
    xs = [x for _, lines in panels for _, line in lines for x, _ in line]
    xs += [x for x, _ in labels or ()]
    most = max([*xs, 0.0]) or 1.0
    if labels is None:
        labels = [(x, f"{x:g}") for x in ticks(most) if x <= most]
    for i, (title, lines) in enumerate(panels):
        shown = [line for line in lines if line[1]]
        limit = (limits or {}).get(title)
        parts += _panel(head + i * tall + _TOP, title, shown, most, labels, axis, limit)
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(most: float) -> list[float]:
    """Up to six round numbers from 0 to at least ``most``. Example: 7.3 is 0, 2, 4, 6, 8."""
    if most <= 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(most / 5))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor * 5 >= most)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def _panel(
    top: float,
    title: str,
    lines: Sequence[Line],
    most: float,
    labels: Sequence[tuple[float, str]],
    axis: str,
    limit: tuple[str, float] | None,
) -> list[str]:
    highest = max((y for _, line in lines for _, y in line), default=0.0)
    heights = ticks(highest if limit is None else max(highest, limit[1]))
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
    parts.append(f'<text x="{_LEFT + _WIDTH}" y="{bottom + 28}" text-anchor="end">{escape(axis)}</text>')
    if limit is not None:
        name, y = limit
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{up(y)}" y2="{up(y)}" stroke="#dc2626" '
            'stroke-dasharray="6 4"/>'
        )
        parts.append(f'<text x="{_LEFT + 6}" y="{up(y) - 4}" fill="#dc2626">{escape(name)}</text>')
    shown = sorted(
        ((i, name, sorted(line)) for i, (name, line) in enumerate(lines)), key=lambda one: one[2][-1][1]
    )
    places = _apart([up(ordered[-1][1]) + 4 for _, _, ordered in shown], top)
    for (number, name, ordered), place in zip(shown, places, strict=True):
        path = " ".join(f"{across(x)},{up(y)}" for x, y in ordered)
        # The tenth line has the first one's colour again, and is dashed.
        colour = COLOURS[number % len(COLOURS)]
        dashes = ' stroke-dasharray="5 3"' if number >= len(COLOURS) else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        for x, y in ordered if len(ordered) <= _DOTS else ():
            parts.append(
                f'<circle cx="{across(x)}" cy="{up(y)}" r="3" fill="{colour}">'
                f"<title>{escape(name)}: {y:.4g} at {x:g}</title></circle>"
            )
        parts.append(
            f'<text x="{across(ordered[-1][0]) + 8}" y="{place}" fill="{colour}">{escape(name)}</text>'
        )
    return parts


def _apart(wanted: Sequence[float], top: float) -> list[float]:
    """Heights of names, of which the lowest comes first, so that none covers another and none lies above ``top``.

    Example: 100, 100, 100 are 100, 87, 74; with a top of 80 they are 106, 93, 80.
    """
    places: list[float] = []
    for place in wanted:
        places.append(min([place, *(other - 13 for other in places[-1:])]))
    least = top
    for i in reversed(range(len(places))):
        places[i] = max(places[i], least)
        least = places[i] + 13
    return places


class Cells(NamedTuple):
    """A surface as cells: ``values[row, column]`` is a height and the words in its cell; where there is none, the cell
    stays empty."""

    title: str
    columns: Sequence[int]
    rows: Sequence[int]
    values: Mapping[tuple[int, int], tuple[float, str]]


_CELL, _LINE = 88, 28
_LOW, _HIGH = (0xEF, 0xF6, 0xFF), (0x25, 0x63, 0xEB)


def cells_svg(surfaces: Sequence[Cells], across: str, down: str) -> str:
    """Surfaces one below the other; the higher a cell, the darker. ``across``, ``down``: what columns and rows are."""
    longest = max((len(words) for s in surfaces for _, words in s.values.values()), default=0)
    size = max(_CELL, 6 * longest + 20)  # words have some air on both sides
    widest = max(max(size * len(s.columns), 7 * len(s.title)) for s in surfaces)
    width = _LEFT + widest + 16
    height = sum(_TOP + _LINE * len(s.rows) + _BOTTOM for s in surfaces)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    top = 0
    for surface in surfaces:
        top += _TOP
        parts.append(f'<text x="{_LEFT}" y="{top - 12}" font-size="13">{escape(surface.title)}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{top - 12}" text-anchor="end">{escape(down)}</text>')
        heights = [height for height, _ in surface.values.values()]
        low, high = min(heights, default=0.0), max(heights, default=0.0)
        for i, row in enumerate(surface.rows):
            y = top + _LINE * i
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 18}" text-anchor="end">{row}</text>')
            for j, column in enumerate(surface.columns):
                cell = surface.values.get((row, column))
                if cell is None:
                    continue
                share = (cell[0] - low) / (high - low) if high > low else 0.0
                fill = "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(_LOW, _HIGH, strict=True))
                x, ink = _LEFT + size * j, "white" if share > 0.6 else "#111827"
                parts.append(
                    f'<rect x="{x + 1}" y="{y + 1}" width="{size - 2}" height="{_LINE - 2}" rx="3" fill="#{fill}"/>'
                    f'<text x="{x + size / 2:g}" y="{y + 18}" text-anchor="middle" fill="{ink}">'
                    f"{escape(cell[1])}</text>"
                )
        top += _LINE * len(surface.rows)
        for j, column in enumerate(surface.columns):
            parts.append(
                f'<text x="{_LEFT + size * (j + 0.5):g}" y="{top + 15}" text-anchor="middle">{column}</text>'
            )
        end = _LEFT + size * len(surface.columns)
        parts.append(f'<text x="{end}" y="{top + 29}" text-anchor="end">{escape(across)}</text>')
        top += _BOTTOM
    return "\n".join([*parts, "</svg>"]) + "\n"
