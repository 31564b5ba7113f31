"""The forms of tool calls by name. Names are those of vLLM's ``--tool-call-parser``."""

from __future__ import annotations

from draftwise.errors import ConfigError, suggest
from draftwise.server.tool_formats import HermesParser, Llama3JsonParser, MistralParser, ToolParser
from draftwise.server.tool_pythonic import OlmoParser, PythonicParser
from draftwise.server.tool_sections import DeepSeekParser, HarmonyParser, KimiParser
from draftwise.server.tool_tags import GlmParser, MiniMaxParser, QwenCoderParser


class GraniteParser(MistralParser):
    """Granite 3: ``<|tool_call|>[{"name": ..., "arguments": {...}}]``."""

    MARK = "<|tool_call|>"


class Phi4Parser(MistralParser):
    """Phi-4-mini: ``functools[{"name": ..., "arguments": {...}}]``."""

    MARK = "functools"


PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "deepseek_v3": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
    "glm45": GlmParser,
    "glm47": GlmParser,
    "granite": GraniteParser,
    "kimi_k2": KimiParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "minimax_m2": MiniMaxParser,
    "mistral": MistralParser,
    "olmo3": OlmoParser,
    "openai": HarmonyParser,
    "phi4_mini_json": Phi4Parser,
    "pythonic": PythonicParser,
    "qwen3_coder": QwenCoderParser,
}


def parser_class(name: str) -> type[ToolParser]:
    """Raises ConfigError for a name that is not there."""
    if name not in PARSERS:
        names = ", ".join(PARSERS)
        raise ConfigError(f"tool_call_parser: expected one of {names}, got {name!r}{suggest(name, PARSERS)}")
    return PARSERS[name]
