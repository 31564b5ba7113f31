"""The examples run as they stand."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftwise.config import registry

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def test_custom_proposer(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "custom_proposer.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "same tokens as plain decoding: True" in printed
    assert "tokens per verification: " in printed
    assert float(printed.rsplit(" ", 1)[1]) > 1.0
