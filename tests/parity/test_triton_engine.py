"""Whole engines on Triton's kernels, verification and compaction included, against engines on plain torch: the same
text. In the interpreter, where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise import LLM, RequestOutput, SamplingParams
from draftwise.kernels.select import KERNELS_VARIABLE
from draftwise.kernels.triton.availability import equal_bits_shown, interpreted
from tests.fakes.every_method import SHAPES, VOCAB, make_families, make_target
from tests.fakes.tiny import save_llama

DEVICE = "cpu" if interpreted() else "cuda"
Asked = list[tuple[dict[str, Any], float]]
FEW: Asked = [
    ({"method": "ngram", "num_speculative_tokens": 3}, 0.0),
    ({"method": "draft_model", **SHAPES["static"]}, 0.0),
    ({"method": "draft_model", "rule": "rejection", **SHAPES["static"]}, 0.9),
]
CASES: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "ngram", "num_speculative_tokens": 3},
    *(
        {"method": method, **SHAPES[shape]}
        for method in ("draft_model", "eagle3")
        for shape in ("chain", "static", "dynamic")
    ),
    {"method": "draft_model", "rule": "rejection", **SHAPES["chain"]},
    {"method": "draft_model", "rule": "rejection", **SHAPES["static"]},
    {"method": "eagle3", "rule": "block", **SHAPES["chain"]},
    {"method": "medusa", "rule": "typical", **SHAPES["static"]},
    *({"method": "dflash", **SHAPES[shape]} for shape in ("chain", "static")),
]
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "eos_token_id": None,
    "initializer_range": 0.5,
}
"""The interpreter takes milliseconds for each row and head of a layer."""
MANY: Asked = [(case, temperature) for case in CASES for temperature in (0.0, 0.9)]
"""All requests share the batches of one engine. At a temperature a seed means the rule "coupled"."""


def outputs(
    folder: str, drafters: list[dict[str, Any]], asked: Asked, batch_invariant: bool = False
) -> list[RequestOutput]:
    rng = np.random.default_rng(7)
    prompts = [{"prompt_token_ids": rng.integers(0, VOCAB, 3 + i).tolist()} for i in range(len(asked))]
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=4 if asked is FEW else 6,
            ignore_eos=True,
            seed=i,
            speculation=speculation,
        )
        for i, (speculation, temperature) in enumerate(asked)
    ]
    with LLM(
        folder,
        dtype="float32",
        device=DEVICE,
        skip_tokenizer_init=True,
        block_size=4,
        num_kv_blocks=400,
        speculative_config=drafters,
        keep_trace=True,
        batch_invariant=batch_invariant,
        speculation_control="static",
    ) as llm:
        assert llm.guarantees.same_bits is (batch_invariant and equal_bits_shown(torch.device(DEVICE)))
        done = llm.generate(prompts, params)
        llm.check_integrity()
    return done


@pytest.mark.parametrize(
    "asked", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "every method"]
)
def test_the_text_is_that_of_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    used = {speculation["method"] for speculation, _ in asked}
    if asked is MANY:
        folder = make_target(tmp_path)
        drafters = [d for d in make_families(tmp_path)["methods"] if d["method"] in used]
    else:
        folder = save_llama(tmp_path / "target", seed=1, **SMALL)
        near = save_llama(tmp_path / "near", seed=1, noise=0.05, **SMALL)
        drafters = [{"method": "draft_model", "model": near, "num_speculative_tokens": 3}]
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    expected = outputs(folder, drafters, asked)
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")
    actual = outputs(folder, drafters, asked, batch_invariant=asked is FEW)
    for case, a, e in zip(asked, actual, expected, strict=True):
        assert list(a.outputs[0].token_ids) == list(e.outputs[0].token_ids), case
    steps = [step for o in actual for step in o.outputs[0].trace or ()]
    paths = {step.accepted_nodes for step in steps if step.draft_tokens}
    assert any(path != tuple(range(len(path))) for path in paths), "compaction was needed"
    assert sum(len(path) > 1 for path in paths) > (2 if asked is MANY else 0)
