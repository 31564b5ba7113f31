"""Engines on a pretended device, with what a GPU runs when nobody names kernels: plain torch, which says there what it
says on a CPU, and Triton's products for what only they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_families, make_target
from tests.fakes.fake_cuda import fake_cuda

from draftwise import LLM, SamplingParams
from draftwise.kernels.replaced import STEPS, replace_kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true device")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, seed=5),
    SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, seed=6, speculation={"rule": "rejection"}),
    SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, seed=6, top_p=0.9, logprobs=1),
    SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, seed=7, presence_penalty=1.0, min_p=0.1),
]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("rehearsal")
    return make_target(Path(root)), make_families(Path(root))


def said(target: str, config: dict[str, Any], device: str, **options: Any) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(7)
    prompts = [{"prompt_token_ids": rng.integers(0, VOCAB, 4 + 5 * i).tolist()} for i in range(len(PARAMS))]
    with LLM(
        target,
        device=device,
        dtype="float32",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        max_num_seqs=3,
        max_model_len=64,
        max_num_batched_tokens=64,
        speculative_config=config,
        **({"speculation_control": "static"} | options),
    ) as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, PARAMS)]


_SHAPES = ("static", "chain", "dynamic")
_DRAFTERS = list(dict.fromkeys((family, method) for family, method, _ in CASES))


def _is_quick(case: tuple[str, str, str]) -> bool:
    """Every drafter with one shape; every shape with several of them. Kernels have all cases in
    test_cuda_rehearsal.py."""
    family, method, shape = case
    drawn = [s for s in _SHAPES if (family, method, s) in CASES]
    return shape == drawn[_DRAFTERS.index((family, method)) % len(drawn)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case_id(case), marks=[] if _is_quick(case) else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_device_says_what_a_cpu_says(
    checkpoints: tuple[str, dict[str, Any]], caplog: pytest.LogCaptureFixture, case: tuple[str, str, str]
) -> None:
    (family, method, shape), (target, families) = case, checkpoints
    config: dict[str, Any] = next(s for s in families[family] if s["method"] == method)
    if shape != "chain":
        config = {k: v for k, v in config.items() if k != "num_speculative_tokens"} | SHAPES[shape]
    wanted = said(target, config, "cpu")
    with fake_cuda() as device:
        assert said(target, config, "cuda") == wanted
        assert device.waits
    assert not [record for record in caplog.records if "failed" in record.getMessage()]


@pytest.mark.parametrize(
    ("case", "options"),
    [
        pytest.param(case, options, id=f"{case}-{options}", marks=[] if quick else pytest.mark.slow)
        for case, first in (
            (("draft_model", "chain"), True),
            (("eagle3", "static"), False),
            (("mtp", "dynamic"), True),
        )
        for options, quick in (({"quantization": "int8"}, first), ({"batch_invariant": True}, not first))
    ],
)
def test_products_of_kernels_with_draws_of_torch(
    checkpoints: tuple[str, dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, str],
    options: dict[str, Any],
) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    from tests.fakes.fake_cuda_triton import fake_launches

    target, families = checkpoints
    config = next(s for s in families["methods"] if s["method"] == case[0])
    config = {k: v for k, v in config.items() if k != "num_speculative_tokens"} | SHAPES[case[1]]
    with fake_cuda() as device, fake_launches(device, "skip") as launches:
        replace_kernels("cuda", [STEPS])  # as if the engine had found them wrong
        assert all(len(tokens) == 8 for tokens in said(target, config, "cuda", **options))
        kernels = launches.kernels()
        assert device.replays and "linear" in kernels and "walk_trees" not in kernels
    assert not [record for record in caplog.records if "failed" in record.getMessage()]
