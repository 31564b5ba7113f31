"""What every endpoint needs, and the steps that they share."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.engine.outputs import RequestOutput
from draftwise.errors import ConfigError
from draftwise.sampling.params import SamplingParams
from draftwise.server.admission import Admission
from draftwise.server.config import ServerConfig
from draftwise.server.engine import ServedEngine
from draftwise.server.errors import APIError, bad_request
from draftwise.server.generation import Generation, Prompt
from draftwise.server.spans import Spans

_LONG_TEXT = 16384
"""Characters from which on a text is tokenized in a thread, for milliseconds in which other streams go on."""


class Context:
    """One server: its engine, its settings, and who is in it."""

    def __init__(self, engine: ServedEngine, config: ServerConfig, spans: Spans | None = None) -> None:
        self.engine = engine
        self.spans = spans
        self.config = config
        self.admission = Admission(engine, config, engine.config.max_num_seqs or 64)
        self.created = int(time.time())
        self.token_text = functools.lru_cache(maxsize=65536)(self._token_text)

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
            raise bad_request("this server has no tokenizer (skip_tokenizer_init): prompts are token ids")
        return tokenizer

    def _token_text(self, token_id: int) -> str:
        tokenizer = self.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([token_id]))

    def model_name(self, asked: str | None) -> str:
        """The name in the answer. Raises APIError (404) for a model that is not served."""
        if asked is None or asked == "":
            return self.config.model_names[0]
        if asked not in self.config.model_names:
            names = ", ".join(self.config.model_names)
            raise APIError(
                404,
                f"the model {asked[:200]!r} does not exist; there is {names}",
                param="model",
                code="model_not_found",
            )
        return asked

    def start(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int | None,
        timeout: float | None,
        keep_trace: bool = False,
        operation: str = "text_completion",
        headers: Mapping[str, str] | None = None,
    ) -> Generation:
        """Admit and queue. ``operation`` and ``headers`` (of the HTTP request) are for `Spans`. Raises APIError,
        RequestError."""
        if timeout is not None and not 0 < timeout < 1e9:
            raise bad_request(f"timeout is {timeout:g}; it must be seconds above 0", "timeout")
        if priority is not None and abs(priority) > 1 << 53:
            raise bad_request("priority is out of range", "priority")
        ticket = self.admission.enter(len(prompts) * params.n)
        return Generation(
            self.engine,
            prompts,
            params,
            request_id=request_id,
            priority=priority or 0,
            timeout=self.config.request_timeout if timeout is None else timeout,
            keep_trace=keep_trace,
            on_close=ticket.release,
            spans=None
            if self.spans is None
            else self.spans.request(headers or {}, operation, request_id, params),
        )

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises APIError without a tokenizer."""
        tokenizer = self.need_tokenizer()
        if len(text) < _LONG_TEXT:
            return list(tokenizer.encode(text, add_special_tokens=special_tokens))
        return list(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special_tokens))

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> dict[str, Any]:
        """Messages -> prompt of token ids. Raises APIError, RequestError."""
        self.need_tokenizer()
        if chat_template is not None and not self.config.trust_request_chat_template:
            raise bad_request(
                "chat_template: this server takes no templates from requests (--trust-request-chat-template)",
                "chat_template",
            )
        render = functools.partial(
            self.engine.apply_chat_template,
            messages,
            chat_template=chat_template or self.config.chat_template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_options=template_options,
        )
        length = sum(len(content) for m in messages if isinstance(content := m.get("content"), str))
        return render() if length < _LONG_TEXT else await asyncio.to_thread(render)


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
