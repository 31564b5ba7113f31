"""Bodies of requests: OpenAI's fields, vLLM's, and those of this engine.

Three kinds of fields: those that do something; those of OpenAI's service which have no meaning here and are taken
without effect (`NO_EFFECT`, listed in the guide); and unknown ones, which are refused with the closest valid name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from draftwise.errors import suggest
from draftwise.server.errors import APIError, bad_request

TokenIds = list[StrictInt]
Number = StrictInt | StrictFloat
Object = dict[str, Any]

NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
    }
)
"""Fields of OpenAI's service about its accounts, its storage and its scheduling: taken, without effect here."""


class Body(BaseModel):
    """Base of all bodies: strict types, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    model: StrictStr | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage so far in every chunk
    include_obfuscation: bool = False  # OpenAI's padding against traffic analysis: not done here


class SamplingBody(Body):
    """Fields that become `SamplingParams`; None stands for "not given". Ranges are checked there."""

    n: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: list[StrictStr] | None = None
    prompt_logprobs: StrictInt | None = None
    skip_special_tokens: StrictBool | None = None
    spaces_between_special_tokens: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    structured_outputs: Object | None = None
    response_format: Object | None = None
    speculation: Object | None = Field(
        None,
        description="of this request: method, num_speculative_tokens, speculative_token_tree, "
        "speculative_dynamic_tree, rule",
    )

    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    priority: StrictInt | None = Field(None, description="lower values first")
    timeout: Number | None = Field(None, description="deadline in seconds")
    request_id: StrictStr | None = Field(None, max_length=256)
    return_token_ids: StrictBool | None = None
    return_metrics: StrictBool | None = None
    return_trace: StrictBool | None = Field(None, description="the draft tree of every step")


SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "allowed_token_ids",
    "bad_words", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "structured_outputs", "speculation",
)  # fmt: skip
"""Fields of `SamplingBody` that go to `SamplingParams` as they are."""


class CompletionBody(SamplingBody):
    prompt: StrictStr | TokenIds | list[StrictStr] | list[TokenIds]
    max_tokens: StrictInt | None = 16
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None
    add_special_tokens: StrictBool = True


class ChatBody(SamplingBody):
    messages: list[Object]
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    tools: list[Object] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    reasoning_effort: StrictStr | None = None
    modalities: list[StrictStr] | None = None
    REFUSED: ClassVar[tuple[str, ...]] = ("audio", "functions", "function_call", "web_search_options")


class ResponsesBody(Body):
    """Text and function calls of OpenAI's Responses API. Nothing is stored."""

    input: StrictStr | list[Object]
    instructions: StrictStr | None = None
    max_output_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    text: Object | None = None
    tools: list[Object] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: StrictStr | None = Field(None, description="refused: nothing is stored")
    stream: StrictBool | None = None
    seed: StrictInt | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    speculation: Object | None = None
    priority: StrictInt | None = None
    timeout: Number | None = None
    return_metrics: StrictBool | None = None
    REFUSED: ClassVar[tuple[str, ...]] = (
        "conversation", "background", "reasoning", "include", "prompt", "max_tool_calls", "top_logprobs",
        "stream_options",
    )  # fmt: skip


class TokenizeBody(Body):
    prompt: StrictStr | None = None
    messages: list[Object] | None = None
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    return_token_strs: StrictBool | None = None
    tools: list[Object] | None = None
    chat_template: StrictStr | None = None
    chat_template_kwargs: Object | None = None


class DetokenizeBody(Body):
    tokens: Annotated[TokenIds, Field(max_length=1_000_000)]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: bytes) -> B:
    """The body of a request. Raises APIError (400) that names the field."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        extra = {str(e["loc"][0]) for e in error.errors(include_url=False) if _is_extra(e)}
        if extra and not (extra - NO_EFFECT - _empty_refused(kind, data)):
            known = {k: v for k, v in json.loads(data).items() if k not in extra}
            return parse(kind, json.dumps(known).encode())
        raise _refusal(kind, error) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


def _is_extra(error: Any) -> bool:
    return error["type"] == "extra_forbidden" and len(error["loc"]) == 1


def _empty_refused(kind: type[Body], data: bytes) -> set[str]:
    """Fields that are refused with a value, and that clients send empty."""
    names = getattr(kind, "REFUSED", ())
    return {k for k, v in json.loads(data).items() if k in names and (v is None or v is False or v == [])}


def _refusal(kind: type[Body], error: ValidationError) -> APIError:
    details = error.errors(include_url=False, include_context=False)
    first = next((e for e in details if _is_extra(e) and e["loc"][0] not in NO_EFFECT), None)
    if first is not None:
        name = str(first["loc"][0])
        if name in getattr(kind, "REFUSED", ()):
            return bad_request(f"{name} is not supported", param=name, code="unsupported_parameter")
        hint = suggest(name, kind.model_fields)
        return bad_request(f"unknown field {name[:80]!r}{hint}", param=name[:80], code="unknown_parameter")
    first = next((e for e in details if not _is_extra(e)), details[0])
    if first["type"] == "json_invalid":
        return bad_request(f"the body is no valid JSON: {first['msg']}", code="invalid_json")
    location = [str(part) for part in first["loc"]]
    if not location:
        return bad_request("the body must be a JSON object")
    if first["type"] == "missing":
        return bad_request(f"{location[0]} is required", param=location[0], code="missing_required_parameter")
    # A union reports one error per alternative; all of them begin with the field.
    same = [e for e in details if e["loc"] and e["loc"][0] == first["loc"][0]]
    message = " or ".join(dict.fromkeys(str(e["msg"]) for e in same[:4]))
    return bad_request(f"{location[0]}: {message}", param=location[0])
