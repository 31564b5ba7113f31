"""A server's process that was forked after its engine was built."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from draftwise.server.admission import Admission
from draftwise.server.config import ServerConfig
from draftwise.server.errors import APIError


def test_it_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Gunicorn's --preload."""
    engine: Any = SimpleNamespace(is_alive=True)
    admission = Admission(engine, ServerConfig(), 8)
    admission.check_alive()
    engine.is_alive = False
    with pytest.raises(APIError, match="the engine has failed"):
        admission.enter(1)
    parent = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: parent + 1)
    with pytest.raises(APIError, match="build it in each worker") as found:
        admission.enter(1)
    assert found.value.status == 503 and found.value.code == "engine_dead"
