"""Tables of plain text, the same on a terminal and in a file, made to fit 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 80
"""Columns that a table may take: a terminal as it opens."""


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str] | str]) -> str:
    """Lines of a table, without a line end behind the last.

    ``columns``: headings; a line end in one divides it over two lines, a leading "<" puts the column's cells to the
    left (the others stand to the right, as numbers do). ``rows``: cells, or a text that stands over the rows below it.

    >>> print(table("speed", ["<method", "tokens\\nper s"], ["greedily", ["plain", "2145"], ["mtp", "3582"]]))
    speed
    <BLANKLINE>
    method  tokens
             per s
    --------------
    greedily
    plain     2145
    mtp       3582
    """
    headings = [name.lstrip("<").split("\n") for name in columns]
    left = [name.startswith("<") for name in columns]
    height = max(map(len, headings))
    # A heading stands at the top, as the eye looks for it there: [["method", ""], ["tokens", "per s"]].
    headings = [lines + [""] * (height - len(lines)) for lines in headings]
    cells = [row for row in rows if not isinstance(row, str)]
    widths = [max([*map(len, lines), *(len(row[i]) for row in cells)]) for i, lines in enumerate(headings)]

    def line(texts: Sequence[str]) -> str:
        parts = (
            text.ljust(width) if to_left else text.rjust(width)
            for text, width, to_left in zip(texts, widths, left, strict=True)
        )
        return "  ".join(parts).rstrip()

    out = [*textwrap.wrap(title, WIDTH), ""] if title else []
    out += [line([lines[i] for lines in headings]) for i in range(height)]
    out.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
    out += [row if isinstance(row, str) else line(row) for row in rows]
    return "\n".join(out)


def positions(rates: Sequence[float], most: int = 4) -> str:
    """Shares of accepted drafts by position, short.

    >>> positions([0.853, 0.72, 1.0]), positions([0.5] * 9)
    ('.85 .72 1.0', '.50 .50 .50 .50 ..')
    """
    shown = [f"{rate:.2f}".removeprefix("0") if rate < 0.995 else "1.0" for rate in rates[:most]]
    return " ".join(shown) + (" .." if len(rates) > most else "")
