"""Variables of chat templates that requests and settings may set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwise.server.errors import bad_request

_RESERVED = frozenset(
    {
        "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "padding",
        "truncation", "max_length", "tokenizer_kwargs", "processor_kwargs", "load_audio_from_video",
    }
)  # fmt: skip
"""Arguments of the rendering itself, which no request may set."""


def may_be_set(name: str) -> bool:
    """Whether it is a variable, and no argument of the rendering."""
    return name.isidentifier() and name not in _RESERVED and not name.startswith("return_")


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the template. Raises APIError for those that are arguments of its rendering."""
    for name in options:
        if not may_be_set(name):
            raise bad_request(f"chat_template_kwargs: {name[:80]!r} cannot be set", "chat_template_kwargs")
    return dict(options)
