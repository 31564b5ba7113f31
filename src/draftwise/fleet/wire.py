"""Messages between the server's process and a replica's: batches of tuples, pickled, over a local socket.

What is to be sent in one turn of an event loop goes in one message: the tokens of all streams of a step, say. What
nobody waits for goes along with the next one: a message wakes the other process, and takes the interpreter from the
engine beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftwise.config import EngineConfig
from draftwise.config.lora import LoRARequest
from draftwise.engine.outputs import Guarantees
from draftwise.engine.processor import Numbers
from draftwise.sampling.params import SamplingParams
from draftwise.types import IntArray

_HEAD = struct.Struct("<Q")
_READ = 1 << 18
_HOLD = 0.003
"""Seconds after which a message is sent that has waited for another one to go along with."""
HIGH_WATER = 1 << 20
"""Bytes of unread messages above which a sender that can wait does so (`Channel.room`)."""


@dataclass(frozen=True, slots=True)
class Start:
    """The first order: what a replica is made of."""

    number: int
    config: EngineConfig
    max_chunk_rate: float | None
    log_level: int
    methods: tuple[tuple[str, str], ...]  # that third parties registered, and where their classes are


@dataclass(frozen=True, slots=True)
class Hello:
    """A replica's first message, once it is built."""

    guarantees: Guarantees
    max_model_len: int
    vocab_size: int
    caches_prefixes: bool


class Submit(NamedTuple):
    """A request for a replica."""

    stream: int
    name: str
    text: str | None
    ids_np: IntArray  # [n] int32
    params: SamplingParams
    priority: int
    keep_trace: bool | None
    lora_request: LoRARequest | None
    numbers: Numbers


class TextOnly(NamedTuple):
    """The reader of a stream takes pieces of text."""

    stream: int


class Abort(NamedTuple):
    """End a stream, and say so in its last output."""

    stream: int


class Close(NamedTuple):
    """The reader of a stream is gone."""

    stream: int


class Queued(NamedTuple):
    """The request of a stream is valid, and waits or runs."""

    stream: int


class News(NamedTuple):
    """Output of a stream: a `TextPiece` as (text, tokens), or a `RequestOutput` without its prompt."""

    stream: int
    output: Any


class Failed(NamedTuple):
    """A stream ends with an exception."""

    stream: int
    error: BaseException


class Ping(NamedTuple):
    """How are you? Asked by the fleet, one at a time."""


class Pong(NamedTuple):
    """The answer: seconds for which the engine has been in its step, 0 between steps."""

    in_step: float


class Cache(NamedTuple):
    """Changes of cached blocks, in order: ("+" or "-", digests), or ("0", ()) when all were forgotten."""

    changes: list[tuple[str, tuple[bytes, ...]]]


class Channel:
    """One end of the socket, in an event loop. Made and used there, by its thread alone."""

    def __init__(
        self,
        end: socket.socket,
        receive: Callable[[list[Any]], None],
        lost: Callable[[], None],
    ) -> None:
        """
        Args:
            end: a connected socket, which becomes the channel's.
            receive: called with what came in one message.
            lost: called once, when the other side is gone.
        """
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._receive = receive
        self._lost = lost
        self._posted: list[Any] = []
        self._flushing: asyncio.Handle | None = None  # what will send them
        self._hurried = False  # in this turn of the loop
        self._in = bytearray()
        self._out = bytearray()
        self._writing = False
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        end.setblocking(False)
        self._loop.add_reader(end.fileno(), self._readable)

    def post(self, message: Any) -> None:
        """Send with whatever else this turn of the loop posts. What is posted after the end is dropped."""
        if self._closed:
            return
        self._posted.append(message)
        if not self._hurried:
            self._hurried = True
            if self._flushing is not None:
                self._flushing.cancel()
            self._flushing = self._loop.call_soon(self._flush)

    def hold(self, message: Any) -> None:
        """Send with what is posted next, in order, or a few milliseconds later."""
        if self._closed:
            return
        self._posted.append(message)
        if self._flushing is None:
            self._flushing = self._loop.call_later(_HOLD, self._flush)

    async def room(self) -> None:
        """Wait while the other side is far behind."""
        if not self._room.is_set():
            await self._room.wait()

    def _flush(self) -> None:
        self._flushing, self._hurried = None, False
        posted, self._posted = self._posted, []
        if self._closed or not posted:
            return
        data = pickle.dumps(posted, pickle.HIGHEST_PROTOCOL)
        self._out += _HEAD.pack(len(data))
        self._out += data
        if not self._writing:
            self._write()

    def _write(self) -> None:
        try:
            while self._out:
                sent = self._end.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            pass
        except OSError:  # what it said before it went may still be there to read
            self._out.clear()
        if bool(self._out) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._end.fileno(), self._write)
            else:
                self._loop.remove_writer(self._end.fileno())
        if len(self._out) > HIGH_WATER:
            self._room.clear()
        elif not self._room.is_set():
            self._room.set()

    def _readable(self) -> None:
        try:
            data = self._end.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._lost()
            return
        self._in += data
        start = 0
        while len(self._in) - start >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._in, start)
            end = start + _HEAD.size + size
            if len(self._in) < end:
                break
            with memoryview(self._in) as view:
                batch = pickle.loads(view[start + _HEAD.size : end])
            start = end
            self._receive(batch)
            if self._closed:
                return
        del self._in[:start]

    def close(self) -> None:
        """Send and receive nothing more. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError, OSError, ValueError):  # the loop is closed
            self._loop.remove_reader(self._end.fileno())
            if self._writing:
                self._loop.remove_writer(self._end.fileno())
        self._end.close()
        self._room.set()
