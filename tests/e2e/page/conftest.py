"""A browser, servers, and pages in tabs that must not have misbehaved."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from draftwise import AsyncLLM
from tests.e2e.page.driving import PROGRAM, Scripts
from tests.fakes.chromium import Chromium, Tab
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat
from tests.fakes.traced_engine import TracedEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=256, speculation_control="static")
    yield engine
    engine.check_integrity()
    assert engine.stats().num_used_blocks == 0
    engine.close()


@pytest.fixture(scope="module")
def server(llm: AsyncLLM) -> Iterator[RunningServer]:
    with RunningServer(llm) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    assert PROGRAM is not None
    with Chromium(PROGRAM, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def open_page(browser: Chromium) -> Iterator[Callable[..., Tab]]:
    """``open(server)``: a tab that must not have seen an exception, an error in the console, a violation of the
    security policy, or an address elsewhere when the test ends."""
    opened: list[tuple[Tab, str]] = []

    def go(server: RunningServer, path: str = "/", **size: int) -> Tab:
        tab = browser.open(server.url + path, **size)
        opened.append((tab, server.url))
        tab.wait("document.documentElement.dataset.ready === 'true'")
        return tab

    yield go
    for tab, url in opened:
        assert tab.troubles() == []
        assert [asked for asked in tab.requested() if not asked.startswith(url + "/")] == []
        tab.close()


@pytest.fixture
def scripts(folder: str) -> Scripts:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda *answers, **more: TracedEngine(folder, tokenizer, answers, **more)
