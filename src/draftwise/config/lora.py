"""A LoRA adapter as a request names it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftwise.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in PEFT's format, as in vLLM: ``LoRARequest("sql", 1, "path/to/adapter")``.

    Raises:
        RequestError: a name or path is empty, or the number is no positive integer.
    """

    lora_name: str
    lora_int_id: int
    """The user's own number for it; requests with the same number mean the same adapter."""
    lora_path: str
    """Folder or hub id."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise RequestError(f"lora_request: {name} must be a text, not {value!r}")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RequestError(f"lora_request: lora_int_id must be an integer from 1 on, not {number!r}")


def parse_modules(given: Sequence[str]) -> tuple[LoRARequest, ...]:
    """``name=path``, or JSON ``{"name": ..., "path": ...}``, each.

    Raises:
        ConfigError: one is neither, or two have one name.
    """
    found: list[LoRARequest] = []
    for text in given:
        name: object
        path: object
        name, _, path = text.partition("=")
        if text.lstrip().startswith("{"):
            value = _object(text)
            name, path = value.get("name"), value.get("path")
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            raise ConfigError(f"lora_modules: expected name=path, got {text!r}")
        if any(module.lora_name == name for module in found):
            raise ConfigError(f"lora_modules: the name {name!r} is given twice")
        found.append(LoRARequest(name, len(found) + 1, path))
    return tuple(found)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {}
