"""A rank that dies, raises or hangs ends the engine with an error that names it; no process stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.cluster.executor import RanksExecutor
from draftwise.cluster.group import RankGroup
from draftwise.cluster.processes import LocalRank
from draftwise.errors import EngineDeadError
from draftwise.types import RowPlan, StepPlan
from tests.fakes.tiny import save_llama

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "num_kv_blocks": 64,
    "tensor_parallel_size": 2,
    "worker_timeout": 60,
}
PROMPTS = [{"prompt_token_ids": [3, 4, 5]}] * 3
LONG = SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("failing") / "target", seed=3)


def ranks_of(llm: LLM) -> RankGroup:
    assert llm._engine is not None
    executor = llm._engine.core.executor
    assert isinstance(executor, RanksExecutor)
    return executor.ranks


def pids_of(llm: LLM) -> list[int]:
    return [one.running.pid for one in ranks_of(llm).ranks if isinstance(one, LocalRank)]


def is_running(pid: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(is_running(pid) for pid in pids)


def fails_after(llm: LLM, delay: float, harm: Callable[[], object]) -> str:
    """What generating says when harm is done meanwhile."""
    timer = threading.Timer(delay, harm)
    timer.start()
    try:
        with pytest.raises(EngineDeadError) as failure:
            while True:
                llm.generate(PROMPTS, LONG)
    finally:
        timer.join()
    return str(failure.value)


def test_a_rank_that_is_killed_is_named_and_nobody_stays(target: str) -> None:
    llm = LLM(target, **OPTIONS)
    pids = pids_of(llm)
    ranks = ranks_of(llm)
    assert all(map(is_running, pids))
    said = fails_after(llm, random.uniform(0.0, 0.5), lambda: os.kill(pids[1], signal.SIGSEGV))
    assert said.startswith("rank 1 was ended by SIGSEGV") and "Segmentation fault" in said
    assert all_gone(pids)
    with pytest.raises(EngineDeadError, match="rank 1"):
        llm.generate(PROMPTS, LONG)
    assert isinstance(ranks.failure, EngineDeadError)
    llm.close()


def test_a_rank_that_hangs_is_named(target: str) -> None:
    llm = LLM(target, **(OPTIONS | {"worker_timeout": 2}))
    pids = pids_of(llm)
    said = fails_after(llm, 0.2, lambda: os.kill(pids[0], signal.SIGSTOP))
    assert said.startswith("rank 0 did not answer within 2 s")
    assert all_gone(pids)
    llm.close()


@pytest.mark.slow
def test_a_rank_that_raises_says_what(target: str) -> None:
    llm = LLM(target, **OPTIONS)
    pids = pids_of(llm)
    assert llm._engine is not None
    executor = llm._engine.core.executor
    with pytest.raises(
        EngineDeadError, match=r"rank [01] failed: KeyError: 77(.|\n)*last words(.|\n)*Traceback"
    ):
        executor.execute(StepPlan(step=1, rows=(RowPlan(77, 1, 0, 0),)))
    assert all_gone(pids)
    assert executor.failure is not None
    llm.close()


_HOST = """
import sys, time
from draftwise import LLM
options = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "num_kv_blocks": 64}
llm = LLM(sys.argv[1], tensor_parallel_size=2, **options)
print(*(one.running.pid for one in llm._engine.core.executor.ranks.ranks), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_do_not_outlive_their_host(target: str, number: int) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST, target], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with host:
        assert host.stdout is not None
        pids = [int(pid) for pid in host.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        host.send_signal(number)
        host.wait(30)
    assert all_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_killed_at_any_moment(target: str, seed: int) -> None:
    """Also while it is being built."""
    chance = random.Random(seed)
    rank, delay = chance.randrange(2), chance.uniform(0.0, 4.0)
    killed: list[int] = []
    stop = threading.Event()

    def harm() -> None:
        time.sleep(delay)
        while not stop.is_set():
            children = ranks_below(os.getpid())
            if len(children) == 2:
                os.kill(children[rank], signal.SIGKILL)
                killed.extend(children)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=harm)
    thread.start()
    try:
        with (
            pytest.raises(EngineDeadError, match=rf"rank {rank} was ended by SIGKILL"),
            LLM(target, **OPTIONS) as llm,
        ):
            while True:
                llm.generate(PROMPTS, LONG)
    finally:
        stop.set()
        thread.join()
    assert killed and all_gone(killed)


def ranks_below(parent: int) -> list[int]:
    """Processes of ranks that a process has started, in their order."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == parent and b"draftwise.engine.worker" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return sorted(found)


@pytest.mark.slow
def test_a_server_says_503_and_ends(target: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "draftwise", "serve", "--model", target, "--port", "0", "--tensor-parallel-size", "2",
         "--skip-tokenizer-init", "--num-kv-blocks", "64"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        pids = ranks_below(server.pid)
        with urllib.request.urlopen(url + "/health", timeout=10) as answer:
            assert answer.status == 200
        os.kill(pids[1], signal.SIGKILL)
        codes = []
        try:
            while True:
                try:
                    with urllib.request.urlopen(url + "/health", timeout=10) as answer:
                        codes.append(answer.status)
                except urllib.error.HTTPError as error:
                    codes.append(error.code)
                    error.close()
                time.sleep(0.05)
        except OSError:  # it has ended
            pass
        assert 503 in codes
        assert server.wait(30) == 1
    assert len(pids) == 2 and all_gone(pids)
