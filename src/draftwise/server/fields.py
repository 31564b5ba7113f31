"""Names of fields: those of other servers with their meaning here, those without effect, and unknown ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from draftwise.errors import suggest
from draftwise.server.errors import APIError, bad_request

logger = logging.getLogger("draftwise.server")

Object = dict[str, Any]

NO_EFFECT = frozenset(
    {
        # of OpenAI's service: its accounts, its storage, its scheduling
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
        # of Anthropic's
        "cache_control",
        "diagnostics",
        "inference_geo",
        "speed",
        "user_profile_id",
        "workspace_id",
        # of other servers: how they work inside
        "cache_prompt",
        "guided_decoding_backend",
        "include_reasoning",
        "length_penalty",
    }
)
"""Fields that are accepted without effect. Prefixes are always cached; ``length_penalty`` is of beam search alone."""

_OFF: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (None, False),
    "early_stopping": (None, False),
    "vllm_xargs": (None, {}),
}
"""Fields of vLLM for missing features, and the values that ask for nothing."""

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""vLLM's names before ``structured_outputs``."""


def translate(body: Object, known: Mapping[str, Any]) -> Object:
    """A body whose fields of other servers have become ours; ``known``: the names that its kind has.

    Example: {"n_predict": 8, "enable_thinking": false} is {"max_tokens": 8, "chat_template_kwargs":
    {"enable_thinking": false}}. Raises APIError (400) for two that contradict each other.
    """
    if body.keys() <= known.keys():
        return body
    out = dict(body)
    if "n_predict" in out and "max_tokens" in known:
        limit = out.pop("n_predict")
        if limit is not None:
            _put(out, "max_tokens", None if limit == -1 else limit, "n_predict")
    if "enable_thinking" in out and "chat_template_kwargs" in known:
        _put_inside(
            out, "chat_template_kwargs", "enable_thinking", out.pop("enable_thinking"), "enable_thinking"
        )
    if "structured_outputs" in known:
        for name, inner in _GUIDED.items():
            if name in out and (value := out.pop(name)) is not None:
                _put_inside(out, "structured_outputs", inner, value, name)
    for name, values in _OFF.items():
        if name in out and "temperature" in known and out.pop(name) not in values:
            raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
    return out


def _put(out: Object, name: str, value: Any, given: str) -> None:
    if out.get(name) is not None:
        raise bad_request(f"{given} and {name} mean the same; give one of them", given)
    out[name] = value


def _put_inside(out: Object, name: str, inner: str, value: Any, given: str) -> None:
    holder = out.get(name)
    if holder is None:
        holder = {}
    if not isinstance(holder, dict):
        return  # the code that reads it reports the error
    if inner in holder:
        raise bad_request(f"{given} and {name}.{inner} mean the same; give one of them", given)
    out[name] = {**holder, inner: value}


class UnknownFields:
    """The policy for unknown fields: they are refused, or left out with a warning."""

    _MOST_WARNINGS = 100  # names that the log tells of, each once: a stranger may invent any number

    def __init__(self, refuse: bool) -> None:
        self._refuse = refuse
        self._told: set[str] = set()

    def remove(self, body: Object, known: Mapping[str, Any], refused: tuple[str, ...]) -> Object:
        """``body`` with known fields only; ``refused``: names of OpenAI's fields that this server does not support; a
        value that asks for nothing is accepted. Raises APIError (400) with the closest valid name."""
        if body.keys() <= known.keys():
            return body
        out: Object = {}
        for name, value in body.items():
            if name in known:
                out[name] = value
            elif name in refused:
                if value not in (None, False, 0, []):
                    raise bad_request(f"{name} is not supported", name, "unsupported_parameter")
            elif name not in NO_EFFECT:
                self._unknown(name, known)
        return out

    def _unknown(self, name: str, known: Mapping[str, Any]) -> None:
        short = name[:80]
        if self._refuse:
            raise APIError(
                400,
                f"unknown field {short!r}{suggest(short, known)} (--unknown-fields warn ignores it)",
                param=short,
                code="unknown_parameter",
            )
        if short not in self._told and len(self._told) < self._MOST_WARNINGS:
            self._told.add(short)
            logger.warning("unknown field %r of a request is ignored%s", short, suggest(short, known))
