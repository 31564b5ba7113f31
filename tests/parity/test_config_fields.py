"""Every field of a configuration that Transformers reads: changed, the result is equal to Transformers', or refused.

A field that changes a model and that a family does not know would give wrong text in silence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise.errors import ModelLoadError
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from tests.fakes.config_fields import changed, flipped, read_fields
from tests.parity.any_model import prompts

CPU = torch.device("cpu")
_ALWAYS = ("llama", "gemma2")
_KINDS = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
    "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "cohere2", "falcon", "granite", "smollm3",
)  # fmt: skip
_TINY = 1e-3  # of logits


def compared(model: Any, folder: Path) -> str:
    """ "equal", or why it is refused."""
    model.save_pretrained(folder)
    try:
        decoder = load_model(folder, dtype=torch.float32, device=CPU)
    except ModelLoadError as error:
        return str(error)
    tokens = prompts()[2]
    kv = KVStorage(decoder.kv_layout(), 4, 16, torch.float32, CPU)
    blocks = np.arange(4, dtype=np.int32)
    with torch.inference_mode():
        parts = [RowInput(tokens[:20], 0, blocks), RowInput(tokens[20:], 20, blocks)]
        found = torch.cat([decoder.forward_logits(build_step_input([p], 16, CPU), kv)[1] for p in parts])
        wanted = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(found, wanted, rtol=_TINY, atol=_TINY)
    return "equal"


@pytest.mark.parametrize(
    "kind", [k if k in _ALWAYS else pytest.param(k, marks=pytest.mark.slow) for k in _KINDS]
)
@pytest.mark.filterwarnings("ignore")
def test_each_field_is_followed_or_refused(kind: str, tmp_path: Path) -> None:
    fields = read_fields(kind)
    assert {"hidden_size", "num_hidden_layers"} <= fields.keys() and len(fields) >= 8
    wrong, tried = [], 0
    for name, value in fields.items():
        for i, other in enumerate(flipped(name, value)):
            model = changed(kind, name, other)
            if model is None:
                continue
            tried += 1
            try:
                compared(model, tmp_path / f"{name}{i}")
            except AssertionError as error:
                wrong.append(f"{name} = {other!r} (was {value!r}): {str(error).splitlines()[2:5]}")
    assert not wrong, "\n".join(wrong)
    assert tried >= len(fields) / 2


def test_a_field_that_nobody_follows_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that forgets a field is caught by this comparison."""
    from draftwise.models import config as module

    monkeypatch.setattr(module, "_norm_eps", lambda raw: 1e-6)
    model = changed("llama", "rms_norm_eps", 0.5)
    with pytest.raises(AssertionError, match="not close"):
        compared(model, tmp_path / "model")
