"""The limits of one server with their values, for the page at ``/docs``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from draftwise.config import RequestLimits
from draftwise.server.config import ServerConfig

_SERVER: tuple[tuple[str, str, str], ...] = (
    ("max_header_size", "bytes of a request's first line and headers", "431"),
    ("max_headers", "headers of a request", "431"),
    ("header_timeout", "seconds for the headers of a request to come", "408"),
    ("max_body_size", "bytes of a body", "413"),
    ("body_timeout", "seconds for a body to come", "408"),
    ("max_body_memory", "bytes of bodies over 64 KiB, held at once for all requests", "429"),
    ("max_body_depth", "levels of nesting in a body", "400"),
    ("max_body_fields", "named fields in a body, all its objects together", "400"),
    ("max_body_values", "values in a body: members of its lists and objects", "400"),
    ("max_samples", "samples of a request: prompts times n", "400"),
    ("max_logprobs", "alternatives per token", "400"),
    ("max_concurrent", "requests being answered at once", "429"),
    ("max_queue", "samples that wait for the engine", "429"),
    ("request_timeout", "seconds for a request that names no deadline", "503"),
    ("send_timeout", "seconds for a client to leave an answer unread", "closed"),
)
"""The limit's name, its meaning, and the answer to a request over it."""


def listed(config: ServerConfig, limits: RequestLimits, max_model_len: int) -> list[dict[str, Any]]:
    """``{name, value, text, answer, option}`` of each limit; ``value`` None: there is none."""
    values: dict[str, Any] = {name: getattr(config, name) for name, _, _ in _SERVER}
    values["max_body_values"] = config.body_values(max_model_len)
    out = [
        {"name": name, "value": values[name], "text": text, "answer": answer, "option": _flag(name)}
        for name, text, answer in _SERVER
    ]
    for field in fields(RequestLimits):
        value = getattr(limits, field.name)
        if field.name == "max_prompt_chars":
            value = limits.prompt_chars(max_model_len)
        option = f"--request-limits '{{\"{field.name}\": ...}}'"
        text = field.metadata["help"]
        out.append({"name": field.name, "value": value, "text": text, "answer": "400", "option": option})
    return out


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
