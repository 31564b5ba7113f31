"""Cache events as vLLM's subscribers read them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwise.config import resolve_engine_config
from draftwise.config.events import EventsConfig
from draftwise.engine.publishing import CachePublisher, as_integer, moved
from draftwise.errors import ConfigError
from draftwise.kv.events import BlocksRemoved, BlocksStored, CacheCleared

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):  # type: ignore[name-defined, misc]
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):  # type: ignore[name-defined, misc]
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Typed(Batch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


DIGESTS = tuple(bytes([i]) * 16 for i in range(1, 4))
EVENTS = [
    BlocksStored(DIGESTS[1:], DIGESTS[0], np.arange(8, dtype=np.int32), "adapter 1"),
    BlocksRemoved(DIGESTS[:1]),
    CacheCleared(),
]


@pytest.fixture
def settings(tmp_path: Path) -> EventsConfig:
    return EventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/events",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic="kv",
    )


def test_a_subscriber_reads_them(settings: EventsConfig) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        publisher = CachePublisher(settings, 4, rank=1)
        subscriber.connect(moved(settings.endpoint, 1))
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
        first = None
        for _ in range(200):  # a subscriber that joins late misses what was sent before
            publisher.publish([CacheCleared()])
            if subscriber.poll(50):
                first = subscriber.recv_multipart()
                break
        assert first is not None and first[0] == b"kv"
        while subscriber.poll(200):
            subscriber.recv_multipart()
        publisher.publish(EVENTS)
        publisher.publish([CacheCleared()])
        numbers = []
        for wanted in (3, 1):
            topic, number, payload = subscriber.recv_multipart()
            batch = msgspec.msgpack.decode(payload, type=Typed)
            assert topic == b"kv" and batch.data_parallel_rank == 1 and len(batch.events) == wanted
            numbers.append(int.from_bytes(number, "big"))
            if wanted == 3:
                stored, removed, cleared = batch.events
        assert numbers[1] == numbers[0] + 1
        a, b, c = map(as_integer, DIGESTS)
        assert stored == BlockStored([b, c], a, list(range(8)), 4, None, "GPU", "adapter 1")
        assert removed == BlockRemoved([a], "GPU") and cleared == AllBlocksCleared()
        publisher.close()
        publisher.close()


def test_what_was_missed_is_replayed(settings: EventsConfig) -> None:
    publisher = CachePublisher(settings, 4)
    for _ in range(5):
        publisher.publish([CacheCleared()])
    assert settings.replay_endpoint is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(settings.replay_endpoint)
        while len(publisher._sent) < 5:
            time.sleep(0.01)
        asking.send_multipart((b"", b"what?"))  # is passed over
        asking.send_multipart((b"", (3).to_bytes(8, "big")))
        got = [asking.recv_multipart() for _ in range(3)]
    assert [int.from_bytes(number, "big", signed=True) for _, number, _ in got] == [3, 4, -1]
    assert msgspec.msgpack.decode(got[0][2], type=Typed).events == [AllBlocksCleared()]
    publisher.close()


def test_nobody_waits_for_a_slow_subscriber(settings: EventsConfig, caplog: pytest.LogCaptureFixture) -> None:
    publisher = CachePublisher(settings, 4)
    publisher.close()  # nobody takes messages away any more
    publisher._most = 2
    for _ in range(5):
        publisher.publish([CacheCleared()])
    assert publisher._number == 5 and publisher._queue.qsize() == 2
    assert [r.getMessage() for r in caplog.records] == [
        "cache events are dropped: 2 messages wait to be sent"
    ]


def test_a_publisher_that_is_dropped_leaves_its_address(settings: EventsConfig) -> None:
    """As with an engine that is not closed: the cell of a notebook runs again."""
    thread = CachePublisher(settings, 4)._thread
    thread.join(20)
    assert not thread.is_alive()
    CachePublisher(settings, 4).close()


def test_engines_publish_what_they_cache(tmp_path: Path) -> None:
    from draftwise import LLM, SamplingParams

    seen: list[Any] = []
    config = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/engine"}
    with LLM(kv_events_config=config, device="cpu", num_kv_blocks=64) as llm:
        assert llm._engine is not None
        assert llm._engine.core.observe_cache(seen.extend)
        llm.generate([list(range(10, 60))], SamplingParams(max_tokens=4, temperature=0))
    stored = [event for event in seen if isinstance(event, BlocksStored)]
    assert sum(len(event.digests) for event in stored) == 3  # of 50 to 53 tokens in blocks of 16
    assert np.concatenate([event.token_ids_np for event in stored]).tolist() == list(range(10, 58))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"publisher": "kafka"}, "publisher"),
        ({"endpoint": "http://x"}, "endpoint"),
        ({"endpoint": "tcp://host"}, "port"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"enable_events": True}, "enable_kv_cache_events"),
        ("{", "kv_events_config"),
    ],
)
def test_bad_settings_are_named(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve_engine_config(model="M", device="cpu", kv_events_config=given)


def test_an_address_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_events_config"):
        CachePublisher(EventsConfig(True, endpoint=f"ipc://{tmp_path}/no/such/folder"), 16)


def test_events_are_off_unless_enabled() -> None:
    assert not EventsConfig().publishes and not EventsConfig(True, publisher="null").publishes
    assert EventsConfig.from_value("kv_events_config", '{"enable_kv_cache_events": true}').publishes
