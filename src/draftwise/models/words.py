"""Words for messages about models."""

from __future__ import annotations


def shorten(names: list[str], limit: int = 8) -> str:
    """A list for a message: the first few names, and how many more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
