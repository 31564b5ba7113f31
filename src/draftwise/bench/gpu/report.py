"""The results of the parts, as a table and as JSON. It needs no package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Line:
    """One number. ``wanted``: what was asked for, in words; ``met``: whether it is so (None: nothing was asked for)."""

    name: str
    value: float | str | None
    unit: str = ""
    wanted: str = ""
    met: bool | None = None
    note: str = ""


@dataclass(slots=True)
class PartReport:
    """``error``: why a part came to no end; ``skipped``: why it was not run. What was found until then is kept."""

    name: str
    lines: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None
    skipped: str | None = None
    path: str | None = None
    """A file that is written with every line: what was found stays if the process is stopped."""

    def add(
        self,
        name: str,
        value: float | str | None,
        unit: str = "",
        *,
        wanted: str = "",
        met: bool | None = None,
        note: str = "",
    ) -> None:
        """Add a line."""
        self.lines.append(Line(name, value, unit, wanted, met, note))
        self.save()

    def save(self) -> None:
        """Write the file, if there is one."""
        if self.path is not None:
            Path(self.path).write_text(json.dumps(self.as_dict()))

    def at_least(self, name: str, value: float, least: float, unit: str = "", note: str = "") -> None:
        """Add a number that should be ``least`` or more."""
        self.add(name, value, unit, wanted=f">= {least:g}", met=value >= least, note=note)

    def at_most(self, name: str, value: float, most: float, unit: str = "", note: str = "") -> None:
        """Add a number that should be ``most`` or less."""
        self.add(name, value, unit, wanted=f"<= {most:g}", met=value <= most, note=note)

    def check(self, name: str, good: bool, note: str = "") -> None:
        """Add something that has to be so."""
        self.add(name, "yes" if good else "NO", wanted="yes", met=good, note=note)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PartReport:
        """From JSON."""
        lines = [Line(**line) for line in data["lines"]]
        return cls(data["name"], lines, data["seconds"], data["error"], data["skipped"])


def table(reports: Sequence[PartReport]) -> str:
    """All parts, one line for each number; what was asked for and is not so is marked."""
    rows: list[tuple[str, str, str, str]] = []
    for report in reports:
        rows.append((f"{report.name} ({report.seconds:.0f} s)", "", "", ""))
        for line in report.lines:
            value = f"{line.value:.4g}" if isinstance(line.value, float) else str(line.value)
            mark = "" if line.met is None else ("ok" if line.met else "MISSED")
            wanted = f"{line.wanted} {mark}".strip()
            rows.append((f"  {line.name}", f"{value} {line.unit}".strip(), wanted, line.note))
        if report.skipped is not None:
            rows.append(("  not run", report.skipped, "", ""))
        if report.error is not None:
            rows.append(("  FAILED", report.error, "", ""))
    widths = [
        max(len(row[i]) for row in rows if i == 0 or row[3] or row[2] or len(row[i]) < 40) for i in (0, 1, 2)
    ]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)).rstrip()
        for row in rows
    )
