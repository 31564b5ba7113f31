"""Every causal architecture of Transformers: equal to Transformers, or refused with words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.architectures import KINDS
from tests.parity.any_model import LIST, outcome

EQUAL = frozenset(LIST.read_text().split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_equal_or_refused(kind: str, tmp_path: Path) -> None:
    found = outcome(kind, tmp_path / "model")
    if found.way == "":
        pytest.skip(f"no small one: {found.words[:200]}")
    assert kind not in EQUAL or found.way != "refused", found.words
