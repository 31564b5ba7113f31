"""SamplingParams: defaults, normalisation, and an error that helps for every invalid value."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from draftwise.errors import DraftwiseError, RequestError
from draftwise.sampling.params import SamplingParams, resolve_bad_words
from draftwise.sampling.structured import StructuredOutputs


def test_defaults() -> None:
    p = SamplingParams()
    assert (p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.n, p.seed) == (
        1.0,
        1.0,
        0,
        0.0,
        16,
        1,
        None,
    )
    assert not p.is_greedy and p.output_kind == "cumulative"


def test_lists_become_tuples() -> None:
    p = SamplingParams(
        stop="END",
        stop_token_ids=[1, 2],
        bad_words=["a"],
        allowed_token_ids=[3],
        logit_bias={"5": 1, 6: -2.5},
    )  # type: ignore[arg-type]
    assert p.stop == ("END",) and p.stop_token_ids == (1, 2) and p.bad_words == ("a",)
    assert p.allowed_token_ids == (3,) and p.logit_bias == {5: 1, 6: -2.5}
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("n", 0, "at least 1"),
        ("n", True, "an integer"),
        ("temperature", -0.1, "[0, 1000000]"),
        ("temperature", 1e300, "[0, 1000000]"),
        ("temperature", 10**400, "[0, 1000000]"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "1", "finite number"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.5, "an integer"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.1, "[0, 1]"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("frequency_penalty", -2.1, "[-2, 2]"),
        ("repetition_penalty", 0.0, "[0.001, 1000]"),
        ("repetition_penalty", 1e-300, "[0.001, 1000]"),
        ("repetition_penalty", 1e300, "[0.001, 1000]"),
        ("repetition_penalty", math.nan, "finite"),
        ("presence_penalty", -math.inf, "[-2, 2]"),
        ("min_p", math.nan, "[0, 1]"),
        ("top_p", 5e-324 - 5e-324, "(0, 1]"),
        ("n", 2**63, "at least 1"),
        ("top_k", 10**400, "at least -1"),
        ("logprobs", 2**70, "at least -1"),
        ("logit_bias", {"9" * 5000: 1}, "a mapping"),
        ("seed", 1.0, "an integer"),
        ("seed", 2**64, "in ["),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -1, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "at most max_tokens (16)"),
        ("logprobs", -2, "at least -1"),
        ("prompt_logprobs", "all", "an integer"),
        ("stop", [""], "non-empty strings"),
        ("stop", 3, "a list"),
        ("bad_words", [1], "non-empty strings"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", "12", "a list"),
        ("allowed_token_ids", [], "at least one"),
        ("allowed_token_ids", [1.5], "an integer"),
        ("logits_processors", [3], "callables"),
        ("output_kind", "all", "cumulative, delta, final_only"),
        ("ignore_eos", 1, "true or false"),
        ("speculation", "ngram", "a mapping"),
        ("logit_bias", [1], "a mapping"),
        ("logit_bias", {"x": 1.0}, "a mapping"),
    ],
)
def test_invalid_values(field: str, value: Any, valid: str) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field} is ") and valid in message
    assert isinstance(error.value, ValueError) and isinstance(error.value, DraftwiseError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x" * 10**6, ""]),
        ("stop", [3] * 10**5),
        ("bad_words", {"x" * 10**6: 1}),
        ("max_tokens", "9" * 10**6),
        ("output_kind", "x" * 10**6),
        ("speculation", ["x" * 10**6] * 3),
        ("structured_outputs", "x" * 10**6),
        ("structured_outputs", {"choice": ["x" * 10**6, ""]}),
        ("structured_outputs", {"x" * 10**6: 1}),
        ("structured_outputs", {"regex": [10**5000]}),
        ("logit_bias", {1: "x" * 10**6}),
        ("logit_bias", {"x" * 10**6: 1}),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str) else type(value).__name__,
)
def test_messages_are_short_whatever_was_given(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "field", ["n", "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "temperature", "min_p"]
)
def test_integers_with_more_digits_than_python_prints(field: str) -> None:
    with pytest.raises(RequestError, match=f"{field} is an integer of 16610 bits"):
        SamplingParams(**{field: 10**5000})
    for name in ("stop_token_ids", "allowed_token_ids"):
        with pytest.raises(RequestError, match=f"{name} is an integer of 16610 bits"):
            SamplingParams(**{name: [1, 10**5000]})


def test_schemas_nested_without_end_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    for given in (schema, '{"not":' * 100_000 + "{}" + "}" * 100_000):
        with pytest.raises(RequestError, match=r"json is not (a )?JSON"):
            SamplingParams(structured_outputs={"json": given})
    while schema:  # piece by piece: taking it down at once would recurse, too
        schema = schema["not"]


def test_words_that_are_no_text_are_refused() -> None:
    from draftwise.config.embedded import embedded_path
    from draftwise.models.tokenizer import load_tokenizer

    with pytest.raises(RequestError, match="bad_words: no text that can be encoded"):
        resolve_bad_words(load_tokenizer(str(embedded_path("target"))), ["half \ud800"])


def test_invalid_bias_names_the_token() -> None:
    with pytest.raises(
        RequestError, match=r"logit_bias\[7\] is 101.0; it must be a finite number in \[-100, 100\]"
    ):
        SamplingParams(logit_bias={7: 101.0})


def test_structured_outputs_from_plain_data() -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert params.structured_outputs == StructuredOutputs(choice=("a", "b"))
    with pytest.raises(RequestError, match="unknown field 'jsn'; did you mean 'json'"):
        SamplingParams(structured_outputs={"jsn": {}})


def test_numbers_are_kept_as_floats() -> None:
    """Arithmetic on the logits is in float32, and JSON has whole numbers where it can."""
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
    for one in (1, np.float64(1)):
        p = SamplingParams(**dict.fromkeys(names, one))
        assert [(type(getattr(p, name)), getattr(p, name)) for name in names] == [(float, 1.0)] * len(names)
        p.presence_penalty = -one
        assert type(p.presence_penalty) is float


def test_from_dict() -> None:
    assert SamplingParams.from_dict({"temperature": 0, "max_tokens": None}) == SamplingParams(
        temperature=0, max_tokens=None
    )
    with pytest.raises(
        RequestError, match=r"unknown sampling parameter 'temprature'; did you mean 'temperature'\?"
    ):
        SamplingParams.from_dict({"temprature": 1})


def test_greedy_forms() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-6).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=0.01, top_k=-1).is_greedy


def test_pickle_and_replace() -> None:
    p = SamplingParams(temperature=0.5, stop=["x"], logit_bias={1: 2.0}, speculation={"method": "ngram"})
    assert pickle.loads(pickle.dumps(p)) == p
    assert p.replace(n=2).n == 2 and p.n == 1
    with pytest.raises(RequestError):
        p.replace(top_p=2.0)


class WordTokenizer:
    """Letters are their own tokens; a leading space is part of the first one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        ids, space = [1] if add_special_tokens else [], 0
        for ch in text:
            if ch == " ":
                space = 100
            elif ch.isalpha():
                ids.append(ord(ch) - ord("a") + 10 + space)
                space = 0
        return ids


def test_resolve_bad_words() -> None:
    assert resolve_bad_words(WordTokenizer(), ["ab", " c"]) == ((10, 11), (110, 11), (12,), (112,))
    with pytest.raises(RequestError, match="bad_words is '!'"):
        resolve_bad_words(WordTokenizer(), ["!"])


def test_numbers_of_numpys_are_taken() -> None:
    """What programs compute with arrays: a seed of a generator, tokens of a batch."""
    given = SamplingParams(
        n=np.int32(2),
        seed=np.int64(3),
        max_tokens=np.int64(8),
        logprobs=np.uint8(1),
        temperature=np.float32(0.5),
        top_k=np.int64(4),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=[np.int64(5), 6],
        logit_bias={np.int64(7): 1.0},
    )  # type: ignore[arg-type]
    plain = SamplingParams(
        n=2, seed=3, max_tokens=8, logprobs=1, temperature=0.5, top_k=4, stop_token_ids=(1, 2),
        allowed_token_ids=(5, 6), logit_bias={7: 1.0},
    )  # fmt: skip
    assert given == plain
    stored = (*given.stop_token_ids, *(given.allowed_token_ids or ()), *(given.logit_bias or ()))
    assert {type(value) for value in (given.n, given.seed, given.max_tokens, given.logprobs, *stored)} == {
        int
    }
    assert type(given.temperature) is float
    for field, value in (("n", np.bool_(True)), ("seed", np.float64(3)), ("stop_token_ids", np.array([1.5]))):
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})
