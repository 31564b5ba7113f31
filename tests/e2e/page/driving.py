"""What the tests of the pages do over and over."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fakes.chromium import Tab, find_chromium
from tests.fakes.traced_engine import TracedEngine

PROGRAM = find_chromium()
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium on the path")

Scripts = Callable[..., TracedEngine]


def run(tab: Tab) -> None:
    tab.wait("!document.querySelector('#run').disabled")
    tab.click("#run")
    tab.wait("!document.querySelector('#run').disabled && document.querySelector('.finish').textContent")


def tokens(tab: Tab, pane: str = "A") -> list[list[str]]:
    """[class names, text] of every token shown."""
    found: list[list[str]] = tab.evaluate(
        f"[...document.querySelectorAll('[data-pane={pane}] .output .tok')].map(t => [t.className, t.textContent])"
    )
    return found


def shown(tab: Tab, pane: str = "A") -> str:
    return tab.text(f"[data-pane={pane}] .output")
