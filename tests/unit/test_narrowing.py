"""Passes of which only logits are read: behind the last layer's keys and values, rows without logits are left out."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.fakes.architectures import save, small
from tests.native import native_or_skip

from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.program import Program
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.recorded import RecordedDecoder
from draftwise.types import StepInput

CPU = torch.device("cpu")
BLOCK = 4
VOCAB = 200
KINDS = (
    "llama",
    "gemma2",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
)  # windows, norms behind products, experts, latent attention


def load(folder: str, threads: int = 2) -> RecordedDecoder:
    library = native_or_skip()
    ops = NativeOps(library, ThreadPool(library, threads), torch.bfloat16)
    model = load_model(folder, dtype=torch.bfloat16, device=CPU, ops=ops)
    assert isinstance(model, RecordedDecoder)
    return model


def storage(model: RecordedDecoder) -> KVStorage:
    """Filled with the same numbers every time: committed keys of any request."""
    kv = KVStorage(model.kv_layout(), 400, BLOCK, model.dtype, CPU)
    noise = torch.Generator().manual_seed(5)
    for i in range(len(model.kv_layout())):
        for part in kv.layer(i):
            part.copy_(torch.randn(part.shape, generator=noise))
    return kv


def mixed(seed: int) -> tuple[StepInput, list[int]]:
    """Prompts that end and that go on, drafts to verify, trees; and the rows with logits."""
    draw = random.Random(seed)
    inputs: list[RowInput] = []
    wanted: list[int] = []
    end = 0
    for i in range(draw.randint(1, 5)):
        table = np.arange(1 + 40 * i, 41 + 40 * i, dtype=np.int32)
        start = draw.choice((0, 3, 40))
        kind = draw.choice(("ends", "ends", "goes on", "one", "drafts", "tree"))
        count = 1 if kind == "one" else draw.randint(2, 30)
        tokens = [draw.randrange(VOCAB) for _ in range(count)]
        ancestors = None
        logits = {"ends": 1, "goes on": 0, "drafts": min(count, 4)}.get(kind, count)
        if kind == "tree":
            masks = [1]
            for node in range(1, count):
                masks.append(masks[draw.randrange(node)] | 1 << node)
            ancestors = np.array(masks, np.uint64)
        inputs.append(RowInput(tokens, start, table, ancestors=ancestors))
        end += count
        wanted += range(end - logits, end)
    return build_step_input(inputs, BLOCK, CPU), wanted


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / request.param
    save(small(request.param), path)
    return str(path)


@pytest.mark.usefixtures("level")
@torch.inference_mode()
def test_logits_and_keys_have_the_bits_of_the_whole_pass(folder: str) -> None:
    model = load(folder)
    for seed in range(12):
        rows, wanted = mixed(seed)
        kv, other = storage(model), storage(model)
        want = model.forward_logits(rows, kv, wanted)[1]
        assert torch.equal(model.logits_alone(rows, other, wanted), want), seed
        for i in range(len(model.kv_layout())):
            for one, same in zip(kv.layer(i), other.layer(i), strict=True):
                assert torch.equal(one, same), (seed, i)


@torch.inference_mode()
def test_rows_without_logits_are_left_out(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown by the memory for hidden states: the first rows of a narrowed pass are those of its head."""
    model = load(folder)
    made: list[torch.Tensor] = []
    own = Program._results

    def noticed(program: Program, rows: int, head_rows: int) -> object:
        results = own(program, rows, head_rows)
        made.append(results.hidden.zero_())
        return results

    monkeypatch.setattr(Program, "_results", noticed)
    table = np.arange(1, 41, dtype=np.int32)
    rows = build_step_input([RowInput(list(range(1, 10)), 3, table)], BLOCK, CPU)
    kv = storage(model)
    for wanted, narrow in (([8], True), ([], True), ([6, 7, 8], True), ([2, 8], False), ([0], False)):
        whole = model.forward_logits(rows, kv, wanted)[0].hidden
        assert made[-1] is whole
        model.logits_alone(rows, kv, wanted)
        first = made[-1][: len(wanted)]
        assert torch.equal(first, whole[wanted]) is (narrow or wanted == [0]), wanted
        assert torch.equal(made[-1], whole) is not narrow, wanted
