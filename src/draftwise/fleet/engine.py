"""`FleetEngine`: several engines in processes of their own that answer as one. What `server.engine` asks of an engine.

The fleet's process tokenizes prompts, applies chat templates, and routes; replicas compute and make text. It lives in
one event loop: that of the first request. Other threads may call what answers at once (`stats`, `close`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftwise import lifetime
from draftwise.config import EngineConfig
from draftwise.config.lora import LoRARequest
from draftwise.engine.device import load_engine_tokenizer
from draftwise.engine.limits import check_params, check_portable, check_prompt
from draftwise.engine.llm import chat_prompt
from draftwise.engine.outputs import EngineStats, Guarantees
from draftwise.engine.processor import Numbers, is_quick, prompt_text, tokenize_prompt
from draftwise.engine.prompts import PromptLike, one_prompt
from draftwise.engine.workers import Lane, Workers
from draftwise.errors import ConfigError, EngineDeadError, ReplicaLostError, RequestError
from draftwise.fleet.adapters import FleetAdapters
from draftwise.fleet.books import total
from draftwise.fleet.child import ReplicaProcesses
from draftwise.fleet.replicas import Replica, plan
from draftwise.fleet.router import Router
from draftwise.fleet.stream import FleetStream
from draftwise.fleet.wire import Abort, Cache, Close, Failed, News, Queued, Submit, TextOnly
from draftwise.metrics.books import Books
from draftwise.sampling.params import SamplingParams

logger = logging.getLogger("draftwise.fleet")

_BOOKS_TIMEOUT = 0.5
"""Seconds that a replica has to tell its numbers; the last known ones stand for one that is late."""


class FleetEngine:
    """``config.data_parallel_size`` engines. Raises what building one of them raises; then none is left."""

    def __init__(self, config: EngineConfig, *, max_chunk_rate: float | None = None) -> None:
        """``max_chunk_rate``: of all streams together; see `AsyncLLM`."""
        self._config = config
        self._max_chunk_rate = max_chunk_rate
        self._tokenizer = load_engine_tokenizer(config)
        self._workers = Workers()
        self._replicas: dict[int, Replica] = {}
        self._next_replica = 0
        self._next_number = 0
        self._next_stream = 0
        self._streams: dict[str, FleetStream] = {}
        self._where: dict[int, Replica] = {}  # by the stream's number
        self._asked: dict[int, Submit] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._adapters = FleetAdapters()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scaling = asyncio.Lock()
        self._closing = False
        self._processes = ReplicaProcesses()
        lifetime.survive_forks(self)
        try:
            made = self._start(config.data_parallel_size)
        except BaseException:
            self._processes.close()
            raise
        self._hello = made[0].hello
        kinship = config.default_method == "suffix"
        self._router = Router(config.block_size, prefixes=self._hello.caches_prefixes, kinship=kinship)
        for replica in made:
            self._join(replica)

    # ---------------------------------------------------------------------------------------------- replicas

    def _start(self, count: int) -> list[Replica]:
        """Start processes, all at once, and wait until they are built."""
        first, self._next_replica = self._next_replica, self._next_replica + count
        plans = (plan(self._config, first + i, self._max_chunk_rate) for i in range(count))
        return [Replica(*built) for built in self._processes.start(plans)]

    def _join(self, replica: Replica) -> None:
        """From now on it gets requests."""
        self._replicas[replica.number] = replica
        self._router.add(replica.number)
        if self._loop is not None:
            self._connect(replica)

    def _connect(self, replica: Replica) -> None:
        replica.connect(functools.partial(self._receive, replica), functools.partial(self._lost, replica))

    def _attach(self) -> asyncio.AbstractEventLoop:
        """The running event loop, to which the fleet belongs from its first request on. Raises RequestError in another
        one."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            for replica in self._replicas.values():
                self._connect(replica)
        elif self._loop is not loop:
            raise RequestError("data_parallel_size: requests of several replicas come from one event loop")
        return loop

    def _lost(self, replica: Replica) -> None:
        """Its process is gone. Whose requests nobody has seen anything of, begin again elsewhere."""
        if replica.number not in self._replicas:
            return
        del self._replicas[replica.number]
        self._router.remove(replica.number)
        replica.close()
        words = replica.process.last_words() if not self._closing else f"replica {replica.number} was closed"
        if not self._closing and not replica.retired:
            logger.error("%s", words)
        first = words.partition("\n")[0].partition(";")[0]
        streams, replica.streams = replica.streams, {}
        for number, stream in streams.items():
            del self._where[number]
            asked = self._asked.pop(number)
            replica.leave(self._router, stream, None)
            if stream.aborted:
                stream.end_aborted()
            elif stream.delivered or self._closing:
                stream.failed(self._lost_error(first))
            else:
                stream.begin_again()
                self._place(stream, asked)
        self._processes.forget(replica.process)

    def _lost_error(self, words: str) -> EngineDeadError:
        if self._closing:
            return EngineDeadError("the engine was closed")
        if not self._replicas:
            return EngineDeadError(f"{words}: there is no replica left")
        return ReplicaLostError(f"{words}, and what it had begun to stream ends here; ask again")

    @property
    def replicas(self) -> tuple[int, ...]:
        """Numbers of those that serve; those that drain are not among them."""
        return tuple(n for n, r in self._replicas.items() if not r.retired)

    def state(self) -> list[dict[str, Any]]:
        """Of every replica: its number, "ready" or "draining", and how many requests it has."""
        return [
            {
                "replica": number,
                "state": "draining" if replica.retired else "ready",
                "num_requests": len(replica.streams),
            }
            for number, replica in self._replicas.items()
        ]

    async def scale(self, count: int) -> None:
        """Have ``count`` replicas: start some, or let the last ones drain: they get no new requests, streams that run
        end where they are, and then their processes end. Returns when those that were started serve.

        Raises ConfigError for a number under 1, and what building an engine raises.
        """
        if count < 1:
            raise ConfigError(f"data_parallel_size: expected an integer >= 1, got {count}")
        self._attach()
        async with self._scaling:
            serving = self.replicas
            for number in sorted(serving)[count:]:
                self._retire(self._replicas[number])
            if count > len(serving):
                for replica in await asyncio.to_thread(self._start, count - len(serving)):
                    await asyncio.to_thread(self._adapters.catch_up, replica)
                    self._join(replica)

    def _retire(self, replica: Replica) -> None:
        replica.retired = True
        self._router.remove(replica.number)
        logger.info("replica %d drains: %d requests", replica.number, len(replica.streams))
        self._end_if_idle(replica)

    def _end_if_idle(self, replica: Replica) -> None:
        if replica.retired and not replica.streams:
            replica.process.ask_to_end()

    # ---------------------------------------------------------------------------------------------- requests

    def submit(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        keep_trace: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> FleetStream:
        """See `AsyncLLM.submit`. What a replica finds wrong with a request is raised by `FleetStream.ready`."""
        self._attach()
        self._check_alive()
        prompt = one_prompt(prompt)
        params = (sampling_params or SamplingParams()).clone()
        check_params(self._config.request_limits, params, walk=False)
        check_portable(params)
        text = prompt_text(prompt)
        has_ids = isinstance(prompt, Mapping) and "prompt_token_ids" in prompt
        if text is not None and not has_ids:
            check_prompt(self._config.request_limits, text, self.max_model_len)
        name = request_id if request_id is not None else uuid.uuid4().hex
        if name in self._streams:
            raise RequestError(f"request id {name!r} is in use")
        numbers = Numbers(self._next_number, time.perf_counter())
        self._next_number += params.n
        self._next_stream += 1
        number = self._next_stream
        stream = FleetStream(
            number, name, params, numbers.arrival_time, on_text_only=self._text_only, on_close=self._closed
        )

        def tokenized() -> Submit:
            found, ids_np = tokenize_prompt(
                prompt, self._tokenizer, self._hello.vocab_size, self._hello.max_model_len
            )
            return Submit(number, name, found, ids_np, params, priority, keep_trace, lora_request, numbers)

        if is_quick(prompt, params):
            self._place(stream, tokenized())
            self._streams[name] = stream
            return stream
        self._streams[name] = stream
        task = asyncio.ensure_future(self._prepare(stream, tokenized))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _prepare(self, stream: FleetStream, tokenized: Callable[[], Submit]) -> None:
        try:
            asked = await self._workers.submit(Lane.TEXT, tokenized)
        except Exception as error:
            stream.failed(error)
            return
        if stream.aborted:
            stream.end_aborted()
        elif self._streams.get(stream.request_id) is stream:  # its reader is still there
            self._place(stream, asked)

    def _place(self, stream: FleetStream, asked: Submit) -> None:
        """Send a request to the replica that suits it best."""
        salts = self._adapters.salts(asked.lora_request)
        route = self._router.route(
            asked.ids_np, max_tokens=asked.params.max_tokens, samples=asked.params.n, salts=salts
        )
        if not route.names:
            stream.failed(EngineDeadError("there is no replica left"))
            return
        best = route.names[0]
        assert isinstance(best, int)
        replica = self._replicas[best]
        stream.text, stream.prompt_ids = asked.text, tuple(asked.ids_np.tolist())
        replica.enter(stream, self._router.begin(route, best, None if salts is None else salts.get(best)))
        self._where[stream.number] = replica
        self._asked[stream.number] = asked
        replica.post(asked)
        if stream.text_only:
            replica.post(TextOnly(stream.number))

    def _receive(self, replica: Replica, batch: Sequence[Any]) -> None:
        for message in batch:
            if isinstance(message, Cache):
                self._note(replica.number, message)
                continue
            stream = replica.streams.get(message.stream)
            if stream is None:
                continue  # nobody reads it any more
            if isinstance(message, News):
                stream.arrived(message.output)
            elif isinstance(message, Queued):
                stream.queued()
            elif isinstance(message, Failed):
                if isinstance(message.error, EngineDeadError):
                    continue  # its replica ends, and `_lost` sees to it
                stream.failed(message.error)
            if stream.ended:
                self._leave(replica, stream, stream.num_output if isinstance(message, News) else None)

    def _note(self, number: int, cache: Cache) -> None:
        for kind, digests in cache.changes:
            if kind == "+":
                self._router.stored(number, digests)
            elif kind == "-":
                self._router.removed(number, digests)
            else:
                self._router.cleared(number)

    def _leave(self, replica: Replica, stream: FleetStream, num_output: int | None = None) -> None:
        """A request is over; see `Router.end`."""
        replica.leave(self._router, stream, num_output)
        self._where.pop(stream.number, None)
        self._asked.pop(stream.number, None)
        self._end_if_idle(replica)

    def _text_only(self, stream: FleetStream) -> None:
        if (replica := self._where.get(stream.number)) is not None:
            replica.post(TextOnly(stream.number))

    def _closed(self, stream: FleetStream) -> None:
        """Its reader is gone."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
        if (replica := self._where.get(stream.number)) is not None:
            replica.post(Close(stream.number))
            self._leave(replica, stream)
        self._asked.pop(stream.number, None)

    def abort(self, request_id: str) -> bool:
        """Stop a request; its iterator ends with ``finish_reason == "abort"``. False if it is not running."""
        stream = self._streams.get(request_id)
        if stream is None or stream.aborted or stream.ended:
            return False
        stream.aborted = True
        if (replica := self._where.get(stream.number)) is not None:
            replica.post(Abort(stream.number))
        return True

    def abort_all(self) -> int:
        """`abort` whatever runs or waits; how many requests it were."""
        return sum(self.abort(request_id) for request_id in list(self._streams))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """See `AsyncLLM.apply_chat_template`."""
        return chat_prompt(
            self.get_tokenizer(),
            messages,
            limits=self._config.request_limits,
            max_model_len=self.max_model_len,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_options=template_options,
        )

    # ---------------------------------------------------------------------------------------------- adapters

    async def add_lora(self, lora_request: LoRARequest) -> None:
        """Load an adapter on all replicas, or on none. Raises RequestError if it cannot be."""
        await asyncio.to_thread(self.load_lora, lora_request)

    def load_lora(self, lora_request: LoRARequest) -> None:
        """See `add_lora`; waits."""
        self._adapters.load(list(self._replicas.values()), lora_request)

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter everywhere; requests that have it go on with it. False: there is none of this number."""
        return await asyncio.to_thread(self._adapters.remove, list(self._replicas.values()), lora_int_id)

    # -------------------------------------------------------------------------------------------- inspection

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def guarantees(self) -> Guarantees:
        return self._hello.guarantees

    @property
    def max_model_len(self) -> int:
        return self._hello.max_model_len

    @property
    def is_alive(self) -> bool:
        """Whether any replica serves."""
        return not self._closing and any(not r.process.has_ended for r in self._replicas.values())

    def _check_alive(self) -> None:
        if self._closing:
            raise EngineDeadError("the engine was closed")
        if not self._replicas:
            raise EngineDeadError("there is no replica left")

    def get_tokenizer(self) -> Any:
        """The Transformers tokenizer. Raises ConfigError if there is none."""
        if self._tokenizer is None:
            raise ConfigError("the engine has no tokenizer (skip_tokenizer_init)")
        return self._tokenizer

    def books(self) -> list[Books]:
        """Of every replica that is there, under its number."""
        found = []
        for number, replica in list(self._replicas.items()):
            with contextlib.suppress(TimeoutError, EngineDeadError):
                replica.books = replica.process.order("books", timeout=_BOOKS_TIMEOUT)
            if replica.books is not None:
                found.append(Books(str(number), *replica.books))
        return found

    def stats(self) -> EngineStats:
        """Sums over the replicas that are there. Raises EngineDeadError if none is."""
        found = self.books()
        if not found:
            raise EngineDeadError("there is no replica left")
        return total([books.stats for books in found])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks of all replicas; False if one has requests that hold some."""
        done = [r.process.order("reset_prefix_cache") for r in list(self._replicas.values())]
        return all(done)

    def check_integrity(self) -> None:
        """Raise AssertionError if the books of an engine do not agree."""
        for replica in list(self._replicas.values()):
            replica.process.order("check_integrity")

    # -------------------------------------------------------------------------------------------- life cycle

    def close(self) -> None:
        """End all replicas; running requests end with EngineDeadError at their readers. Closing twice is fine."""
        if self._closing:
            return
        self._closing = True
        self._workers.close()
        self._processes.ask_to_end()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end_streams)
        self._processes.close()

    def _end_streams(self) -> None:
        for replica in list(self._replicas.values()):
            self._lost(replica)

    def after_fork_in_child(self) -> None:
        """The replicas are the parent's."""
        self._processes.forked()
        self._replicas.clear()
        self._closing = True
