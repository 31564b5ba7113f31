"""Engines whose passes and draft loops are captured and replayed: the text of the same engine without graphs, with
every method, alone and among others, through chunked prompts and preemption. The graphs here need no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.errors import ConfigError
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.head import GraphedHead
from draftwise.kernels.torch_ops import TorchOps
from tests.e2e.conftest import token_ids
from tests.fakes.every_method import SHAPES, VOCAB, make_families, make_target
from tests.fakes.fake_graphs import FakeGraphs

RULES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    "coupled": SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, seed=5),
    "rejection": SamplingParams(
        temperature=0.9, max_tokens=12, ignore_eos=True, seed=6, speculation={"rule": "rejection"}
    ),
}
METHODS = ["none", "draft_model", "eagle", "eagle3", "mtp", "early_exit", "ngram"]


class Engines:
    def __init__(self, root: Path) -> None:
        self.target = make_target(root)
        self.families = make_families(root)
        rng = np.random.default_rng(7)
        prompts = [rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist() for _ in range(5)]
        self.prompts = [{"prompt_token_ids": ids} for ids in [*prompts, prompts[2]]]
        chosen = [s for s in self.families["methods"] if s["method"] in METHODS]
        self.backends: list[FakeGraphs] = []
        self.made = {
            eager: self.make(enforce_eager=eager, speculative_config=chosen) for eager in (True, False)
        }
        self.piecewise = self.make(
            compilation_config={"cudagraph_mode": "PIECEWISE"},
            max_cudagraph_capture_size=32,
            speculative_config=chosen,
        )

    def make(self, **options: Any) -> LLM:
        base: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "block_size": 4,
            "num_kv_blocks": 52,
            "max_num_seqs": 4,
            "max_model_len": 64,
            "max_num_batched_tokens": 48,
            "speculation_control": "static",
        }
        return LLM(self.target, **(base | options))

    def backend(self, device: torch.device) -> FakeGraphs:
        self.backends.append(FakeGraphs())
        return self.backends[-1]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    def ops(dtype: torch.dtype, device: torch.device, *args: object, **options: object) -> TorchOps:
        return TorchOps(dtype, device, TorchStaticAttention())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwise.models.self_test.default_ops", ops)
        made = Engines.__new__(Engines)
        patch.setattr("draftwise.engine.device.backend_for", lambda device: made.backend(device))
        made.__init__(tmp_path_factory.mktemp("graphs"))  # type: ignore[misc]
        yield made
        for llm in (*made.made.values(), made.piecewise):
            llm.close()


def graphed(llm: LLM) -> dict[str, GraphedDecoder | GraphedHead]:
    """The target and drafters, as far as something of them is captured."""
    assert llm._engine is not None
    executor: Any = llm._engine.core.executor
    parts = {"target": executor._model}
    for name, proposer in executor._drafting._proposers.items():
        parts[name] = getattr(proposer, "_model", None) or getattr(proposer, "_head", None)
    return {name: part for name, part in parts.items() if isinstance(part, GraphedDecoder | GraphedHead)}


def replays(llm: LLM) -> dict[str, int]:
    """Whole passes and loops, of the target and of each drafter."""
    return {name: part.num_replays for name, part in graphed(llm).items()}


def piecewise(llm: LLM) -> dict[str, int]:
    """Passes in pieces, likewise."""
    return {n: p.num_piecewise for n, p in graphed(llm).items() if isinstance(p, GraphedDecoder)}


@pytest.mark.parametrize(
    ("rule", "method"),
    [
        # each method greedily and under one other rule, in turns; --all: under all
        pytest.param(rule, method, marks=[] if i in (0, 1 + j % 2) else [pytest.mark.slow])
        for i, rule in enumerate(RULES)
        for j, method in enumerate(METHODS)
    ],
)
def test_text_is_that_without_graphs(engines: Engines, method: str, rule: str) -> None:
    params = RULES[rule]
    given = {**(params.speculation or {}), "method": method}
    params = params.replace(
        speculation=given if method != "none" or rule != "rejection" else {"method": "none"}
    )
    before = replays(engines.made[False])
    wanted = token_ids(engines.made[True].generate(engines.prompts, params))
    assert token_ids(engines.made[False].generate(engines.prompts, params)) == wanted
    for prompt, expected in zip(engines.prompts[:2], wanted, strict=False):
        if rule == "greedy":  # alone
            assert token_ids(engines.made[False].generate([prompt], params)) == [expected]
    after = replays(engines.made[False])
    assert after["target"] > before["target"]
    if method in before and method != "early_exit":
        assert after[method] > before[method], "the draft loop was replayed"


@pytest.mark.parametrize("shape", ["static", "dynamic"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_trees(engines: Engines, method: str, shape: str) -> None:
    params = RULES["greedy"].replace(speculation={"method": method, **SHAPES[shape]})
    wanted = token_ids(engines.made[True].generate(engines.prompts, params))
    assert token_ids(engines.made[False].generate(engines.prompts, params)) == wanted
    assert token_ids(engines.piecewise.generate(engines.prompts, params)) == wanted


@pytest.mark.parametrize(
    ("rule", "method"),
    [
        pytest.param(rule, method, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for i, rule in enumerate(("greedy", "coupled"))
        for j, method in enumerate(METHODS)
    ],
)
def test_all_in_pieces(engines: Engines, method: str, rule: str) -> None:
    """Prompts in chunks of up to 48 rows, of which those over 32 fit no pass; requests that join while others decode;
    and, the second time, prompts whose beginnings are in the cache."""
    params = RULES[rule].replace(speculation={"method": method})
    wanted = token_ids(engines.made[True].generate(engines.prompts, params))
    for _ in range(2):
        before = piecewise(engines.piecewise)
        assert token_ids(engines.piecewise.generate(engines.prompts, params)) == wanted
        after = piecewise(engines.piecewise)
        assert after["target"] > before["target"]
    if method == "draft_model":
        assert after[method] > before[method], "its passes, token by token"
    assert not any(replays(engines.piecewise).values()), "no whole pass, no loop"


def test_chunks_beside_decoding_requests_are_passes_in_pieces(engines: Engines) -> None:
    llm = engines.made[False]
    rng = np.random.default_rng(11)
    lengths = (3, 50, 4, 40)
    prompts = [{"prompt_token_ids": rng.integers(0, VOCAB, n).tolist()} for n in lengths]
    params = RULES["greedy"].replace(speculation={"method": "ngram"})
    wanted = token_ids(engines.made[True].generate(prompts, params))
    before = piecewise(llm)["target"], replays(llm)["target"]
    assert token_ids(llm.generate(prompts, params)) == wanted
    # 97 tokens of prompts in steps of 48: the chunks of the first two are wider than a verification
    assert piecewise(llm)["target"] - before[0] >= 2 and replays(llm)["target"] > before[1]


@pytest.mark.parametrize(
    ("method", "shape"),
    [
        ("draft_model", "static"),
        ("eagle3", "dynamic"),
        pytest.param("draft_model", "dynamic", marks=pytest.mark.slow),
        pytest.param("eagle3", "static", marks=pytest.mark.slow),
    ],
)
def test_captured_trees_are_those_drafted_level_by_level(engines: Engines, method: str, shape: str) -> None:
    entry = next(s for s in engines.families["methods"] if s["method"] == method)
    specs = [{k: v for k, v in entry.items() if k != "num_speculative_tokens"} | SHAPES[shape]]
    drafted = []
    for eager in (True, False):
        llm = engines.make(enforce_eager=eager, speculative_config=specs, keep_trace=True)
        outputs = llm.generate(engines.prompts, RULES["greedy"])
        drafted.append(
            [
                [(s.draft_tokens, s.draft_parents, s.token_ids) for s in o.outputs[0].trace or ()]
                for o in outputs
            ]
        )
        if not eager:
            assert replays(llm)[method] > 0
        llm.close()
    assert drafted[0] == drafted[1] and any(len(tokens) > 3 for trace in drafted[0] for tokens, _, _ in trace)


def test_a_drafter_without_graphs(engines: Engines) -> None:
    entry = engines.families["methods"][0] | {"enforce_eager": True}
    llm = engines.make(speculative_config=entry)
    wanted = token_ids(engines.made[True].generate(engines.prompts[:2], RULES["greedy"]))
    assert token_ids(llm.generate(engines.prompts[:2], RULES["greedy"])) == wanted
    assert set(graphed(llm)) == {"target"} and replays(llm)["target"] > 0
    llm.close()


def test_what_is_captured(engines: Engines) -> None:
    assert engines.backends and engines.backends[0].num_graphs > 0
    sized = engines.make(cudagraph_capture_sizes=[4, 8], speculative_config=engines.families["methods"][:1])
    assert sized._engine is not None
    target = sized._engine.model
    assert isinstance(target, GraphedDecoder)
    assert [(s.requests, s.rows) for s in target.captures.passes] == [(1, 4), (2, 4), (4, 1)]
    sized.close()
    none = engines.make(compilation_config={"cudagraph_mode": "NONE"})
    assert none._engine is not None and not isinstance(none._engine.model, GraphedDecoder)
    none.close()
    with pytest.raises(ConfigError, match="cudagraph_mode"):
        engines.make(compilation_config={"cudagraph_mode": "sideways"})
