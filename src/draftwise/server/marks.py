"""Looking for marks in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence


def until(held: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """(text before the first mark, the mark or None, what is left to look at).

    Without a mark, its possible beginning at the end is left, and white space before that; with it, white space before
    it is dropped. Of two marks at one place the longer one counts. Example: "a \\n</th" with ``</think>`` gives
    ("a", None, " \\n</th").
    """
    found = [(at, -len(mark), mark) for mark in marks if (at := held.find(mark)) >= 0]
    if found:
        at, _, mark = min(found)
        return held[:at].rstrip(), mark, held[at + len(mark) :]
    cut = len(held[: len(held) - begun(held, marks)].rstrip())
    return held[:cut], None, held[cut:]


def begun(held: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a mark.

    Example: "a</" with ``</think>`` has 2."""
    most = min(max(map(len, marks)) - 1, len(held))
    return next((n for n in range(most, 0, -1) if any(mark.startswith(held[-n:]) for mark in marks)), 0)
