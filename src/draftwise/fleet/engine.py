"""`FleetEngine`: several engines in processes of their own that answer as one. What `server.engine` asks of an engine.

The fleet's process tokenizes prompts, applies chat templates, and routes; replicas compute and make text. It lives in
one event loop: that of the first request. Other threads may call what answers at once (`stats`, `close`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftwise import lifetime
from draftwise.config import EngineConfig
from draftwise.config.lora import LoRARequest
from draftwise.engine.chats import chat_prompt
from draftwise.engine.device import load_engine_tokenizer
from draftwise.engine.limits import check_params, check_portable, check_prompt
from draftwise.engine.outputs import EngineStats, Guarantees
from draftwise.engine.processor import Numbers
from draftwise.engine.prompts import PromptLike, one_prompt
from draftwise.engine.tokenizing import is_quick, prompt_text, tokenize_prompt
from draftwise.engine.workers import Lane, Workers
from draftwise.errors import ConfigError, EngineDeadError, ReplicaLostError, RequestError
from draftwise.fleet.books import total
from draftwise.fleet.members import Members
from draftwise.fleet.replicas import Replica
from draftwise.fleet.stream import FleetStream
from draftwise.fleet.watching import RequestWatch
from draftwise.fleet.wire import Abort, Cache, Close, Failed, News, Pong, Queued, Submit, TextOnly
from draftwise.metrics.books import Books
from draftwise.sampling.params import SamplingParams

_RESET_TIMEOUT = 5.0
"""Seconds that a replica has to forget its cached blocks."""


class FleetEngine:
    """``config.data_parallel_size`` engines. Raises what building one of them raises; then none is left."""

    def __init__(
        self, config: EngineConfig, *, max_chunk_rate: float | None = None, most: int | None = None
    ) -> None:
        """``max_chunk_rate``: of all streams together; see `AsyncLLM`. ``most``: how many replicas the machine is
        divided for, if more may be started later."""
        count = max(config.data_parallel_size, most or 1)
        self._config = replace(config, data_parallel_size=count)
        self._tokenizer = load_engine_tokenizer(config)
        self._workers = Workers()
        self._next_number = 0
        self._next_stream = 0
        self._streams: dict[str, FleetStream] = {}
        self._where: dict[int, Replica] = {}  # by the stream's number
        self._asked: dict[int, Submit] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: RequestWatch | None = None
        self._members = Members(
            config, count=count, max_chunk_rate=max_chunk_rate, receive=self._receive, lost=self._lost
        )
        lifetime.survive_forks(self)

    # ---------------------------------------------------------------------------------------------- replicas

    def attach(self) -> None:
        """Belong to the running event loop, before the first request, so that replicas are watched from now on."""
        self._members.attach()

    def _lost(self, replica: Replica, words: str) -> None:
        """Requests of which nothing was delivered begin again on another replica; others end."""
        streams, replica.streams = replica.streams, {}
        for number, stream in streams.items():
            del self._where[number]
            asked = self._asked.pop(number)
            replica.leave(self._members.router, stream, None)
            if stream.aborted:
                stream.end_aborted()
            elif stream.delivered or self._members.closing:
                stream.failed(self._lost_error(words))
            else:
                stream.begin_again()
                self._place(stream, asked)

    def _lost_error(self, words: str) -> EngineDeadError:
        if self._members.closing:
            return EngineDeadError("the engine was closed")
        if not len(self._members):
            return EngineDeadError(f"{words}: there is no replica left")
        return ReplicaLostError(f"{words}, and what it had begun to stream ends here; ask again")

    @property
    def replicas(self) -> tuple[int, ...]:
        """Numbers of those that serve; those that drain are not among them."""
        return self._members.serving

    def state(self) -> list[dict[str, Any]]:
        """See `Members.state`."""
        return self._members.state()

    async def scale(self, count: int) -> None:
        """Have ``count`` replicas: start some, or let the last ones drain: they get no new requests, streams that run
        end where they are, and then their processes end. Returns when those that were started serve.

        Raises ConfigError for a number under 1, and what building an engine raises.
        """
        await self._members.scale(count)

    def warming(self, seconds: float) -> int:
        """How many replicas have served for less than this time."""
        now = time.monotonic()
        return sum(now - replica.since < seconds for replica in self._members)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """That it belongs to, unless there is none yet."""
        return self._members.loop

    @property
    def replica_config(self) -> EngineConfig:
        """The configuration of each replica."""
        return self._members.replica_config

    def watch(self, watch: RequestWatch) -> None:
        """Register an observer of requests that come and end."""
        self._watch = watch

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
        self._members.attach()
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
                prompt, self._tokenizer, self._members.hello.vocab_size, self._members.hello.max_model_len
            )
            return Submit(number, name, found, ids_np, params, priority, keep_trace, lora_request, numbers)

        if is_quick(prompt, params):
            self._arrived(stream, tokenized())
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
            self._arrived(stream, asked)

    def _arrived(self, stream: FleetStream, asked: Submit) -> None:
        if self._watch is not None:
            self._watch.arrived(len(asked.ids_np), asked.params.n)
        self._place(stream, asked)

    def _place(self, stream: FleetStream, asked: Submit) -> None:
        """Send a request to the replica that suits it best."""
        members = self._members
        salts = members.adapters.salts(asked.lora_request)
        route = members.router.route(
            asked.ids_np,
            max_tokens=asked.params.max_tokens,
            samples=asked.params.n,
            salts=salts,
            among=members.preferred(),
        )
        if not route.names:
            stream.failed(EngineDeadError("there is no replica left"))
            return
        best = route.names[0]
        assert isinstance(best, int)
        replica = members[best]
        stream.text, stream.prompt_ids = asked.text, tuple(asked.ids_np.tolist())
        replica.enter(stream, members.router.begin(route, best, None if salts is None else salts.get(best)))
        self._where[stream.number] = replica
        self._asked[stream.number] = asked
        replica.post(asked)
        if stream.text_only:
            replica.post(TextOnly(stream.number))

    def _receive(self, replica: Replica, batch: Sequence[Any]) -> None:
        for message in batch:
            if isinstance(message, Cache):
                self._members.router.changed(replica.number, message.changes)
                continue
            if isinstance(message, Pong):
                continue
            stream = replica.streams.get(message.stream)
            if stream is None:
                continue  # its reader is gone
            if isinstance(message, News):
                stream.arrived(message.output)
            elif isinstance(message, Queued):
                stream.queued()
            elif isinstance(message, Failed):
                if isinstance(message.error, EngineDeadError):
                    continue  # its replica ends, and `_lost` sees to it
                stream.failed(message.error)
            if stream.ended:
                if self._watch is not None and isinstance(message, News):
                    self._watch.ended(stream.num_output, stream.params.n, message.output.metrics)
                self._leave(replica, stream, stream.num_output if isinstance(message, News) else None)

    def _leave(self, replica: Replica, stream: FleetStream, num_output: int | None = None) -> None:
        """A request is over; see `Router.end`."""
        replica.leave(self._members.router, stream, num_output)
        self._where.pop(stream.number, None)
        self._asked.pop(stream.number, None)
        self._members.end_if_idle(replica)

    def _text_only(self, stream: FleetStream) -> None:
        if (replica := self._where.get(stream.number)) is not None:
            replica.post(TextOnly(stream.number))

    def _closed(self, stream: FleetStream) -> None:
        """Its reader is gone."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
        if (replica := self._where.get(stream.number)) is not None:
            replica.post(Close(stream.number))
            if self._watch is not None:
                self._watch.ended(stream.num_output, stream.params.n, None)
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
        """Abort all requests that run or wait. Returns how many there were."""
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
        self._members.adapters.load(list(self._members), lora_request)

    async def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter everywhere; requests that have it go on with it. False: there is none of this number."""
        return await asyncio.to_thread(self._members.adapters.remove, list(self._members), lora_int_id)

    # -------------------------------------------------------------------------------------------- inspection

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def guarantees(self) -> Guarantees:
        return self._members.hello.guarantees

    @property
    def max_model_len(self) -> int:
        return self._members.hello.max_model_len

    @property
    def is_alive(self) -> bool:
        """Whether any replica serves."""
        return not self._members.closing and any(not r.process.has_ended for r in self._members)

    def _check_alive(self) -> None:
        if self._members.closing:
            raise EngineDeadError("the engine was closed")
        if not len(self._members):
            raise EngineDeadError("there is no replica left")

    def get_tokenizer(self) -> Any:
        """The Transformers tokenizer. Raises ConfigError if there is none."""
        if self._tokenizer is None:
            raise ConfigError("the engine has no tokenizer (skip_tokenizer_init)")
        return self._tokenizer

    def books(self) -> list[Books]:
        """The books of every present replica, under its number."""
        return self._members.books()

    def stats(self) -> EngineStats:
        """Sums over the replicas that are there. Raises EngineDeadError if none is."""
        found = self.books()
        if not found:
            raise EngineDeadError("there is no replica left")
        return total([books.stats for books in found])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks of all replicas; False if one has requests that hold some, or does not answer."""
        done = True
        for replica in self._members:
            try:
                done &= replica.process.order("reset_prefix_cache", timeout=_RESET_TIMEOUT)
            except (TimeoutError, EngineDeadError):
                done = False
        return done

    def check_integrity(self) -> None:
        """Raise AssertionError if the books of an engine do not agree."""
        for replica in self._members:
            replica.process.order("check_integrity")

    # -------------------------------------------------------------------------------------------- life cycle

    def close(self) -> None:
        """End all replicas; running requests end with EngineDeadError at their readers. Closing twice is fine."""
        self._workers.close()
        self._members.close()

    def after_fork_in_child(self) -> None:
        """The replicas are the parent's."""
        self._members.forked()
