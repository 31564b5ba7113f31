"""Requests in seats on the device: the text of the engine that waits, with every method and rule, through chunked
prompts, preemption, cancellation, stop tokens, and requests that come and go. The graphs here need no GPU, and refuse
to capture whatever would read a value on the host."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from draftwise import LLM, AsyncLLM, RequestOutput, SamplingParams
from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.graphs.seats.shaping import Shaping
from draftwise.graphs.seats.step import SeatedSteps
from draftwise.kernels.torch_ops import TorchOps
from draftwise.runner.seat_entry import Scratch
from draftwise.runner.seating import Seating
from draftwise.runner.seats import Seats
from draftwise.runner.threaded import ThreadedExecutor
from tests.e2e.conftest import token_ids
from tests.fakes.block import BlockShape, random_weights, save_block
from tests.fakes.every_method import SHAPES, VOCAB, make_families, make_target
from tests.fakes.fake_executor import LateExecutor
from tests.fakes.fake_graphs import FakeGraphs

METHODS = [
    "none", "draft_model", "eagle", "eagle3", "mtp", "dflash", "ngram", "suffix", "medusa", "early_exit", "hybrid",
]  # fmt: skip
TREES = ["draft_model", "eagle", "eagle3", "mtp", "medusa", "early_exit"]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.9},
    "rejection": {"temperature": 1.0},
    "block": {"temperature": 0.8},
    "typical": {"temperature": 0.7},
}


class Pair:
    """An engine that waits, and one that decodes in seats; each is made when it is needed first."""

    def __init__(self, make: Callable[..., LLM]) -> None:
        """``make``: of an engine, with options besides."""
        self._make = make

    @cached_property
    def waiting(self) -> LLM:
        return self._make()

    @cached_property
    def ahead(self) -> LLM:
        return self._make(async_scheduling=True)

    @cached_property
    def _ordinary(self) -> list[int]:
        return count_ordinary(self.ahead)

    def generate(
        self, prompts: Sequence[Any], params: list[SamplingParams]
    ) -> tuple[list[RequestOutput], list[RequestOutput]]:
        """Of both, in this order: the same text; and in seats nobody ever decodes in an ordinary step."""
        wanted = self.waiting.generate(prompts, params)
        entered = seats(self.ahead).num_entered
        self._ordinary.clear()
        found = self.ahead.generate(prompts, params)
        assert token_ids(found) == token_ids(wanted)
        assert seats(self.ahead).num_entered - entered == len(params)
        assert self._ordinary and not any(self._ordinary)
        assert not self.ahead.stats().drafter_failures
        self.ahead.check_integrity()
        return wanted, found

    def close(self) -> None:
        for name in ("waiting", "ahead"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()


_KEPT = 8


class Engines:
    def __init__(self, root: Path, **shape: Any) -> None:
        """``shape``: of drafts, of all methods in `TREES`; nothing: chains."""
        self.target = make_target(root)
        self.families = make_families(root)
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist() for _ in range(6)]
        prompts += [prompts[2], [*prompts[5], 1]]  # prefix hits
        self.prompts = [{"prompt_token_ids": ids} for ids in prompts]
        self.chosen = [s for s in self.families["methods"] if s["method"] in METHODS]
        (hybrid,) = (s for s in self.chosen if s["method"] == "hybrid")
        # a suffix look-up is another one on the device
        hybrid |= {"hybrid_lookup": "ngram", "hybrid_min_match": 2}
        hybrid |= {"prompt_lookup_min": 1, "prompt_lookup_max": 5}
        if shape:
            self.chosen = [
                {k: v for k, v in s.items() if k != "num_speculative_tokens"} | shape
                for s in self.chosen
                if s["method"] in TREES
            ]
        self.pairs: dict[str, Pair] = {}

    @cached_property
    def waiting(self) -> LLM:
        return LLM(self.target, **self.options())

    @cached_property
    def ahead(self) -> LLM:
        return LLM(self.target, **self.options(async_scheduling=True))

    def make(self, **options: Any) -> LLM:
        """Another one, with passes and loops for two numbers of requests; `waiting` and `ahead` have all. A start, with
        all that is captured, takes longer than to generate."""
        with pytest.MonkeyPatch.context() as patch:
            for place in ("sizes", "setup"):
                patch.setattr(f"draftwise.graphs.{place}.request_counts", lambda most: (2, most))
            return LLM(self.target, **self.options(**options))

    def pair(self, entry: dict[str, Any]) -> Pair:
        """Of one drafter, with room for all prompts, and no prefixes that are shared: a drafter that did not see one
        drafts something else, which is accepted as often as not. The last ones are kept: other tests come back to them.
        """
        options: dict[str, Any] = {
            "enable_prefix_caching": False,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 96,
            "num_kv_blocks": 192,
            "keep_trace": True,
            "speculative_config": entry,
        }
        name = repr(entry)
        if name not in self.pairs:
            if len(self.pairs) == _KEPT:
                self.pairs.pop(next(iter(self.pairs))).close()
            self.pairs[name] = Pair(partial(self.make, **options))
        return self.pairs[name]

    def close_pairs(self) -> None:
        while self.pairs:
            self.pairs.popitem()[1].close()

    def close(self) -> None:
        self.close_pairs()
        for name in ("waiting", "ahead"):
            if name in self.__dict__:
                self.__dict__.pop(name).close()

    def options(self, **more: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "block_size": 4,
            "num_kv_blocks": 128,
            "max_num_seqs": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 48,
            "speculation_control": "static",
            "speculative_config": self.chosen,
            "compilation_config": {"cudagraph_mode": "FULL"},
        }
        return base | more


@pytest.fixture(scope="module")
def graphs() -> Iterator[None]:
    """Graphs that need no GPU."""

    def ops(dtype: torch.dtype, device: torch.device, *args: object, **options: object) -> TorchOps:
        return TorchOps(dtype, device, TorchStaticAttention())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwise.models.self_test.default_ops", ops)
        patch.setattr("draftwise.engine.device.backend_for", lambda device: FakeGraphs())
        yield


def made_of(shape: str, folders: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose drafters draft so, closed behind the tests."""
    made = Engines(folders.mktemp(shape), **({} if shape == "chain" else SHAPES[shape]))
    yield made
    made.close()


@pytest.fixture(scope="module")
def engines(graphs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from made_of("chain", tmp_path_factory)


@pytest.fixture(scope="module")
def forests(graphs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose drafters draft static trees."""
    yield from made_of("static", tmp_path_factory)


@pytest.fixture(scope="module")
def growing(graphs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines whose drafters draft dynamic trees."""
    yield from made_of("dynamic", tmp_path_factory)


def seats(llm: LLM) -> Seats:
    assert llm._engine is not None
    executor: Any = llm._engine.core.executor
    found: Seats = executor.inner.seats
    assert found is not None
    return found


def params_of(rule: str, method: str, **more: Any) -> list[SamplingParams]:
    speculation = {"method": method} | ({} if rule == "greedy" or method == "none" else {"rule": rule})
    options = {"max_tokens": 14, "ignore_eos": True} | RULES[rule] | more
    return [SamplingParams(seed=5 + i, speculation=speculation, **options) for i in range(8)]


CASES = [
    *(("greedy", method) for method in METHODS),
    *(
        ("coupled", method)
        for method in ("none", "draft_model", "eagle3", "ngram", "suffix", "medusa", "early_exit", "hybrid")
    ),
    *(
        ("rejection", method)
        for method in ("none", "draft_model", "eagle3", "mtp", "ngram", "medusa", "early_exit", "hybrid")
    ),
    *(("block", method) for method in ("draft_model", "eagle3", "medusa", "hybrid")),
    *(("typical", method) for method in ("draft_model", "eagle3", "ngram", "medusa")),
]


@pytest.mark.parametrize(("rule", "method"), CASES)
def test_text_is_that_of_the_engine_that_waits(engines: Engines, method: str, rule: str) -> None:
    params = params_of(rule, method)
    wanted = engines.waiting.generate(engines.prompts, params)
    before = seats(engines.ahead).num_steps
    found = engines.ahead.generate(engines.prompts, params)
    assert token_ids(found) == token_ids(wanted)
    assert seats(engines.ahead).num_steps > before
    for one, other in zip(found, wanted, strict=True):
        mine, theirs = one.metrics.speculation, other.metrics.speculation
        # a suffix look-up is another one on the device
        assert method == "suffix" or mine.num_accepted_tokens == theirs.num_accepted_tokens
        if method == "hybrid":
            assert mine == theirs, "also of which part the drafts are"
    assert not engines.ahead.stats().drafter_failures and not engines.waiting.stats().drafter_failures
    engines.ahead.check_integrity()


_GROWING = ("coupled", "rejection", "greedy", "block")
# each method with two rules, each rule with two methods or more; --all: with all of them
TREE_CASES = [
    *(("forests", m, list(RULES)[(i + k) % 5]) for i, m in enumerate(TREES) for k in (0, 2)),
    *(("growing", m, _GROWING[i % 2]) for i, m in enumerate(TREES)),
]


@pytest.mark.parametrize(
    ("shape", "method", "rule"),
    [
        *TREE_CASES,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("forests", method, rule) for method in TREES for rule in RULES),
                *(("growing", method, rule) for method in TREES for rule in _GROWING),
            )
            if case not in TREE_CASES
        ),
    ],
)
def test_trees_stay_on_the_device(request: pytest.FixtureRequest, shape: str, method: str, rule: str) -> None:
    """The text of the engine that waits, by the same drafts; nobody ever decodes in an ordinary step."""
    forests: Engines = request.getfixturevalue(shape)
    params = params_of(rule, method, max_tokens=24)
    draws = rule in ("rejection", "block", "typical")
    if (
        not draws
    ):  # what a drafter makes of these depends on whether its loop fits, and so does what is drawn then
        params[3] = params[3].replace(presence_penalty=0.7, repetition_penalty=1.2)
        params[5] = params[5].replace(top_p=0.9)
    params[5] = params[5].replace(logprobs=2)
    pair = forests.pair(_entry(forests, method))
    wanted, found = pair.generate(forests.prompts, params)
    accepted = 0
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        mine, theirs = one.metrics.speculation, other.metrics.speculation
        if draws or i not in (3, 5):  # drafts of a captured tree look at no penalty, and at no top_p
            assert mine.num_accepted_tokens == theirs.num_accepted_tokens
            assert mine.num_draft_tokens == theirs.num_draft_tokens
        accepted += mine.num_accepted_tokens
    for one, other in zip(
        found[5].outputs[0].logprobs or (), wanted[5].outputs[0].logprobs or (), strict=True
    ):
        assert {t: p.rank for t, p in one.items()} == {t: p.rank for t, p in other.items()}
        assert [p.logprob for p in one.values()] == pytest.approx(
            [p.logprob for p in other.values()], abs=1e-4
        )
    assert accepted > 20 and found[5].outputs[0].logprobs


@pytest.mark.parametrize(
    ("inner", "rule"),
    [("eagle3", "coupled"), ("p-eagle", "rejection"), ("medusa", "rejection"), ("early_exit", "block")],
)
def test_hybrids_of_all_drafters_stay_on_the_device(engines: Engines, inner: str, rule: str) -> None:
    """What is looked up goes before what is drafted, as in the engine that waits."""
    family = engines.families["other forms" if inner == "p-eagle" else "methods"]
    inner = "eagle3" if inner == "p-eagle" else inner
    (drafter,) = (entry for entry in family if entry["method"] == inner)
    (hybrid,) = (entry for entry in engines.chosen if entry["method"] == "hybrid")
    found = _stay(engines, hybrid | {"hybrid_drafter": drafter}, rule)
    used = Counter(name for o in found for name in o.metrics.speculation.steps_by_method)
    assert used["ngram"] > 2 and used[inner] > 2


@pytest.mark.parametrize(
    ("inner", "rule"),
    [("draft_model", "greedy"), ("eagle3", "coupled"), ("medusa", "rejection"), ("early_exit", "block")],
)
def test_trees_of_hybrids_stay_on_the_device(engines: Engines, inner: str, rule: str) -> None:
    """Nodes of the model, and a branch of what is looked up, as in the engine that waits."""
    entry = _entry(engines, "hybrid") | {"hybrid_drafter": _entry(engines, inner)} | SHAPES["dynamic"]
    found = _stay(engines, entry, rule)
    used = Counter(name for o in found for name in o.metrics.speculation.steps_by_method)
    assert used["hybrid"] > 2 and used[inner] > 2


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_in_one_pass_stay_on_the_device(engines: Engines, method: str, rule: str) -> None:
    """PARD and P-EAGLE."""
    (entry,) = (entry for entry in engines.families["other forms"] if entry["method"] == method)
    found = _stay(engines, entry, rule)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 2


@pytest.mark.parametrize("rule", RULES)
def test_layers_that_take_turns_stay_on_the_device(engines: Engines, rule: str) -> None:
    found = _stay(engines, three_layers(engines), rule)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 2


@pytest.mark.parametrize("method", ["eagle3", "dflash", "three layers"])
def test_what_a_head_kept_in_a_seat_is_gone_on_from(engines: Engines, method: str) -> None:
    """A request whose prompt is another one's text: it finds the blocks, and beside them what each layer reads behind
    them, and drafts what it drafts in an engine that waits."""
    entry = three_layers(engines) if method == "three layers" else _entry(engines, method)
    params = params_of("greedy", entry["method"], max_tokens=20)[:1]
    traces = []
    for ahead in (False, True):
        with engines.make(async_scheduling=ahead, speculative_config=entry, keep_trace=True) as llm:
            first = llm.generate(engines.prompts[:1], params)[0]
            text = [*engines.prompts[0]["prompt_token_ids"], *first.outputs[0].token_ids]
            second = llm.generate([{"prompt_token_ids": text}], params)[0]
            assert second.num_cached_tokens > len(text) - 9
            traces.append([o.outputs[0].trace for o in (first, second)])
            assert not ahead or seats(llm).num_entered == 2
    assert traces[0] == traces[1]


def _entry(engines: Engines, method: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in engines.chosen if entry["method"] == method)
    return found


def three_layers(engines: Engines) -> dict[str, Any]:
    """MTP; of four drafts the last layer makes two."""
    (entry,) = (entry for entry in engines.families["other forms"] if entry["method"] == "mtp")
    return entry | {"num_speculative_tokens": 4}


_OF_TARGET: dict[str, Any] = {
    "vocab": VOCAB,
    "target_layers": (0, 2),
    "num_target_layers": 3,
    "mask": VOCAB - 1,
}
BLOCKS = {
    "dflash": BlockShape(**_OF_TARGET, windows=(None, 8), own=True, draft_vocab=VOCAB - 2),
    "dspark": BlockShape("deepspec", **_OF_TARGET, from_root=True, markov="rnn", own=True),
    "dflash2": BlockShape(**_OF_TARGET, windows=(9, 9), selector=(6, 5), conv=(2, 8)),
    "domino": BlockShape(**_OF_TARGET, domino=(7, 5, 1)),
}
"""A vocabulary of its own, and a window for some of the layers; drafts that depend on those before them, through a
state and without; rows that read one another outside of attention."""


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("blocks")
    return {
        name: {"method": "dflash", "model": save_block(root / name, shape, random_weights(shape, 4, 0.15))}
        for name, shape in BLOCKS.items()
    }


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    [
        *(("dflash", "chain", rule) for rule in RULES),
        *(
            (name, "chain", rule)
            for name in ("dspark", "dflash2", "domino")
            for rule in ("coupled", "rejection")
        ),
        *(("dflash", shape, rule) for shape in ("static", "dynamic") for rule in ("coupled", "rejection")),
        *((name, "static", "block") for name in ("dspark", "dflash2")),
        *((name, "dynamic", "greedy") for name in ("dspark", "domino")),
    ],
)
def test_blocks_that_are_filled_in_stay_on_the_device(
    engines: Engines, blocks: dict[str, dict[str, Any]], name: str, shape: str, rule: str
) -> None:
    found = _stay(engines, blocks[name] | SHAPES[shape], rule)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 2


def test_a_block_in_another_requests_place_is_found(
    engines: Engines, blocks: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that have no scratch of their own behind a request's blocks read those of others: other drafts."""
    take = Scratch.take

    def first(self: Scratch, method: str) -> range:
        own = take(self, method)
        return range(128, 128 + len(own))

    monkeypatch.setattr(Scratch, "take", first)
    monkeypatch.setattr(engines, "pairs", {})
    with pytest.raises(AssertionError):
        _stay(engines, blocks["dflash"] | SHAPES["chain"], "greedy")
    assert engines.pairs
    engines.close_pairs()


@pytest.mark.parametrize(("mode", "reserved"), [("FULL", True), ("PIECEWISE", False)])
def test_blocks_have_scratch_where_loops_are_captured(
    engines: Engines, blocks: dict[str, dict[str, Any]], mode: str, reserved: bool
) -> None:
    options = {"speculative_config": blocks["dflash"], "compilation_config": {"cudagraph_mode": mode}}
    with engines.make(async_scheduling=True, **options) as llm:
        executor: Any = llm._engine.core.executor  # type: ignore[union-attr]
        scratch = executor.inner._drafting._proposers["dflash"]._scratch
        assert bool(scratch.seats) == reserved


@pytest.mark.parametrize("family", ["forests", "growing"])
def test_given_rates_hold_on_trees(request: pytest.FixtureRequest, family: str) -> None:
    engines: Engines = request.getfixturevalue(family)
    (entry,) = (entry for entry in engines.chosen if entry["method"] == "medusa")
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    found = _stay(engines, entry | rates, "greedy")
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 60


STEERING: list[dict[str, Any]] = [
    {"allowed_token_ids": [1, 3, 4, 6]},
    {"logit_bias": {2: 6.0, 5: -4.0}},
    {},
    {"allowed_token_ids": [0, 1, 2, 3, 4, 6, 7]},
]


@pytest.mark.parametrize(
    ("method", "shape", "rule"),
    [
        *((method, "chain", rule) for method in ("draft_model", "eagle3") for rule in RULES),
        *((method, "chain", "rejection") for method in ("dflash", "medusa", "early_exit", "hybrid")),
        *((method, "static", "coupled") for method in ("draft_model", "eagle3")),
        *((method, "dynamic", "greedy") for method in ("draft_model", "medusa")),
    ],
)
def test_who_is_steered_stays_on_the_device(engines: Engines, method: str, shape: str, rule: str) -> None:
    """What may decide which tokens are likely is looked at in drafts, too. Trees want so many tokens of a place."""
    entry, kinds = _entry(engines, method), STEERING
    if shape != "chain":
        entry = {name: value for name, value in entry.items() if name != "num_speculative_tokens"} | SHAPES[
            shape
        ]
        kinds = STEERING[1:]
    found = _stay(engines, entry, rule, kinds)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 20


@pytest.mark.parametrize(("shape", "allowed"), [("chain", [VOCAB - 1]), ("static", [1, VOCAB - 1])])
def test_who_is_steered_to_what_a_head_does_not_know_loses_drafts_alone(
    engines: Engines, shape: str, allowed: list[int]
) -> None:
    """One allowed token, or a tree that wants more tokens than are allowed: the same text. Children that would be drawn
    without replacement are drafted in ordinary steps."""
    entry = {k: v for k, v in _entry(engines, "eagle3").items() if k != "num_speculative_tokens"}
    options: dict[str, Any] = {
        "speculative_config": entry | SHAPES[shape],
        "enable_prefix_caching": False,
    }
    with engines.make(**options) as waiting, engines.make(async_scheduling=True, **options) as llm:
        for rule in ("greedy", "coupled", "rejection"):
            params = params_of(rule, "eagle3", max_tokens=20)
            params = [one.replace(allowed_token_ids=allowed) for one in params]
            wanted = token_ids(waiting.generate(engines.prompts, params))
            before = seats(llm).num_entered
            assert token_ids(llm.generate(engines.prompts, params)) == wanted, rule
            entered = seats(llm).num_entered - before
            assert bool(entered) == (shape == "chain" or rule != "rejection"), rule
            assert not llm.stats().drafter_failures


def _stay(
    engines: Engines, entry: dict[str, Any], rule: str, kinds: Sequence[dict[str, Any]] = ({},)
) -> list[RequestOutput]:
    """The text of the engine that waits, by the same drafts of this drafter; and nobody ever waits. ``kinds``: what
    requests want besides, by turns."""
    params = params_of(rule, entry["method"], max_tokens=24)
    params = [one.replace(**kinds[i % len(kinds)]) for i, one in enumerate(params)]
    wanted, found = engines.pair(entry).generate(engines.prompts, params)
    assert [o.metrics.speculation for o in found] == [o.metrics.speculation for o in wanted]
    assert [o.outputs[0].trace for o in found] == [o.outputs[0].trace for o in wanted]
    return found


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "early_exit"])
def test_nodes_that_are_not_verified_go_to_scratch_blocks(forests: Engines, method: str) -> None:
    """Trees of three nodes, of eight that are fed: more than a plan has room for. Nobody writes into another's: drafts,
    and with them the numbers of those accepted, are what they are in the engine that waits."""
    (entry,) = (e for e in forests.chosen if e["method"] == method)
    entry = {k: v for k, v in entry.items() if k != "speculative_token_tree"}
    entry |= {"speculative_dynamic_tree": {"top_k": 4, "depth": 3}, "num_speculative_tokens": 3}
    options = {"enable_prefix_caching": False, "max_num_seqs": 8, "speculative_config": entry}
    params = params_of("coupled", method, max_tokens=24)
    counts = []
    for ahead in (False, True):
        with forests.make(async_scheduling=ahead, **options) as llm:
            done = llm.generate(forests.prompts, params)
            counts.append(
                [
                    (
                        o.outputs[0].token_ids,
                        o.metrics.speculation.num_accepted_tokens,
                        o.metrics.speculation.num_draft_tokens,
                    )
                    for o in done
                ]
            )
            if ahead:
                assert seats(llm).num_entered >= len(params)
            llm.check_integrity()
    assert counts[0] == counts[1] and sum(count[1] for count in counts[0]) > 20


def test_whoever_drafts_when_it_pays_has_a_seat_all_the_same(engines: Engines) -> None:
    """Adaptive control, as by default: requests begin and cease to draft, and change their seats for that."""
    methods = ["eagle3", "draft_model", "ngram", "medusa", "eagle3", "mtp", "none", "suffix"]
    params = [
        params_of("coupled" if i % 2 else "greedy", method, max_tokens=24)[i]
        for i, method in enumerate(methods)
    ]
    wanted = token_ids(engines.waiting.generate(engines.prompts, params))
    used = [entry for entry in engines.chosen if entry["method"] in methods]
    with engines.make(async_scheduling=True, speculation_control="adaptive", speculative_config=used) as llm:
        for _ in range(3):
            assert token_ids(llm.generate(engines.prompts, params)) == wanted
        control = llm.stats().control
        assert control.mode == "adaptive" and control.decisions > 0
        assert seats(llm).num_entered > len(params) and not llm.stats().drafter_failures
        llm.check_integrity()


def test_outputs_of_requests_that_ended_are_looked_up(engines: Engines) -> None:
    """The same request again: its output stands on the device. Forgotten, it is as in the beginning."""
    entry = next(entry for entry in engines.chosen if entry["method"] == "suffix")
    params = params_of("coupled", "suffix", max_tokens=30)[:1]
    with engines.make(async_scheduling=True, speculative_config=entry) as llm:
        core = llm._engine.core  # type: ignore[union-attr]

        def run() -> tuple[tuple[int, ...], int]:
            (done,) = llm.generate(engines.prompts[:1], params)
            return done.outputs[0].token_ids, done.metrics.speculation.num_accepted_tokens

        first, second = run(), run()
        assert second[0] == first[0] and second[1] >= first[1] + 10
        core.executor.forget()
        assert run() == first
        llm.check_integrity()


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "logprobs": 3},
    {"temperature": 1.0, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    {"temperature": 0.8, "allowed_token_ids": list(range(0, VOCAB, 2)), "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {3: 2.5, 7: -1.0}, "logprobs": 0},
    {"temperature": 1.0, "logprobs": 20, "frequency_penalty": -0.5},
]


def test_requests_of_all_kinds_decode_beside_each_other(engines: Engines) -> None:
    """Drafters, rules, and all that shapes a distribution, in the same steps: nobody's text is another one's."""
    beside = ["medusa", "draft_model", "eagle", "eagle3", "mtp", "none", "suffix", "ngram"]
    # what a drafter makes of top_p depends on whether its loop fits, and so does what rejection draws then
    rules = ["greedy", "coupled", "coupled", "coupled", "rejection", "", "greedy", "block"]
    params = []
    for i, (kind, rule) in enumerate(zip(KINDS, rules, strict=True)):
        method = beside[i]
        own: dict[str, Any] = {"method": method}
        if rule not in ("", "greedy"):
            own["rule"] = rule
        params.append(SamplingParams(seed=i, max_tokens=16, ignore_eos=True, speculation=own, **kind))
    # a head that did not see a shared prefix drafts something else, which changes what is drawn
    options: dict[str, Any] = {
        "enable_prefix_caching": False,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "speculative_config": [entry for entry in engines.chosen if entry["method"] in beside],
    }
    with engines.make(**options) as waiting:
        wanted = waiting.generate(engines.prompts, params)
    with engines.make(async_scheduling=True, **options) as llm:
        entered = seats(llm).num_entered
        ordinary = count_ordinary(llm)
        found = llm.generate(engines.prompts, params)
        assert token_ids(found) == token_ids(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert (one.outputs[0].logprobs is None) is (other.outputs[0].logprobs is None)
            # torch's products round differently among other rows
            for mine, theirs in zip(
                one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True
            ):
                assert {token: p.rank for token, p in mine.items()} == {t: p.rank for t, p in theirs.items()}
                assert [p.logprob for p in mine.values()] == pytest.approx(
                    [p.logprob for p in theirs.values()], abs=1e-4
                )
        assert seats(llm).num_entered - entered == len(params), "who has a seat keeps it"
        assert ordinary and not any(ordinary), "prompts are computed, and nothing of them is waited for"
        llm.generate(engines.prompts, params)
        assert not any(ordinary), "seats of those who are gone are free in the same step"
        assert not llm.stats().drafter_failures
        llm.check_integrity()


def count_ordinary(llm: LLM) -> list[int]:
    """Of every ordinary part of a step, from now on: how many requests it decides, which is waited for."""
    executor: Any = llm._engine.core.executor  # type: ignore[union-attr]
    verifying = executor.inner._verifying
    found: list[int] = []
    verify = verifying.verify

    def watched(logits: torch.Tensor, batch: Any, deciding: Any) -> Any:
        found.append(len(batch.owners))
        return verify(logits, batch, deciding)

    verifying.verify = watched
    return found


def test_who_has_to_wait_waits_alone(engines: Engines) -> None:
    """A processor of the user's runs on the host; the others' steps stay on the device, and all texts are right."""

    def shifted(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.roll(len(ids) % 3)

    params = params_of("coupled", "eagle3")[:3]
    params.append(params[0].replace(logits_processors=[shifted], speculation={"method": "none"}))
    wanted = token_ids(engines.waiting.generate(engines.prompts[:4], params))
    found = seats(engines.ahead)
    before = found.num_steps, found.num_entered
    assert token_ids(engines.ahead.generate(engines.prompts[:4], params)) == wanted
    assert found.num_entered - before[1] == 3 and found.num_steps > before[0] + 3


def test_most_steps_stay_on_the_device(engines: Engines) -> None:
    """Two prompts of a chunk each, then 13 steps of plain decoding, of which none is an ordinary one."""
    found = seats(engines.ahead)
    before = found.num_steps, found.num_entered
    params = params_of("greedy", "none")[:2]
    engines.ahead.generate(engines.prompts[:2], params)
    # the last plan is made before the tokens that end the requests are known
    assert 12 <= found.num_steps - before[0] <= 14 and found.num_entered - before[1] == 2


CHAINS = [("engines", method) for method in ("draft_model", "eagle3", "ngram", "suffix", "medusa", "hybrid")]


@pytest.mark.parametrize(("family", "method"), [*CHAINS, ("forests", "draft_model"), ("forests", "eagle3")])
def test_requests_come_and_go_among_all_that_happens(
    request: pytest.FixtureRequest, engines: Engines, family: str, method: str
) -> None:
    """A tight cache with preemptions, prompts in chunks, requests of other methods and kinds in between, stop tokens,
    one request that ends after the other; and a device that runs a step as late as can be."""
    drafting: Engines = request.getfixturevalue(family)
    others = [{"method": method}] * 8
    others[4] = {"method": "none"}
    others[6] = {"method": "mtp"}
    params = [
        SamplingParams(
            temperature=0.9 if i == 5 else 0.0,
            max_tokens=8 + i,
            seed=i,
            speculation=speculation,
            stop_token_ids=(i,) if i % 3 == 0 else (),
            ignore_eos=True,
            min_tokens=4,
        )
        for i, speculation in enumerate(others)
    ]
    # the text, which is plain decoding's, of the same target with drafters of chains
    wanted = token_ids(engines.waiting.generate(engines.prompts, params))
    used = [entry for entry in drafting.chosen if entry["method"] in (method, "mtp")]
    tight: dict[str, Any] = {
        "num_kv_blocks": 18,
        "max_num_batched_tokens": 24,
        "speculative_config": used,
    }
    for late in (False, True) if method == "draft_model" else (True,):
        with drafting.make(async_scheduling=True, **tight) as llm:
            core = llm._engine.core  # type: ignore[union-attr]
            found = seats(llm)
            if late:
                assert isinstance(core.executor, ThreadedExecutor)
                core.executor = LateExecutor(core.executor.inner)
            for _ in range(1 + late):  # the second time with prefix hits
                assert token_ids(llm.generate(engines.prompts, params)) == wanted
                llm.check_integrity()
            assert llm.stats().num_preemptions > 0
            assert found.num_entered >= 2 and found.num_steps > 8
            assert not llm.stats().drafter_failures
            while core.has_work:
                core.step()
            assert core.scheduler.kv.num_used == 0


def test_what_waited_when_a_request_came_is_not_kept(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proposal holds distributions over the vocabulary, for which no memory is planned once they are copied."""
    entered, kept = [], []
    enter, finish = Seats._enter, Seats.finish

    def noticed(self: Seats, *args: Any) -> Any:
        member = enter(self, *args)
        entered.extend([] if member is None or member.before is None else [member.before.q])
        return member

    def finished(self: Seats, flight: Any) -> Any:
        rows = finish(self, flight)
        kept.extend(member.before for member, _ in flight.members)
        return rows

    monkeypatch.setattr(Seats, "_enter", noticed)
    monkeypatch.setattr(Seats, "finish", finished)
    sent_away_at_times(monkeypatch)
    engines.ahead.generate(engines.prompts, params_of("rejection", "draft_model", max_tokens=20))
    assert any(q is not None for q in entered) and kept == [None] * len(kept) != []


def test_cancelling_in_the_middle_disturbs_nobody(engines: Engines) -> None:
    params = params_of("coupled", "eagle3", output_kind="delta")
    wanted = token_ids(
        engines.waiting.generate(engines.prompts, [p.replace(output_kind="cumulative") for p in params])
    )
    options = engines.options(
        async_scheduling=True, num_kv_blocks=40, speculative_config=_entry(engines, "eagle3")
    )

    async def one(llm: AsyncLLM, i: int) -> tuple[int, ...]:
        got: list[int] = []
        stop_at = 5 if i % 2 else 99
        async for output in llm.generate(engines.prompts[i], params[i]):
            got += output.outputs[0].token_ids
            if len(got) >= stop_at:
                break
        return tuple(got)

    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLM(engines.target, **options) as llm:
            got = await asyncio.gather(*(one(llm, i) for i in range(8)))
            llm.check_integrity()
            return got

    for i, got in enumerate(asyncio.run(run())):
        assert got == wanted[i][: len(got)] and len(got) >= (5 if i % 2 else 14)


def sent_away_at_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every seventh time nobody knows how a request could go on in its seat."""
    asked = count()
    goes_on = Seating.goes_on
    monkeypatch.setattr(
        Seating, "goes_on", lambda *args: next(asked) % 7 != 6 and goes_on(*args), raising=True
    )


@pytest.mark.parametrize(
    "method", ["draft_model", "eagle3", "dflash", "three layers", "ngram", "medusa", "early_exit", "hybrid"]
)
def test_who_leaves_a_seat_goes_on_as_it_stood(
    engines: Engines, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests arrive one after the other and leave their seats every few steps; drafts, what they were drawn from and
    a head's features go with the requests, so that no draw changes."""
    sent_away_at_times(monkeypatch)
    entry = three_layers(engines) if method == "three layers" else _entry(engines, method)
    params = params_of("rejection", entry["method"], max_tokens=20)
    # a head that did not see a shared prefix drafts something else, which changes what is drawn
    options = engines.options(enable_prefix_caching=False, speculative_config=entry, async_scheduling=True)
    wanted = token_ids(engines.pair(entry).waiting.generate(engines.prompts, params))
    found: list[Seats] = []

    async def one(llm: AsyncLLM, i: int) -> tuple[int, ...]:
        got: tuple[int, ...] = ()
        async for output in llm.generate(engines.prompts[i], params[i]):
            got = tuple(output.outputs[0].token_ids)
        return got

    async def run() -> list[tuple[int, ...]]:
        async with AsyncLLM(engines.target, **options) as llm:
            executor: Any = llm._engine.core.executor
            found.append(executor.inner.seats)
            tasks = []
            for i in range(8):
                tasks.append(asyncio.create_task(one(llm, i)))
                steps = found[0].num_steps
                for _ in range(200):
                    if found[0].num_steps > steps + 2:
                        break
                    await asyncio.sleep(0.002)
            return list(await asyncio.gather(*tasks))

    assert asyncio.run(run()) == wanted
    assert found[0].num_entered > 12


def moving(engines: Engines, what: str) -> tuple[dict[str, Any], list[SamplingParams]]:
    """A drafter and requests of which the last one stays when all others have ended, and so takes the first seat.
    What is drawn depends on what was drafted, and that on features; or on what the request has said, and its biases."""
    if what == "features":
        entry, rule, more = three_layers(engines), "rejection", {}
    else:
        entry, rule = _entry(engines, "draft_model"), "coupled"
        more = {"frequency_penalty": 1.2, "repetition_penalty": 1.3, "logit_bias": {3: 1.5, 7: -100.0}}
    params = params_of(rule, entry["method"], max_tokens=4)
    return entry, [*params[:7], params[7].replace(max_tokens=30, **more)]


def text_and_moves(engines: Engines, entry: dict[str, Any], params: list[SamplingParams]) -> tuple[Any, int]:
    """What an engine with seats says, and how often a request took another one."""
    moved: list[int] = []
    move = SeatedSteps.move
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SeatedSteps, "move", lambda *args: (moved.append(args[1]), move(*args)))
        return token_ids(engines.pair(entry).ahead.generate(engines.prompts, params)), len(moved)


@pytest.mark.parametrize("what", ["features", "shaping"])
def test_who_takes_another_seat_goes_on_as_it_stood(engines: Engines, what: str) -> None:
    entry, params = moving(engines, what)
    wanted = token_ids(engines.pair(entry).waiting.generate(engines.prompts, params))
    found, moved = text_and_moves(engines, entry, params)
    assert found == wanted and moved


def test_who_leaves_its_penalties_behind_does_not(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above notices it. What features a head reads may change no draw: `tests/unit/test_seats.py`."""
    entry, params = moving(engines, "shaping")
    wanted = token_ids(engines.pair(entry).waiting.generate(engines.prompts, params))
    monkeypatch.setattr(Shaping, "move", lambda *_: None)
    found, moved = text_and_moves(engines, entry, params)
    assert moved and found[:7] == wanted[:7] and found[7] != wanted[7]


LEAVING = [
    ("draft_model", "coupled"),
    ("draft_model", "rejection"),
    ("eagle3", "coupled"),
    ("medusa", "block"),
]


@pytest.mark.parametrize(
    ("family", "method", "rule"),
    [*(("forests", *case) for case in LEAVING), ("engines", "hybrid", "coupled")],
)
def test_who_leaves_a_seat_takes_its_drafts_along(
    request: pytest.FixtureRequest, family: str, method: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is verified in an ordinary step, and drafted on from there: all is accepted that would have been."""
    forests: Engines = request.getfixturevalue(family)
    sent_away_at_times(monkeypatch)
    params = params_of(rule, method, max_tokens=24)
    pair = forests.pair(_entry(forests, method))
    before = seats(pair.ahead).num_entered
    found = []
    for llm in (pair.waiting, pair.ahead):
        done = llm.generate(forests.prompts, params)
        found.append([(o.outputs[0].token_ids, o.outputs[0].trace) for o in done])
        llm.check_integrity()
    assert found[0] == found[1]
    assert seats(pair.ahead).num_entered - before > 12


def test_a_drafter_stops_at_its_longest_context(engines: Engines) -> None:
    """Behind it nothing is drafted, and a head that is left there goes on behind a gap."""
    entry = next(entry for entry in engines.chosen if entry["method"] == "eagle3")
    options = engines.options(
        speculative_config=entry | {"max_model_len": 24}, enable_prefix_caching=False, num_kv_blocks=80
    )
    params = params_of("rejection", "eagle3", max_tokens=20)
    found = []
    for ahead in (False, True):
        with LLM(engines.target, async_scheduling=ahead, **options) as llm:
            done = llm.generate(engines.prompts, params)
            found.append([(o.outputs[0].token_ids, o.metrics.speculation.num_draft_tokens) for o in done])
    assert found[0] == found[1]


def failing(*_: object, **__: object) -> Any:
    raise RuntimeError("lost")


WRONG: dict[str, list[Any]] = {
    "kind": [failing, lambda *_: "guess"],
    "catch_up": [failing, lambda *_: 10_000, lambda *_: None],
    "place": [failing, lambda *_: (10_000, 0, 0), lambda *_: 3],
    "seats": [failing],
    "prepare": [failing],
    "went_on": [failing, lambda *_: (10_000, 0), lambda *_: (1, 99), lambda *_: None],
    "left": [failing],
}


class BesideMtp(NamedTuple):
    """A method, and an engine of it and of MTP; what it is asked, and the text of the engine that waits."""

    method: str
    llm: LLM
    prompts: list[dict[str, list[int]]]
    params: list[SamplingParams]
    wanted: list[tuple[int, ...]]


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def beside_mtp(request: pytest.FixtureRequest, engines: Engines) -> Iterator[BesideMtp]:
    method, prompts = request.param, engines.prompts[:4]
    params = [params_of("coupled", method, max_tokens=8 + 2 * i)[i] for i in range(3)]
    params.append(params_of("coupled", "mtp", max_tokens=6)[3])
    wanted = token_ids(engines.waiting.generate(prompts, params))
    used = [_entry(engines, method), _entry(engines, "mtp")]
    with engines.make(async_scheduling=True, speculative_config=used, max_num_seqs=3) as llm:
        yield BesideMtp(method, llm, prompts, params, wanted)


@pytest.mark.parametrize("hook", WRONG)
def test_a_drafter_that_fails_costs_speculation_only(beside_mtp: BesideMtp, hook: str) -> None:
    """The last request has another drafter, and goes on with it."""
    method, llm, prompts, params, wanted = beside_mtp
    drafter = seats(llm)._seating.drafters[method]._drafter
    for number, wrong in enumerate(WRONG[hook]):
        before = Counter(llm.stats().drafter_failures)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafter, hook, wrong)
            if hook == "left":
                sent_away_at_times(patch)
            outputs = llm.generate(prompts, params)
        assert token_ids(outputs) == wanted, number
        assert (
            Counter(llm.stats().drafter_failures)[f"{method}.seated_{hook}"]
            > before[f"{method}.seated_{hook}"]
        ), number
        assert outputs[3].metrics.speculation.num_drafts > 1, "its neighbour goes on"
        llm.check_integrity()
    again = llm.generate(prompts, params)
    assert token_ids(again) == wanted and again[0].metrics.speculation.num_drafts > 1


def test_a_drafter_that_cannot_say_whether_it_takes_part_does_not(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwise.propose.models.draft_model.DraftModelProposer.seated", failing)
    params = params_of("coupled", "draft_model")
    wanted = token_ids(engines.waiting.generate(engines.prompts, params))
    with engines.make(async_scheduling=True, speculative_config=engines.chosen[:1]) as llm:
        outputs = llm.generate(engines.prompts, params)
        assert token_ids(outputs) == wanted and outputs[0].metrics.speculation.num_drafts > 1
        assert llm.stats().drafter_failures == {"draft_model.seated": 1}


def test_who_finds_no_loop_leaves_alone(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """One drafter has nothing captured for this kind of draws: its requests decode in the ordinary way from then on,
    those beside them go on in seats."""
    used = [_entry(engines, "draft_model"), _entry(engines, "eagle3")]
    methods = ("eagle3", "draft_model", "none")
    params = [params_of("greedy", method)[i] for i, method in enumerate(methods)]
    wanted = token_ids(engines.waiting.generate(engines.prompts[:3], params))
    with engines.make(async_scheduling=True, speculative_config=used) as llm:
        found = seats(llm)
        monkeypatch.setattr(found._seating.drafters["eagle3"]._drafter, "seats", lambda *_: None)
        for _ in range(2):
            before = found.num_steps
            assert token_ids(llm.generate(engines.prompts[:3], params)) == wanted
            assert found._without == {("eagle3", "argmax")} and found.num_steps > before + 5
        assert not llm.stats().drafter_failures
        llm.check_integrity()


def test_ways_that_find_nothing_in_common_leave_those_who_do_not_draft(engines: Engines) -> None:
    """Each drafter finds a pass and a loop, but both do not find one pass."""
    found = seats(engines.ahead)
    ways: dict[Any, Any] = {("draft_model", "argmax"): [], ("none", "argmax"): [], ("eagle3", "argmax"): []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "_shape", lambda some, *_: None if len(some) > 1 else ())
        assert found._uncaptured(ways, 3, 20) == {("draft_model", "argmax"), ("eagle3", "argmax")}


def test_look_ups_that_nobody_configured_take_the_passes_there_are(engines: Engines) -> None:
    """A request may name them in any engine; passes of their own, 6 and 17 rows wide, are not captured."""
    head = next(s for s in engines.chosen if s["method"] == "mtp")
    assert head["num_speculative_tokens"] < 5
    options: dict[str, Any] = {"speculative_config": [head], "enable_prefix_caching": False}
    with engines.make(**options) as waiting, engines.make(async_scheduling=True, **options) as llm:
        ordinary = count_ordinary(llm)
        for method in ("ngram", "suffix"):
            params = params_of("greedy", method, max_tokens=24)
            wanted = token_ids(waiting.generate(engines.prompts, params))
            before = seats(llm).num_entered
            found = llm.generate(engines.prompts, params)
            assert token_ids(found) == wanted, method
            assert seats(llm).num_entered - before >= len(params) and not any(ordinary), method
            told = [o.metrics.speculation for o in found]
            assert sum(one.num_accepted_tokens for one in told if one is not None) > 0, method
            llm.check_integrity()
