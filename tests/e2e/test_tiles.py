"""Whole engines on tiles, computed ones where the processor has none: no way of drafting changes a token, drafts do not
depend on how they are called for, and models put together from Transformers' code have the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.kernels.cpu.blocks import NativeBlocks
from draftwise.kernels.cpu.library import Isa
from draftwise.kv.storage import KVStorage
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.heads.recorded import RecordedBlock
from draftwise.models.inputs import RowInput
from draftwise.models.loader import load_model
from draftwise.models.recorded import RecordedDecoder
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.block import BlockShape, random_weights, save_block
from tests.fakes.general import logits_of, made
from tests.fakes.tiny import VOCAB, TinyModels
from tests.native import native_or_skip, on_level

CPU = torch.device("cpu")
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]
BLOCKS = {
    "windows": BlockShape(vocab=VOCAB, windows=(9, None)),
    "rnn": BlockShape("speculators", vocab=VOCAB, own=True, draft_vocab=47, from_root=True, markov="rnn"),
}


@pytest.fixture(params=["emulated", "amx"], autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    with on_level(request.param):
        yield
        assert native_or_skip().isa is Isa[request.param.upper()], "an engine went to another level"


@pytest.fixture(scope="module")
def block(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    shape = BLOCKS[request.param]
    return save_block(tmp_path_factory.mktemp("block") / "drafter", shape, random_weights(shape, seed=7))


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, **options)


@pytest.mark.parametrize(
    "quantization", [None, "int8", "int4", pytest.param("int4_weight_only", marks=pytest.mark.slow)]
)
def test_no_way_of_drafting_changes_a_token(
    make_llm: Callable[..., LLM], tiny: TinyModels, quantization: str | None
) -> None:
    drafters = [
        {"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": 5},
    ]
    llm = make_llm(
        dtype="bfloat16", quantization=quantization, speculative_config=drafters, max_num_batched_tokens=40
    )
    prompts = random_prompts(5, seed=3)
    plain = token_ids(llm.generate(prompts, greedy(speculation={"method": "none"})))
    ways: list[dict[str, Any]] = [
        {"method": "draft_model"},
        {"method": "draft_model", "speculative_token_tree": TREE},
        {"method": "draft_model", "speculative_dynamic_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 20},
        {"method": "ngram"},
    ]  # fmt: skip
    for way in ways:
        assert token_ids(llm.generate(prompts, greedy(speculation=way))) == plain, way
        assert token_ids(llm.generate(prompts[1], greedy(speculation=way))) == plain[1:2], way
    stats = llm.stats().speculation
    assert 50 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(
    ("block", "tree"),
    [
        pytest.param("windows", False, id="windows-chain"),
        pytest.param("rnn", True, id="rnn-tree"),
        pytest.param("windows", True, id="windows-tree", marks=pytest.mark.slow),
        pytest.param("rnn", False, id="rnn-chain", marks=pytest.mark.slow),
    ],
    indirect=["block"],
)
def test_blocks_are_drafted_in_one_call(
    make_llm: Callable[..., LLM], block: str, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drafted by that call, alone or beside others, is what torch drafts place by place from the same pass."""
    calls = []
    for name in ("chains", "trees", "own_pass"):
        inner = getattr(NativeBlocks, name)
        monkeypatch.setattr(
            NativeBlocks, name, lambda self, *args, _inner=inner: calls.append(0) or _inner(self, *args)
        )
    spec: dict[str, Any] = {"num_speculative_tokens": 4}
    if tree:
        spec = {"speculative_dynamic_tree": {"top_k": 3, "depth": 4}, "num_speculative_tokens": 12}
    prompts = random_prompts(4, seed=21)

    def run(prompts: list[dict[str, Any]]) -> list[Any]:
        llm = make_llm(
            dtype="bfloat16", speculative_config={"model": block, **spec}, keep_trace=True, max_num_seqs=4
        )
        outputs = llm.generate(prompts, greedy())
        assert not llm.stats().drafter_failures
        return [
            [(step.draft_tokens, step.draft_parents, step.token_ids) for step in out.outputs[0].trace or ()]
            for out in outputs
        ]

    together = run(prompts)
    assert run(prompts[2:3]) == together[2:3]
    assert len(calls) > 8 and sum(len(step[0]) for steps in together for step in steps) > 60
    monkeypatch.setattr(RecordedBlock, "lay_out", lambda self, layout: None)
    calls.clear()
    assert run(prompts) == together and not calls


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        # each kind with one quantization, in turns; --all: with all
        pytest.param(kind, quantization, marks=[pytest.mark.slow] if (i + j) % 3 != 2 else [])
        for i, kind in enumerate(("granite", "dots1", "glm4_moe_lite"))
        for j, quantization in enumerate((None, "int8", "int4"))
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_models_put_together_have_the_same_bits_in_any_batch(
    kind: str, quantization: str | None, tmp_path: Path
) -> None:
    """Dense, with experts, and with experts and latent attention: chunks, beside others, and in one pass."""
    folder, model = made(kind, tmp_path)
    decoder = load_model(folder, dtype=torch.bfloat16, device=CPU, quantization=quantization)
    assert isinstance(decoder, RecordedDecoder) and isinstance(decoder.inner, AssembledDecoder)
    tokens = [5 + (7 * i) % 90 for i in range(41)]
    mine, other = np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32)
    whole = logits_of(decoder, RowInput(tokens, 0, mine))
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    limit = {None: 0.1, "int8": 0.2, "int4": 0.6}[quantization]
    assert float((whole - wanted).abs().mean()) < limit * float(wanted.std())
    kv = KVStorage(decoder.kv_layout(), 8, 16, torch.bfloat16, CPU)
    first = logits_of(decoder, RowInput(tokens[:33], 0, mine), kv=kv)
    second = logits_of(decoder, RowInput(tokens[:3], 0, other), RowInput(tokens[33:40], 33, mine), kv=kv)
    last = logits_of(decoder, RowInput(tokens[40:], 40, mine), kv=kv)
    assert torch.equal(torch.cat([first, second[3:], last]), whole)
    assert torch.equal(second[:3], whole[:3])
