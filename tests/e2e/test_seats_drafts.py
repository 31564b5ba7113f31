"""Drafts of requests in seats, of every form: the drafts and the text of the engine that waits, and nobody ever decodes
in an ordinary step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from draftwise.runner.seat_entry import Scratch
from tests.e2e.conftest import token_ids
from tests.e2e.seated_engines import (
    RULES,
    TREES,
    Engines,
    engines,
    entry_of,
    forests,
    graphs,
    growing,
    params_of,
    seats,
    some,
    stay,
    three_layers,
)
from tests.fakes.block import BlockShape, random_weights, save_block
from tests.fakes.every_method import SHAPES, VOCAB

__all__ = ["engines", "forests", "growing", "graphs"]  # fixtures


_GROWING = ("coupled", "rejection", "greedy", "block")
# each method in one of both shapes, and each rule once or twice
TREE_CASES = [
    ("forests", "draft_model", "greedy"),
    ("forests", "eagle3", "rejection"),
    ("forests", "medusa", "typical"),
    ("growing", "eagle", "rejection"),
    ("growing", "mtp", "block"),
    ("growing", "early_exit", "coupled"),
]
MORE_TREE_CASES = [
    *(("forests", method, rule) for method in TREES for rule in RULES),
    *(("growing", method, rule) for method in TREES for rule in _GROWING),
]


@pytest.mark.parametrize(("shape", "method", "rule"), some(TREE_CASES, MORE_TREE_CASES))
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
    pair = forests.pair(entry_of(forests, method))
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
    # those that are slow stand below, in trees
    some(
        [("p-eagle", "rejection"), ("early_exit", "block")],
        [("eagle3", "coupled"), ("medusa", "rejection")],
    ),
)
def test_hybrids_of_all_drafters_stay_on_the_device(engines: Engines, inner: str, rule: str) -> None:
    """What is looked up goes before what is drafted, as in the engine that waits."""
    family = engines.families["other forms" if inner == "p-eagle" else "methods"]
    inner = "eagle3" if inner == "p-eagle" else inner
    (drafter,) = (entry for entry in family if entry["method"] == inner)
    (hybrid,) = (entry for entry in engines.chosen if entry["method"] == "hybrid")
    found = stay(engines, hybrid | {"hybrid_drafter": drafter}, rule)
    used = Counter(name for o in found for name in o.metrics.speculation.steps_by_method)
    assert used["ngram"] > 2 and used[inner] > 2


@pytest.mark.parametrize(
    ("inner", "rule"),
    some(
        [("eagle3", "coupled"), ("medusa", "rejection")], [("draft_model", "greedy"), ("early_exit", "block")]
    ),
)
def test_trees_of_hybrids_stay_on_the_device(engines: Engines, inner: str, rule: str) -> None:
    """Nodes of the model, and a branch of what is looked up, as in the engine that waits."""
    entry = entry_of(engines, "hybrid") | {"hybrid_drafter": entry_of(engines, inner)} | SHAPES["dynamic"]
    found = stay(engines, entry, rule)
    used = Counter(name for o in found for name in o.metrics.speculation.steps_by_method)
    assert used["hybrid"] > 2 and used[inner] > 2


@pytest.mark.parametrize(
    ("method", "rule"),
    some(
        [
            *(("draft_model", rule) for rule in ("greedy", "typical")),
            *(("eagle3", rule) for rule in ("coupled", "rejection")),
        ],
        ((method, rule) for method in ("draft_model", "eagle3") for rule in RULES),
    ),
)
def test_drafts_in_one_pass_stay_on_the_device(engines: Engines, method: str, rule: str) -> None:
    """PARD and P-EAGLE."""
    (entry,) = (entry for entry in engines.families["other forms"] if entry["method"] == method)
    found = stay(engines, entry, rule)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 2


@pytest.mark.parametrize(("rule",), some([("greedy",), ("block",)], ((rule,) for rule in RULES)))
def test_layers_that_take_turns_stay_on_the_device(engines: Engines, rule: str) -> None:
    found = stay(engines, three_layers(engines), rule)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 2


@pytest.mark.parametrize("method", ["eagle3", "dflash", "three layers"])
def test_what_a_head_kept_in_a_seat_is_gone_on_from(engines: Engines, method: str) -> None:
    """A request whose prompt is another one's text: it finds the blocks, and beside them what each layer reads behind
    them, and drafts what it drafts in an engine that waits."""
    entry = three_layers(engines) if method == "three layers" else entry_of(engines, method)
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


BLOCK_CASES = [
    ("dflash", "chain", "greedy"),
    ("dflash", "chain", "typical"),
    ("dflash", "dynamic", "rejection"),
    ("dspark", "static", "block"),
    ("dflash2", "chain", "coupled"),
    ("domino", "dynamic", "greedy"),
]
MORE_BLOCK_CASES = [
    *(("dflash", "chain", rule) for rule in RULES),
    *((name, "chain", rule) for name in ("dspark", "dflash2", "domino") for rule in ("coupled", "rejection")),
    *(("dflash", shape, rule) for shape in ("static", "dynamic") for rule in ("coupled", "rejection")),
    *((name, "static", "block") for name in ("dspark", "dflash2")),
    *((name, "dynamic", "greedy") for name in ("dspark", "domino")),
]


@pytest.mark.parametrize(("name", "shape", "rule"), some(BLOCK_CASES, MORE_BLOCK_CASES))
def test_blocks_that_are_filled_in_stay_on_the_device(
    engines: Engines, blocks: dict[str, dict[str, Any]], name: str, shape: str, rule: str
) -> None:
    found = stay(engines, blocks[name] | SHAPES[shape], rule)
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
        stay(engines, blocks["dflash"] | SHAPES["chain"], "greedy")
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


@pytest.mark.parametrize(("family",), some([("growing",)], [("forests",)]))
def test_given_rates_hold_on_trees(request: pytest.FixtureRequest, family: str) -> None:
    engines: Engines = request.getfixturevalue(family)
    (entry,) = (entry for entry in engines.chosen if entry["method"] == "medusa")
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    found = stay(engines, entry | rates, "greedy")
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 60


STEERING: list[dict[str, Any]] = [
    {"allowed_token_ids": [1, 3, 4, 6]},
    {"logit_bias": {2: 6.0, 5: -4.0}},
    {},
    {"allowed_token_ids": [0, 1, 2, 3, 4, 6, 7]},
]


STEERED = [
    ("draft_model", "chain", "block"),
    ("eagle3", "chain", "typical"),
    *((method, "chain", "rejection") for method in ("dflash", "hybrid")),
    ("draft_model", "static", "coupled"),
    ("medusa", "dynamic", "greedy"),
]
MORE_STEERED = [
    *((method, "chain", rule) for method in ("draft_model", "eagle3") for rule in RULES),
    ("early_exit", "chain", "rejection"),
    ("medusa", "chain", "rejection"),
    ("eagle3", "static", "coupled"),
    ("draft_model", "dynamic", "greedy"),
]


@pytest.mark.parametrize(("method", "shape", "rule"), some(STEERED, MORE_STEERED))
def test_who_is_steered_stays_on_the_device(engines: Engines, method: str, shape: str, rule: str) -> None:
    """What may decide which tokens are likely is looked at in drafts, too. Trees want so many tokens of a place."""
    entry, kinds = entry_of(engines, method), STEERING
    if shape != "chain":
        entry = {name: value for name, value in entry.items() if name != "num_speculative_tokens"} | SHAPES[
            shape
        ]
        kinds = STEERING[1:]
    found = stay(engines, entry, rule, kinds)
    assert sum(o.metrics.speculation.num_accepted_tokens for o in found) > 20


@pytest.mark.parametrize(("shape", "allowed"), [("chain", [VOCAB - 1]), ("static", [1, VOCAB - 1])])
def test_who_is_steered_to_what_a_head_does_not_know_loses_drafts_alone(
    engines: Engines, shape: str, allowed: list[int]
) -> None:
    """One allowed token, or a tree that wants more tokens than are allowed: the same text. Children that would be drawn
    without replacement are drafted in ordinary steps."""
    entry = {k: v for k, v in entry_of(engines, "eagle3").items() if k != "num_speculative_tokens"}
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


@pytest.mark.parametrize(("method",), some([("early_exit",)], [("eagle3",), ("draft_model",)]))
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
