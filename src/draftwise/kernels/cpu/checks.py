"""Guards of native calls."""

from __future__ import annotations

from typing import NoReturn


def require(holds: bool, what: str) -> None:
    """Raise ValueError, saying what was expected, unless it holds.

    For what would make a kernel read or write memory that is not there. Not an assertion: ``python -O`` leaves those
    out.
    """
    if not holds:
        refuse(what)


def refuse(what: str) -> NoReturn:
    """Raise what `require` raises. Code that runs for every pass asks for itself whether something holds."""
    raise ValueError(f"a native kernel needs {what}")
