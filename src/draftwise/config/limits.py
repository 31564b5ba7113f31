"""`RequestLimits`: how much one request may ask for before any work is done for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from draftwise.config import coerce as to
from draftwise.config.coerce import option
from draftwise.errors import ConfigError, suggest

CHARS_PER_TOKEN = 16
"""Characters of a prompt for each token of the model's length: text has 3 to 5, code with wide indents up to 8."""
LEAST_PROMPT_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on the parts of a request whose cost grows with their size. They hold for `LLM`, `AsyncLLM` and the server
    alike; each can be raised (``request_limits={"max_choices": "1M"}``). A request over a limit is refused with a
    `LimitError` that names it.

    Defaults leave room for what clients of other servers send (OpenAI: 4 stop strings, 1,024 biases, 1,000 enum
    values) and keep the preparation of one request under about a second. Sizes are in characters, times in seconds.

    Raises:
        ConfigError: a value is out of range.
    """

    max_prompt_chars: int | None = option(
        None,
        to.size(),
        f"characters of a prompt, before it is tokenized ({CHARS_PER_TOKEN} per token of max_model_len, "
        f"at least {LEAST_PROMPT_CHARS})",
    )
    max_messages: int = option(16_384, to.size(), "messages of a conversation")
    max_tools: int = option(1024, to.size(), "tools of a conversation")
    max_n: int = option(1024, to.size(), "samples of a prompt (n)")
    max_stop_strings: int = option(64, to.size(), "stop strings")
    max_stop_chars: int = option(16_384, to.size(), "characters of all stop strings together")
    max_stop_token_ids: int = option(16_384, to.size(), "stop_token_ids")
    max_bad_words: int = option(1024, to.size(), "bad_words")
    max_bad_words_chars: int = option(65_536, to.size(), "characters of all bad_words together")
    max_logit_bias: int = option(4096, to.size(), "entries of logit_bias")
    max_allowed_token_ids: int = option(262_144, to.size(), "allowed_token_ids")
    max_choices: int = option(10_000, to.size(), "strings of a choice")
    max_choice_chars: int = option(1_000_000, to.size(), "characters of all strings of a choice together")
    max_regex_chars: int = option(16_384, to.size(), "characters of a regular expression")
    max_grammar_chars: int = option(131_072, to.size(), "characters of a grammar")
    max_gbnf_chars: int = option(
        32_768, to.size(), "characters of a grammar in GBNF, which is translated first"
    )
    max_schema_chars: int = option(262_144, to.size(), "characters of a JSON schema")
    max_schema_depth: int = option(100, to.integer(1, 400), "levels of nesting in the JSON text of a schema")
    max_enum_values: int = option(10_000, to.size(), "enum values of a schema, all its enums together")
    max_grammar_seconds: float = option(
        10.0, to.number(0.01, 1e9), "seconds until the compilation of a schema, grammar or regex is given up"
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not f.default:
                value = f.default if value is None else f.metadata["to"](f.name, value)
                object.__setattr__(self, f.name, value)

    @classmethod
    def from_value(cls, name: str, value: Any) -> RequestLimits:
        """Build from user input: an instance, a mapping of some fields, or its JSON text. Raises `ConfigError`."""
        if isinstance(value, cls):
            return value
        given: Mapping[str, Any] = to.mapping(name, value)
        for field in given:
            if field not in LIMIT_NAMES:
                raise ConfigError(f"{name}: unknown limit {field!r}{suggest(str(field), LIMIT_NAMES)}")
        return cls(**given)

    def prompt_chars(self, max_model_len: int) -> int:
        """Characters that a prompt may have where prompt and output have at most ``max_model_len`` tokens."""
        if self.max_prompt_chars is not None:
            return self.max_prompt_chars
        return max(LEAST_PROMPT_CHARS, CHARS_PER_TOKEN * max_model_len)


LIMIT_NAMES: tuple[str, ...] = tuple(f.name for f in fields(RequestLimits))
