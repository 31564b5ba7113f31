"""The server on Ray Serve: two engines behind a front."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.ray_cluster import ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings


class Served:
    """The server's address, and Ray's modules."""

    def __init__(self, ray: Any, serve: Any, port: int) -> None:
        self.ray, self.serve, self.url = ray, serve, f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def cached(self, prompt: list[int]) -> int:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
        code, text = self.ask("/v1/completions", body)
        assert code == 200, text
        return int(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ray_cluster() as ray:
        from ray import serve

        from draftwise.cluster.serve import app

        engine = {"device": "cpu", "num_kv_blocks": 400, "num_threads": 1, "dtype": "float32"}
        arguments = {"engine": engine, "server": {"port": port}, "num_replicas": 2}
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(app(arguments), name="draftwise", route_prefix="/")
            yield Served(ray, serve, port)
        finally:
            serve.shutdown()


def test_answers_are_those_of_the_whole_application(served: Served) -> None:
    body = {"prompt": "def main(", "max_tokens": 12, "temperature": 0}
    code, text = served.ask("/v1/completions", body)
    assert code == 200
    whole = json.loads(text)["choices"][0]["text"]
    code, text = served.ask("/v1/completions", body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert code == 200 and lines[-1] == "[DONE]" and len(lines) > 2
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole
    assert served.ask("/health")[0] == 200
    assert served.ask("/metrics")[0] == 501
    code, text = served.ask("/v1/completions", {"prompt": "a", "max_token": 1})
    assert code == 400 and "max_token" in text


def test_prompts_go_where_their_beginning_is(served: Served) -> None:
    heads = [[10 + i] * 64 for i in range(6)]
    assert [served.cached([*head, 1]) for head in heads] == [0] * 6
    for turn in (2, 3):
        assert [served.cached([*head, turn]) for head in heads] == [64] * 6


def test_a_replica_that_is_lost_is_replaced(served: Served) -> None:
    os.kill(pid_of_an_engine(), signal.SIGKILL)
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
    assert [served.ask("/v1/completions", body)[0] for _ in range(8)] == [200] * 8
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        status = served.serve.status().applications["draftwise"].deployments["Engine"]
        if status.replica_states.get("RUNNING") == 2 and status.status == "HEALTHY":
            break
        time.sleep(0.5)
    assert status.replica_states.get("RUNNING") == 2


def pid_of_an_engine() -> int:
    """By the title that Ray gives the process."""
    for folder in os.listdir("/proc"):
        if folder.isdecimal():
            try:
                with open(f"/proc/{folder}/cmdline", encoding="utf-8", errors="replace") as file:
                    if file.read().startswith("ray::ServeReplica:draftwise:Engine"):
                        return int(folder)
            except OSError:
                continue
    raise AssertionError("there is none")
