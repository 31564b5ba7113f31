"""Whole engines whose steps stay on the device, on Triton's kernels: the text of engines that wait, on plain torch. In
the interpreter, where there is no GPU; nothing is captured there, each function is run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise import LLM, SamplingParams
from draftwise.graphs.backend import CudaGraphs, GraphBackend, Rerun
from draftwise.kernels.select import KERNELS_VARIABLE
from draftwise.kernels.triton.availability import interpreted
from tests.fakes.every_method import VOCAB, make_families, make_target
from tests.fakes.tiny import save_llama

DEVICE = "cpu" if interpreted() else "cuda"
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
PROMPTS = [{"prompt_token_ids": [3, 1, 4, 1, 5]}, {"prompt_token_ids": [2, 7, 1]}]


def outputs(
    folder: str, drafter: dict[str, Any], asked: list[list[SamplingParams]], **options: Any
) -> list[list[Any]]:
    found = []
    with LLM(
        folder,
        dtype="float32",
        device=DEVICE,
        skip_tokenizer_init=True,
        block_size=4,
        num_kv_blocks=40,
        max_num_seqs=2,
        max_model_len=32,
        max_num_batched_tokens=16,
        compilation_config={"cudagraph_mode": "FULL"},
        speculative_config=drafter,
        **({"speculation_control": "static"} | options),
    ) as llm:
        for params in asked:
            done = llm.generate(PROMPTS, params)
            found.append([(o.outputs[0].token_ids, o.metrics.speculation.num_accepted_tokens) for o in done])
            llm.check_integrity()
        if options:
            executor: Any = llm._engine.core.executor  # type: ignore[union-attr]
            assert executor.inner.seats.num_steps >= 2 * len(asked)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("draft_model", False),
        ("eagle3", False),
        ("medusa", False),
        ("eagle3", True),
        ("hybrid", False),
        ("p-eagle", False),
        ("dflash", False),
        ("dflash", True),
        ("dspark", False),
        ("mtp3", False),
    ],
)
def test_the_text_is_that_of_engines_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, tree: bool
) -> None:
    wanted: list[tuple[float, dict[str, Any]]] = [
        (0.0, {}),
        (0.9, {"rule": "rejection"}),
        *([(0.9, {"rule": "coupled"}), (1.1, {"rule": "block"})] if tree else []),
    ]
    if method != "draft_model":  # whose vocabulary is smaller
        folder = make_target(tmp_path)
        families = make_families(tmp_path)
        others = {"p-eagle": "eagle3", "dspark": "dflash", "mtp3": "mtp"}
        family = families["other forms" if method in others else "methods"]
        method = others.get(method, method)
        drafter = next(d for d in family if d["method"] == method)
        if tree:
            del drafter["num_speculative_tokens"]
            drafter["speculative_token_tree"] = [[0], [1], [0, 0], [1, 0]]
    else:
        folder = save_llama(tmp_path / "target", seed=1, **SMALL)
        near = save_llama(tmp_path / "near", seed=1, noise=0.05, **SMALL)
        drafter = {"method": method, "model": near, "num_speculative_tokens": 2}
        wanted += [(0.9, {"rule": "coupled"}), (0.9, {"rule": "block"}), (0.0, {"method": "none"})]
    asked = [
        [
            SamplingParams(
                temperature=t,
                max_tokens=6,
                ignore_eos=True,
                seed=i,
                speculation=speculation,
                logit_bias={2: 5.0} if i else None,
            )
            for i in range(2)
        ]
        for t, speculation in wanted
    ]
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    expected = outputs(folder, drafter, asked)
    monkeypatch.setenv(KERNELS_VARIABLE, "triton")

    def backend(device: Any) -> GraphBackend:
        return Rerun(device) if interpreted() else CudaGraphs(device)

    monkeypatch.setattr("draftwise.engine.device.backend_for", backend)
    assert outputs(folder, drafter, asked, async_scheduling=True) == expected
