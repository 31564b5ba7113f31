"""``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftwise.engine.group import TextPiece
from draftwise.engine.outputs import CompletionOutput, RequestOutput
from draftwise.server.context import Context, Prepared, metrics_of, new_id, size_of, usage, usage_of
from draftwise.server.errors import bad_request
from draftwise.server.generation import Generation, Prompt
from draftwise.server.logprobs import CompletionLogprobs, prompt_logprobs
from draftwise.server.params import completion_params
from draftwise.server.protocol import CompletionBody
from draftwise.server.sse import DONE, EventStream, TextEvents, event, unless_gone
from draftwise.server.trace import Tracer, token_sources


async def completions(context: Context, request: Request, body: CompletionBody) -> Response:
    """Answer a request. Raises APIError, RequestError."""
    model = context.model_name(body.model)
    if body.stream and body.echo and body.logprobs is not None:
        raise bad_request("echo with logprobs cannot be streamed", "stream")
    prompts = _split(body)

    def prepare() -> Prepared:
        params = completion_params(body, context.config)
        return prompts_of(context, body, prompts), params

    answer = _Answer(context, body, model)
    generation = await context.start(
        request,
        body,
        prepare,
        num_samples=len(prompts) * (body.n or 1),
        request_id=answer.id,
        keep_trace=body.keep_trace,
    )
    if body.stream:
        return EventStream(answer.chunks(generation), generation.close)
    try:
        outputs = await unless_gone(request, generation.final())
    finally:
        generation.close()
    return await context.work(size_of(outputs), lambda: JSONResponse(answer.whole(outputs)))


def _split(body: CompletionBody) -> list[Any]:
    """The prompts of a body: a text, a list of texts, token ids, or a list of those. Raises APIError."""
    given = body.prompt
    if isinstance(given, str):
        many: list[Any] = [given]
    elif given and isinstance(given[0], int):
        many = [given]
    else:
        many = list(given)
    if not many:
        raise bad_request("prompt is empty", "prompt")
    return many


def prompts_of(context: Context, body: CompletionBody, many: Sequence[Any]) -> list[Prompt]:
    """Prompts with their token ids. Raises APIError, LimitError."""
    context.check_salt(body.cache_salt)
    out: list[Prompt] = []
    for one in many:
        if isinstance(one, str):
            ids = context.encode(one, body.add_special_tokens)
            prompt = {"prompt": one, "prompt_token_ids": ids}
        else:
            prompt = {"prompt_token_ids": one}
        out.append(context.truncated(prompt, body.truncate_prompt_tokens, body.max_tokens))
    return out


class _Answer:
    """One answer, whole or in chunks. Choice = prompt * n + sample."""

    def __init__(self, context: Context, body: CompletionBody, model: str) -> None:
        self.id = new_id("cmpl", body.request_id)
        self._context = context
        self._body = body
        self._n = body.n or 1
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._tracer = Tracer(context.token_text)
        self._hide = body.max_tokens == 0  # echo only: the one token that was generated is not shown

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._context.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(list(output.prompt_token_ids)))

    # ---------------------------------------------------------------------------------------------- whole

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices, trace = [], []
        for i, output in enumerate(outputs):
            for completion in output.outputs:
                index = i * self._n + completion.index
                choices.append(self._choice(index, output, completion))
                trace += self._tracer.steps(index, completion.trace)
        answer: dict[str, Any] = {**self._head, "choices": choices}
        answer["usage"] = usage_of(outputs, hidden=len(choices) if self._hide else 0)
        if self._body.return_metrics:
            answer["metrics"] = metrics_of(outputs)
        if self._body.return_trace:
            answer["trace"] = trace
        return answer

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        text, ids = ("", ()) if self._hide else (completion.text, completion.token_ids)
        choice: dict[str, Any] = {
            "index": index,
            "text": (self._prompt_text(output) if self._body.echo else "") + text,
            "logprobs": self._logprobs(output, completion),
            "finish_reason": "length" if self._hide else completion.finish_reason,
            "stop_reason": None if self._hide else completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = list(output.prompt_token_ids)
            choice["token_ids"] = list(ids)
        if self._body.return_token_sources:
            choice["token_sources"] = token_sources(completion.trace, len(ids))
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def _form(self) -> CompletionLogprobs:
        as_ids = self._context.tokens_as_ids(self._body.return_tokens_as_token_ids)
        return CompletionLogprobs(self._body.logprobs or 0, as_ids=as_ids)

    def _logprobs(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | None:
        if self._body.logprobs is None or completion.logprobs is None:
            return None
        form = self._form()
        pieces: dict[str, list[Any]] = form.piece(())
        if self._body.echo and output.prompt_logprobs is not None:
            text = self._context.token_text
            ids = output.prompt_token_ids
            pieces = form.piece(zip(ids, output.prompt_logprobs, map(text, ids), strict=True))
        if not self._hide:
            more = form.generated(completion.token_ids, completion.logprobs)
            pieces = {name: pieces[name] + more[name] for name in pieces}
        return pieces

    # --------------------------------------------------------------------------------------------- chunks

    def _texts(self, index: int, with_usage: bool) -> TextEvents:
        rest = {"usage": None} if with_usage else {}

        def chunk(text: str) -> dict[str, Any]:
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
            return {**self._head, "choices": [choice], **rest}

        return TextEvents(chunk)

    async def chunks(self, generation: Generation) -> AsyncIterator[bytes]:
        body, head, n = self._body, self._head, self._n
        options = body.stream_options
        with_usage = self._context.config.enable_force_include_usage or (
            options is not None and options.include_usage is True
        )
        running = options is not None and options.continuous_usage_stats is True
        forms: dict[int, CompletionLogprobs] = {}
        # Chunks of text and nothing else, which nearly all are, go a shorter way.
        short = not (
            body.keep_trace or body.return_token_ids or running or self._hide or body.logprobs is not None
        )
        per_token = body.return_token_ids or body.return_token_sources
        texts: dict[int, TextEvents] = {}
        done: set[int] = set()
        echoed: set[int] = set()
        prompt_tokens: dict[int, tuple[int, int]] = {}
        completion_tokens = 0
        plain = self._texts(0, with_usage)
        async for i, output in generation.pieces() if short else generation.outputs():
            if isinstance(output, TextPiece):
                completion_tokens += output.num_tokens
                if output.text:
                    yield plain(output.text)
                continue
            prompt_tokens[i] = (len(output.prompt_token_ids), output.num_cached_tokens)
            for completion in output.outputs:
                index = i * n + completion.index
                finish = completion.finish_reason
                if index in done:
                    continue
                text, ids = ("", ()) if self._hide else (completion.text, completion.token_ids)
                completion_tokens += len(ids)
                if short and text and finish is None and (not body.echo or index in echoed):
                    if index not in texts:
                        texts[index] = self._texts(index, with_usage)
                    yield texts[index](text)
                    continue
                choice: dict[str, Any] = {
                    "index": index,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": None,
                }
                if body.echo and index not in echoed:
                    choice["text"] = self._prompt_text(output) + text
                    echoed.add(index)
                if completion.logprobs and not self._hide:
                    form = forms.setdefault(index, self._form())
                    choice["logprobs"] = form.generated(completion.token_ids, completion.logprobs)
                if body.return_token_ids:
                    choice["token_ids"] = list(ids)
                if body.return_token_sources:
                    choice["token_sources"] = token_sources(completion.trace, len(ids))
                if finish is not None:
                    done.add(index)
                    choice["finish_reason"] = "length" if self._hide else finish
                    choice["stop_reason"] = None if self._hide else completion.stop_reason
                chunk: dict[str, Any] = {**head, "choices": [choice]}
                if body.return_trace:
                    chunk["trace"] = self._tracer.steps(index, completion.trace)
                elif not (choice["text"] or finish or choice["logprobs"] or per_token):
                    continue  # a step that completed no character
                if (
                    output.finished
                    and body.return_metrics
                    and all(i * n + c.index in done for c in output.outputs)
                ):
                    chunk["metrics"] = output.metrics.as_dict()
                if running:
                    chunk["usage"] = _sum(prompt_tokens, completion_tokens)
                elif with_usage:
                    chunk["usage"] = None
                yield event(chunk)
        if with_usage:
            yield event({**head, "choices": [], "usage": _sum(prompt_tokens, completion_tokens)})
        yield DONE


def _sum(prompt_tokens: dict[int, tuple[int, int]], completion_tokens: int) -> dict[str, Any]:
    counts = prompt_tokens.values()
    return usage(sum(p for p, _ in counts), completion_tokens, sum(c for _, c in counts))
