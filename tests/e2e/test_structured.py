"""Structured outputs of whole engines on the embedded models: always valid, the same with and without speculation."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
import torch

from draftwise import LLM, AsyncLLM, ConfigError, RequestError, RequestOutput, SamplingParams
from draftwise.cli import main
from draftwise.config import registry
from draftwise.config.embedded import embedded_path
from draftwise.structured.grammars import Grammars
from tests.fakes.tree_proposer import tree_proposer

PROMPTS = [
    "import json\n\nCONFIG = ",
    "def parse(text):\n    return ",
    "# settings\nDEFAULTS = json.loads('''",
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "level": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "level", "tags"],
    "additionalProperties": False,
}
STRUCTURE = {"json": SCHEMA, "disable_any_whitespace": True}
METHODS = ("grammar", "ngram", "suffix", "draft_model", "synthetic")
DRAFTERS: list[dict[str, Any]] = [
    {"method": "draft_model", "model": str(embedded_path("draft")), "num_speculative_tokens": 4},
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    {"method": "suffix", "num_speculative_tokens": 4},
    {"method": "synthetic", "num_speculative_tokens": 4},
]
HEADS: list[dict[str, Any]] = [
    {"method": "eagle3", "num_speculative_tokens": 4},
    {"method": "mtp", "num_speculative_tokens": 4},
    {"method": "medusa", "num_speculative_tokens": 3},
]
"""Those that are shipped for the embedded target."""
PLAIN = {"method": "none"}
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def make_llm() -> Iterator[Callable[..., LLM]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made: dict[str, LLM] = {}

    def make(**options: Any) -> LLM:
        """Engines are kept by their options: loading costs more than a test."""
        base: dict[str, Any] = {
            "num_kv_blocks": 512,
            "max_model_len": 512,
            "keep_trace": True,
            "speculation_control": "static",
        }
        name = repr(sorted(options.items()))
        if name not in made:
            made[name] = LLM(**(base | {"speculative_config": DRAFTERS} | options))
        return made[name]

    yield make
    for llm in made.values():
        llm.check_integrity()
        assert llm.stats().num_used_blocks == 0, "blocks leak"
        llm.close()
    torch.set_num_threads(before)


def params(method: str | None = None, rule: str | None = None, **changes: Any) -> SamplingParams:
    speculation = {name: value for name, value in (("method", method), ("rule", rule)) if value is not None}
    base: dict[str, Any] = {"temperature": 0, "max_tokens": 96, "structured_outputs": STRUCTURE}
    return SamplingParams(**(base | {"speculation": speculation} | changes))


def ids(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def texts(outputs: Sequence[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def check_json(outputs: Sequence[RequestOutput], schema: dict[str, Any] = SCHEMA) -> None:
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "stop", (completion.text, completion.error)
            jsonschema.validate(json.loads(completion.text), schema)


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 1.3, "seed": 8, "n": 3}]
)
def test_the_same_text_with_every_method(make_llm: Callable[..., LLM], changes: dict[str, Any]) -> None:
    """Greedy, and with a seed (rule coupled)."""
    llm = make_llm()
    plain = llm.generate(PROMPTS, params("none", **changes))
    check_json(plain)
    assert all(o.metrics.speculation.num_drafts == 0 for o in plain)
    for method in METHODS:
        outputs = llm.generate(PROMPTS, params(method, **changes))
        assert ids(outputs) == ids(plain), method
        assert sum(o.metrics.speculation.num_accepted_tokens for o in outputs) > 0, method
    together = llm.generate(PROMPTS, [params(m, **changes) for m in ("ngram", "draft_model", "grammar")])
    assert ids(together) == ids(plain)


def test_preemption_and_chunks_change_nothing(make_llm: Callable[..., LLM]) -> None:
    prompts = [PROMPTS[i % 3] + f"{i} = " for i in range(8)]
    plain = make_llm().generate(prompts, params("none"))
    tight = make_llm(num_kv_blocks=40, block_size=4, max_num_seqs=6, max_num_batched_tokens=24)
    for method in ("ngram", "draft_model"):
        assert ids(tight.generate(prompts, params(method))) == ids(plain), method
    assert tight.stats().num_preemptions > 0


def test_forced_drafts_are_always_kept(make_llm: Callable[..., LLM]) -> None:
    """Where a grammar leaves one token the target has no other: nothing forced is ever rejected, at any temperature."""
    for changes in ({}, {"temperature": 1.0, "speculation": {"method": "grammar", "rule": "rejection"}}):
        outputs = make_llm().generate(PROMPTS, params("grammar", **changes))
        counts = [output.metrics.speculation for output in outputs]
        drafted = sum(count.num_draft_tokens for count in counts)
        assert sum(count.num_accepted_tokens for count in counts) == drafted > 30


@pytest.mark.parametrize("rule", [None, "rejection", "coupled"])
@pytest.mark.parametrize("shape", [{}, {"speculative_token_tree": [[0], [1], [0, 0], [0, 0, 0]]}])
def test_drafts_under_a_grammar_are_right_where_the_drafter_is(
    make_llm: Callable[..., LLM], shape: dict[str, Any], rule: str | None
) -> None:
    """The target drafts for itself: masked as the target is, nearly all is kept, forced tokens among it."""
    spec = {"method": "draft_model", "model": str(embedded_path("target")), "num_speculative_tokens": 4}
    llm = make_llm(speculative_config=spec, speculation_control="static")
    speculation = {"method": "draft_model", **shape} | ({"rule": rule} if rule else {})
    drawn = {"temperature": 1.0, "seed": 3} if rule else {}
    outputs = llm.generate(PROMPTS, params(speculation=speculation, **drawn))
    check_json(outputs)
    counts = [output.metrics.speculation for output in outputs]
    accepted = sum(count.num_accepted_tokens for count in counts)
    # the end of the text cuts what was drafted behind it
    cut = 4 * len(PROMPTS)
    if shape:
        assert accepted >= 0.97 * 3 * sum(count.num_drafts for count in counts) - cut
    else:
        assert accepted >= 0.97 * sum(count.num_draft_tokens for count in counts) - cut


@pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])
def test_a_grammar_that_does_not_come_back_fails_its_request_alone(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """After a preemption a cursor is made anew behind the output so far."""
    prompts = [PROMPTS[i % 3] + f"{i} = " for i in range(8)]
    options: dict[str, Any] = {"num_kv_blocks": 34, "block_size": 4, "max_num_seqs": 8}
    tight = make_llm(max_num_batched_tokens=24, async_scheduling=ahead, **options)
    plain = ids(make_llm().generate(prompts, params("none")))
    cursor, failed = Grammars.cursor, 0

    def fails_once(self: Grammars, given: SamplingParams, output_ids: Sequence[int] = ()) -> Any:
        nonlocal failed
        if output_ids and not failed:
            failed += 1
            raise MemoryError("no room for a grammar")
        return cursor(self, given, output_ids)

    monkeypatch.setattr(Grammars, "cursor", fails_once)
    outputs = tight.generate(prompts, params("draft_model"))
    ends = [output.outputs[0].finish_reason for output in outputs]
    assert failed == 1 and sorted(ends) == ["error", *["stop"] * 7]
    lost = ends.index("error")
    assert outputs[lost].outputs[0].error == "MemoryError: no room for a grammar"
    whole = ids(outputs)
    assert plain[lost][0][: len(whole[lost][0])] == whole[lost][0], "what it had said stays"
    assert whole[:lost] + whole[lost + 1 :] == plain[:lost] + plain[lost + 1 :]
    tight.check_integrity()
    assert ids(tight.generate(prompts, params("draft_model"))) == plain


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        # each method under one rule, in turns; --all: under all
        pytest.param(method, rule, marks=[] if i % 3 == j else [pytest.mark.slow])
        for i, method in enumerate(METHODS)
        for j, rule in enumerate(("rejection", "block", "coupled"))
    ],
)
def test_sampled_outputs_are_valid(make_llm: Callable[..., LLM], method: str, rule: str) -> None:
    check_json(make_llm().generate(PROMPTS * 4, params(method, rule, temperature=1.0)))


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("draw", ["fixed", "without_replacement"])
def test_trees_of_drafters_that_know_no_grammar(
    make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, draw: Any, rule: str
) -> None:
    """Point masses are pruned; what was drawn without a mask stays, and is rejected."""
    method = f"{draw}_tree"
    monkeypatch.setitem(registry._registered, method, tree_proposer(draw=draw))
    llm = make_llm(speculative_config={"method": method, "speculative_token_tree": TREE})
    spec = {"method": method, "rule": rule}
    check_json(llm.generate(PROMPTS * 2, params(temperature=1.0, speculation=spec)))
    if rule == "coupled":
        with_tree = llm.generate(PROMPTS, params(temperature=1.0, seed=5, speculation=spec))
        assert ids(with_tree) == ids(llm.generate(PROMPTS, params("none", rule, temperature=1.0, seed=5)))


TREES: dict[str, dict[str, Any]] = {
    "static": {"speculative_token_tree": TREE},
    "dynamic": {"speculative_dynamic_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 9},
}


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        # both shapes under rules that change; --all: under all
        pytest.param(TREES[shape], rule, id=f"{shape}-{rule}", marks=[] if quick else [pytest.mark.slow])
        for shape, rule, quick in (
            ("static", None, True),
            ("static", "rejection", True),
            ("static", "coupled", False),
            ("dynamic", None, False),
            ("dynamic", "rejection", False),
            ("dynamic", "coupled", True),
        )
    ],
)
def test_trees_of_a_draft_model(
    make_llm: Callable[..., LLM], shape: dict[str, Any], rule: str | None
) -> None:
    """Drawn under the masks, behind forced tokens; with the text of plain decoding where that is determined."""
    spec: dict[str, Any] = {"method": "draft_model", **shape}
    changes: dict[str, Any] = {"temperature": 1.0, "seed": 5} if rule else {"temperature": 0.0}
    if rule:
        spec["rule"] = rule
    llm = make_llm()
    outputs = llm.generate(PROMPTS * 2, params(speculation=spec, **changes))
    check_json(outputs)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in outputs) > 0
    if rule != "rejection":
        assert ids(outputs) == ids(llm.generate(PROMPTS * 2, params("none", rule, **changes)))


def test_typical_and_synthetic_rules_stay_valid(make_llm: Callable[..., LLM]) -> None:
    """Rules that are not lossless do not leave the grammar either."""
    check_json(make_llm().generate(PROMPTS, params("draft_model", "typical", temperature=1.0)))
    spec = [
        {**d, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0} for d in DRAFTERS
    ]
    llm = make_llm(speculative_config=spec)
    for method in ("draft_model", "ngram", "synthetic"):
        check_json(llm.generate(PROMPTS, params(method, temperature=1.0)))


def test_forced_tokens_are_drafts_without_a_drafter(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(speculative_config=PLAIN)
    output = llm.generate(PROMPTS[0], params())[0]
    check_json([output])
    speculation = output.metrics.speculation
    assert speculation.steps_by_method["grammar"] > 0
    assert speculation.num_accepted_tokens == speculation.num_draft_tokens, "they have no alternative"
    num_steps = sum(speculation.steps_by_method.values())
    assert num_steps < 0.6 * len(output.outputs[0].token_ids)
    for off in ({"method": "none"}, {"num_speculative_tokens": 0}):
        same = llm.generate(PROMPTS[0], params(speculation=off))[0]
        assert same.metrics.speculation.num_drafts == 0
        assert ids([same]) == ids([output])
    only = llm.generate(PROMPTS[0], params(structured_outputs={"choice": ["nothing else"]}))[0]
    assert only.outputs[0].text == "nothing else" and only.outputs[0].finish_reason == "stop"


def test_every_kind(make_llm: Callable[..., LLM]) -> None:
    lark = 'start: "[" WORD ("," WORD)~1..3 "]"\nWORD: /[a-z]{1,6}/'
    booleans = {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}
    kinds: list[tuple[dict[str, Any], Callable[[str], object]]] = [
        ({"regex": r"\d{3}-[a-z]{2,5}"}, re.compile(r"\d{3}-[a-z]{2,5}").fullmatch),
        ({"choice": ["positive", "negative"]}, lambda text: text in ("positive", "negative")),
        ({"grammar": lark}, re.compile(r"\[[a-z]{1,6}(,[a-z]{1,6}){1,3}\]").fullmatch),
        ({"json": booleans}, lambda text: isinstance(json.loads(text), list)),
    ]
    wanted = [params("draft_model", structured_outputs=kind, temperature=1.0) for kind, _ in kinds]
    for (_, valid), text in zip(kinds, texts(make_llm().generate([PROMPTS[1]] * 4, wanted)), strict=True):
        assert valid(text), text


@pytest.mark.parametrize(
    "structure", [{"choice": [f"value {i}" for i in range(3000)]}, {"regex": "a{3,4294967295}"}]
)
def test_thousands_of_choices_and_endless_repetitions(
    make_llm: Callable[..., LLM], structure: dict[str, Any]
) -> None:
    """Of whichever the library could keep but a part open, or would draft four milliards of characters."""
    plain = make_llm().generate(PROMPTS, params("none", structured_outputs=structure, max_tokens=12))
    for output in plain:
        assert output.outputs[0].finish_reason in ("stop", "length"), output.outputs[0].error
        assert output.outputs[0].text in structure.get("choice", ()) or set(output.outputs[0].text) == {"a"}
    for method in ("grammar", "ngram", "draft_model"):
        outputs = make_llm().generate(PROMPTS, params(method, structured_outputs=structure, max_tokens=12))
        assert ids(outputs) == ids(plain), method


def test_with_other_parameters(make_llm: Callable[..., LLM]) -> None:
    """Stop strings cut inside accepted drafts; logprobs, penalties and truncation go along."""
    llm = make_llm()
    for changes in (
        {"stop": ['"level":']},
        {"logprobs": 2},
        {"repetition_penalty": 1.3, "top_k": 20, "temperature": 0.9, "seed": 1},
        {"top_p": 0.8, "min_p": 0.02, "frequency_penalty": 0.5, "temperature": 1.1, "seed": 2},
        {"ignore_eos": True},
        {"max_tokens": 9},
    ):
        plain = llm.generate(PROMPTS, params("none", **changes))
        for method in ("ngram", "draft_model"):
            assert ids(llm.generate(PROMPTS, params(method, **changes))) == ids(plain), (method, changes)
        first = plain[0].outputs[0]
        if "stop" in changes:
            assert first.text.endswith(",") and first.stop_reason == '"level":'
        elif "max_tokens" in changes:
            assert first.finish_reason == "length" and len(first.token_ids) == 9
        else:
            check_json(plain)
        if "logprobs" in changes:
            assert first.logprobs is not None and len(first.logprobs) == len(first.token_ids)


def test_bad_grammars_are_refused_before_anything_runs(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for value, words in (
        ({"json": {"type": "objekt"}}, "invalid JSON schema.*objekt"),
        ({"regex": "("}, "invalid regex"),
        ({"grammar": "start: nothing"}, "invalid grammar"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate(PROMPTS[0], params(structured_outputs=value))
    with pytest.raises(RequestError, match="'grammar' is not loaded"):
        llm.generate(PROMPTS[0], SamplingParams(speculation={"method": "grammar"}))
    bare = make_llm(skip_tokenizer_init=True, speculative_config=PLAIN)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        bare.generate([{"prompt_token_ids": [5, 6]}], params(detokenize=False))


def test_without_the_library(make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    llm = make_llm(speculative_config=PLAIN, max_num_seqs=2)  # an engine that has made no grammar yet
    with pytest.raises(ConfigError, match=r"\.\[structured\]"):
        llm.generate(PROMPTS[0], params())


def test_parameters_that_leave_nothing_fail_their_request_alone(make_llm: Callable[..., LLM]) -> None:
    wanted = [params("draft_model"), params("draft_model", allowed_token_ids=[1, 2])]
    good, bad = make_llm().generate(PROMPTS[:2], wanted)
    check_json([good])
    assert bad.outputs[0].finish_reason == "error"
    assert "exclude every token" in (bad.outputs[0].error or "")
    short = SamplingParams(temperature=0, min_tokens=20, max_tokens=30, structured_outputs={"choice": ["ab"]})
    bad = make_llm().generate(PROMPTS[0], short)[0]
    assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].text == "ab"
    assert (bad.outputs[0].error or "").endswith("min_tokens (20) excludes the end")


def test_streaming(make_llm: Callable[..., LLM]) -> None:
    wanted = texts(make_llm().generate(PROMPTS[:1], params("draft_model")))[0]

    async def work() -> str:
        pieces = []
        async with AsyncLLM(
            num_kv_blocks=64, speculative_config=DRAFTERS, speculation_control="static"
        ) as llm:
            async for output in llm.generate(PROMPTS[0], params("draft_model", output_kind="delta")):
                pieces.append(output.outputs[0].text)
        return "".join(pieces)

    assert asyncio.run(work()) == wanted


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Everything in it is bounded, so that outputs end."""
    kinds = ["string", "integer", "boolean", "enum", "pattern", "null", "array", "object"]
    kind = "object" if depth == 0 else rng.choice(kinds if depth < 3 else kinds[:6])
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 8)}
    if kind == "integer":
        return {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 5000)}
    if kind == "enum":
        return {"enum": rng.sample(["alpha", "beta", 3, None, True, "ü"], rng.randint(1, 4))}
    if kind == "pattern":
        return {"type": "string", "pattern": "^[a-z]{1,5}(-[0-9]{2})?$"}
    if kind == "array":
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": rng.randint(0, 1),
            "maxItems": 2,
        }
    if kind == "object":
        names = rng.sample(["id", "name", "items", "value", "is_open", "größe"], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
    return {"type": kind}


def check_random_schemas(llm: LLM, count: int, seed: str, methods: Sequence[str]) -> None:
    """``count`` requests at temperature 1, one after the other with the methods and the lossless rules: every answer is
    valid, and drafts were of use."""
    rng = random.Random(seed)
    schemas = [random_schema(rng) for _ in range(count)]
    rules = ("rejection", "block", "coupled")
    spaced, compact = {"whitespace_pattern": " ?"}, {"disable_any_whitespace": True}
    wanted = [
        params(
            methods[i % len(methods)],
            rules[i // len(methods) % 3],
            temperature=1.0,
            max_tokens=400,
            structured_outputs={"json": schema} | (spaced if i % 2 else compact),
        )
        for i, schema in enumerate(schemas)
    ]
    outputs = llm.generate([PROMPTS[i % 3] for i in range(count)], wanted)
    for schema, output in zip(schemas, outputs, strict=True):
        check_json([output], schema)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in outputs) > 2 * count


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("count", [40, pytest.param(100, marks=pytest.mark.slow)])
def test_many_schemas_at_temperature_1(make_llm: Callable[..., LLM], method: str, count: int) -> None:
    """--all: with both methods 200 requests."""
    check_random_schemas(make_llm(max_num_seqs=32), count, method, [method])


def test_draft_heads_side_by_side_and_schemas_at_temperature_1(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_num_seqs=32, speculative_config=HEADS)
    check_random_schemas(llm, 24, "heads", ["eagle3", "mtp", "medusa"])


# every run: all three side by side, above
@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "mtp", "medusa"])
def test_200_schemas_at_temperature_1_with_a_draft_head(make_llm: Callable[..., LLM], method: str) -> None:
    check_random_schemas(make_llm(max_num_seqs=32, speculative_config=HEADS), 200, method, [method])


@pytest.mark.parametrize("method", ["eagle3", "mtp", "medusa"])
def test_draft_heads_change_no_token_of_a_structured_answer(
    make_llm: Callable[..., LLM], method: str
) -> None:
    llm = make_llm(max_num_seqs=32, speculative_config=HEADS)
    for changes in ({}, {"temperature": 1.0, "seed": 5}):  # a seed: the coupled rule
        plain = llm.generate(PROMPTS, params("none", **changes))
        assert ids(llm.generate(PROMPTS, params(method, **changes))) == ids(plain)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    structure = json.dumps({"json": SCHEMA, "disable_any_whitespace": True})
    command = ["generate", PROMPTS[0], "--structured-outputs", structure, "--num-kv-blocks", "64"]
    assert main.main([*command, "--temperature", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(json.loads(answer["outputs"][0]["text"]), SCHEMA)
    bad = ["generate", "x", "--structured-outputs", '{"regex": "("}', "--num-kv-blocks", "64"]
    assert main.main(bad) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "invalid regex" in error and "unclosed group" in error


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0, "seed": 7}])
def test_a_grammar_behind_free_text(make_llm: Callable[..., LLM], changes: dict[str, Any]) -> None:
    """As behind reasoning. The mark is a line's end, which the draft model foresees: the free text ends inside
    accepted drafts, and the first tokens of the answer are accepted with it."""
    llm = make_llm()
    free = {"structured_outputs": {**STRUCTURE, "after": "\n"}, "max_tokens": 160, **changes}
    prompts = ["import os\nimport re\nimport", "from x import y\nfrom", "import sys\nimport"]
    plain = llm.generate(prompts, params("none", **free))
    crossed = 0
    for method in METHODS:
        outputs = llm.generate(prompts, params(method, **free))
        assert ids(outputs) == ids(plain), method
        for output in outputs:
            for step in output.outputs[0].trace or ():
                text = [llm.get_tokenizer().decode([t]) for t in step.token_ids[: len(step.accepted_nodes)]]
                crossed += any(a.endswith("\n") and b[:1] == "{" for a, b in pairwise(text))
    for output in plain:
        _, mark, answer = output.outputs[0].text.partition("\n")
        if mark:
            jsonschema.validate(json.loads(answer), SCHEMA)
    assert crossed > 0, "no free text ended inside an accepted draft"


def test_free_text_comes_back_after_preemption(make_llm: Callable[..., LLM]) -> None:
    free = {"structured_outputs": {**STRUCTURE, "after": ["\n", ":"], "opened_by": " "}, "max_tokens": 128}
    prompts = [PROMPTS[i % 3] + f"{i} = " for i in range(8)]
    plain = make_llm().generate(prompts, params("none", **free))
    tight = make_llm(num_kv_blocks=40, block_size=4, max_num_seqs=6, max_num_batched_tokens=24)
    outputs = tight.generate(prompts, params("draft_model", **free))
    assert ids(outputs) == ids(plain)
    assert sum(o.metrics.num_preemptions for o in outputs) > 0
