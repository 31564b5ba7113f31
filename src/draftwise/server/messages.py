"""``/v1/messages``: text and functions of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftwise.engine.group import TextPiece
from draftwise.engine.outputs import RequestOutput
from draftwise.server.context import Context, Prepared, metrics_of
from draftwise.server.errors import APIError, bad_request
from draftwise.server.generation import Generation
from draftwise.server.message_blocks import MessageBlocks, chat_messages, message_tools, new_message_id
from draftwise.server.params import messages_params
from draftwise.server.protocol import CountTokensBody, MessagesBody
from draftwise.server.reader import AnswerReader, Reading, reading_of
from draftwise.server.sse import EventStream, event, unless_gone
from draftwise.server.template_options import checked_options
from draftwise.server.tool_parsers import parser_class
from draftwise.server.tools import ToolPlan, forced_call_errors


async def messages(context: Context, request: Request, body: MessagesBody) -> Response:
    """Answer a request. Raises APIError, RequestError."""
    model = context.model_name(body.model)
    plan, only_one = message_tools(body.tools, body.tool_choice)
    parser = parser_class(context.config.tool_call_parser)

    def prepare() -> Prepared:
        prompt, reading = _render(context, body, plan)
        marked = reading.special_tokens or (plan.parse and parser.special_tokens)
        params = reading.params(messages_params(body, plan.schema, special_tokens=marked), _budget(body))
        answer.num_prompt = len(prompt["prompt_token_ids"])
        answer.reader = AnswerReader(reading.parser(), plan.parser(parser, only_one=only_one))
        return [prompt], params

    answer = _Answer(body, model)
    with forced_call_errors(plan):
        generation = await context.start(
            request, body, prepare, num_samples=1, request_id=answer.id, operation="chat"
        )
    if body.stream:
        return EventStream(answer.events(generation), generation.close, _failed)
    try:
        outputs = await unless_gone(request, generation.final())
    finally:
        generation.close()
    return JSONResponse(answer.whole(outputs[0]))


async def count_tokens(context: Context, request: Request, body: CountTokensBody) -> Response:
    """``/v1/messages/count_tokens``. Raises APIError, RequestError."""
    context.model_name(body.model)
    plan, _ = message_tools(body.tools, body.tool_choice)
    prompt, _ = await context.work(body.size, lambda: _render(context, body, plan))
    return JSONResponse({"input_tokens": len(prompt["prompt_token_ids"])})


def _render(context: Context, body: CountTokensBody, plan: ToolPlan) -> tuple[dict[str, Any], Reading]:
    """The prompt, and the reader of the answer. A last message of the assistant is continued. Raises APIError,
    RequestError."""
    given = chat_messages(body.system, body.messages)
    continued = given[-1] if given and given[-1]["role"] == "assistant" else None
    if continued is not None and (not continued["content"] or "tool_calls" in continued):
        raise bad_request(
            "messages: the last one is the assistant's and has no text to be continued", "messages"
        )
    options = checked_options({**_template_options(body), **(body.chat_template_kwargs or {})})
    if continued is not None:
        options["continue_final_message"] = True
    prompt = context.render_chat(
        given, tools=plan.shown, template_options=options, add_generation_prompt=continued is None
    )
    return prompt, reading_of(context, prompt, continued)


def _template_options(body: CountTokensBody) -> dict[str, Any]:
    """Variables of the template. Raises APIError."""
    options: dict[str, Any] = {}
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise bad_request("thinking: type must be enabled, disabled or adaptive", "thinking")
        if kind != "adaptive":
            options["enable_thinking"] = kind == "enabled"
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise bad_request("output_config: effort must be text", "output_config")
        options["reasoning_effort"] = effort
    return options


def _budget(body: CountTokensBody) -> int | None:
    """Most tokens of thinking. Raises APIError."""
    if body.thinking is None or body.thinking.get("type") != "enabled":
        return None
    budget = body.thinking.get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise bad_request("thinking: budget_tokens must be an integer, at least 1", "thinking")
    return budget


def _failed(error: APIError) -> bytes:
    return event(error.messages_body(), "error")


class _Answer:
    """One answer, whole or in events."""

    def __init__(self, body: MessagesBody, model: str) -> None:
        self.id = new_message_id()
        self.num_prompt = 0  # until the prompt is known, as is how the answer is read
        self.reader = AnswerReader(None, None)
        self._body = body
        self._blocks = MessageBlocks()
        self._base: dict[str, Any] = {"id": self.id, "type": "message", "role": "assistant", "model": model}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer to a request that asked for no stream."""
        completion = output.outputs[0]
        self._blocks.push([*self.reader.push(completion.text), *self.reader.finish()])
        self._blocks.finish()
        usage = self._usage(output.num_cached_tokens, len(completion.token_ids))
        answer = {**self._base, "content": self._blocks.content, **self._stop(output), "usage": usage}
        if self._body.return_metrics:
            answer["metrics"] = metrics_of([output])
        return answer

    def _usage(self, cached: int, num_output: int) -> dict[str, int]:
        return {
            "input_tokens": self.num_prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": num_output,
        }

    def _stop(self, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        reason, sequence = "end_turn", None
        if completion.finish_reason == "length":
            reason = "max_tokens"
        elif self.reader.num_calls:
            reason = "tool_use"
        elif isinstance(completion.stop_reason, str):
            reason, sequence = "stop_sequence", completion.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """message_start, then per block content_block_start, _delta, _stop, then message_delta and message_stop."""

        def say(name: str, fields: dict[str, Any]) -> bytes:
            return event({"type": name, **fields}, name)

        begun = {**self._base, "content": [], "stop_reason": None, "stop_sequence": None}
        yield say("message_start", {"message": {**begun, "usage": self._usage(0, 0)}})
        num_output = 0
        last: RequestOutput | None = None
        async for _, output in generation.pieces():
            if isinstance(output, TextPiece):
                text, new = output
            else:
                last, text, new = output, output.outputs[0].text, len(output.outputs[0].token_ids)
            num_output += new
            for one in self._blocks.push(self.reader.push(text)):
                yield say(*one)
        assert last is not None
        for one in [*self._blocks.push(self.reader.finish()), *self._blocks.finish()]:
            yield say(*one)
        fields: dict[str, Any] = {
            "delta": self._stop(last),
            "usage": self._usage(last.num_cached_tokens, num_output),
        }
        if self._body.return_metrics:
            fields["metrics"] = metrics_of([last])
        yield say("message_delta", fields)
        yield say("message_stop", {})
