"""Two nodes of a Ray cluster share a model: what two processes of a machine say, they say, and they end together."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.cluster.executor import RanksExecutor
from draftwise.cluster.group import RankGroup
from draftwise.cluster.rays import ActorHand
from draftwise.cluster.remote import RemoteRank
from draftwise.errors import ConfigError, EngineDeadError
from tests.e2e.conftest import token_ids
from tests.e2e.rank_pairs import OPTIONS, Pair
from tests.fakes.every_method import CASES, case_id
from tests.fakes.ray_cluster import all_gone, is_running, ray_cluster
from tests.fakes.tiny import save_llama

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
QUICK = {
    ("methods", "draft_model", "chain"),
    ("methods", "eagle3", "dynamic"),
    ("methods", "suffix", "chain"),
}
SMALL = {k: v for k, v in OPTIONS.items() if k not in ("max_num_batched_tokens", "max_num_seqs")} | {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "ray",
    "num_kv_blocks": 200,
}
PROMPTS = [{"prompt_token_ids": [3, 4, 5]}] * 3
LONG = SamplingParams(
    temperature=0.0, max_tokens=80, ignore_eos=True
)  # again and again, until something fails


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with ray_cluster() as made:
        yield made


@pytest.fixture(scope="module")
def pair(ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Pair(tmp_path_factory.mktemp("rays"), distributed_executor_backend="ray", num_threads=1)
    yield made
    made.close()


def group_of(llm: LLM) -> RankGroup:
    assert llm._engine is not None
    executor = llm._engine.core.executor
    assert isinstance(executor, RanksExecutor)
    return executor.ranks


def hands_of(llm: LLM) -> list[ActorHand]:
    ranks = [one for one in group_of(llm).ranks if isinstance(one, RemoteRank)]
    return [one.hand for one in ranks if isinstance(one.hand, ActorHand)]


def cases() -> Iterator[Any]:
    for case in CASES:
        if case[0] == "methods":
            yield pytest.param(case, marks=() if case in QUICK else pytest.mark.slow, id=case_id(case))


@pytest.mark.parametrize("case", list(cases()))
def test_every_method_says_what_plain_decoding_says(pair: Pair, case: tuple[str, str, str]) -> None:
    pair.check(case[1], case[2])


# Tokens of "synthetic" go with a request's number, which is another one in each engine.
@pytest.mark.parametrize("case", [case for case in cases() if case.values[0][1] != "synthetic"])
def test_rejection_draws_what_one_process_draws(pair: Pair, case: tuple[str, str, str]) -> None:
    pair.draw(case[1], case[2])


def test_ranks_are_on_two_nodes_and_say_what_two_processes_say(pair: Pair) -> None:
    hands = hands_of(pair.llm)
    assert len({hand.machine for hand in hands}) == 2
    assert min(one.posted() for one in group_of(pair.llm).ranks) > 100, "sums went through sockets"
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(pair.target, tensor_parallel_size=2, **OPTIONS) as local:
        assert token_ids(local.generate(pair.prompts, params)) == token_ids(
            pair.llm.generate(pair.prompts, params)
        )


def test_no_room_in_the_cluster_is_said_with_what_there_is(pair: Pair, ray: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"found no room for 2 bundles of CPU 1 within 1 s.*free in the cluster"
    ):
        LLM(pair.target, **(SMALL | {"worker_timeout": 1, "num_threads": 1}))
    assert len(hands_of(pair.llm)) == 2, "the engine that has the room is as it was"
    pair.llm.generate(pair.prompts[:1], SamplingParams(temperature=0.0, max_tokens=4))


def fails(llm: LLM, harm: Callable[[], object], delay: float) -> str:
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


def pids_of(llm: LLM) -> list[tuple[int, int]]:
    """(actor's process, rank's process) of each rank."""
    return [hand.call("process_ids") for hand in hands_of(llm)]


class TestFailures:
    """They need the nodes' room, which the pair has: it comes first, and is closed."""

    @pytest.fixture
    def target(self, pair: Pair, tmp_path: Path) -> str:
        pair.close()
        return save_llama(tmp_path / "target", seed=3)

    @pytest.mark.parametrize(
        ("rank", "number", "said"),
        [
            (1, signal.SIGSEGV, "rank 1 was ended by SIGSEGV"),
            pytest.param(0, signal.SIGKILL, "rank 0 was ended by SIGKILL", marks=pytest.mark.slow),
            pytest.param(1, signal.SIGSTOP, "rank 1 did not answer within 4 s", marks=pytest.mark.slow),
        ],
    )
    def test_a_rank_that_fails_is_named_and_nobody_stays(
        self, ray: Any, pair: Pair, request: pytest.FixtureRequest, rank: int, number: int, said: str
    ) -> None:
        if number == signal.SIGSEGV and not pair.is_closed:
            llm = pair.llm  # nobody needs it any more, and another one takes long to start
        else:
            waits = {"worker_timeout": 60 if number != signal.SIGSTOP else 4}
            llm = LLM(request.getfixturevalue("target"), **(SMALL | waits))
        pids = pids_of(llm)
        found = fails(llm, lambda: os.kill(pids[rank][1], number), random.uniform(0.0, 0.5))
        assert found.startswith(said)
        if number == signal.SIGSEGV:
            assert "Segmentation fault" in found, "its last words"
        llm.close()
        assert all_gone([pid for both in pids for pid in both])
        assert room_is_free(ray)

    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, 1])
    def test_an_actor_that_dies_takes_its_rank_along(self, ray: Any, target: str, rank: int) -> None:
        llm = LLM(target, **SMALL)
        pids = pids_of(llm)
        assert all(is_running(pid) for both in pids for pid in both)
        found = fails(llm, lambda: os.kill(pids[rank][0], signal.SIGKILL), 0.3)
        assert found.startswith(f"rank {rank} was ended with its Ray actor on node ")
        llm.close()
        assert all_gone([pid for both in pids for pid in both])
        assert room_is_free(ray)

    @pytest.mark.slow
    def test_what_a_rank_raises_while_it_is_built_is_raised(self, ray: Any, target: str) -> None:
        (Path(target) / "model.safetensors").write_bytes(b"nothing")
        with pytest.raises(Exception, match="safetensors"):
            LLM(target, **SMALL)
        assert room_is_free(ray)


def room_is_free(ray: Any, seconds: float = 20.0) -> bool:
    """Whether the cluster has all its processors again."""
    deadline = time.monotonic() + seconds
    while ray.available_resources().get("CPU") != 2.0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(ray.available_resources().get("CPU") == 2.0)
