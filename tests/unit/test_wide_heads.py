"""Heads that are wider than the native kernels take: refused as the model is loaded, and served where they can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from tests.fakes.general import logits_of
from tests.fakes.tiny import save_llama
from tests.native import native_or_skip

from draftwise.errors import ModelLoadError
from draftwise.kernels.cpu.attention import MOST_HEAD_DIM
from draftwise.models.inputs import RowInput
from draftwise.models.loader import load_model

CPU = torch.device("cpu")
WIDE = MOST_HEAD_DIM + 8


def llama(folder: Path, head_dim: int) -> str:
    return save_llama(folder, 1, head_dim=head_dim, num_hidden_layers=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_refused_at_load(tmp_path: Path, dtype: torch.dtype) -> None:
    native_or_skip()
    with pytest.raises(
        ModelLoadError, match=f"heads have {WIDE} values.*at most 1024: set DRAFTWISE_KERNELS=torch"
    ):
        load_model(llama(tmp_path / "wide", WIDE), dtype=dtype, device=CPU)
    decoder = load_model(llama(tmp_path / "widest", MOST_HEAD_DIM), dtype=dtype, device=CPU)
    assert logits_of(decoder, RowInput([3, 4, 5], 0, [0])).isfinite().all()


def test_plain_torch_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    decoder = load_model(llama(tmp_path / "wide", WIDE), dtype=torch.float32, device=CPU)
    assert logits_of(decoder, RowInput([3, 4, 5], 0, [0])).isfinite().all()


def test_other_models_with_them_run_on_their_own_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native_or_skip()
    caplog.set_level("INFO", "draftwise")
    torch.manual_seed(1)
    settings = transformers.StableLmConfig(
        vocab_size=61, hidden_size=2 * WIDE, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1,
        intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.StableLmForCausalLM(settings).eval()
    model.save_pretrained(tmp_path)
    decoder = load_model(str(tmp_path), dtype=torch.float32, device=CPU)
    assert f"its heads have {WIDE} values, and native kernels take at most 1024" in caplog.text
    found = logits_of(decoder, RowInput([3, 4, 5], 0, [0]))
    assert torch.allclose(found, model(torch.tensor([[3, 4, 5]])).logits[0], atol=1e-3)
