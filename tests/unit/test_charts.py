"""Charts as SVG text: every line is drawn, and no name covers another."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from draftwise.charts import Cells, cells_svg, lines_svg, write_svg
from draftwise.errors import ConfigError


@pytest.mark.parametrize("end", [0.0, 5.0, 10.0])
def test_names_of_lines_that_end_at_one_height_stand_below_each_other(end: float) -> None:
    lines = [(f"line {i}", [(0.0, float(i)), (3.3, end)]) for i in range(11)]
    text = lines_svg([("a title", lines)], "seconds")
    places = [float(y) for y in re.findall(r'y="([\d.]+)" fill="#[0-9a-f]+">line \d', text)]
    assert len(places) == 11
    ordered = sorted(places)
    assert all(b - a >= 13 for a, b in pairwise(ordered))
    assert ordered[0] >= 34 and ordered[-1] <= 34 + 180 + 4  # between the panel's top and its axis


def test_the_tenth_line_is_drawn_too_and_dashed() -> None:
    text = lines_svg([("t", [(f"line {i}", [(0.0, 1.0), (1.0, float(i))]) for i in range(10)])], "s")
    assert text.count("<polyline") == 10 and text.count("stroke-dasharray") == 1


def test_the_axis_ends_where_the_lines_do() -> None:
    text = lines_svg([("t", [("line", [(0.0, 1.0), (60.3, 2.0)])])], "s")
    assert 'text-anchor="middle">60<' in text and ">80<" not in text
    assert re.search(r'<polyline points="64[.0]*,[\d.]+ 584[.0]*,', text)


def test_cells_are_as_dark_as_they_are_high_and_missing_ones_stay_empty() -> None:
    cells = Cells("a long title that needs more room than its cells", [1, 2], [64], {(64, 1): (1.0, "<low>")})
    text = cells_svg([cells], "requests", "context")
    assert text.count('rx="3"') == 1 and "&lt;low&gt;" in text
    width = re.search(r' width="(\d+)"', text)
    assert width is not None and int(width[1]) > 7 * len(cells.title)
    both = cells._replace(values={(64, 1): (1.0, "a"), (64, 2): (3.0, "b")})
    assert re.findall(r'fill="(#\w{6})"/>', cells_svg([both], "x", "y")) == ["#eff6ff", "#2563eb"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_chart_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "lines.svg"
    write_svg("<svg/>", path)

    def torn(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[:3])
        raise error

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(ConfigError if isinstance(error, OSError) else KeyboardInterrupt):
        write_svg("<svg>another</svg>", path)
    assert path.read_text(encoding="utf-8") == "<svg/>"
    assert list(tmp_path.iterdir()) == [path]
