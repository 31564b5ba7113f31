"""`SamplingParams`: the parameters of one request. Plain data without torch, so that a command's ``--help`` is
quick."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from draftwise.encoding import TextEncoder, encode_text
from draftwise.errors import RequestError, shown, suggest
from draftwise.sampling.structured import StructuredOutputs

OutputKind = Literal["cumulative", "delta", "final_only"]
OUTPUT_KINDS: tuple[OutputKind, ...] = ("cumulative", "delta", "final_only")


class RequestOutputKind(enum.StrEnum):
    """vLLM's names of `SamplingParams.output_kind`; plain strings work as well."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


GREEDY_EPSILON = 1e-5
"""Temperatures below this decode greedily: dividing float32 logits by them would only produce infinities."""


class _Assignable:
    """Fields that may be assigned after construction, and are then checked like there."""

    __slots__ = ("_complete",)

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(self, "_complete"):  # being made
            object.__setattr__(self, name, value)
            return
        fields = self.__dataclass_fields__  # type: ignore[attr-defined]
        if name not in fields:
            raise RequestError(f"unknown sampling parameter {name!r}{suggest(name, fields)}")
        checked = dataclasses.replace(self, **{name: value})  # type: ignore[type-var]
        for field in fields:
            object.__setattr__(self, field, getattr(checked, field))

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Of a pickle: every request of a fleet is one, and its values were checked where it was made."""
        put = object.__setattr__
        for name, value in state[1].items():
            put(self, name, value)


@dataclass(slots=True)
class SamplingParams(_Assignable):
    """How one request is sampled; names, meanings and defaults are those of vLLM.

    A field may be assigned: ``params.max_tokens = 64``. A request keeps the values that it was given with.

    Order of work on the logits: penalties; bad words, allowed ids, grammar mask, ``min_tokens``;
    ``logit_bias``; ``logits_processors``; temperature; ``min_p``; ``top_k``; ``top_p``. All of it works
    together with speculation. Lists are accepted wherever a tuple is stored.

    Raises `RequestError` (a ValueError) that names the field, its value and what would be valid.
    """

    n: int = 1
    presence_penalty: float = 0.0  # in [-2, 2]; subtracted once for every token already in the output
    frequency_penalty: float = 0.0  # in [-2, 2]; subtracted per occurrence in the output
    repetition_penalty: float = (
        1.0  # in [0.001, 1000]; divides (positive) or multiplies logits of seen tokens
    )
    temperature: float = 1.0  # in [0, 1000000]; 0: greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # in [0, 1]; least probability relative to the most likely token
    seed: int | None = None  # None: drawn at admission
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: until the model's length is reached
    min_tokens: int = 0
    logprobs: int | None = (
        None  # alternatives per output token; 0: only the token's own; -1: whole vocabulary
    )
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logits_processors: tuple[
        Callable[..., Any], ...
    ] = ()  # fn(token_ids, logits [V] float32) -> logits, pure
    logit_bias: Mapping[int, float] | None = None  # token id -> [-100, 100]
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None  # or a mapping of its fields: {"json": {...}}
    output_kind: OutputKind = "cumulative"
    speculation: Mapping[str, Any] | None = (
        None  # per-request overrides; its keys are validated by the engine
    )
    extra_args: Mapping[str, Any] | None = None  # for plugins of vLLM; nothing here reads any

    def __post_init__(self) -> None:
        self._normalise()
        _check_int("n", self.n, low=1)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        # Beyond these, logits that are float32 become infinite or NaN.
        _check_number("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _check_number("temperature", self.temperature, 0.0, 1e6)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, low=-1)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        for name in _NUMBERS:  # 1, or one of numpy's: arithmetic on the logits is in floats
            value = getattr(self, name)
            if type(value) is not float:
                object.__setattr__(self, name, float(value))
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _invalid("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=-1)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "true or false")
        for name in ("stop", "bad_words"):
            if not all(isinstance(s, str) and s for s in getattr(self, name)):
                raise _invalid(name, getattr(self, name), "non-empty strings")
        if not all(callable(fn) for fn in self.logits_processors):
            raise _invalid(
                "logits_processors", self.logits_processors, "callables fn(token_ids, logits) -> logits"
            )
        _check_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise _invalid("allowed_token_ids", (), "at least one token id")
            _check_ids("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias:
            _check_ids("logit_bias", self.logit_bias)
            for token, bias in self.logit_bias.items():
                if type(bias) is not float or not -100.0 <= bias <= 100.0:
                    _check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.output_kind not in OUTPUT_KINDS:
            raise _invalid("output_kind", self.output_kind, f"one of {', '.join(OUTPUT_KINDS)}")
        if self.speculation is not None and not isinstance(self.speculation, Mapping):
            raise _invalid("speculation", self.speculation, 'a mapping such as {"method": "ngram"}')
        if self.extra_args:
            raise RequestError(
                "extra_args: nothing here reads them; give logits_processors, or leave them out"
            )
        object.__setattr__(self, "_complete", True)

    def _normalise(self) -> None:
        """Bring lists, single strings and JSON's string keys into the stored form."""
        put = object.__setattr__
        for name in _INTEGERS:
            put(self, name, _plain(getattr(self, name)))
        for name in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) and isinstance(value, numbers.Real):  # numpy's float32
                put(self, name, float(value))
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            put(self, name, (value,) if isinstance(value, str) else _as_tuple(name, value))
        for name in ("stop_token_ids", "logits_processors"):
            put(self, name, _as_tuple(name, getattr(self, name)))
        if isinstance(self.output_kind, RequestOutputKind):
            put(self, "output_kind", self.output_kind.value)
        if self.structured_outputs is not None:
            put(self, "structured_outputs", StructuredOutputs.from_value(self.structured_outputs))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids and not set(map(type, ids)) <= {int, bool}:
                put(self, name, tuple(map(_plain, ids)))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _invalid("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
            try:  # JSON objects have strings as keys
                items: Iterable[tuple[Any, Any]] = self.logit_bias.items()
                bias = {int(k) if isinstance(k, str) else _plain(k): v for k, v in items}
            except ValueError:
                raise _invalid("logit_bias", self.logit_bias, "a mapping from token ids to numbers") from None
            put(self, "logit_bias", bias)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from plain data; raises `RequestError` for an unknown name, with the closest valid one."""
        for name in values:
            if name not in cls.__dataclass_fields__:
                raise RequestError(
                    f"unknown sampling parameter {name!r}{suggest(name, cls.__dataclass_fields__)}"
                )
        return cls(**values)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """vLLM's name for parameters of which some may be None, which then have their defaults. ``max_tokens=None``
        means what it means everywhere: until the model's length is reached. Raises `RequestError`."""
        return cls.from_dict(
            {
                name: value
                for name, value in values.items()
                if value is not None or name not in _OPTIONAL or name == "max_tokens"
            }
        )

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed; validated again."""
        return dataclasses.replace(self, **changes)

    def clone(self) -> SamplingParams:
        """A copy, to be changed without touching this one."""
        return dataclasses.replace(self)

    @property
    def is_greedy(self) -> bool:
        """One token has all the probability: temperature 0, or top_k 1."""
        return self.temperature < GREEDY_EPSILON or self.top_k == 1

    def validate_for_vocab(self, vocab_size: int) -> None:
        """Raise `RequestError` if a field names a token id that the model does not have."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            largest = max(getattr(self, name) or (0,))
            if largest >= vocab_size:
                raise _invalid(name, largest, f"below the vocabulary size {vocab_size}")


_OPTIONAL = {*SamplingParams.__dataclass_fields__, "watermarking", "thinking_token_budget", "prompt_logprob_token_ids",
             "prompt_logprob_start", "logprob_token_ids", "stream_interval", "repetition_detection",
             "trace_decode_token_ids"}  # fmt: skip
"""What may be None for `SamplingParams.from_optional`; some are vLLM's alone."""
_NUMBERS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_BOOLEANS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def resolve_bad_words(tokenizer: TextEncoder, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences that must not be completed, for `SamplingState`.

    A word counts both at the start of a text and after a space; most tokenizers encode these differently
    ("word" and " word"), so each word gives one or two sequences. Raises `RequestError` for a word without
    tokens.
    """
    found: dict[tuple[int, ...], None] = {}  # a set that keeps the order
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tuple(encode_text(tokenizer, text, "bad_words", False))
            if not ids:
                raise _invalid("bad_words", word, "words that the tokenizer can encode")
            found[ids] = None
    return tuple(found)


def _plain(value: Any) -> Any:
    """An integer of numpy's, as of an array or its random numbers, as an int; anything else as it is."""
    if isinstance(value, int) or not isinstance(value, numbers.Integral):
        return value
    return operator.index(value)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _invalid(name, value, "a list")
    return tuple(value)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Without ``high``: the range of 64 bits."""
    valid = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= (high or _LARGEST):
        raise _invalid(name, value, valid)


_LARGEST = 2**63 - 1


def _check_ids(name: str, tokens: Collection[Any]) -> None:
    """Token ids; there may be hundreds of thousands."""
    if tokens and not (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) <= _LARGEST):
        for token in tokens:
            _check_int(name, token, low=0)


def _check_number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not low <= value <= high
        or (low_open and value == low)
    ):
        valid = f"a finite number in {'(' if low_open else '['}{low:.15g}, {high:.15g}]"
        raise _invalid(name, value, valid)


def _invalid(name: str, value: Any, valid: str) -> RequestError:
    return RequestError(f"{name} is {shown(value)}; it must be {valid}")
