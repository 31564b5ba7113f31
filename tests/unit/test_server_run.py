"""What a process is told before it serves."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.tiny_chat import make_tiny_chat

from draftwise.server import run as module
from draftwise.server.config import ServerConfig
from draftwise.server.context import Context
from draftwise.server.protocol import CompletionBody


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


class _Asked:
    """As much of a request as reading its body takes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def stream(self) -> AsyncIterator[bytes]:
        yield self._data

    async def receive(self) -> Any:
        await asyncio.Event().wait()


def test_memory_goes_back_after_large_bodies(tmp_path_factory: pytest.TempPathFactory) -> None:
    from transformers import AutoTokenizer

    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"))
    engine = ScriptedEngine(folder, AutoTokenizer.from_pretrained(folder), ["a"])
    calls: list[int] = []

    async def main() -> None:
        context = Context(engine, ServerConfig())
        trimming = asyncio.ensure_future(context.give_back_memory(lambda: calls.append(1), 0.001))

        async def parse(size: int) -> None:
            data = b'{"prompt": "' + b"x" * size + b'"}'
            assert (await context.parse(CompletionBody, _Asked(data))).prompt  # type: ignore[arg-type]

        await parse(100_000)
        await asyncio.sleep(0.05)
        assert calls == []
        await parse(300_000)
        await parse(300_000)
        while not calls and not trimming.done():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert 1 <= len(calls) <= 2
        trimming.cancel()
        context.close()

    asyncio.run(main())


def test_the_allocator_can_be_trimmed() -> None:
    trim = module.allocator_trim()
    assert trim is None or trim() in (0, 1)
