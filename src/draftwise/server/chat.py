"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftwise.engine.group import TextPiece
from draftwise.engine.outputs import CompletionOutput, RequestOutput
from draftwise.server.context import Context, Prepared, metrics_of, new_id, size_of, usage, usage_of
from draftwise.server.errors import bad_request
from draftwise.server.generation import Generation
from draftwise.server.logprobs import chat_logprobs, prompt_logprobs
from draftwise.server.params import chat_params
from draftwise.server.protocol import ChatBody
from draftwise.server.reader import AnswerReader, Reading, ThoughtCounter, joined, reading_of
from draftwise.server.sse import DONE, EventStream, TextEvents, event, unless_gone
from draftwise.server.template_options import checked_options
from draftwise.server.tool_parsers import parser_class
from draftwise.server.tools import (
    ToolPlan,
    delta_of,
    forced_call_errors,
    plan_tools,
    template_calls,
    whole_calls,
)
from draftwise.server.trace import Tracer, token_sources


async def chat(context: Context, request: Request, body: ChatBody) -> Response:
    """Answer a request. Raises APIError, RequestError."""
    model = context.model_name(body.model)
    if body.modalities is not None and body.modalities != ["text"]:
        raise bad_request("modalities: only text is supported", "modalities")
    if body.thinking_token_budget is not None and context.config.reasoning_parser is None:
        raise bad_request(
            "thinking_token_budget needs a server with --reasoning-parser",
            "thinking_token_budget",
            "unsupported_parameter",
        )
    plan = plan_tools(body.tools, body.tool_choice)
    # Arguments of a call are parsed, not shown: no white space that a model might never end.
    structured = None if plan.schema is None else {"json": plan.schema, "disable_any_whitespace": True}

    def prepare() -> Prepared:
        prompt, answer.reading = _render(context, body, plan)
        # Marks that are special tokens would not be in the text otherwise.
        marked = answer.reading.special_tokens or (
            plan.parse and parser_class(context.config.tool_call_parser).special_tokens
        )
        params = chat_params(body, context.config, structured, special_tokens=marked)
        return [prompt], answer.reading.params(params, body.thinking_token_budget)

    answer = _Answer(context, body, model, plan)
    with forced_call_errors(plan):
        generation = await context.start(
            request,
            body,
            prepare,
            num_samples=body.n or 1,
            request_id=answer.id,
            keep_trace=body.keep_trace,
            operation="chat",
        )
    if body.stream:
        return EventStream(answer.chunks(generation), generation.close)
    try:
        outputs = await unless_gone(request, generation.final())
    finally:
        generation.close()
    return await context.work(size_of(outputs), lambda: JSONResponse(answer.whole(outputs)))


def _render(context: Context, body: ChatBody, plan: ToolPlan) -> tuple[dict[str, Any], Reading]:
    """The prompt, and the reader of the answer. Raises APIError, RequestError."""
    context.check_salt(body.cache_salt)
    options = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        options.setdefault("documents", body.documents)
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    if body.continue_final_message:
        if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
            raise bad_request(
                "continue_final_message and add_generation_prompt contradict each other",
                "continue_final_message",
            )
        options["continue_final_message"] = True
    messages = plain_messages(body.messages)
    prompt = context.render_chat(
        messages,
        tools=plan.shown,
        chat_template=body.chat_template,
        template_options=checked_options(options),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
    )
    reading = reading_of(context, prompt, messages[-1] if body.continue_final_message else None)
    if body.add_special_tokens:
        prompt["prompt_token_ids"] = context.encode(prompt["prompt"], name="messages")
    limit = body.max_completion_tokens or body.max_tokens
    return context.truncated(prompt, body.truncate_prompt_tokens, limit), reading


def plain_messages(messages: Sequence[Mapping[str, Any]], field: str = "messages") -> list[dict[str, Any]]:
    """Messages whose content is text: lists of text parts are joined. ``field``: where they stand in the request.
    Raises APIError for other parts."""
    out = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise bad_request(f"{field}: every message needs a role", field)
        if isinstance(content, list):
            texts = []
            for part in content:
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind not in ("text", "input_text", "output_text", "refusal"):
                    raise bad_request(f"{field}: content of type {kind!r} is not supported, only text", field)
                text = part.get("text", part.get("refusal"))
                if not isinstance(text, str):
                    raise bad_request(f"{field}: a text part needs text", field)
                texts.append(text)
            content = "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise bad_request(f"{field}: content must be text or a list of parts", field)
        plain = {**message, "content": content if content is not None else ""}
        if isinstance(thought := message.get("reasoning"), str):  # templates know the older name
            plain.setdefault("reasoning_content", thought)
        if "tool_calls" in plain:
            plain["tool_calls"] = template_calls(plain["tool_calls"])
        out.append(plain)
    return out


class _Answer:
    """One answer, whole or in chunks."""

    def __init__(self, context: Context, body: ChatBody, model: str, plan: ToolPlan) -> None:
        self.id = new_id("chatcmpl", body.request_id)
        self._context = context
        self._body = body
        self._plan = plan
        self.reading = Reading()  # until the prompt is known
        self._model = model
        self._created = int(time.time())
        self._tracer = Tracer(context.token_text)
        last = body.messages[-1] if body.echo and body.messages else {}
        self._echo = ""
        if last.get("role") == "assistant":
            self._echo = str(plain_messages([last])[0]["content"])

    # ---------------------------------------------------------------------------------------------- whole

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        answer: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(c) for c in output.outputs],
            "usage": self._details(usage_of(outputs), sum(self._count(c.token_ids) for c in output.outputs)),
        }
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self._body.return_metrics:
            answer["metrics"] = metrics_of(outputs)
        if self._body.return_trace:
            answer["trace"] = [s for c in output.outputs for s in self._tracer.steps(c.index, c.trace)]
        return answer

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        reader = self._new_reader()
        thoughts, text, pieces = joined([*reader.push(completion.text), *reader.finish()])
        calls = whole_calls(pieces)
        text = self._echo + text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if thoughts and self._body.include_reasoning:
            message |= _reasoning(thoughts)
        finish = completion.finish_reason
        if calls:
            message["tool_calls"] = calls
            message["content"] = text or None
            finish = "tool_calls" if finish == "stop" else finish
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": self._logprobs(completion),
            "finish_reason": finish,
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(completion.token_ids)
        if self._body.return_token_sources:
            choice["token_sources"] = token_sources(completion.trace, len(completion.token_ids))
        return choice

    def _new_reader(self) -> AnswerReader:
        kind = parser_class(self._context.config.tool_call_parser)
        tools = self._plan.parser(kind, only_one=self._body.parallel_tool_calls is False)
        return AnswerReader(self.reading.parser(), tools)

    def _count(self, token_ids: Sequence[int]) -> int:
        return self.reading.count(token_ids, self._context.token_text)

    def _details(self, usage: dict[str, Any], num_thoughts: int) -> dict[str, Any]:
        """``usage`` with the number of reasoning tokens, if there is a reasoning parser."""
        if self.reading.reasoning is None:
            return usage
        return {**usage, "completion_tokens_details": {"reasoning_tokens": num_thoughts}}

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if not self._body.logprobs or completion.logprobs is None:
            return None
        return chat_logprobs(
            completion.token_ids,
            completion.logprobs,
            self._body.top_logprobs or 0,
            bytes_of=self._context.token_bytes,
            as_ids=self._context.tokens_as_ids(self._body.return_tokens_as_token_ids),
        )

    # --------------------------------------------------------------------------------------------- chunks

    async def chunks(self, generation: Generation) -> AsyncIterator[bytes]:
        body = self._body
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
        }
        options = body.stream_options
        with_usage = self._context.config.enable_force_include_usage or (
            options is not None and options.include_usage is True
        )
        running = options is not None and options.continuous_usage_stats is True
        # Chunks of text and nothing else, which nearly all are, go a shorter way.
        per_token = body.return_token_ids or body.return_token_sources
        read = self._plan.parse or self._plan.schema is not None or self.reading.reasoning is not None
        short = not (body.keep_trace or per_token or running or body.logprobs or read)
        texts: dict[int, TextEvents] = {}
        readers: dict[int, AnswerReader] = {}
        counters: dict[int, ThoughtCounter] = {}
        begun: set[int] = set()
        done: set[int] = set()
        prompt_tokens = completion_tokens = cached = 0
        plain = _texts(head, 0, with_usage)
        async for _, output in generation.pieces() if short else generation.outputs():
            if isinstance(output, TextPiece):
                completion_tokens += output.num_tokens
                if output.text:
                    yield plain(output.text)
                continue
            prompt_tokens, cached = len(output.prompt_token_ids), output.num_cached_tokens
            for completion in output.outputs:
                index, finish = completion.index, completion.finish_reason
                if index in done:
                    continue
                completion_tokens += len(completion.token_ids)
                text = completion.text
                if short and text and finish is None and index in begun:
                    if index not in texts:
                        texts[index] = _texts(head, index, with_usage)
                    yield texts[index](text)
                    continue
                delta: dict[str, Any] = {}
                if read:
                    if index not in readers:
                        readers[index] = self._new_reader()
                        counters[index] = self.reading.counter(self._context.token_text)
                    text, finish = self._read(readers[index], completion, delta)
                    if with_usage:
                        counters[index].add(completion.token_ids)
                if index not in begun:
                    text = self._echo + text
                if text:
                    delta["content"] = text
                if index not in begun:
                    begun.add(index)
                    delta = {"role": "assistant", "content": "", **delta}
                choice: dict[str, Any] = {
                    "index": index,
                    "delta": delta,
                    "logprobs": None,
                    "finish_reason": finish,
                }
                if completion.logprobs:
                    choice["logprobs"] = self._logprobs(completion)
                if body.return_token_ids:
                    choice["token_ids"] = list(completion.token_ids)
                if body.return_token_sources:
                    choice["token_sources"] = token_sources(completion.trace, len(completion.token_ids))
                if finish is not None:
                    done.add(index)
                    choice["stop_reason"] = completion.stop_reason
                chunk: dict[str, Any] = {**head, "choices": [choice]}
                if body.return_trace:
                    chunk["trace"] = self._tracer.steps(index, completion.trace)
                elif not (delta or finish or choice["logprobs"] or per_token):
                    continue  # a step that completed no character
                if output.finished and body.return_metrics and len(done) == len(output.outputs):
                    chunk["metrics"] = output.metrics.as_dict()
                if running:
                    chunk["usage"] = usage(prompt_tokens, completion_tokens, cached)
                elif with_usage:
                    chunk["usage"] = None
                yield event(chunk)
        if with_usage:
            thoughts = sum(counter.count for counter in counters.values())
            counts = self._details(usage(prompt_tokens, completion_tokens, cached), thoughts)
            yield event({**head, "choices": [], "usage": counts})
        yield DONE

    def _read(
        self, reader: AnswerReader, completion: CompletionOutput, delta: dict[str, Any]
    ) -> tuple[str, str | None]:
        """Put new reasoning and calls into ``delta``; returns (text, finish reason)."""
        found = reader.push(completion.text)
        finish = completion.finish_reason
        if finish is not None:
            found += reader.finish()
            if reader.num_calls and finish == "stop":
                finish = "tool_calls"
        thoughts, text, pieces = joined(found)
        if thoughts and self._body.include_reasoning:
            delta |= _reasoning(thoughts)
        if pieces:
            delta["tool_calls"] = [delta_of(piece) for piece in pieces]
        return text, finish


def _reasoning(text: str) -> dict[str, Any]:
    """Reasoning under both names: DeepSeek's, which older clients and vLLM use, and the newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _texts(head: dict[str, Any], index: int, with_usage: bool) -> TextEvents:
    rest = {"usage": None} if with_usage else {}

    def chunk(text: str) -> dict[str, Any]:
        choice = {"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
        return {**head, "choices": [choice], **rest}

    return TextEvents(chunk)
