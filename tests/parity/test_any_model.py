"""Every causal architecture of Transformers: equal to Transformers, or refused with words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwise.errors import ModelLoadError
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.text_part import PLAIN
from tests.fakes.architectures import KINDS, WRAPPERS, save, small
from tests.native import native_or_skip
from tests.parity.any_model import LENGTH, LIST, SHORT, listed, outcome, prompts

CPU = torch.device("cpu")
EQUAL = frozenset(LIST.read_text().split())


_QUICK = {
    "deepseek_v2", "deepseek_v3", "gemma2", "gemma3", "gemma3_text", "glm4_moe", "got_ocr2", "gpt_oss",
    "internlm3", "iquestcoder", "llama", "mistral", "mixtral", "moss_transcribe_diarize", "olmoe", "phi3",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "afmoe", "aria_text", "axk2", "bigbird_pegasus", "bitnet",
    "camembert", "cohere2", "diffllama", "falcon_h1", "gemma4", "git", "gpt2", "gpt_neox", "llama4_text",
    "longcat_flash", "mimo_v2_flash", "minicpm3", "minimax", "mpt", "nanochat", "phi4_multimodal",
    "qwen4_exp", "recurrent_gemma", "roc_bert", "rwkv", "vaultgemma", "whisper", "blt", "cpmant",
    "deepseek_v4", "dots3_note", "gemma3n", "gemma4_assistant", "gemma4_unified_assistant", "musicgen",
    "musicgen_melody", "openai-gpt", "prophetnet", "reformer", "xlm", "xlnet",
}  # fmt: skip
"""All that have code of our own; of those on Transformers' code the cheapest ones that, together, execute the lines of
draftwise.models that any kind does, but for the lines that state one reason why a model is not put together, most of
which have tests of their own (test_general_*.py); two that many people use; all that are refused. The other ones take
these same ways: --all."""


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *(pytest.param(kind, SHORT, id=kind) for kind in KINDS if kind in _QUICK),
        *(pytest.param(kind, LENGTH, id=f"{kind}-long", marks=pytest.mark.slow) for kind in KINDS),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_equal_or_refused(kind: str, length: int, tmp_path: Path) -> None:
    found = outcome(kind, tmp_path / "model", length=length)
    if found.way == "":
        pytest.skip(f"no small one: {found.words[:200]}")
    assert kind not in EQUAL or found.way != "refused", found.words


_SOME = ("paligemma", "gemma3", "llama4", "mistral3", "qwen2_audio", "qwen2_5_vl")
"""Wrappers that differ: read in both directions, masks of their own, a whole causal model inside, sound, M-RoPE."""


@pytest.mark.parametrize(
    "kind", [k if k in _SOME else pytest.param(k, marks=pytest.mark.slow) for k in WRAPPERS]
)
@pytest.mark.filterwarnings("ignore")
def test_the_text_part_of_a_model_of_more_is_equal_or_refused(kind: str, tmp_path: Path) -> None:
    found = outcome(kind, tmp_path / "model", wrapper=True)
    if found.way == "":
        pytest.skip(f"no small one: {found.words[:200]}")
    assert listed(kind, True) not in EQUAL or found.way != "refused", found.words
    if found.architecture in PLAIN:
        assert found.way == "own code"


def test_what_reads_images_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = small("aya_vision", wrapper=True)
    save(made, tmp_path / "aya")
    with caplog.at_level("INFO", "draftwise"):
        decoder = load_model(tmp_path / "aya", dtype=torch.float32, device=CPU)
    assert "served as its text part: images, sound and the like are not (vision_tower" in caplog.text
    assert made.model is not None
    text = (
        sum(p.numel() for p in made.model.model.language_model.parameters())
        + made.model.lm_head.weight.numel()
    )
    assert decoder.weight_bytes() == pytest.approx(4 * text, rel=0.02)


@pytest.fixture
def gemma(tmp_path: Path) -> tuple[Path, Any]:
    """A window in every other layer, soft caps on scores and logits."""
    made = small("vaultgemma")
    save(made, tmp_path / "gemma")
    return tmp_path / "gemma", made.model


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int8_weight_only", "int4_weight_only"])
def test_linear_layers_in_every_format(gemma: tuple[Path, Any], quantization: str | None) -> None:
    """The load's own check lets them pass, and logits are near the model's; those of a broken layer would not be."""
    native_or_skip()
    folder, model = gemma
    decoder = load_model(folder, dtype=torch.bfloat16, device=CPU, quantization=quantization)
    tokens = prompts()[1]
    kv = KVStorage(decoder.kv_layout(), 4, 16, torch.bfloat16, CPU)
    batch = build_step_input([RowInput(tokens, 0, np.arange(4, dtype=np.int32))], 16, CPU)
    with torch.inference_mode():
        found = decoder.forward_logits(batch, kv)[1]
        wanted = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    limit = 0.05 if quantization is None else 0.1 if "int8" in quantization else 0.4
    assert 0 < float((found - wanted).abs().mean()) < limit * float(wanted.std())
    if quantization is not None:
        plain = load_model(folder, dtype=torch.bfloat16, device=CPU)
        assert decoder.weight_bytes() < plain.weight_bytes()


def test_hidden_states_that_enter_a_layer(gemma: tuple[Path, Any]) -> None:
    folder, model = gemma
    decoder = load_model(folder, dtype=torch.float32, device=CPU)
    tokens = prompts()[0]
    kv = KVStorage(decoder.kv_layout(), 4, 16, torch.float32, CPU)
    batch = build_step_input([RowInput(tokens, 0, np.arange(4, dtype=np.int32))], 16, CPU)
    with torch.inference_mode():
        found = decoder.forward(batch, kv, capture=(0, 2, 3)).captured
        wanted = model(
            input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True
        ).hidden_states
    for layer in (0, 2):
        torch.testing.assert_close(found[layer], wanted[layer][0], rtol=1e-4, atol=1e-4)
    # Transformers' last ones are normed; ours leave the last layer
    normed = model.base_model.norm(found[3])
    torch.testing.assert_close(normed, wanted[3][0], rtol=1e-4, atol=1e-4)


def test_a_model_of_few_positions_is_checked_within_them(tmp_path: Path) -> None:
    made = small("gpt2", max_position_embeddings=32)
    save(made, tmp_path / "short")
    assert load_model(tmp_path / "short", dtype=torch.float32, device=CPU).config.max_model_len == 32


def test_what_cannot_be_had_of_such_a_model_is_said(gemma: tuple[Path, Any]) -> None:
    folder, _ = gemma
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "layer_types": None}))
    with pytest.raises(ModelLoadError, match="missing"):
        load_model(folder, dtype=torch.float32, device=CPU)


def test_attention_of_its_own_in_every_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever attends by itself has our linear layers, too, and any form of keys; the log says what it costs."""
    native_or_skip()
    made = small("gptj")
    save(made, tmp_path / "gptj")
    with caplog.at_level("INFO", "draftwise"):
        decoder = load_model(
            tmp_path / "gptj", dtype=torch.bfloat16, device=CPU, quantization="int8_weight_only"
        )
    assert "own attention over our cache" in caplog.text and "one after the other" in caplog.text
    tokens = prompts()[1]
    with torch.inference_mode():
        wanted = made.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]  # type: ignore[union-attr, misc]
        for dtype in (torch.bfloat16, torch.int8):
            kv = KVStorage(decoder.kv_layout(), 4, 16, dtype, CPU)
            for start, end in ((0, 9), (9, len(tokens))):
                row = RowInput(tokens[start:end], start, np.arange(4, dtype=np.int32))
                found = decoder.forward_logits(build_step_input([row], 16, CPU), kv)[1]
            assert 0 < float((found - wanted[9:]).abs().mean()) < 0.1 * float(wanted.std())
