"""`AsyncLLM`: the asynchronous facade. The core runs in a thread of its own; requests come and go at any time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from draftwise import lifetime
from draftwise.config import EngineConfig, resolve_engine_config
from draftwise.config.lora import LoRARequest
from draftwise.engine.absent import Absent
from draftwise.engine.builder import Engine, build_engine, check_alone
from draftwise.engine.contained import contained
from draftwise.engine.core import CacheListener
from draftwise.engine.group import Reading, RequestGroup
from draftwise.engine.health import Health
from draftwise.engine.inspection import Inspection
from draftwise.engine.loops import running_loop
from draftwise.engine.outputs import RequestOutput
from draftwise.engine.processor import Numbers
from draftwise.engine.prompts import PromptLike, one_prompt, own_params
from draftwise.engine.readers import Readers
from draftwise.engine.stream import RequestStream, wake
from draftwise.engine.thread import EngineThread, weakly
from draftwise.engine.tokenizing import prompt_text
from draftwise.engine.workers import Lane, Workers
from draftwise.errors import RequestError
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import RequestUpdate, adapter_salt

logger = logging.getLogger("draftwise")


StepObserver = Callable[[Sequence[RequestUpdate]], None]
"""Called with the changes of every step, in the engine's thread. It must be quick."""


class AsyncLLM(Health, Inspection, Absent):
    """A model and its drafters behind an asynchronous interface; takes the arguments of `LLM`.

    async for output in engine.generate("def main(", SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        keep_trace: bool = False,
        max_chunk_rate: float | None = None,
        **options: Any,
    ) -> None:
        """``max_chunk_rate``: the most outputs per second for all readers of an event loop. With more than a few
        readers, one output then has the tokens of several steps. None: an output for every step."""
        config = resolve_engine_config(model=model, **options)
        self._begin(check_alone(config), keep_trace, max_chunk_rate)

    @classmethod
    def from_config(cls, config: EngineConfig, *, max_chunk_rate: float | None = None) -> Self:
        """An engine from a resolved configuration."""
        made = cls.__new__(cls)
        made._begin(config, False, max_chunk_rate)
        return made

    def _begin(self, config: EngineConfig, keep_trace: bool, max_chunk_rate: float | None) -> None:
        with lifetime.computing():
            self._engine: Engine = build_engine(config, keep_trace=keep_trace)
        self._streams: dict[str, RequestStream] = {}
        self._by_rid: dict[int, RequestStream] = {}
        self._readers: dict[asyncio.AbstractEventLoop, Readers] = {}
        self._max_chunk_rate = max_chunk_rate
        self._observers: tuple[StepObserver, ...] = ()
        self._workers = Workers()
        self._thread = EngineThread(self._engine.core, weakly(self._announce), weakly(self._wake_all))
        # Dropped without `close`, as by running the cell of a notebook again. Streams keep the engine.
        self._dropped = weakref.finalize(self, _abandon, self._thread, self._workers)
        self._dropped.atexit = False
        lifetime.stop_at_exit(self)
        lifetime.survive_forks(self)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: Any, usage_context: Any = None) -> Self:
        """An engine with the options of an `EngineArgs`. ``usage_context``: vLLM's telemetry; there is none here."""
        return cls(**engine_args.given())

    # ------------------------------------------------------------------------------------------ generating

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one prompt as they come: cumulative, pieces ("delta") or only the last ("final_only"), as
        ``sampling_params.output_kind`` says. Leaving the iteration early, or cancelling the task, aborts the request.

        Raises RequestError for an invalid request, EngineDeadError if the engine fails.
        """
        stream = self.submit(
            prompt, sampling_params, request_id, priority=priority, lora_request=lora_request
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    def submit(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keep_trace: bool | None = None,
        lora_request: LoRARequest | None = None,
        numbers: Numbers | None = None,
    ) -> RequestStream:
        """Begin one prompt and return its outputs, to be iterated over and closed in the running event loop.

        Long work (a long text, a grammar) is done in a thread. Await `RequestStream.ready` to know before the first
        output whether the request is valid. Requests are served in the order of these calls.

        ``lora_request``: an adapter, read in a thread when it is first named. While running requests have
        ``max_loras`` others, the request waits.
        ``keep_trace``: remember the verified trees of this request (None: as the engine was built).
        ``numbers``: the numbers of its samples, for callers that number requests over several engines. They must be
        unique within an engine. Such callers hand over their ``sampling_params``, which are not copied.

        Raises RequestError for an invalid request (nothing was queued), here or, if a thread found it, from the
        stream; EngineDeadError if the engine has failed.
        """
        prompt = one_prompt(prompt)
        if numbers is None or sampling_params is None:
            sampling_params = own_params(sampling_params)
        params = contained(sampling_params)
        loop = running_loop()
        self._thread.check_alive()
        processor = self._engine.processor
        processor.check(prompt, params)
        # A name that no caller gives: a number could be taken by a caller that counts requests.
        name = request_id if request_id is not None else uuid.uuid4().hex
        numbers = numbers or processor.take_numbers(params.n)
        with self._wakeup:
            self._thread.check_alive()
            readers = self._readers.get(loop)
            if readers is None:
                self._forget_closed_loops()
            if name in self._streams:
                raise RequestError(f"request id {name!r} is in use")
            if readers is None:
                readers = self._readers[loop] = Readers(loop, self._max_chunk_rate)
            stream = RequestStream(
                self, name, prompt_text(prompt), params, readers, self._workers, numbers.arrival_time
            )
            readers.num_open += 1
            self._streams[name] = stream

        def prepare() -> RequestGroup:
            lease = self._engine.adapters.lease(lora_request, self._between_steps)
            return processor.group(
                prompt, params, name, priority, keep_trace=keep_trace, numbers=numbers, lease=lease
            )

        try:
            lane = processor.lane(prompt, params)
            if lora_request is not None and lane in (None, Lane.TEXT):
                lane = Lane.TEXT if self._engine.adapters.has(lora_request) else Lane.ADAPTER
            if lane is None:
                self.enqueue(stream, prepare())
            else:
                stream.prepare(self._workers.submit(lane, prepare))
        except BaseException:
            self.forget(stream)
            raise
        return stream

    def enqueue(self, stream: RequestStream, group: RequestGroup) -> None:
        """See `StreamOwner`."""
        with self._wakeup:
            self._thread.check_alive()
            if stream.aborted or self._streams.get(stream.request_id) is not stream:
                return  # the reader is gone
            for request in group.requests:
                self._engine.core.scheduler.check(request.num_prompt, request.max_total)
            stream.queued(group)
            for request in group.requests:
                self._by_rid[request.rid] = stream
                self._engine.core.add(request)
            group.lease = None
            self._wakeup.notify()

    def read(self, stream: RequestStream) -> Reading | None:
        """See `StreamOwner`."""
        group = stream.group
        with self._engine.core.lock:
            if self._thread.failed and not group.finished:
                self._thread.check_alive()
            if not stream.wants_pieces and not group.finished:
                return None
            # A reader that was woken for one step may read when the next has ended, too; the call for that step then
            # wakes it for nothing.
            progress = group.num_output, group.num_finished
            if progress == stream.progress:
                return None
            stream.progress = progress
            return group.read(stream.params.output_kind, text_only=stream.text_only)

    def observe(self, observer: StepObserver) -> None:
        """Call ``observer`` with the updates of every step. An observer that raises is logged and dropped."""
        self._observers = (*self._observers, observer)

    def observe_cache(self, listener: CacheListener) -> bool:
        """Call ``listener`` with the changes of cached blocks, in the engine's thread, after every step and before
        the readers of that step are woken. False: this engine has no prefix cache."""
        return self._engine.core.observe_cache(listener)

    def forget(self, stream: RequestStream) -> None:
        """See `StreamOwner`."""
        readers = stream.readers
        with self._wakeup:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
                readers.num_open -= 1
                if not readers.num_open:
                    self._readers.pop(readers.loop, None)
            if stream.prepared:
                stopped = False
                for request in stream.group.requests:
                    self._by_rid.pop(request.rid, None)
                    stopped |= self._engine.core.cancel(request.rid)
                if stopped:  # a reader may still wait for an output: it says "abort"
                    wake({stream: True})
                self._wakeup.notify()

    def _forget_closed_loops(self) -> None:
        """Forget requests that were being prepared when their event loop was closed: nothing tells us of them any more.
        Called with the lock held."""
        for stream in list(self._streams.values()):
            if stream.readers.loop.is_closed():
                self.forget(stream)

    def abort(self, request_id: str) -> bool:
        """Stop a request; its iterator ends with ``finish_reason == "abort"``. False if it is not running."""
        with self._wakeup:
            stream = self._streams.get(request_id)
            if stream is None:
                return False
            if not stream.prepared:
                if stream.aborted:
                    return False
                stream.aborted = True
                with contextlib.suppress(RuntimeError):  # its loop is closed: it has no reader
                    stream.readers.loop.call_soon_threadsafe(stream.abort)
                return True
            stopped = [self._engine.core.cancel(r.rid) for r in stream.group.requests]
            wake({stream: True})
            self._wakeup.notify()
            return any(stopped)

    def abort_all(self) -> int:
        """Abort all requests that run or wait. Returns how many there were."""
        with self._wakeup:
            return sum(self.abort(request_id) for request_id in list(self._streams))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """`apply_chat_template` in a thread, with its options. Raises RequestError."""
        work = functools.partial(self.apply_chat_template, messages, **options)
        return await self._workers.submit(Lane.TEXT, work)

    # ------------------------------------------------------------------------------------------- adapters

    def load_lora(self, lora_request: LoRARequest) -> None:
        """Read an adapter, which stays in memory until `remove_lora`. Raises RequestError if that cannot be."""
        self._engine.adapters.add(lora_request, self._between_steps)

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """`load_lora` in a thread."""
        await self._workers.submit(Lane.ADAPTER, functools.partial(self.load_lora, lora_request))

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; its requests go on with it. False: there is no adapter of this number."""
        work = functools.partial(self._engine.adapters.remove, lora_int_id, self._between_steps)
        return await self._workers.submit(Lane.TEXT, work)

    def list_loras(self) -> list[LoRARequest]:
        """The loaded adapters."""
        return self._engine.adapters.requests()

    def prefix_salt(self, lora_request: LoRARequest | None) -> str | None:
        """The salt of this adapter's blocks in the prefix cache. Reads the adapter if necessary."""
        lease = self._engine.adapters.lease(lora_request, self._between_steps)
        return None if lease is None else adapter_salt(lease.slot)

    def _between_steps(self, work: Callable[[], object]) -> None:
        """Run a function in the engine's thread before its next step, and wait for it."""
        self._thread.between_steps(work).result()

    # ----------------------------------------------------------------------------------------- the thread

    @property
    def _wakeup(self) -> threading.Condition:
        return self._thread.wakeup

    def _announce(self, updates: Sequence[RequestUpdate]) -> None:
        """Tell observers of a step, then wake the readers of what it changed: an answer that was read is counted.
        Requests whose event loop was closed have no reader any more."""
        if self._observers:
            self._tell(updates)
        touched: dict[RequestStream, bool] = {}
        with self._wakeup:
            for update in updates:
                if not (update.num_new or update.finished):
                    continue
                stream = self._by_rid.get(update.request.rid)
                if stream is not None and (update.finished or stream.wants_pieces):
                    touched[stream] = update.finished or touched.get(stream, False)
        for stream in wake(touched):
            self.forget(stream)

    def _wake_all(self) -> None:
        """No step follows: every reader hears of it."""
        with self._wakeup:
            streams = list(self._streams.values())
        wake(dict.fromkeys(streams, True))

    def _tell(self, updates: Sequence[RequestUpdate]) -> None:
        for observer in self._observers:
            try:
                observer(updates)
            except Exception:
                logger.exception("a step observer failed and is not called again")
                self._observers = tuple(o for o in self._observers if o is not observer)

    # ------------------------------------------------------------------------------------------ inspection

    def _inspected(self) -> Engine:
        return self._engine  # a closed one, too: `close` leaves what it says of itself

    def get_num_unfinished_requests(self) -> int:
        """The number of prompts that run or wait."""
        return len(self._streams)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False while requests hold some."""
        with self._engine.core.lock:
            done = self._engine.core.scheduler.kv.reset_prefix_cache()
        if done:  # listeners hear of it behind what that thread has told them
            self._thread.between_steps(self._engine.core.tell_cache)
        return done

    def reset_drafters(self) -> None:
        """Make drafters forget what they learned from past requests (method ``suffix``: their outputs), before the
        next step. Running requests go on."""
        self._thread.between_steps(
            self._engine.core.executor.forget
        )  # drafters belong to the thread that steps

    # ------------------------------------------------------------------------------------------ life cycle

    def close(self) -> None:
        """Stop the engine, and let go of models and caches; `config`, `stats` and the tokenizer stay. Readers of
        running requests get EngineDeadError. Closing twice is allowed."""
        if not self._thread.close():
            return
        self._workers.close()
        self._thread.join()
        self._engine.core.close()
        self._engine = dataclasses.replace(self._engine, device=None)  # a closed engine may be held for long

    shutdown = close
    """vLLM's name."""

    def ask_to_stop(self) -> None:
        """Called at the end of the program: begin no further step."""
        self._thread.ask_to_stop()

    def wait_stopped(self, timeout: float) -> None:
        """See `ask_to_stop`."""
        self._thread.join(timeout)

    def after_fork_in_child(self) -> None:
        """Called in a forked child. The thread stayed in the parent, so this copy answers with EngineDeadError."""
        self._dropped.detach()  # of what it would end, threads that are gone may hold the locks
        self._engine.adapters.after_fork_in_child()
        self._engine.core.after_fork_in_child()
        self._thread.after_fork_in_child()
        self._workers = Workers()

    async def __aenter__(self) -> Self:
        try:
            running_loop()
        except RequestError:  # nobody calls `__aexit__` then
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


def _abandon(thread: EngineThread, workers: Workers) -> None:
    thread.abandon()
    workers.close()


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
