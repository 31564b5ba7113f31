"""What a process is told before it serves."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from draftwise.server import run as module
from draftwise.server.config import ServerConfig


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    interval, files = sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    sys.setswitchinterval(interval)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    gc.unfreeze()


def test_threads_that_prepare_requests_give_way_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the default the engine waits for 5 ms whenever it comes back from a native call."""
    seen: list[tuple[float, int]] = []

    async def serve(*_: Any, **__: Any) -> int:
        seen.append((sys.getswitchinterval(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        return 0

    monkeypatch.setattr(module, "serve", serve)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 256 if hard == resource.RLIM_INFINITY else min(256, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    assert module.run(None, ServerConfig()) == 0  # type: ignore[arg-type]
    [(interval, files)] = seen
    assert (interval == pytest.approx(0.001) and files > low) or files == hard
