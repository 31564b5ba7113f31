"""A whole model on Triton kernels, in the interpreter where there is no GPU, against plain torch."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise import LLM, SamplingParams
from draftwise.errors import ConfigError
from draftwise.kernels import triton
from draftwise.kernels.base import Ops
from draftwise.kernels.select import default_ops
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kernels.triton.attention import TritonAttention
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.linear import LinearTiling, TritonLinear
from draftwise.kernels.triton.ops import TritonOps
from draftwise.kernels.triton.tiling import Tiling
from draftwise.kv.storage import KVStorage
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.quantization.scheme import parse_scheme
from tests.fakes.architectures import save, small
from tests.fakes.tiny import VOCAB, save_llama
from tests.unit.test_gguf import convert, meant
from tests.unit.test_quantized_checkpoints import write

DEVICE = torch.device("cpu" if interpreted() else "cuda")
PARENTS = (-1, -1, 0, 0, 2)


def triton_ops() -> TritonOps:
    """With tiles of a size for the interpreter."""
    tiling = Tiling(block_n=16, partition=32)
    return TritonOps(torch.float32, DEVICE, TritonAttention(tiling), LinearTiling(16, 32, 32))


def run(folder: str, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a pass over a prompt of 20 tokens and a short one, then of a tree beside a decoding row."""
    model = load_model(folder, dtype=torch.float32, device=DEVICE, ops=ops)
    kv = KVStorage(model.kv_layout(), 12, 4, torch.float32, DEVICE)
    tokens = np.random.default_rng(0).integers(3, VOCAB, 40).astype(np.int32)
    tables = np.arange(1, 8, dtype=np.int32), np.arange(8, 12, dtype=np.int32)
    with torch.inference_mode():
        first = build_step_input(
            [RowInput(tokens[:20], 0, tables[0]), RowInput(tokens[20:25], 0, tables[1])], 4, DEVICE
        )
        prefill = model.logits(model.forward(first, kv).hidden)
        second = build_step_input(
            [RowInput(tokens[25:31], 20, tables[0], PARENTS), RowInput(tokens[31:32], 5, tables[1])],
            4,
            DEVICE,
        )
        return prefill, model.logits(model.forward(second, kv).hidden)


@pytest.mark.parametrize("kind", ["granite", "gpt_neox"])
def test_models_that_are_put_together(kind: str, tmp_path: Path) -> None:
    """Scales and serial residuals; layer norms, biases, a rotated part of each head and parallel residuals."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    save(small(kind, vocab_size=VOCAB, head_dim=8, num_key_value_heads=1, **sizes), tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=DEVICE, ops=triton_ops())
    assert isinstance(model, AssembledDecoder)
    del model
    folder = str(tmp_path)
    for actual, expected in zip(
        run(folder, triton_ops()), run(folder, TorchOps(torch.float32, DEVICE)), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_prompts_and_a_tree_as_plain_torch_has_them(tmp_path: Path) -> None:
    folder = save_llama(tmp_path, seed=3)
    for actual, expected in zip(
        run(folder, triton_ops()), run(folder, TorchOps(torch.float32, DEVICE)), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_a_path_of_a_tree_has_the_bits_of_plain_decoding(tmp_path: Path) -> None:
    model = load_model(save_llama(tmp_path, seed=3), dtype=torch.float32, device=DEVICE, ops=triton_ops())
    tokens = np.random.default_rng(0).integers(3, VOCAB, 14).astype(np.int32)
    table = np.arange(1, 5, dtype=np.int32)
    in_tree = (8, 9, 11, 13)  # the root and nodes 0, 2 and 4 of PARENTS: one path
    with torch.inference_mode():
        logits = []
        for tree in (True, False):
            kv = KVStorage(model.kv_layout(), 5, 4, torch.float32, DEVICE)
            model.forward(build_step_input([RowInput(tokens[:8], 0, table)], 4, DEVICE), kv)
            if tree:
                batch = build_step_input([RowInput(tokens[8:], 8, table, PARENTS)], 4, DEVICE)
                logits.append(model.logits(model.forward(batch, kv).hidden)[[i - 8 for i in in_tree]])
                continue
            for depth, i in enumerate(in_tree):
                batch = build_step_input([RowInput(tokens[i : i + 1], 8 + depth, table)], 4, DEVICE)
                logits.append(model.logits(model.forward(batch, kv).hidden))
    assert torch.equal(logits[0], torch.cat(logits[1:]))


@pytest.mark.skipif(not interpreted(), reason="asks for the interpreter on a CPU")
def test_kernels_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "triton")
    assert isinstance(default_ops(torch.float32, torch.device("cpu")), TritonOps)
    with pytest.raises(ConfigError, match="no float64 activations"):
        default_ops(torch.float64, torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="need a CUDA device, or TRITON_INTERPRET=1"):
        default_ops(torch.float32, torch.device("cpu"))


@pytest.mark.skipif(not interpreted(), reason="asks for the interpreter on a CPU")
def test_an_engine_speculates_on_them_without_a_change_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "triton")
    folder = save_llama(tmp_path / "target", seed=3)
    near = save_llama(tmp_path / "near", seed=3, noise=0.02)
    outputs = []
    for speculation in (None, {"method": "draft_model", "model": near, "num_speculative_tokens": 3}):
        with LLM(
            folder,
            dtype="float32",
            device="cpu",
            skip_tokenizer_init=True,
            num_kv_blocks=32,
            speculative_config=speculation,
            speculation_control="static",
        ) as llm:
            prompt = {"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, 6]}
            done = llm.generate([prompt], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            outputs.append(done[0].outputs[0].token_ids)
    assert len(outputs[0]) == 8 and list(outputs[0]) == list(outputs[1])


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_checkpoints_with_rounded_rows(tmp_path: Path, name: str) -> None:
    """Rows are rounded, too: close to the model of the weights as floats, not equal to it."""
    quantized, plain = write(tmp_path, name)
    reference = load_model(plain, dtype=torch.float32, device=DEVICE, ops=TorchOps(torch.float32, DEVICE))
    model = load_model(quantized, dtype=torch.float32, device=DEVICE, ops=triton_ops())
    batch = build_step_input([RowInput([5, 6, 7], 0, np.array([1], np.int32))], 4, DEVICE)
    with torch.inference_mode():
        actual, expected = (
            m.logits(m.forward(batch, KVStorage(m.kv_layout(), 2, 4, torch.float32, DEVICE)).hidden)
            for m in (model, reference)
        )
    error = float((actual - expected).abs().max() / expected.abs().max())
    assert 1e-5 < error < 0.1


def layers() -> list[TritonLinear]:
    return [found for found in gc.get_objects() if type(found) is TritonLinear]


KEPT = [
    "gptq", "gptq 8 bits", "w4a16", "w8a16 groups", "nvfp4 w4a4", "mxfp4", "mxfp8", "nf4 nested", "fp8 block",
    "fp8 blocks", "Q4_0", "Q4_1", "Q8_0",
]  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_codes_of_checkpoints_stay_as_they_are(tmp_path: Path, name: str) -> None:
    """The model of the weights as floats, in the memory that codes take. Q4_1 and its like are GGUF files."""
    if name.startswith("Q"):
        folder = Path(save_llama(tmp_path / "model", seed=1, hidden_size=64, intermediate_size=64))
        weights = convert(folder, tmp_path / "m.gguf", "llama", name)
        quantized, plain = tmp_path / "m.gguf", meant(folder, weights, tmp_path / "plain")
    else:
        quantized, plain = write(tmp_path, name)
    reference = load_model(plain, dtype=torch.float32, device=DEVICE, ops=TorchOps(torch.float32, DEVICE))
    before = layers()
    model = load_model(quantized, dtype=torch.float32, device=DEVICE, ops=triton_ops())
    made = [layer for layer in layers() if not any(layer is other for other in before)]
    batch = build_step_input([RowInput([5, 6, 7], 0, np.array([1], np.int32))], 4, DEVICE)
    with torch.inference_mode():
        actual, expected = (
            m.logits(m.forward(batch, KVStorage(m.kv_layout(), 2, 4, torch.float32, DEVICE)).hidden)
            for m in (model, reference)
        )
    assert float((actual - expected).abs().max() / expected.abs().max()) < 1e-4
    # the output layer, and what 64 does not divide, the blocks of nf4
    floats = 3 if name.startswith("nf4") else 1
    assert len(made) == 9 and [layer.bits for layer in made].count(16) == floats


def test_rows_that_cannot_be_rounded_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    triton.ops._say_rows_stay.cache_clear()
    quantized, _ = write(tmp_path, "mxfp4")
    ops = TritonOps(torch.float32, DEVICE, scheme=parse_scheme("int8", device="cuda"))
    load_model(quantized, dtype=torch.float32, device=DEVICE, ops=ops)
    assert [record.message for record in caplog.records if "rows are not rounded" in record.message]
