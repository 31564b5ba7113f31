"""From bodies to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from draftwise.sampling.params import SamplingParams
from draftwise.server.config import ServerConfig
from draftwise.server.errors import bad_request
from draftwise.server.protocol import (
    SAMPLING_FIELDS,
    ChatBody,
    CompletionBody,
    MessagesBody,
    ResponsesBody,
    SamplingBody,
)


def completion_params(body: CompletionBody, config: ServerConfig) -> SamplingParams:
    """Raises APIError or RequestError. ``max_tokens`` 0 with ``echo`` generates one token, which is not shown."""
    if body.suffix:
        raise bad_request("suffix is not supported", "suffix", "unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad_request("best_of is supported only when it equals n", "best_of", "unsupported_parameter")
    more: dict[str, Any] = {"max_tokens": body.max_tokens, "logprobs": body.logprobs}
    if body.echo:
        if body.max_tokens == 0:
            more["max_tokens"] = 1
            if body.min_tokens:
                raise bad_request("min_tokens is over max_tokens (0)", "min_tokens")
        if body.logprobs is not None and body.prompt_logprobs is None:
            more["prompt_logprobs"] = body.logprobs
    return _params(body, config, more)


def chat_params(
    body: ChatBody,
    config: ServerConfig,
    structured: Mapping[str, Any] | None,
    *,
    special_tokens: bool = False,
) -> SamplingParams:
    """``structured``: what a forced tool call constrains the output to; ``special_tokens``: they are needed in the
    text, unless the request says that it wants none. Raises APIError or RequestError."""
    _check_limit("max_completion_tokens", body.max_completion_tokens)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    more: dict[str, Any] = {"max_tokens": limit}
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.logprobs:
        more["logprobs"] = top = body.top_logprobs or 0
        if not 0 <= top <= config.max_logprobs:
            raise bad_request(
                f"top_logprobs is {top}; it must be in 0..{config.max_logprobs}", "top_logprobs"
            )
    if structured is not None:
        more["structured_outputs"] = structured
    if special_tokens and body.skip_special_tokens is None:
        more["skip_special_tokens"] = False
    return _params(body, config, more)


def responses_params(
    body: ResponsesBody, forced: Mapping[str, Any] | None, *, special_tokens: bool = False
) -> SamplingParams:
    """``forced``: the schema of a forced call; ``special_tokens``: they are needed in the text. Raises APIError or
    RequestError."""
    _check_limit("max_output_tokens", body.max_output_tokens)
    given: dict[str, Any] = {"max_tokens": body.max_output_tokens}
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "speculation"):
        if getattr(body, name) is not None:
            given[name] = getattr(body, name)
    form = (body.text or {}).get("format") or {}
    if not isinstance(form, Mapping):
        raise bad_request("text.format: expected an object", "text.format")
    if form:
        # Responses writes the schema beside its type, chat completions below "json_schema".
        if form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        structured = structured_of(form, "text.format")
        if structured is not None and forced is not None:
            raise bad_request("text.format and a forced call contradict each other", "tool_choice")
        if structured is not None:
            given["structured_outputs"] = structured
    if forced is not None:
        # Arguments of a call are parsed, not shown: no white space that a model might never end.
        given["structured_outputs"] = {"json": forced, "disable_any_whitespace": True}
    if special_tokens:
        given["skip_special_tokens"] = False
    return SamplingParams(output_kind="delta" if body.stream else "final_only", **given)


def messages_params(
    body: MessagesBody, forced: Mapping[str, Any] | None, *, special_tokens: bool = False
) -> SamplingParams:
    """``forced``: the schema of a forced call; ``special_tokens``: they are needed in the text. Raises APIError or
    RequestError."""
    _check_limit("max_tokens", body.max_tokens)
    if not all(body.stop_sequences or ()):
        raise bad_request("stop_sequences: expected non-empty texts", "stop_sequences")
    given: dict[str, Any] = {"max_tokens": body.max_tokens, "stop": body.stop_sequences or ()}
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "speculation"):
        if getattr(body, name) is not None:
            given[name] = getattr(body, name)
    form = (body.output_config or {}).get("format")
    if form is not None:
        if not isinstance(form, Mapping) or form.get("type") != "json_schema":
            raise bad_request("output_config: format must be of type json_schema", "output_config")
        if forced is not None:
            raise bad_request("output_config.format and a forced call contradict each other", "tool_choice")
        given["structured_outputs"] = structured_of(
            {"type": "json_schema", "json_schema": form}, "output_config.format"
        )
    if forced is not None:
        given["structured_outputs"] = {"json": forced, "disable_any_whitespace": True}
    if special_tokens:
        given["skip_special_tokens"] = False
    return SamplingParams(output_kind="delta" if body.stream else "final_only", **given)


def _check_limit(name: str, value: int | None) -> None:
    """``name``: what the client calls the most tokens of an answer. Raises APIError."""
    if value is not None and value < 1:
        raise bad_request(f"{name} is {value}; it must be at least 1", name)


def _params(body: SamplingBody, config: ServerConfig, more: Mapping[str, Any]) -> SamplingParams:
    given = {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    given.update(more)
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    for name in ("logprobs", "prompt_logprobs"):
        value = given.get(name)
        if value is not None and not 0 <= value <= config.max_logprobs:
            raise bad_request(f"{name} is {value}; it must be in 0..{config.max_logprobs}", name)
    if body.response_format is not None:
        structured = structured_of(body.response_format, "response_format")
        if structured is not None and "structured_outputs" in given:
            raise bad_request(
                "response_format and structured_outputs contradict each other", "response_format"
            )
        if structured is not None:
            given["structured_outputs"] = structured
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs cannot be streamed", "prompt_logprobs")
    kind: Literal["delta", "final_only"] = "delta" if body.stream else "final_only"
    return SamplingParams(output_kind=kind, **given)


def structured_of(form: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """``response_format`` as `SamplingParams.structured_outputs`; None for plain text. Raises APIError."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        holder = form.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise bad_request(f"{name}: json_schema needs a schema (a JSON object)", name)
        return {"json": schema}
    raise bad_request(f"{name}: type is {kind!r}; it must be text, json_object or json_schema", name)
