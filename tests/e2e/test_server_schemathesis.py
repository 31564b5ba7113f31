"""Requests made from the server's own OpenAPI document, valid ones and broken ones: never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from draftwise import AsyncLLM
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"), max_position_embeddings=64)
    llm = AsyncLLM(folder, dtype="float32", device="cpu", num_kv_blocks=64, max_num_seqs=4)
    with RunningServer(llm, max_samples=8, request_timeout=60.0) as running:
        yield running
    assert llm.is_alive
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.filterwarnings("ignore")  # of the generator's libraries
def test_never_a_500(server: RunningServer, mode: str) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    generation = schemathesis.GenerationMode[mode]
    tried: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode == "NEGATIVE" and not list(operation.body):
            continue  # nothing to break in a request without a body

        @settings(
            max_examples=60, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(operation.as_strategy(generation_mode=generation))
        def check(case: Any) -> None:
            name = f"{case.method} {case.path}"
            answer = case.call(timeout=60)
            tried.setdefault(name, set()).add(answer.status_code)
            assert answer.status_code < 500, (name, case.body, answer.text)
            if answer.status_code >= 400:
                assert {"message", "type", "param", "code"} <= set(answer.json()["error"]), name

        check()
    assert len(tried) >= (10 if mode == "POSITIVE" else 5)
    if mode == "POSITIVE":
        assert all(200 in codes for name, codes in tried.items() if "GET" in name and "{" not in name), tried
    assert server.request("GET", "/health")[0] == 200
