"""State that all endpoints need, and the steps that they share."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request

from draftwise.encoding import encode_text
from draftwise.engine.detokenizer import bytes_of_token
from draftwise.engine.limits import check_prompt
from draftwise.engine.outputs import RequestOutput
from draftwise.engine.workers import Lane, Workers
from draftwise.errors import ConfigError, shown
from draftwise.sampling.params import SamplingParams
from draftwise.server.adapter_names import ServedAdapters
from draftwise.server.admission import Admission
from draftwise.server.body import Bodies
from draftwise.server.config import ServerConfig
from draftwise.server.engine import ServedEngine
from draftwise.server.errors import APIError, bad_request
from draftwise.server.generation import Generation, Prompt
from draftwise.server.protocol import Body, GeneratingBody
from draftwise.server.spans import Spans
from draftwise.server.sse import unless_gone

_SMALL = 4096
"""Bytes of a body up to which the work with it, a few milliseconds at most, is done in the event loop. Handing it to a
thread costs a tenth of one."""

_LARGE = 1 << 18
"""Bytes of a body whose objects leave gaps in memory that are worth giving back."""

T = TypeVar("T")
B = TypeVar("B", bound=Body)
Prepared = tuple[Sequence[Prompt], SamplingParams]


class Context:
    """One server: its engine, its settings, and the admitted requests."""

    def __init__(self, engine: ServedEngine, config: ServerConfig, spans: Spans | None = None) -> None:
        self.engine = engine
        self.spans = spans
        self.config = config
        places = (engine.config.max_num_seqs or 64) * engine.config.data_parallel_size
        self.admission = Admission(engine, config, places)
        self.created = int(time.time())
        self.adapters = ServedAdapters(config.lora_modules)
        self.token_text = functools.lru_cache(maxsize=65536)(self._token_text)
        self.limits = engine.config.request_limits
        self._bodies = Bodies(config, self.limits, engine.max_model_len)
        self._workers = Workers()
        self.num_large_bodies = 0  # so far

    async def parse(self, kind: type[B], request: Request) -> B:
        """The body of a request, checked. Raises APIError (400, 413), LimitError."""
        # Not `Request.body`, which keeps the bytes for as long as the answer takes.
        data = b"".join([piece async for piece in request.stream()])
        self.num_large_bodies += len(data) >= _LARGE
        return await self._work_for(request, len(data), functools.partial(self._bodies.parse, kind, data))

    async def work(self, size: int, function: Callable[[], T]) -> T:
        """Call a function: directly if ``size`` bytes are few, else in one of two threads, so that streams go on."""
        if size < _SMALL:
            return function()
        return await self._workers.submit(Lane.TEXT, function)

    async def _work_for(self, request: Request, size: int, function: Callable[[], T]) -> T:
        """`work` that is dropped if the client leaves before it began. Raises ClientGone."""
        if size < _SMALL:
            return function()
        return await unless_gone(request, self.work(size, function))

    async def give_back_memory(self, trim: Callable[[], object], interval: float) -> None:
        """Call ``trim`` in a thread after large bodies, every ``interval`` seconds at most. Never returns."""
        seen = 0
        while True:
            await asyncio.sleep(interval)
            if self.num_large_bodies != seen:
                seen = self.num_large_bodies
                await self._workers.submit(Lane.TEXT, trim)

    def close(self) -> None:
        """Drop work that has not begun."""
        self._workers.close()

    @property
    def tokenizer(self) -> Any | None:
        """None if the engine has none."""
        try:
            return self.engine.get_tokenizer()
        except ConfigError:
            return None

    def need_tokenizer(self) -> Any:
        """Raises APIError (400) without one."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise bad_request("this server has no tokenizer (skip_tokenizer_init): send prompts as token ids")
        return tokenizer

    def _token_text(self, token_id: int) -> str:
        tokenizer = self.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([token_id]))

    def token_bytes(self, token_id: int) -> bytes:
        """A token's bytes. Needs a tokenizer."""
        return bytes_of_token(self.need_tokenizer(), token_id)

    @property
    def names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [*self.config.model_names, *(module.lora_name for module in self.adapters.all)]

    def model_name(self, asked: str | None) -> str:
        """The model's name for the answer. Raises APIError (404) for a model that is not served."""
        if asked is None or asked == "":
            return self.config.model_names[0]
        if asked not in self.names:
            names = ", ".join(self.names)
            raise APIError(
                404,
                f"the model {asked[:200]!r} does not exist; there is {names}",
                param="model",
                code="model_not_found",
            )
        return asked

    async def start(
        self,
        request: Request,
        body: GeneratingBody,
        prepare: Callable[[], Prepared],
        *,
        num_samples: int,
        request_id: str,
        keep_trace: bool = False,
        operation: str = "text_completion",
    ) -> Generation:
        """Admit, prepare and queue. ``prepare`` makes prompts and parameters, perhaps in a thread; ``num_samples``:
        prompts times n. ``operation`` is for `Spans`. Raises APIError, RequestError."""
        timeout, priority = body.timeout, body.priority
        if timeout is not None and not 0.001 <= timeout < 1e9:
            raise bad_request(f"timeout is {shown(timeout)}; it must be seconds, at least 0.001", "timeout")
        if priority is not None and abs(priority) > 1 << 53:
            raise bad_request("priority is out of range", "priority")
        lora_request = self.adapters.get(
            body.model
        )  # before anything is awaited: it may be unloaded meanwhile
        ticket = self.admission.enter(num_samples)
        try:
            prompts, params = await self._work_for(request, body.size, prepare)
        except BaseException:
            ticket.release()
            raise
        generation = Generation(
            self.engine,
            prompts,
            params,
            request_id=request_id,
            priority=priority or 0,
            timeout=self.config.request_timeout if timeout is None else timeout,
            keep_trace=keep_trace,
            lora_request=lora_request,
            on_close=ticket.release,
            spans=None
            if self.spans is None
            else self.spans.request(request.headers, operation, request_id, params),
        )
        await generation.ready(request)
        return generation

    def encode(self, text: str, special_tokens: bool = True, name: str = "prompt") -> list[int]:
        """Token ids of a text; ``name``: the field it stands in. Long work. Raises APIError without a tokenizer,
        LimitError, RequestError."""
        tokenizer = self.need_tokenizer()
        check_prompt(self.limits, text, self.engine.max_model_len, name)
        return encode_text(tokenizer, text, name, special_tokens)

    def truncated(self, prompt: dict[str, Any], count: int | None, max_tokens: int | None) -> dict[str, Any]:
        """The end of a prompt: ``count`` tokens of it, -1: what leaves room for ``max_tokens``. Raises APIError."""
        if count is None:
            return prompt
        if count < -1 or count == 0:
            raise bad_request(
                f"truncate_prompt_tokens is {count}; it must be -1 or at least 1", "truncate_prompt_tokens"
            )
        room = count if count > 0 else max(1, self.engine.max_model_len - max(1, max_tokens or 1))
        ids = prompt["prompt_token_ids"]
        return prompt if len(ids) <= room else {"prompt_token_ids": ids[-room:]}

    def tokens_as_ids(self, asked: bool | None) -> bool:
        """Whether log-probabilities name tokens by their ids."""
        return self.config.return_tokens_as_token_ids if asked is None else asked

    def check_salt(self, salt: str | None) -> None:
        """Raises APIError for a ``cache_salt`` if requests share prefixes."""
        if salt is not None and self.engine.config.enable_prefix_caching:
            raise bad_request(
                "cache_salt is not supported: prefixes are shared by all requests, or by none with "
                "--enable-prefix-caching false",
                "cache_salt",
                "unsupported_parameter",
            )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> dict[str, Any]:
        """Messages -> prompt of token ids. Long work. Raises APIError, RequestError."""
        self.need_tokenizer()
        if chat_template is not None and not self.config.trust_request_chat_template:
            raise bad_request(
                "chat_template: this server takes no templates from requests (--trust-request-chat-template)",
                "chat_template",
            )
        return self.engine.apply_chat_template(
            messages,
            chat_template=chat_template or self.config.chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_options={**self.config.default_chat_template_kwargs, **(template_options or {})},
        )


def new_id(prefix: str, given: str | None = None) -> str:
    return f"{prefix}-{given if given else uuid.uuid4().hex}"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def size_of(outputs: Sequence[RequestOutput]) -> int:
    """About how many bytes an answer will have."""
    size = 0
    for output in outputs:
        for completion in output.outputs:
            size += len(completion.text) + 16 * len(completion.token_ids) + _entries(completion.logprobs)
        size += _entries(output.prompt_logprobs)
    return size


def _entries(positions: Sequence[Mapping[int, Any] | None] | None) -> int:
    return 0 if not positions else 64 * len(positions) * len(positions[-1] or ())


def usage_of(outputs: Sequence[RequestOutput], hidden: int = 0) -> dict[str, Any]:
    """Usage of finished outputs; ``hidden``: tokens that were generated but are not part of the answer."""
    return usage(
        sum(len(o.prompt_token_ids) for o in outputs),
        sum(len(c.token_ids) for o in outputs for c in o.outputs) - hidden,
        sum(o.num_cached_tokens for o in outputs),
    )


def metrics_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The answer's ``metrics``: of one prompt, or a list with one entry per prompt."""
    if len(outputs) == 1:
        return outputs[0].metrics.as_dict()
    return {"prompts": [o.metrics.as_dict() for o in outputs]}
