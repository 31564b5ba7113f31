"""Grammars from strangers: what is large, endless or broken fails its request alone, in plain words, in time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftwise.config import RequestLimits
from draftwise.config.embedded import embedded_path
from draftwise.engine.limits import check_structured
from draftwise.errors import LimitError, RequestError
from draftwise.models.tokenizer import load_tokenizer
from draftwise.sampling.structured import StructuredOutputs
from draftwise.structured import compiling
from draftwise.structured.compiling import Compiler
from draftwise.structured.llguidance import LlguidanceBackend, LlguidanceMatcher
from draftwise.structured.sources import may_force, num_remainders, source_of

VOCAB = 4096
EOS = 0


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(embedded_path("target")))


@pytest.fixture(scope="module")
def backend(tokenizer: Any) -> LlguidanceBackend:
    return LlguidanceBackend(tokenizer, VOCAB, (EOS,), seconds=100.0)


def matcher_of(backend: LlguidanceBackend, **fields: Any) -> LlguidanceMatcher:
    matcher = backend.compile(StructuredOutputs(**fields)).matcher()
    assert isinstance(matcher, LlguidanceMatcher)
    return matcher


def follows(matcher: Any, token: int) -> bool:
    return bool(matcher.mask()[token >> 5] >> (token & 31) & 1)


# --------------------------------------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    "choices",
    [
        [f"value number {i}" for i in range(10_000)],
        [f"{i * 7919 % 100_003:x} and more" for i in range(10_000)],
        [chr(0x4E00 + i) + chr(0x4E00 + 2 * i) for i in range(5000)],
        [f'"\\{i}\n\t/\x7f\U0001f600"' for i in range(3000)],
        ["x" * i for i in range(1, 500)],
    ],
    ids=["common beginning", "no common beginning", "not ascii", "escapes", "beginnings of one another"],
)
def test_thousands_of_choices(backend: LlguidanceBackend, tokenizer: Any, choices: list[str]) -> None:
    start = matcher_of(backend, choice=choices)
    assert start.mask().any()
    for choice in choices[:: len(choices) // 20]:
        matcher = matcher_of(backend, choice=choices)
        for token in tokenizer.encode(choice, add_special_tokens=False):
            assert follows(matcher, token) and matcher.advance(token)
        assert matcher.is_accepting()
    assert not matcher_of(backend, choice=choices).is_accepting()


def test_choices_that_begin_one_another_may_all_end(backend: LlguidanceBackend, tokenizer: Any) -> None:
    matcher = matcher_of(backend, choice=["a", "ab", "abc"])
    for char in "abc":
        assert matcher.advance(tokenizer.encode(char, add_special_tokens=False)[0]) and matcher.is_accepting()
    assert matcher.is_finished()


# ------------------------------------------------------------------------------------------------ endless ones


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"minimum": 1}]}}}},
        {"regex": r"[^\s\S]"},
        {"grammar": "start: a\na: a\n"},
        {"grammar": 'start: A\nA: "x" A\n'},
        {"grammar": "start: " + "(" * 5000 + '"x"' + ")" * 5000},
        {"grammar": "root ::= " + "(" * 5000 + '"x"' + ")" * 5000},
        {"regex": "(" * 5000 + "x" + ")" * 5000},
        {"regex": "a{4294967295}" * 3},
        {"regex": "a{99999999999999999999}"},
        {"json": {"type": "integer", "minimum": 10**400}},
        {"json": {"type": "number", "multipleOf": 1e-300}},
        {"json": {"type": "string", "minLength": 10**18}},
        {"json": {"const": "\ud800"}},
        {"regex": "\ud800"},
        {"choice": ["\ud800"]},
        {"grammar": 'start: "\ud800"'},
    ],
    ids=lambda fields: str(fields)[:50].encode("ascii", "replace").decode(),
)
def test_grammars_without_end_or_text_are_refused_or_served(
    backend: LlguidanceBackend, fields: dict[str, Any]
) -> None:
    """What cannot be served is refused when it is compiled, in one short line; the rest has a first mask."""
    try:
        matcher = matcher_of(backend, **fields)
    except RequestError as error:
        message = str(error)
        assert message.startswith("structured_outputs: ") and "\n" not in message and len(message) < 400
        assert "panic" not in message and "<state>" not in message
    else:
        assert matcher.mask().any()
        assert "{42949" in str(fields), "all others are refused"


def _lark(schema: str) -> str:
    return f"start: %json {schema}"


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "integer", "multipleOf": 999_983}},
        {"json": {"type": "integer", "multipleOf": 2**31}},
        {"json": {"type": "number", "multipleOf": 999.983}},
        {"json": {"type": "number", "multipleOf": 10**400 + 1}},
        {"json": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}},
        {"json": {"type": "object", "properties": {str(n): {"multipleOf": n} for n in (997, 991)}}},
        {"grammar": _lark('{"type":"integer","multipleOf" : 999983}')},
        {"grammar": _lark('{"type":"integer","multiple\\u004ff":999983}')},
        {"grammar": json.dumps({"grammars": [{"lark_grammar": _lark('{"multipleOf":999983}')}]})},
        {"grammar": json.dumps({"grammars": [{"json_schema": {"multipleOf": 999_983}}]})},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_remainders_of_large_numbers_are_not_followed(
    backend: LlguidanceBackend, fields: dict[str, Any]
) -> None:
    """The library would make a state of each, for minutes, hours or until there is no memory left."""
    with pytest.raises(RequestError, match=r"structured_outputs: multipleOf \d.* has too many remainders"):
        matcher_of(backend, **fields)


@pytest.mark.parametrize(
    "multiples, states",
    [([7], 7), ([0.01], 1), ([10_000_000], 1), ([86_400], 864), ([0.25, 60], 150), ([3] * 50, 3), ([-1], 1)],
)
def test_ordinary_multiples_are_served(
    backend: LlguidanceBackend, tokenizer: Any, multiples: list[float], states: int
) -> None:
    items = [{"type": "number", "multipleOf": number} for number in multiples]
    fields = {"json": {"type": "array", "prefixItems": items, "items": False}}
    assert num_remainders(StructuredOutputs(**fields)) == states
    assert matcher_of(backend, **fields).mask().any()


def test_grammars_with_many_remainders_are_not_kept_by_the_hundred(tokenizer: Any) -> None:
    backend = LlguidanceBackend(tokenizer, VOCAB, (EOS,), seconds=100.0)
    for maximum in range(100_000, 100_024):
        backend.compile(StructuredOutputs(json={"type": "integer", "multipleOf": 4999, "maximum": maximum}))
    assert len(backend._kept) == (1 << 18) // (4 * 4999 + 52)


def test_a_schema_that_refers_to_itself_says_that_it_allows_nothing(backend: LlguidanceBackend) -> None:
    with pytest.raises(RequestError, match="invalid JSON schema: no text can follow it"):
        matcher_of(backend, json={"$ref": "#"})


def test_recursion_that_ends_is_served(backend: LlguidanceBackend, tokenizer: Any) -> None:
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
    }
    text = '{"v":1,"next":' * 40 + "null" + "}" * 40
    matcher = matcher_of(backend, json=schema, disable_any_whitespace=True)
    assert all(matcher.advance(token) for token in canonical(matcher, tokenizer, text))
    assert matcher.is_finished()


def canonical(matcher: LlguidanceMatcher, tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that a grammar with forced tokens takes."""
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


CHAINS = """
import sys
from draftwise.config.embedded import embedded_path
from draftwise.config import RequestLimits
from draftwise.engine.limits import check_structured
from draftwise.errors import RequestError
from draftwise.models.tokenizer import load_tokenizer
from draftwise.sampling.structured import StructuredOutputs
from draftwise.structured.llguidance import LlguidanceBackend

def refs(n, link):
    return {"json": {"$ref": "#/0", **{str(i): link(f"#/{i + 1}") for i in range(n)}, str(n): {"type": "null"}}}

def rules(n, link, name="a"):
    return {"grammar": f"start:{name}0\\n" + "".join(link(i) for i in range(n)) + f'{name}{n}:"x"\\n'}

MAKE = [
    lambda n: refs(n, lambda to: {"$ref": to}),
    lambda n: refs(n, lambda to: {"items": {"$ref": to}}),
    lambda n: refs(n, lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]}),
    lambda n: refs(n, lambda to: {"additionalProperties": {"$ref": to}}),
    lambda n: rules(n, lambda i: f"a{i}:a{i + 1}\\n"),
    lambda n: rules(n, lambda i: f"A{i}:A{i + 1}\\n", "A"),
    lambda n: rules(n, lambda i: f'A{i}:A{i + 1}|"y"\\n', "A"),
]
backend = LlguidanceBackend(load_tokenizer(str(embedded_path("target"))), 4096, (0,), 60.0)
for make in MAKE[:: int(sys.argv[1])]:
    n = 11_000
    while True:  # the longest chain that the limits let in
        try:
            check_structured(RequestLimits(), make(n))
            break
        except RequestError:
            n = int(n * 0.9)
    try:
        matcher = backend.compile(StructuredOutputs(**make(n))).matcher()
        matcher.mask()
        matcher.forced(5)
        print("served", n)
    except RequestError as error:
        assert "panic" not in str(error), error
        print("refused", n)
"""


@pytest.mark.parametrize(("every", "count"), [(3, 3), pytest.param(1, 7, marks=pytest.mark.slow)])
def test_long_chains_of_references_do_not_end_the_process(every: int, count: int) -> None:
    """The library follows them by recursion: with an ordinary stack the process dies of a few hundred to a few
    thousand, here of none that is within the limits."""
    command = [sys.executable, "-c", CHAINS, str(every)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-2000:])
    lines = done.stdout.split("\n")[:-1]
    assert len(lines) == count and all(int(line.split()[1]) > 3000 for line in lines)
    assert sum(line.startswith("served") for line in lines) >= count // 2


# ------------------------------------------------------------------------------------------ time and failures


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    return threading.Event()


def test_a_compilation_that_takes_too_long_is_given_up_and_keeps_its_place(gate: threading.Event) -> None:
    compiler = Compiler(0.05)
    large = compiling.SMALL + 1

    def stuck() -> int:
        assert gate.wait(60)
        return 1

    with pytest.raises(LimitError, match=r"0.05 s were not enough .*\(max_grammar_seconds\)"):
        compiler.run(stuck, large)
    # The one place for large grammars is taken for as long as that runs; small ones have others.
    with pytest.raises(RequestError, match="other grammars are being compiled"):
        compiler.run(lambda: 2, large)
    assert compiler.run(lambda: 3, 10) == 3
    for _ in range(2):
        with pytest.raises(LimitError):
            compiler.run(stuck, 10)
    with pytest.raises(RequestError, match="other grammars are being compiled"):
        compiler.run(lambda: 4, 10)
    gate.set()
    deadline = time.monotonic() + 30
    while True:  # all places come back
        try:
            assert [compiler.run(lambda: 5, size) for size in (large, 10)] == [5, 5]
            break
        except RequestError:
            assert time.monotonic() < deadline


def test_errors_of_a_compilation_come_to_its_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        Compiler(5.0).run(lambda: 1 // 0, 10)


def test_a_stack_that_nobody_can_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(5.0)
    monkeypatch.setattr(compiling, "_STACK_PER_CHAR", 1 << 50)
    for _ in range(3):  # and no place is lost
        with pytest.raises(RequestError, match="more than this server compiles"):
            compiler.run(lambda: 1, 1000)
    monkeypatch.undo()
    assert compiler.run(lambda: 1, 1000) == 1
    assert threading.stack_size() == 0, "other threads have what they had"


class PanicException(BaseException):
    """Named as the library's, which derives from BaseException, too."""


class Panicking:
    """A matcher of the library in which a method panics."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner = inner
        self._method = method

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            return self._panic
        return getattr(self._inner, name)

    def _panic(self, *_: Any) -> Any:
        raise PanicException("index out of bounds: the len is 3 at src/secret.rs:12")


CALLS: dict[str, Callable[[LlguidanceMatcher], Any]] = {
    "compute_bitmask": lambda matcher: matcher.mask(),
    "compute_ff_tokens": lambda matcher: matcher.forced(3),
    "try_consume_tokens": lambda matcher: matcher.advance(5),
    "rollback": lambda matcher: matcher.rollback(1),
}


@pytest.mark.parametrize("method", list(CALLS))
def test_a_panic_of_the_library_fails_its_request_in_plain_words(
    backend: LlguidanceBackend, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    matcher = matcher_of(backend, regex="[ab]+")
    matcher._matcher = Panicking(matcher._matcher, method)
    with pytest.raises(RequestError, match="grammar library, which failed on it") as error:
        CALLS[method](matcher)
    assert "secret" not in str(error.value) and "src/secret.rs" in caplog.text


def test_a_panic_while_compiling(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LlguidanceBackend(tokenizer, VOCAB, (EOS,))
    library = backend._library

    class Library:
        class LLMatcher:
            def __new__(cls, *args: Any, **more: Any) -> Any:
                raise PanicException("secret")

            grammar_from_lark = staticmethod(library.LLMatcher.grammar_from_lark)

        regex_to_lark = staticmethod(library.regex_to_lark)

    monkeypatch.setattr(backend, "_library", Library)
    with pytest.raises(RequestError, match="failed on it") as error:
        backend.compile(StructuredOutputs(regex="a"))
    assert "secret" not in str(error.value) and "secret" in caplog.text
    monkeypatch.undo()
    assert backend.compile(StructuredOutputs(regex="a")).matcher().mask().any(), "it is tried again"


def test_panics_that_the_library_reports_are_not_told(
    backend: LlguidanceBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """It catches some of its own and answers with their text and a backtrace."""
    schema: dict[str, Any] = {"$ref": "#/0"}
    n = 5500
    schema |= {str(i): {"properties": {"a": {"$ref": f"#/{i + 1}"}}} for i in range(n)} | {str(n): {}}
    with pytest.raises(RequestError) as error:
        matcher_of(backend, json=schema)
    assert "panic" not in str(error.value) and "backtrace" not in str(error.value)
    assert "panic" in caplog.text and "failed on it" in str(error.value)


# ------------------------------------------------------------------------------------------------- forced runs


class Counting:
    """Counts how often the library goes through a forced run."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_runs = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute_ff_tokens(self) -> list[int]:
        self.num_runs += 1
        tokens: list[int] = self._inner.compute_ff_tokens()
        return tokens

    def compute_bitmask(self) -> bytes:
        self.num_runs += 1
        mask: bytes = self._inner.compute_bitmask()
        return mask


@pytest.mark.parametrize("length", [500, 1000])
def test_a_forced_run_is_gone_through_once(backend: LlguidanceBackend, length: int) -> None:
    """However long it is: the library would make a list of all of it for each mask."""
    matcher = matcher_of(backend, choice=["ab" * length])
    counting = matcher._matcher = Counting(matcher._matcher)
    taken = 0
    while not matcher.is_finished():
        token = matcher.forced(1)[0]
        assert np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist() == [
            token
        ]
        assert matcher.advance(token)
        taken += 1
    assert taken > length // 4 and counting.num_runs <= 5


def test_masks_along_forced_runs_are_those_of_a_new_matcher(backend: LlguidanceBackend) -> None:
    fields = {
        "json": {
            "type": "object",
            "properties": {
                "first name": {"enum": ["Anna", "Annette"]},
                "n": {"type": "integer", "maximum": 20},
            },
            "required": ["first name", "n"],
            "additionalProperties": False,
        },
        "disable_any_whitespace": True,
    }
    rng = np.random.default_rng(5)
    for _ in range(10):
        matcher = matcher_of(backend, **fields)
        path: list[int] = []
        while not matcher.is_finished():
            fresh = matcher_of(backend, **fields)
            for token in path:
                assert fresh._matcher.try_consume_tokens([token]) == 1
            wanted = np.frombuffer(fresh._matcher.compute_bitmask(), np.int32, len(matcher.mask()))
            assert (matcher.mask() == wanted).all()
            allowed = np.flatnonzero(np.unpackbits(wanted.view(np.uint8), bitorder="little"))
            path.append(int(rng.choice(allowed[allowed != EOS])))
            assert matcher.advance(path[-1])
            if rng.random() < 0.3:
                back = int(rng.integers(1, len(path) + 1))
                matcher.rollback(back)
                del path[-back:]


@pytest.mark.parametrize(
    ("fields", "forces"),
    [
        ({"choice": ["a" * 4096]}, True),
        ({"choice": ["a" * 4097, "b"]}, False),
        ({"regex": "(ab){2000}"}, True),
        ({"regex": "((ab){2000}){3}"}, False),
        ({"regex": "a{4294967295}"}, False),
        ({"json": {"const": "a" * 4097}}, False),
        ({"json": {"pattern": "^a{5000}$"}}, False),
        ({"json": {"enum": ["a" * 100] * 300}}, True),
        ({"json": {"enum": ["a" * 100] * 300}, "disable_any_whitespace": True}, False),
        ({"grammar": 'start: "ab" /[0-9]{4}/'}, True),
        ({"grammar": 'start: "' + "a" * 5000 + '"'}, False),
        ({"grammar": 'root ::= "' + "a" * 5000 + '"'}, False),
    ],
)
def test_grammars_whose_runs_may_be_long_force_nothing(
    backend: LlguidanceBackend, tokenizer: Any, fields: dict[str, Any], forces: bool
) -> None:
    spec = StructuredOutputs(**fields)
    assert may_force(spec) == forces
    source = source_of(spec, backend._library)
    assert ("no_forcing" in source) != forces
    matcher = backend.compile(spec).matcher()
    if not forces:
        assert matcher.forced(10) == () or not matcher.forced(10)
    assert matcher.mask().any()


# ---------------------------------------------------------------------------------------------- what is kept


def test_kept_grammars_are_bounded_by_their_size(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LlguidanceBackend(tokenizer, VOCAB, (EOS,))
    monkeypatch.setattr("draftwise.structured.llguidance._KEPT_CHARS", 1000)
    specs = [StructuredOutputs(regex=f"a{{{i}}}" + "b" * 200) for i in range(1, 9)]
    held = backend.compile(specs[0])
    for spec in specs:
        backend.compile(spec)
    assert [backend.has(spec) for spec in specs] == [True] + [False] * 3 + [True] * 4
    assert backend.compile(specs[0]) is held, "somebody holds it"
    large = StructuredOutputs(regex="c" * 2000)
    grammar = backend.compile(large)
    assert backend.has(large) and backend._kept_chars == 0
    del grammar
    assert not backend.has(large), "what is too large is not kept for anybody who may come"


def test_the_same_grammar_is_compiled_once_for_many_who_ask_together(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LlguidanceBackend(tokenizer, VOCAB, (EOS,))
    gate = threading.Event()
    compiled: list[str] = []
    original = backend._compile

    def slow(source: str, kind: Any) -> Any:
        compiled.append(source)
        assert gate.wait(60)
        return original(source, kind)

    monkeypatch.setattr(backend, "_compile", slow)
    for regex, fails in (("a+", False), ("(", True)):
        gate.clear()
        compiled.clear()
        answers: list[Any] = []

        def ask(regex: str = regex, answers: list[Any] = answers) -> None:
            try:
                answers.append(backend.compile(StructuredOutputs(regex=regex)))
            except RequestError as error:
                answers.append(error)

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        while not compiled or len(backend._under_way) != 1:
            time.sleep(0.001)
        gate.set()
        for thread in threads:
            thread.join(60)
        assert [isinstance(answer, RequestError) for answer in answers] == [fails] * 5
        assert len(compiled) <= (5 if fails else 1)
        assert not backend._under_way


def test_limits_stand_before_all_this() -> None:
    chain = {str(i): {"$ref": f"#/{i + 1}"} for i in range(20_000)}
    with pytest.raises(LimitError, match="max_schema_chars"):
        check_structured(RequestLimits(), {"json": chain})
    with pytest.raises(LimitError, match="max_schema_chars"):
        check_structured(RequestLimits(), {"json": json.dumps(chain)})


# ---------------------------------------------------------------------------------------------------- products


@pytest.mark.parametrize(
    "grammar",
    [
        "start: A\nA: " + " & ".join(f"/([ab]{{{n}}})*/" for n in (97, 89, 83, 79, 73)),
        "start: A\nA: ~/(.|\\n)*a(.|\\n){40}/",
        'start: "/" A "/"\nA: /a/ & /b/',
        "// ::=\nstart: A\nA: /a/ & /b/",
    ],
)
def test_products_of_regexes_are_refused(backend: LlguidanceBackend, grammar: str) -> None:
    """The first one takes more time and memory than a server has; nothing of the library's ends it."""
    with pytest.raises(RequestError, match="is not supported: an intersection"):
        backend.compile(StructuredOutputs(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "a & b" | "~"', "a & b"),
        ("start: A // & ~\nA: /[&~]+/ # & ~", "&~"),
        ('start: "x"~2..3', "xx"),
        ("root ::= [&~]+", "~&"),
        ('root ::= "\\"&" [^/"~]', '"&a'),
        ('start: %json {"const": "a&~b"}', '"a&~b"'),
    ],
)
def test_their_signs_in_texts_regexes_and_comments_are_none(
    backend: LlguidanceBackend, tokenizer: Any, grammar: str, text: str
) -> None:
    matcher = matcher_of(backend, grammar=grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert follows(matcher, token), (grammar, token)
        matcher.advance(token)
