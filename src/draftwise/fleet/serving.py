"""A replica's own side: `AsyncLLM`, its streams, and the orders it obeys."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import logging
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from draftwise.config.registry import register_method
from draftwise.engine.async_llm import AsyncLLM
from draftwise.engine.group import TextPiece
from draftwise.engine.stream import RequestStream
from draftwise.errors import DraftwiseError, EngineDeadError
from draftwise.fleet.wire import (
    Abort,
    Cache,
    Channel,
    Close,
    Failed,
    Hello,
    News,
    Ping,
    Pong,
    Queued,
    Start,
    Submit,
    TextOnly,
)
from draftwise.kv.events import BlocksRemoved, BlocksStored, CacheEvent
from draftwise.metrics.latencies import Latencies

_SWITCH_INTERVAL = 0.001
"""Seconds that a thread which wants the interpreter waits: the engine wants it several times in every step."""


def serve(streams_fd: int, orders_fd: int) -> int:
    """Build an engine and serve it until an order ends it; returns the exit code."""
    faulthandler.enable()
    orders = Connection(orders_fd)
    start: Start = orders.recv()
    logging.basicConfig(level=start.log_level, format="%(levelname)s %(name)s: %(message)s")
    for name, path in start.methods:
        register_method(name, path)
    try:
        llm = AsyncLLM.from_config(start.config, max_chunk_rate=start.max_chunk_rate)
    except BaseException as error:
        orders.send(portable(error))
        return 1
    sys.setswitchinterval(_SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(ImportError):
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Serving(llm, orders).run(streams_fd))
    with asyncio.Runner() as plain:
        return plain.run(_Serving(llm, orders).run(streams_fd))


class _Serving:
    """One engine and the processes that use it."""

    def __init__(self, llm: AsyncLLM, orders: Connection) -> None:
        self._llm = llm
        self._orders = orders
        self._latencies = Latencies()
        self._streams: dict[int, RequestStream] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self, streams_fd: int) -> int:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        end = socket.socket(fileno=streams_fd)
        self._channel = Channel(end, self._receive, self._ended.set)
        llm = self._llm
        llm.observe(self._latencies.observe)
        caches = llm.observe_cache(self._tell_cache)
        self._orders.send(Hello(llm.guarantees, llm.max_model_len, llm.vocab_size, caches))
        threading.Thread(target=self._obey, name="draftwise-orders", daemon=True).start()
        await self._ended.wait()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._channel.close()
        alive = llm.is_alive
        llm.close()
        return 0 if alive else 1

    # ---------------------------------------------------------------------------------------------- streams

    def _receive(self, batch: Sequence[Any]) -> None:
        for message in batch:
            if isinstance(message, Submit):
                self._submit(message)
                continue
            if isinstance(message, Ping):
                self._channel.post(Pong(self._llm.in_step))
                continue
            stream = self._streams.get(message.stream)
            match message:
                case TextOnly() if stream is not None:
                    stream.text_only = True
                case Abort() if stream is not None:
                    self._llm.abort(stream.request_id)
                case Close() if stream is not None:
                    self._tasks[message.stream].cancel()

    def _submit(self, asked: Submit) -> None:
        number = asked.stream
        prompt: dict[str, Any] = {"prompt_token_ids": asked.ids_np}
        if asked.text is not None:
            prompt["prompt"] = asked.text
        try:
            stream = self._llm.submit(
                prompt,
                asked.params,
                asked.name,
                priority=asked.priority,
                keep_trace=asked.keep_trace,
                lora_request=asked.lora_request,
                numbers=asked.numbers,
            )
        except Exception as error:
            self._fail(number, error)
            return
        self._streams[number] = stream
        task = self._tasks[number] = asyncio.ensure_future(self._read(number, stream))

        def gone(_: object) -> None:  # also where the task was cancelled before it began
            stream.close()
            del self._streams[number], self._tasks[number]

        task.add_done_callback(gone)

    async def _read(self, number: int, stream: RequestStream) -> None:
        """Send on what a request has, to its last output."""
        channel = self._channel
        try:
            await stream.ready()
            channel.hold(Queued(number))  # a first token that comes soon says as much
            finished = False
            while not finished:
                output = await stream.next_output()
                if isinstance(output, TextPiece):
                    channel.post(News(number, tuple(output)))
                else:
                    finished = output.finished
                    bare = dataclasses.replace(output, prompt=None, prompt_token_ids=())
                    channel.post(News(number, bare))
                await channel.room()  # outputs stay in the engine meanwhile, which folds them
        except StopAsyncIteration:  # closed
            pass
        except Exception as error:
            self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        self._channel.post(Failed(number, portable(error)))
        if isinstance(error, EngineDeadError):
            self._loop.call_later(0.05, self._ended.set)  # no engine, no replica

    # ---------------------------------------------------------------------------------------------- the cache

    def _tell_cache(self, events: Sequence[CacheEvent]) -> None:
        """In the engine's thread, before the readers of the same step are woken: the fleet hears of a block first."""
        changes: list[tuple[str, tuple[bytes, ...]]] = []
        for event in events:
            if isinstance(event, BlocksStored):
                changes.append(("+", event.digests))
            elif isinstance(event, BlocksRemoved):
                changes.append(("-", event.digests))
            else:
                changes.append(("0", ()))
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._channel.hold, Cache(changes))

    # ----------------------------------------------------------------------------------------------- orders

    def _obey(self) -> None:
        """In a thread: answer orders, one after the other, until the other side is gone."""
        llm = self._llm
        try:
            while True:
                number, call, arguments = self._orders.recv()
                answer: Any
                try:
                    match call:
                        case "books":
                            answer = (llm.stats(), self._latencies.histograms())
                        case "reset_prefix_cache":
                            answer = llm.reset_prefix_cache()
                        case "add_lora":
                            llm.load_lora(*arguments)
                            answer = llm.prefix_salt(*arguments)
                        case "remove_lora":
                            work = llm.remove_lora(*arguments)
                            answer = asyncio.run_coroutine_threadsafe(work, self._loop).result()
                        case "check_integrity":
                            answer = llm.check_integrity()  # type: ignore[func-returns-value]
                        case "close":
                            break
                        case _:
                            raise AssertionError(f"no order {call!r}")
                except BaseException as error:
                    answer = portable(error)
                self._orders.send((number, answer))
        except (EOFError, OSError):
            pass
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended.set)


def portable(error: BaseException) -> BaseException:
    """An exception as another process can have it: what cannot be pickled, or has no business there, by its name."""
    if not isinstance(error, DraftwiseError | AssertionError):
        traceback.print_exception(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DraftwiseError(f"{type(error).__name__}: {error}")
    return error
