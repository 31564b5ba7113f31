"""The bar of requests, where there is no terminal."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from draftwise.engine.progress import RequestProgress, on_terminal


class Written:
    """What a graphical program may put in the place of stderr."""

    def write(self, text: str) -> None: ...


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stderr", [None, Written(), closed()], ids=["none", "written", "closed"])
def test_a_program_without_a_console_shows_no_bar(monkeypatch: pytest.MonkeyPatch, stderr: Any) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert not on_terminal()


def test_a_notebook_without_widgets_gets_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would show a warning there, and no bar."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("draftwise.engine.progress.find_spec", lambda name: None)
    progress = RequestProgress(2)
    progress.update(3, True)
    progress.close()
    assert "1/2" in stream.getvalue()
