"""Publishes cache events on a ZeroMQ socket, in the format of vLLM's publisher, for external routers.

A message has three parts: the topic, its number (8 bytes, big-endian, from 0 on), and as MessagePack the array ::

    [time, [event, ...], data_parallel_rank]
    event: ["BlockStored", hashes, parent hash or null, token ids, block size, lora id, medium, lora name]
           ["BlockRemoved", hashes, medium]
           ["AllBlocksCleared"]

A hash is the last 8 bytes of a block's digest as an integer, as vLLM sends them unless told otherwise. A subscriber
that sees a gap in the numbers sends the first missing number to the replay socket. It gets the messages from there
on, then one numbered -1.

Sources: ``vllm/distributed/kv_events.py`` and ``examples/online_serving/kv_events_subscriber.py`` of vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

from draftwise.config.events import EventsConfig
from draftwise.errors import ConfigError, install
from draftwise.kv.events import BlocksRemoved, BlocksStored, CacheEvent

logger = logging.getLogger("draftwise")

_MEDIUM = "GPU"
"""vLLM's name for the cache that a model reads, on any device."""
_END = (-1).to_bytes(8, "big", signed=True)
_IDLE = 0.1
"""Seconds after which the thread looks for requests to replay."""
_Message = tuple[int, bytes]


class CachePublisher:
    """Sends events from a thread of its own, which ends when nobody has the publisher any more."""

    def __init__(self, config: EventsConfig, block_size: int, rank: int = 0) -> None:
        """``rank``: the engine's number among several, which is added to ports. Raises ConfigError if an address is
        not available, or pyzmq is not installed."""
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"kv_events_config: {error.name} is not installed: {install('events')}"
            ) from None
        self._block_size = block_size
        self._rank = rank
        self._pack = msgspec.msgpack.Encoder().encode
        context = zmq.Context()
        out = context.socket(zmq.PUB)
        out.set_hwm(config.hwm)
        replay: Any = None
        endpoint = moved(config.endpoint, rank)
        try:
            if "*" in endpoint or "::" in endpoint.partition("://")[2] or not endpoint.startswith("tcp://"):
                out.bind(endpoint)
            else:
                out.connect(endpoint)
            if config.replay_endpoint is not None:
                endpoint = moved(config.replay_endpoint, rank)
                replay = context.socket(zmq.ROUTER)
                replay.bind(endpoint)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigError(f"kv_events_config: {endpoint}: {error}") from None
        self._queue: SimpleQueue[_Message | None] = SimpleQueue()
        self._most = config.max_queue_size
        self._sent: deque[_Message] = deque(maxlen=config.buffer_steps)
        self._number = 0
        self._dropping = False
        self._thread = threading.Thread(
            target=_send,
            args=(self._queue, self._sent, config.topic.encode(), context, out, replay),
            name="draftwise-events",
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send events as one message, without waiting. If too many messages wait, it is dropped; subscribers see the
        gap in the numbers."""
        entries = [self._entry(event) for event in events]
        message = self._pack([time.time(), entries, self._rank])
        number, self._number = self._number, self._number + 1
        dropped_before, self._dropping = self._dropping, self._queue.qsize() >= self._most
        if not self._dropping:
            self._queue.put((number, message))
        elif not dropped_before:
            logger.warning("cache events are dropped: %d messages wait to be sent", self._most)

    def _entry(self, event: CacheEvent) -> list[Any]:
        if isinstance(event, BlocksStored):
            hashes = [as_integer(digest) for digest in event.digests]
            parent = None if event.parent is None else as_integer(event.parent)
            ids = event.token_ids_np.tolist()
            return ["BlockStored", hashes, parent, ids, self._block_size, None, _MEDIUM, event.salt]
        if isinstance(event, BlocksRemoved):
            return ["BlockRemoved", [as_integer(digest) for digest in event.digests], _MEDIUM]
        return ["AllBlocksCleared"]

    def close(self) -> None:
        """Send waiting messages, and end. Closing twice is allowed."""
        self._end()
        self._thread.join(2.0)


def _send(
    waiting: SimpleQueue[_Message | None],
    sent: deque[_Message],
    topic: bytes,
    context: Any,
    out: Any,
    replay: Any,
) -> None:
    """What the thread does. It knows no publisher, so that this can be dropped."""
    while True:
        if replay is not None and replay.poll(0):
            _answer(replay, sent)
        try:
            item = waiting.get(timeout=_IDLE if replay is not None else None)
        except Empty:
            continue
        if item is None:
            break
        number, message = item
        sent.append(item)
        out.send_multipart((topic, number.to_bytes(8, "big"), message))
    context.destroy(linger=200)


def _answer(replay: Any, sent: deque[_Message]) -> None:
    """Answer a subscriber that missed messages."""
    frames = replay.recv_multipart()
    if len(frames) != 3 or len(frames[2]) != 8:
        logger.warning("cache events: a request to replay of %d parts is not understood", len(frames))
        return
    client, first = frames[0], int.from_bytes(frames[2], "big")
    for number, message in sent:
        if number >= first:
            replay.send_multipart((client, b"", number.to_bytes(8, "big"), message))
    replay.send_multipart((client, b"", _END, b""))


def as_integer(digest: bytes) -> int:
    """A block's hash as it is sent.

    >>> as_integer(bytes(14) + b"\\x01\\x02")
    258
    """
    return int.from_bytes(digest[-8:], "big")


def moved(endpoint: str, rank: int) -> str:
    """The address of the engine of this rank.

    >>> moved("tcp://*:5557", 2), moved("ipc:///tmp/events", 1), moved("tcp://*:5557", 0)
    ('tcp://*:5559', 'ipc:///tmp/events_dp1', 'tcp://*:5557')
    """
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
