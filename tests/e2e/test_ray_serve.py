"""The server on Ray Serve, as commands: two engines behind a front, by ``draftwise serve --ray`` and by Ray's own
``serve run`` of the file that ``--write-deployment`` wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.ray_cluster import ray_cluster

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings
ENGINE = ["--device", "cpu", "--num-kv-blocks", "400", "--num-threads", "1", "--dtype", "float32"]


class Served:
    """The server's address, and Ray's modules."""

    def __init__(self, ray: Any, serve: Any, port: int) -> None:
        self.ray, self.serve, self.url = ray, serve, f"http://127.0.0.1:{port}"

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
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
def ray() -> Iterator[Any]:
    with ray_cluster() as module:
        yield module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def command(ray: Any, arguments: list[str], log: Path, *, code: int) -> Iterator[subprocess.Popen[bytes]]:
    """A command that joins the cluster; at the end it is sent Ctrl-C, and ends with this code."""
    address = ray.get_runtime_context().gcs_address
    with log.open("wb") as file:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            env=os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == code, log.read_text()[-3000:]
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()
            process.wait()


def wait_until_served(process: subprocess.Popen[bytes], served: Served, log: Path) -> None:
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            if served.ask("/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)


def test_the_written_file_is_served_by_rays_own_command(ray: Any, tmp_path: Path) -> None:
    from ray import serve

    port, file, log = free_port(), tmp_path / "app.yaml", tmp_path / "serve.log"
    written = subprocess.run(
        [sys.executable, "-m", "draftwise", "serve", "--port", str(port), "--write-deployment", str(file), *ENGINE],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert f"serve deploy {file}" in written.stdout
    arguments = [str(Path(sys.executable).parent / "serve"), "run", str(file)]
    with command(ray, arguments, log, code=0) as process:
        running = Served(ray, serve, port)
        wait_until_served(process, running, log)
        body = {"prompt": "def main(", "max_tokens": 4, "temperature": 0}
        code, text = running.ask("/v1/completions", body)
        assert code == 200 and json.loads(text)["usage"]["completion_tokens"] == 4
    serve.shutdown()  # the next one has another port


@pytest.fixture(scope="module")
def served(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from ray import serve

    port = free_port()
    log = tmp_path_factory.mktemp("log") / "serve.log"
    arguments = ["-m", "draftwise", "serve", "--ray", "--port", str(port), "--num-replicas", "2", *ENGINE]
    with command(ray, [sys.executable, *arguments], log, code=130) as process:
        running = Served(ray, serve, port)
        wait_until_served(process, running, log)
        yield running
    with pytest.raises(OSError):  # Ctrl-C ends what was deployed
        running.ask("/health")


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
    chat = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 3}
    assert json.loads(served.ask("/v1/chat/completions", chat)[1])["usage"]["completion_tokens"] == 3
    code, text = served.ask("/v1/completions", b'{"prompt":')
    assert code == 400 and "JSON" in text
    assert served.ask("/nowhere")[0] == 404
    code, text = served.ask("/v1/completions", {"prompt": "a", "max_token": 1})
    assert code == 400 and "max_token" in text


def test_prompts_go_where_their_beginning_is(served: Served) -> None:
    heads = [[10 + i] * 64 for i in range(6)]
    assert [served.cached([*head, 1]) for head in heads] == [0] * 6
    for turn in (2, 3):
        assert [served.cached([*head, turn]) for head in heads] == [64] * 6


def test_what_all_are_asked(served: Served) -> None:
    """And the router hears of what became of blocks: nobody sent it anything when caches were forgotten."""
    code, text = served.ask("/metrics")
    lines = [line for line in text.splitlines() if line.startswith("draftwise:prompt_tokens_total{")]
    replicas = [line.partition('replica="')[2].partition('"')[0] for line in lines]
    assert code == 200 and len(set(replicas)) == 2
    assert json.loads(served.ask("/load")[1])["num_requests_running"] == 0
    prompt = [77] * 64
    assert [served.cached([*prompt, turn]) for turn in range(2)] == [0, 64]
    assert json.loads(served.ask("/reset_prefix_cache", b"")[1]) == {"success": True}
    assert served.cached([*prompt, 2]) == 0
    assert served.ask("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})[0] == 501


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
