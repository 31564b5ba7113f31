"""Bars of what `draftwise bench accept` measured: an SVG file without any library, or a PNG where matplotlib is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from draftwise.bench.accept import AcceptRow
from draftwise.charts import COLOURS, write_svg
from draftwise.errors import ConfigError

_PANELS: tuple[tuple[str, Callable[[AcceptRow], float]], ...] = (
    ("tokens per step", lambda row: row.tokens_per_step),
    ("speed against plain decoding", lambda row: row.speedup),
)
_BAR, _HEIGHT, _LEFT, _TOP, _GAP = 14, 200, 44, 40, 26


def draw_accept(rows: Sequence[AcceptRow], path: Path) -> None:
    """Draw one group of bars per workload, one bar per variant, to a .svg or .png file.

    Raises:
        ConfigError: another suffix, no such folder, or .png without matplotlib.
    """
    check_plot(path)
    if path.suffix == ".svg":
        write_svg(accept_svg(rows), path)
    else:
        _draw_png(rows, path)


def check_plot(path: Path) -> None:
    """Raise ConfigError for a file that cannot be drawn; before anything is measured."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot {path}: expected a name that ends in .svg or .png")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    if path.suffix == ".png":
        from importlib.util import find_spec

        if find_spec("matplotlib") is None:
            raise ConfigError(
                f"--plot {path}: .png needs matplotlib, which is not installed; .svg needs nothing"
            )


def accept_svg(rows: Sequence[AcceptRow]) -> str:
    """The panels one above the other, as SVG text."""
    workloads, methods = _names(rows)
    paint = _paint(methods)
    group = len(methods) * _BAR + _GAP
    width = _LEFT + max(len(workloads) * group, 420)
    panel = _TOP + _HEIGHT + _GAP
    legend = 18 * -(-len(methods) // 4) + 16
    height = len(_PANELS) * panel + legend
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    values = {(row.workload, row.method): row for row in rows}
    for i, (title, value) in enumerate(_PANELS):
        top = i * panel + _TOP
        most = max([value(row) for row in rows] + [1.0])
        parts.append(f'<text x="{_LEFT}" y="{top - 14}" font-size="13">{escape(title)}</text>')
        for tick in range(int(most) + 1):
            y = round(top + _HEIGHT * (1 - tick / most), 1)
            parts.append(f'<line x1="{_LEFT}" x2="{width}" y1="{y}" y2="{y}" stroke="#e5e7eb"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{tick}</text>')
        for w, workload in enumerate(workloads):
            left = _LEFT + w * group + _GAP / 2
            parts.append(f'<text x="{left}" y="{top + _HEIGHT + 14}">{escape(workload)}</text>')
            for m, method in enumerate(methods):
                row = values.get((workload, method))
                if row is None:
                    continue
                tall = round(_HEIGHT * value(row) / most, 1)
                parts.append(
                    f'<rect x="{left + m * _BAR}" y="{round(top + _HEIGHT - tall, 1)}" width="{_BAR - 2}" '
                    f'height="{tall}" {paint[method]}>'
                    f"<title>{escape(method)}, {escape(workload)}: {value(row):.2f}</title></rect>"
                )
    for m, method in enumerate(methods):
        x, y = _LEFT + (m % 4) * (width - _LEFT) / 4, len(_PANELS) * panel + 18 * (m // 4) + 8
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" {paint[method]}/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{escape(method)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _paint(methods: Sequence[str]) -> dict[str, str]:
    """How each variant's bars are filled: one colour per method, half as strong for its trees.

    Example: "ngram", "mtp", "mtp/tree": the first colour, the second one, the second one at half strength.
    """
    bases = list(dict.fromkeys(method.partition("/")[0] for method in methods))
    out: dict[str, str] = {}
    for method in methods:
        base, _, shape = method.partition("/")
        strength = ' fill-opacity="0.5"' if shape else ""
        out[method] = f'fill="{COLOURS[bases.index(base) % len(COLOURS)]}"{strength}'
    return out


def _names(rows: Sequence[AcceptRow]) -> tuple[list[str], list[str]]:
    """Workloads and methods, in the order in which they come."""
    return list(dict.fromkeys(r.workload for r in rows)), list(dict.fromkeys(r.method for r in rows))


def _draw_png(rows: Sequence[AcceptRow], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workloads, methods = _names(rows)
    figure, axes = pyplot.subplots(len(_PANELS), 1, figsize=(2 + 0.3 * len(rows), 8))
    for axis, (title, value) in zip(axes, _PANELS, strict=True):
        for m, method in enumerate(methods):
            mine = [row for row in rows if row.method == method]
            places = [workloads.index(row.workload) + m * 0.8 / len(methods) for row in mine]
            axis.bar(places, [value(row) for row in mine], 0.8 / len(methods), label=method)
        axis.set_title(title)
        axis.set_xticks(range(len(workloads)), workloads)
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
