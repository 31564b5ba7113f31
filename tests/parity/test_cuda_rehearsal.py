"""Whole engines on a pretended device whose kernels run in Triton's interpreter: captured graphs, pinned buffers,
memory that is spoiled when it may be. They say what an engine on plain torch says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise import LLM, SamplingParams
from tests.fakes.every_method import SHAPES
from tests.fakes.fake_cuda import fake_cuda
from tests.fakes.fake_cuda_triton import fake_launches
from tests.fakes.heads import HeadShape, random_weights, save_head
from tests.fakes.tiny import save_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true device"),
]
VOCAB = 8
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
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, seed=5),
    SamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, seed=6, speculation={"rule": "rejection"}),
]


class Checkpoints:
    def __init__(self, root: Path) -> None:
        self.target = save_llama(root / "target", seed=1, **SMALL)
        self.draft = save_llama(root / "draft", seed=1, noise=0.05, **SMALL)
        shape = HeadShape("eagle", 8, 8, VOCAB)
        self.head = save_head(root / "head", shape, random_weights(shape, seed=2, scale=0.15))
        rng = np.random.default_rng(7)
        self.prompts = [{"prompt_token_ids": rng.integers(0, VOCAB, 3 + i).tolist()} for i in range(2)]

    def said(self, device: str, config: dict[str, Any], **options: Any) -> list[list[tuple[int, ...]]]:
        with LLM(
            self.target,
            device=device,
            dtype="float32",
            skip_tokenizer_init=True,
            num_kv_blocks=16,
            max_num_seqs=2,
            max_model_len=32,
            max_num_batched_tokens=32,
            speculative_config=config,
            **({"speculation_control": "static"} | options),
        ) as llm:
            found = [llm.generate(self.prompts, params) for params in PARAMS]
        return [[tuple(output.outputs[0].token_ids) for output in outputs] for outputs in found]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("rehearsal"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chains of a draft model": ({"method": "draft_model", "num_speculative_tokens": 2}, {}),
    "the same, ahead": (
        {"method": "draft_model", "num_speculative_tokens": 2},
        {"async_scheduling": True, "speculation_control": "static"},
    ),
    "trees of a draft model": ({"method": "draft_model", **SHAPES["static"]}, {}),
    "chains of a head": ({"method": "eagle", "num_speculative_tokens": 2}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_device_says_what_torch_says(checkpoints: Checkpoints, case: str) -> None:
    config, options = CASES[case]
    model = checkpoints.head if config["method"] == "eagle" else checkpoints.draft
    config = {**config, "model": model}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTWISE_KERNELS", "torch")
        wanted = checkpoints.said("cpu", config)
    with fake_cuda() as device, fake_launches(device, "interpret"):
        assert checkpoints.said("cuda", config, **options) == wanted
        assert device.replays > 5


def test_an_engine_finds_wrong_kernels_when_it_starts(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the passes, and one between them; the text is that of right ones."""
    from draftwise.kernels.triton import rows
    from draftwise.models import checking
    from draftwise.verify import triton

    config = {"method": "draft_model", "num_speculative_tokens": 2, "model": checkpoints.draft}
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    wanted = checkpoints.said("cpu", config)
    activation, walked = rows.silu_mul, triton.walk_trees
    monkeypatch.setattr(rows, "silu_mul", lambda *args: activation(*args).mul_(1.5))

    def nothing_stays(logits: Any, batch: Any, members: Any, **named: Any) -> None:
        walked(logits, batch, members, **named)
        batch.walk.packed[:, 0].zero_()

    monkeypatch.setattr(triton, "walk_trees", nothing_stays)
    monkeypatch.setattr(checking, "_ROWS", (3,))
    monkeypatch.setattr(checking, "_CHUNK", 5)
    with fake_cuda() as device, fake_launches(device, "interpret", tested=True):
        assert checkpoints.said("cuda", config) == wanted
    said = [record.getMessage() for record in caplog.records if "plain torch instead" in record.getMessage()]
    assert ["gated" in text for text in said] == [True, False] and "verification, greedy" in said[1]
