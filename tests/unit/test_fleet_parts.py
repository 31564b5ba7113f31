"""Parts of a fleet without its processes: the wire, folded outputs, sums of books, and what the cache tells."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from draftwise.adapt.controller import ControlStats
from draftwise.config import resolve_engine_config
from draftwise.engine.group import TextPiece
from draftwise.engine.outputs import (
    AdapterStats,
    CompletionOutput,
    EngineStats,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from draftwise.errors import ConfigError, EngineDeadError, RequestError
from draftwise.fleet.books import total
from draftwise.fleet.child import ReplicaProcesses
from draftwise.fleet.pulse import Pulse
from draftwise.fleet.replicas import plan
from draftwise.fleet.serving import portable
from draftwise.fleet.stream import FleetStream, fold
from draftwise.fleet.wire import HIGH_WATER, Channel
from draftwise.kv.events import BlocksRemoved, BlocksStored, CacheCleared
from draftwise.kv.manager import KVManager
from draftwise.kv.prefix_cache import block_digests, root_digest
from draftwise.metrics import Latencies, Metrics
from draftwise.metrics.books import Books
from draftwise.sampling.params import SamplingParams


def test_messages_arrive_whole_and_in_order() -> None:
    async def main() -> None:
        ends = socket.socketpair()
        got: list[Any] = []
        lost = asyncio.Event()
        sender = Channel(ends[0], lambda batch: None, lambda: None)
        Channel(ends[1], got.extend, lost.set)
        sent: list[Any] = [b"x" * size for size in (0, 1, 70_000, 3_000_000)] + list(range(5))
        for message in sent:
            sender.post(message)
            await asyncio.sleep(0)
        while len(got) < len(sent):
            await asyncio.sleep(0.001)
        assert got == sent
        sender.post("last")
        await asyncio.sleep(0)
        sender.close()
        sender.close()
        sender.post("dropped")
        await asyncio.wait_for(lost.wait(), 10)
        assert got[-1] == "last"

    asyncio.run(main())


def test_one_turn_is_one_message() -> None:
    async def main() -> None:
        ends = socket.socketpair()
        batches: list[list[Any]] = []
        sender = Channel(ends[0], lambda batch: None, lambda: None)
        receiver = Channel(ends[1], batches.append, lambda: None)
        for number in range(64):
            sender.post(number)
        while not batches:
            await asyncio.sleep(0.001)
        assert batches == [list(range(64))]
        sender.close()
        receiver.close()

    asyncio.run(main())


def test_what_nobody_waits_for_goes_along() -> None:
    async def main() -> None:
        ends = socket.socketpair()
        batches: list[list[Any]] = []
        sender = Channel(ends[0], lambda batch: None, lambda: None)
        receiver = Channel(ends[1], batches.append, lambda: None)
        sender.hold("queued")
        await asyncio.sleep(0)
        sender.hold("cache")
        sender.post("token")
        sender.hold("behind it, in the same turn")
        while not batches:
            await asyncio.sleep(0.001)
        sender.hold("alone")
        while len(batches) < 2:
            await asyncio.sleep(0.001)
        assert batches == [["queued", "cache", "token", "behind it, in the same turn"], ["alone"]]
        sender.hold("dropped")
        sender.close()
        sender.hold("dropped")
        await asyncio.sleep(0.01)
        assert len(batches) == 2
        receiver.close()

    asyncio.run(main())


def test_a_sender_waits_for_who_is_far_behind() -> None:
    async def main() -> None:
        ends = socket.socketpair()
        sender = Channel(ends[0], lambda batch: None, lambda: None)
        sender.post(b"x" * (4 * HIGH_WATER))
        await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(sender.room())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        receiver = Channel(ends[1], lambda batch: None, lambda: None)
        await asyncio.wait_for(waiting, 10)
        sender.close()
        receiver.close()

    asyncio.run(main())


def output(text: str, ids: tuple[int, ...], finish: str | None = None, **more: Any) -> RequestOutput:
    completion = CompletionOutput(0, text, ids, finish, **more)
    return RequestOutput("r", None, (), (completion,), finish is not None, RequestMetrics(0.0))


def test_folded_deltas_are_what_they_would_have_been_together() -> None:
    one = output("ab", (1, 2), logprobs=({1: "x"}, {2: "y"}), trace=("s",))  # type: ignore[arg-type]
    two = output("c", (3,), "stop", logprobs=({3: "z"},), trace=("t",))  # type: ignore[arg-type]
    both = fold(one, two)
    assert isinstance(both, RequestOutput) and both.finished
    (completion,) = both.outputs
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("abc", (1, 2, 3), "stop")
    assert completion.logprobs == ({1: "x"}, {2: "y"}, {3: "z"}) and completion.trace == ("s", "t")
    assert fold(TextPiece("a", 1), TextPiece("b", 2)) == TextPiece("ab", 3)
    assert fold(one, TextPiece("b", 2)) is None and fold(TextPiece("b", 2), two) is None


def stream(kind: str) -> FleetStream:
    return FleetStream(
        1, "r", SamplingParams(output_kind=kind), 0.0, on_text_only=lambda s: None, on_close=lambda s: None  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_slow_reader_gets_fewer_and_larger_pieces() -> None:
    async def main() -> None:
        slow = stream("delta")
        slow.prompt_ids = (7, 8)
        slow.arrived(output("a", (1,)))
        for letter in "bcd":
            slow.arrived((letter, 1))
        slow.arrived(output("e", (5,), "stop"))
        pieces = [piece async for piece in slow.pieces()]
        assert [p.text if isinstance(p, TextPiece) else p.outputs[0].text for p in pieces] == [
            "a",
            "bcd",
            "e",
        ]
        assert pieces[-1].prompt_token_ids == (7, 8) and slow.num_output == 5  # type: ignore[union-attr]
        newest = stream("cumulative")
        newest.arrived(output("a", (1,)))
        newest.arrived(output("ab", (1, 2), "stop"))
        assert [o.outputs[0].text async for o in newest] == ["ab"] and newest.num_output == 2

    asyncio.run(main())


def test_what_nobody_has_seen_may_begin_again() -> None:
    async def main() -> None:
        moved = stream("delta")
        moved.arrived(output("x", (1,)))
        moved.begin_again()
        moved.arrived(output("y", (2,), "stop"))
        assert [o.outputs[0].text async for o in moved] == ["y"]
        lost = stream("delta")
        lost.arrived(output("x", (1,)))
        lost.failed(EngineDeadError("gone"))
        assert (await lost.__anext__()).outputs[0].text == "x"  # what came is not kept from its reader
        with pytest.raises(EngineDeadError):
            await lost.__anext__()

    asyncio.run(main())


def stats(**given: Any) -> EngineStats:
    zero: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    own = {"num_blocks": 10, "block_size": 16, "finish_reasons": {}, "drafter_failures": {}, "adapters": None}
    return EngineStats(
        **{**zero, **own, "speculation": SpeculationMetrics(), "control": ControlStats(), **given}
    )


def test_books_of_all_are_sums() -> None:
    one = stats(
        num_running=1,
        finish_reasons={"stop": 2},
        speculation=SpeculationMetrics(1, 3, 2, (1, 1), {"ngram": 1}),
    )
    two = stats(
        num_running=4, finish_reasons={"stop": 1, "abort": 1}, speculation=SpeculationMetrics(2, 6, 1, (1,))
    )
    both = total([one, two])
    assert (both.num_running, both.num_blocks, both.block_size) == (5, 20, 16)
    assert both.finish_reasons == {"stop": 3, "abort": 1}
    assert both.speculation == SpeculationMetrics(3, 9, 3, (2, 1), {"ngram": 1})
    assert total([one]) == one
    first, second = AdapterStats(2, ("a", "b"), ()), AdapterStats(2, ("b",), ("c",))
    adapted = [stats(adapters=adapters) for adapters in (first, second)]
    assert total(adapted).adapters == AdapterStats(4, ("a", "b"), ("c",)) and total(adapted[:1]) == adapted[0]


class Two:
    def books(self) -> list[Books]:
        latencies = Latencies()
        latencies.e2e.observe(1.0)
        return [
            Books(str(i), stats(num_running=i + 1, num_used_blocks=5), latencies.histograms())
            for i in range(2)
        ]


def test_metrics_say_of_which_replica_they_are() -> None:
    metrics = Metrics(Two(), "m")
    metrics.http.count("/health", 200)
    found = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}
    running = found["draftwise:num_requests_running"].samples
    assert [(s.labels, s.value) for s in running] == [
        ({"model_name": "m", "replica": "0"}, 1.0),
        ({"model_name": "m", "replica": "1"}, 2.0),
    ]
    assert {s.labels["replica"] for s in found["draftwise:e2e_request_latency_seconds"].samples} == {"0", "1"}
    (http,) = (s for s in found["draftwise:http_requests"].samples if s.name.endswith("_total"))
    assert http.labels == {"model_name": "m", "path": "/health", "status": "200"}


@given(st.integers(0, 2**32 - 1))
def test_the_log_of_a_cache_says_what_it_holds(seed: int) -> None:
    """Whoever replays the events knows at every moment which blocks can be found."""
    rng = np.random.default_rng(seed)
    kv = KVManager(8, 2)
    assert kv.log_events()
    known: set[bytes] = set()
    lives: dict[int, Any] = {}
    for rid in range(30):
        if len(lives) > 2 or (lives and rng.random() < 0.4):
            kv.release(lives.popitem()[0])
            if not lives and rng.random() < 0.2:
                assert kv.reset_prefix_cache()
        tokens_np = rng.integers(0, 2, int(rng.integers(1, 9))).astype(np.int32)
        salt = "s" if rng.random() < 0.3 else None
        computed, _ = kv.open(rid, tokens_np, salt=salt)
        if kv.reserve(rid, len(tokens_np) - computed) is None:
            kv.release(rid)
        else:
            kv.commit(rid, len(tokens_np) - computed, tokens_np)
            lives[rid] = tokens_np
        for event in kv.take_events():
            if isinstance(event, BlocksStored):
                assert not known & set(event.digests)
                parent = root_digest(event.salt) if event.parent is None else event.parent
                assert event.parent is None or event.parent in known
                count = len(event.digests)
                assert block_digests(parent, event.token_ids_np, 2, 0, count) == list(event.digests)
                known |= set(event.digests)
            elif isinstance(event, BlocksRemoved):
                assert set(event.digests) <= known
                known -= set(event.digests)
            else:
                assert isinstance(event, CacheCleared)
                known.clear()
        assert known == set(kv._cache._blocks)


def test_nothing_is_noted_unless_somebody_asks() -> None:
    kv = KVManager(4, 2)
    kv.open(1, np.arange(4, dtype=np.int32))
    kv.reserve(1, 4)
    kv.commit(1, 4, np.arange(4, dtype=np.int32))
    assert kv.take_events() == []
    assert not KVManager(4, 2, enable_prefix_caching=False).log_events()


def test_processes_that_were_ended_close_nothing_after_a_fork() -> None:
    """Their descriptors' numbers are others' by then: children of `subprocess` lost what it had opened for them."""
    processes = ReplicaProcesses()
    processes.close()
    with open(os.devnull) as one, open(os.devnull) as other:
        processes.forked()
        assert os.fstat(one.fileno()) and os.fstat(other.fileno())


def test_who_does_not_answer_is_late_and_then_at_fault() -> None:
    pulse = Pulse(10.0)
    assert pulse.ask(100.0) and not pulse.ask(101.0) and pulse.silence(103.0) == 3.0
    assert not pulse.is_late(105.0) and pulse.is_late(105.1) and pulse.fault(110.0) is None
    assert pulse.fault(110.1) == "did not answer within 10 s (worker_timeout)"
    pulse.forgive(110.1)  # whoever asked was stopped meanwhile
    assert pulse.fault(120.0) is None
    pulse.answered(9.0)
    assert pulse.silence(999.0) == 0.0 and pulse.fault(999.0) is None and pulse.ask(999.0)
    pulse.answered(10.5)
    assert pulse.fault(999.0) == "was in one step for more than 10 s (worker_timeout)"
    pulse.answered(0.0)
    assert pulse.fault(999.0) is None


def test_a_lost_replicas_devices_are_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,6,7")
    config = replace(
        resolve_engine_config(device="cpu", data_parallel_size=2), device="cuda", tensor_parallel_size=2
    )
    _, environment = plan(config, 7, None, slot=2, count=2)
    assert environment == {"CUDA_VISIBLE_DEVICES": "6,7"}
    for slot, count in ((3, 2), (0, 4)):
        with pytest.raises(ConfigError, match="4 replicas of 2 on 6 CUDA devices"):
            plan(config, 7, None, slot=slot, count=count)


def test_a_replica_gets_its_share() -> None:
    config = resolve_engine_config(device="cpu", data_parallel_size=3, num_threads=None, data_parallel_rank=4)
    start, environment = plan(config, 1, 300.0, slot=1, count=3)
    assert start.max_chunk_rate == 100.0 and start.config.data_parallel_rank == 5
    assert start.config.num_threads is not None and start.config.num_threads >= 1 and environment == {}
    given, _ = plan(
        resolve_engine_config(device="cpu", data_parallel_size=2, num_threads=7), 0, None, slot=0, count=2
    )
    assert given.config.num_threads == 7


def test_a_program_makes_its_engines_itself() -> None:
    from draftwise import LLM, AsyncLLM

    for made in (LLM, AsyncLLM):
        with pytest.raises(ConfigError, match="data_parallel_size"):
            made(data_parallel_size=2, device="cpu")


def test_errors_travel(capsys: pytest.CaptureFixture[str]) -> None:
    error = RequestError("temperature is -1")
    assert portable(error) is error

    class Local(Exception):
        pass

    told = portable(Local("why"))
    assert str(told) == "Local: why" and not isinstance(told, EngineDeadError)
    assert "Local" in capsys.readouterr().err
