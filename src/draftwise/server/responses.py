"""``/v1/responses``: text and function calls of OpenAI's Responses API. Nothing is stored, so that a client sends the
conversation so far with every request."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftwise.engine.group import TextPiece
from draftwise.engine.outputs import RequestOutput
from draftwise.server.context import Context, Prepared, metrics_of, new_id
from draftwise.server.errors import bad_request
from draftwise.server.generation import Generation
from draftwise.server.params import responses_params
from draftwise.server.protocol import ResponsesBody
from draftwise.server.reader import AnswerReader, Reading, reading_of
from draftwise.server.response_items import OutputItems, input_messages, response_tools
from draftwise.server.sse import EventStream, event, unless_gone
from draftwise.server.tool_formats import ToolParser
from draftwise.server.tool_parsers import parser_class
from draftwise.server.tools import forced_call_errors


async def responses(context: Context, request: Request, body: ResponsesBody) -> Response:
    """Answer a request. Raises APIError, RequestError."""
    model = context.model_name(body.model)
    if body.previous_response_id is not None:
        raise bad_request(
            "previous_response_id: this server stores no answers; send the conversation so far in input",
            "previous_response_id",
            "unsupported_parameter",
        )
    plan = response_tools(body.tools, body.tool_choice)
    parser = parser_class(context.config.tool_call_parser)
    options = _template_options(body)

    def prepare() -> Prepared:
        messages = input_messages(body.instructions, body.input)
        prompt = context.render_chat(messages, tools=plan.shown, template_options=options)
        reading = reading_of(context, prompt, None)
        answer.read(reading, plan.parser(parser, only_one=body.parallel_tool_calls is False))
        marked = reading.special_tokens or (plan.parse and parser.special_tokens)
        return [prompt], reading.params(responses_params(body, plan.schema, special_tokens=marked))

    answer = _Answer(body, model, context.token_text)
    with forced_call_errors(plan):
        generation = await context.start(
            request, body, prepare, num_samples=1, request_id=answer.id, operation="chat"
        )
    if body.stream:
        return EventStream(answer.events(generation), generation.close)
    try:
        outputs = await unless_gone(request, generation.final())
    finally:
        generation.close()
    completion = outputs[0].outputs[0]
    answer.items.begin()
    answer.items.push(completion.text)
    answer.items.finish(completion.finish_reason == "length")
    return JSONResponse(
        answer.whole(outputs[0], len(completion.token_ids), answer.count(completion.token_ids))
    )


def _template_options(body: ResponsesBody) -> dict[str, Any]:
    """Variables of the template that the request sets. Raises APIError for parts of an answer that there are not."""
    # Of tools and of reasoning, which no answer has; and a stream of what there is tells all of it.
    if "message.output_text.logprobs" in (body.include or ()):
        raise bad_request("include: there are no logprobs here", "include", "unsupported_parameter")
    effort = (body.reasoning or {}).get("effort")
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise bad_request("reasoning: effort must be text", "reasoning")
    return {"reasoning_effort": effort}


class _Answer:
    def __init__(self, body: ResponsesBody, model: str, token_text: Callable[[int], str]) -> None:
        self.id = new_id("resp")
        self.items = OutputItems(None)  # until the prompt is known
        self._reading = Reading()
        self._token_text = token_text
        self._body = body
        choice = body.tool_choice
        self._base: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": body.text or {"format": {"type": "text"}},
            "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
            "tool_choice": "auto" if choice is None else choice,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "metadata": body.metadata or {},
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "truncation": "disabled",
            "background": False,
            "error": None,
        }

    def read(self, reading: Reading, tools: ToolParser | None) -> None:
        """How the answer is read. Once, before it begins."""
        self._reading = reading
        plain = tools is None and reading.reasoning is None
        self.items = OutputItems(None if plain else AnswerReader(reading.parser(), tools))

    def count(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens are reasoning."""
        return self._reading.count(token_ids, self._token_text)

    def _begun(self) -> dict[str, Any]:
        more: dict[str, Any] = {
            "status": "in_progress",
            "output": [],
            "usage": None,
            "incomplete_details": None,
        }
        return {**self._base, **more}

    def whole(self, output: RequestOutput, num_tokens: int, num_thoughts: int) -> dict[str, Any]:
        """The answer, whose items are complete; ``output``: the last one of the generation."""
        cut = output.outputs[0].finish_reason == "length"
        answer: dict[str, Any] = {
            **self._base,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.items.output,
            "usage": {
                "input_tokens": len(output.prompt_token_ids),
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": num_tokens,
                "output_tokens_details": {"reasoning_tokens": num_thoughts},
                "total_tokens": len(output.prompt_token_ids) + num_tokens,
            },
        }
        if self._body.return_metrics:
            answer["metrics"] = metrics_of([output])
        return answer

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        number = 0

        def say(name: str, fields: dict[str, Any]) -> bytes:
            nonlocal number
            number += 1
            return event({"type": name, "sequence_number": number - 1, **fields}, name)

        yield say("response.created", {"response": self._begun()})
        yield say("response.in_progress", {"response": self._begun()})
        for one in self.items.begin():
            yield say(*one)
        num_tokens = 0
        counter = self._reading.counter(self._token_text)
        thinks = self._reading.reasoning is not None
        last: RequestOutput | None = None
        async for _, output in generation.outputs() if thinks else generation.pieces():
            if isinstance(output, TextPiece):
                text, new = output
            else:
                last, text, new = output, output.outputs[0].text, len(output.outputs[0].token_ids)
                if thinks:
                    counter.add(output.outputs[0].token_ids)
            num_tokens += new
            for one in self.items.push(text):
                yield say(*one)
        assert last is not None
        for one in self.items.finish(last.outputs[0].finish_reason == "length"):
            yield say(*one)
        whole = self.whole(last, num_tokens, counter.count)
        yield say(f"response.{whole['status']}", {"response": whole})
