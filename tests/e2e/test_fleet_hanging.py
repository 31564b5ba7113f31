"""A replica that hangs, in a step or as a whole: it is ended, and what nobody has seen of it begins again elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftwise import SamplingParams
from draftwise.config import resolve_engine_config
from draftwise.errors import ReplicaLostError
from draftwise.fleet import pulse
from draftwise.fleet.engine import FleetEngine
from draftwise.server.errors import from_exception
from tests.fakes.hanging import HangsOnce
from tests.fakes.running_server import RunningServer
from tests.fakes.tiny_chat import make_tiny_chat

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_kv_blocks": 256,
    "num_threads": 1,
    "worker_timeout": 3.0,
    "speculation_control": "static",
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetEngine]:
    folder = make_tiny_chat(tmp_path_factory.mktemp("chat"))
    engine = FleetEngine(resolve_engine_config(model=folder, data_parallel_size=2, **OPTIONS))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def server(fleet: FleetEngine) -> Iterator[RunningServer]:
    with RunningServer(fleet) as running:
        yield running


def run(server: RunningServer, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(90)


async def end_of(stream: Any) -> Any:
    async for output in stream:
        last = output
    return last


def test_a_step_that_does_not_end(fleet: FleetEngine, server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "hang"

    async def main() -> None:
        params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, output_kind="delta")
        hanging = params.replace(logits_processors=[HangsOnce(str(file), 20)])
        wanted = await end_of(fleet.submit("hello", params.replace(output_kind="final_only")))
        file.touch()
        begun = fleet.submit("hello", hanging)
        await begun.__anext__()
        while file.exists():
            await asyncio.sleep(0.01)
        victim = fleet._where[begun.number].number
        unseen = [fleet.submit("hello", params.replace(output_kind="final_only")) for _ in range(6)]
        assert any(fleet._where[stream.number].number == victim for stream in unseen)
        with pytest.raises(
            ReplicaLostError, match=f"replica {victim} was in one step for more than 3 s"
        ) as lost:
            await end_of(begun)
        assert from_exception(lost.value).code == "replica_lost"
        for stream in unseen:
            assert (await end_of(stream)).outputs[0].token_ids == wanted.outputs[0].token_ids
        assert victim not in fleet.replicas and len(fleet.replicas) == 1
        for stream in (begun, *unseen):
            stream.close()
        await fleet.scale(2)

    run(server, main())


def test_a_process_that_stands_still(
    fleet: FleetEngine, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no new requests once it is late, nobody waits for its numbers, and then it is ended."""
    monkeypatch.setattr(pulse, "LATE", 0.5)

    async def main() -> None:
        params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, output_kind="final_only")
        victim = fleet.replicas[0]
        process = fleet._members[victim].process
        os.kill(process.pid, signal.SIGSTOP)
        unseen = [fleet.submit("hello", params) for _ in range(6)]
        assert any(fleet._where[stream.number].number == victim for stream in unseen)
        while "late" not in {one["state"] for one in fleet.state()}:
            await asyncio.sleep(0.05)
        later = [fleet.submit([7, 8, i], params) for i in range(3)]
        assert all(fleet._where[stream.number].number != victim for stream in later)
        assert not fleet.reset_prefix_cache()  # it waits for the answer, and then for it no more
        assert process.owes_an_answer or process.has_ended
        begun = time.monotonic()
        assert len(fleet.books()) >= 1 and time.monotonic() - begun < 0.4
        for stream in [*unseen, *later]:
            assert (await end_of(stream)).outputs[0].finish_reason == "length"
            stream.close()
        assert victim not in fleet.replicas and process.has_ended

    monkeypatch.setattr("draftwise.fleet.engine._RESET_TIMEOUT", 0.2)
    run(server, main())
