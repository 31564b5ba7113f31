"""``/v1/responses``: the text part of OpenAI's Responses API. Nothing is stored, so nothing can be referred to."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftwise.engine.outputs import RequestOutput
from draftwise.server.chat import plain_messages
from draftwise.server.context import Context, metrics_of, new_id
from draftwise.server.errors import bad_request
from draftwise.server.generation import Generation
from draftwise.server.params import responses_params
from draftwise.server.protocol import ResponsesBody
from draftwise.server.sse import EventStream, event, unless_gone


async def responses(context: Context, request: Request, body: ResponsesBody) -> Response:
    """Answer a request. Raises APIError, RequestError."""
    model = context.model_name(body.model)
    params = responses_params(body)
    prompt = await context.render_chat(_messages(body))
    answer = _Answer(body, model)
    generation = context.start(
        [prompt],
        params,
        request_id=answer.id,
        priority=body.priority,
        timeout=body.timeout,
        operation="chat",
        headers=request.headers,
    )
    if body.stream:
        return EventStream(answer.events(generation), generation.close, context.config.send_timeout)
    try:
        outputs = await unless_gone(request, generation.final())
    finally:
        generation.close()
    return JSONResponse(answer.whole(outputs[0], outputs[0].outputs[0].text))


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """Instructions and input as chat messages. Raises APIError."""
    messages: list[Mapping[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for item in body.input:
            if item.get("type", "message") != "message":
                raise bad_request(f"input: items of type {item.get('type')!r} are not supported", "input")
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": item.get("content")})
    return plain_messages(messages)


class _Answer:
    def __init__(self, body: ResponsesBody, model: str) -> None:
        self.id = new_id("resp")
        self._item = new_id("msg")
        self._body = body
        self._base: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": body.text or {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "metadata": {},
            "error": None,
        }

    def _message(self, text: str, status: str) -> dict[str, Any]:
        content = (
            [{"type": "output_text", "text": text, "annotations": []}] if status != "in_progress" else []
        )
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _begun(self) -> dict[str, Any]:
        return {
            **self._base,
            "status": "in_progress",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }

    def whole(self, output: RequestOutput, text: str, num_tokens: int | None = None) -> dict[str, Any]:
        completion = output.outputs[0]
        tokens = len(completion.token_ids) if num_tokens is None else num_tokens
        cut = completion.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        answer: dict[str, Any] = {
            **self._base,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._message(text, status)],
            "usage": {
                "input_tokens": len(output.prompt_token_ids),
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens},
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": len(output.prompt_token_ids) + tokens,
            },
        }
        if self._body.return_metrics:
            answer["metrics"] = metrics_of([output])
        return answer

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        number = 0

        def say(name: str, **more: Any) -> bytes:
            nonlocal number
            number += 1
            return event({"type": name, "sequence_number": number - 1, **more}, name)

        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield say("response.created", response=self._begun())
        yield say("response.in_progress", response=self._begun())
        yield say("response.output_item.added", output_index=0, item=self._message("", "in_progress"))
        empty = {"type": "output_text", "text": "", "annotations": []}
        yield say("response.content_part.added", **place, part=empty)
        pieces: list[str] = []
        tokens = 0
        last: RequestOutput | None = None
        async for _, last in generation.outputs():
            piece = last.outputs[0].text
            tokens += len(last.outputs[0].token_ids)
            if piece:
                pieces.append(piece)
                yield say("response.output_text.delta", **place, delta=piece, logprobs=[])
        assert last is not None
        text = "".join(pieces)
        whole = self.whole(last, text, tokens)
        yield say("response.output_text.done", **place, text=text, logprobs=[])
        yield say("response.content_part.done", **place, part={**empty, "text": text})
        yield say("response.output_item.done", output_index=0, item=whole["output"][0])
        yield say(f"response.{whole['status']}", response=whole)
