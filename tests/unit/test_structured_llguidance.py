"""The grammar engine over the embedded tokenizer: what it accepts, refuses and forces."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
from typing import Any

import jsonschema
import pytest

from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError, RequestError
from draftwise.models.tokenizer import load_tokenizer
from draftwise.sampling.masks import unpack
from draftwise.sampling.structured import StructuredOutputs
from draftwise.structured.cursor import Cursor, Vocabulary
from draftwise.structured.grammars import Grammars
from draftwise.structured.llguidance import LlguidanceBackend
from draftwise.structured.sources import without_anchors
from draftwise.types import Proposal

VOCAB = 4096
EOS = 0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "crab"]},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "kind", "tags", "ok"],
    "additionalProperties": False,
}
GBNF = 'root ::= item+\nitem ::= "(" [a-c]{1,3} ")"'
LARK = 'start: item+\nitem: "(" /[a-c]{1,3}/ ")"'


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(embedded_path("target")))


@pytest.fixture(scope="module")
def backend(tokenizer: Any) -> LlguidanceBackend:
    return LlguidanceBackend(tokenizer, VOCAB, (EOS,))


def cursor(backend: LlguidanceBackend, value: dict[str, Any], **options: Any) -> Cursor:
    matcher = backend.compile(StructuredOutputs.from_value(value)).matcher()
    return Cursor(matcher, Vocabulary(VOCAB, (EOS,), backend.num_tokens), **options)


def allowed(at: Cursor, path: tuple[int, ...] = ()) -> list[int]:
    return at.mask(path).nonzero().flatten().tolist()


def random_text(at: Cursor, tokenizer: Any, rng: random.Random, most: int = 300) -> str | None:
    """A uniformly random walk to the end; None if ``most`` tokens did not get there."""
    tokens: list[int] = []
    while len(tokens) < most:
        token = rng.choice(allowed(at))
        if token == EOS:
            return str(tokenizer.decode(tokens))
        at.commit((token,))
        tokens.append(token)
    return None


def is_json(text: str, schema: Any) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ({"json": SCHEMA, "disable_any_whitespace": True}, lambda t: is_json(t, SCHEMA) and "\n" not in t),
        ({"json": SCHEMA}, lambda t: is_json(t, SCHEMA)),
        ({"json": SCHEMA, "whitespace_pattern": " "}, lambda t: is_json(t, SCHEMA)),
        ({"regex": r"^[a-f]{2,4}-\d{3}$"}, lambda t: re.fullmatch(r"[a-f]{2,4}-\d{3}", t)),
        (
            {"choice": ["yes", "no", 'say "hä?"\n', "yes and no"]},
            lambda t: t in ("yes", "no", 'say "hä?"\n', "yes and no"),
        ),
        ({"grammar": LARK}, lambda t: re.fullmatch(r"(\([a-c]{1,3}\))+", t)),
        ({"grammar": GBNF}, lambda t: re.fullmatch(r"(\([a-c]{1,3}\))+", t)),
    ],
)
def test_random_walks_end_in_valid_texts(
    backend: LlguidanceBackend, tokenizer: Any, value: dict[str, Any], valid: Any
) -> None:
    rng = random.Random(1)
    texts = {random_text(cursor(backend, value), tokenizer, rng) for _ in range(16)}
    assert None not in texts
    assert len(texts) > 1
    for text in texts:
        assert valid(text), text


def test_json_object(backend: LlguidanceBackend) -> None:
    at = cursor(backend, {"json_object": True})
    first = allowed(at)
    assert first and EOS not in first
    at.commit(backend._tokenizer.tokenize_str('{"a": [1, 2.5e3, null, {"b": "\\n"}]}'))
    assert EOS in allowed(at)
    with pytest.raises(RequestError, match="does not follow"):
        cursor(backend, {"json_object": True}, output_ids=backend._tokenizer.tokenize_str("[1]"))


def test_walks_and_rollbacks_leave_no_trace(backend: LlguidanceBackend) -> None:
    """What a cursor that wandered through random trees says is what a fresh one says."""
    rng = random.Random(5)
    for value in ({"json": SCHEMA}, {"grammar": LARK}, {"regex": "(ab?c|[x-z]+ ?)*q"}):
        wandering = cursor(backend, value)
        done: list[int] = []
        for _ in range(25):
            tokens: list[int] = []
            parents: list[int] = []
            paths: list[tuple[int, ...]] = [()]
            for i in range(rng.randint(0, 7)):
                parent = rng.randint(-1, i - 1)
                good = allowed(wandering, paths[parent + 1])
                tokens.append(rng.choice(good) if rng.random() < 0.8 else rng.randrange(VOCAB))
                parents.append(parent)
                paths.append((*paths[parent + 1], tokens[-1]))
            wandering.forced(rng.randint(0, 8))
            masks = unpack(wandering.masks(Proposal(tuple(tokens), tuple(parents))), VOCAB)
            fresh = cursor(backend, value, output_ids=done)
            assert fresh.forced(8) == wandering.forced(8)
            for path, mask in zip(paths, masks, strict=True):
                assert bool((mask == fresh.mask(path)).all())
            step = rng.choice([t for t in allowed(wandering) if t != EOS] or [EOS])
            if step == EOS:
                break
            wandering.commit((step,))
            done.append(step)


def test_the_end_is_allowed_exactly_where_the_text_may_end(backend: LlguidanceBackend) -> None:
    tokenize = backend._tokenizer.tokenize_str
    at = cursor(backend, {"regex": "a+(b{2})?"})
    assert EOS not in allowed(at)
    for text, may_end in (("a", True), ("aab", False), ("aabb", True)):
        assert (EOS in allowed(at, tuple(tokenize(text)))) == may_end
    assert allowed(at, tuple(tokenize("abb"))) == [EOS]
    never = cursor(backend, {"regex": "a+(b{2})?"}, ignore_eos=True)
    assert EOS not in allowed(never, tuple(tokenize("a")))
    assert allowed(never, tuple(tokenize("abb"))) == [EOS]


def test_forced_tokens_have_no_alternative(backend: LlguidanceBackend, tokenizer: Any) -> None:
    at = cursor(backend, {"json": SCHEMA, "disable_any_whitespace": True})
    forced = at.forced(8)
    assert tokenizer.decode(forced).startswith('{"name"')
    for i, token in enumerate(forced):
        assert allowed(at, forced[:i]) == [token]
    at = cursor(backend, {"choice": ["only this"]})
    everything = at.forced(16)
    assert tokenizer.decode(everything[:-1]) == "only this" and everything[-1] == EOS


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"json": {"type": "objekt"}}, ["JSON schema", "objekt"]),
        ({"json": {"$ref": "#/nowhere"}}, ["JSON schema", "/nowhere"]),
        ({"json": {"allOf": [{"type": "string"}, {"type": "null"}]}}, ["JSON schema", "nsatisfiable"]),
        ({"json": {"type": "array", "uniqueItems": True}}, ["JSON schema", "uniqueItems"]),
        ({"regex": "(a"}, ["regex", "unclosed group"]),
        ({"regex": "(?=a)b"}, ["regex", "look-around"]),
        ({"grammar": "start: missing"}, ["grammar", "missing"]),
        ({"grammar": "?"}, ["grammar"]),
        ({"json": {}, "whitespace_pattern": "("}, ["JSON schema"]),
    ],
)
def test_invalid_grammars_are_refused_in_one_line(
    backend: LlguidanceBackend, value: dict[str, Any], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError) as caught:
        backend.compile(StructuredOutputs.from_value(value))
    message = str(caught.value)
    assert "\n" not in message
    for word in ("structured_outputs: invalid", *words):
        assert word in message
    assert capfd.readouterr() == ("", ""), "the library prints nothing"


def test_anchors() -> None:
    assert without_anchors("^ab$") == "ab"
    assert without_anchors(r"a\$") == r"a\$"
    assert without_anchors(r"a\\$") == r"a\\"


def test_compiled_grammars_are_kept(backend: LlguidanceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StructuredOutputs(regex="kept+")
    backend.compile(spec)
    monkeypatch.setattr(backend, "_compile", lambda spec: pytest.fail("compiled twice"))
    one, two = backend.compile(StructuredOutputs(regex="kept+")).matcher(), backend.compile(spec).matcher()
    token = backend._tokenizer.tokenize_str("k")[0]
    assert one.advance(token) and two.advance(token), "requests do not share a state"


def test_threads_share_a_backend(backend: LlguidanceBackend) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(20):
                at = cursor(backend, {"regex": f"x{{{i % 5 + 1}}}(a|b){number % 2}"})
                while (left := allowed(at)) != [EOS]:
                    at.commit((left[0],))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_vocabulary_larger_or_smaller_than_the_tokenizer(tokenizer: Any) -> None:
    """A model may have padding rows; a request never gets a token that the model does not have."""
    for vocab in (VOCAB + 70, VOCAB - 5):
        grammars = Grammars(tokenizer, vocab, (EOS, VOCAB + 100))
        grammars.compile(StructuredOutputs(regex="[a-z ]*"))

        class Params:
            structured_outputs = StructuredOutputs(regex="[a-z ]*")
            ignore_eos = False

        mask = grammars.cursor(Params()).mask()  # type: ignore[arg-type]
        assert mask.shape == (vocab,)
        assert bool(mask[EOS]) and not bool(mask[VOCAB:].any())


def test_what_an_engine_cannot_serve(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StructuredOutputs(regex="a")
    with pytest.raises(RequestError, match="needs a tokenizer"):
        Grammars(None, VOCAB, (EOS,)).compile(spec)
    with pytest.raises(RequestError, match="end-of-sequence token"):
        Grammars(tokenizer, VOCAB, ()).compile(spec)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[structured\]'"):
        Grammars(tokenizer, VOCAB, (EOS,)).compile(spec)
