"""Blocks behind a sliding window are given back: long requests in a small cache have the text of a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from draftwise import LLM, SamplingParams
from draftwise.engine.builder import _window
from draftwise.kv.manager import KVManager
from tests.fakes import architectures

WINDOW, PROMPT, LENGTH = 50, 700, 90
PROMPTS = [[(3 + 7 * i + i * i * (j + 1)) % 90 + 5 for i in range(PROMPT + 60 * j)] for j in range(2)]


def save(folder: Path, **changes: Any) -> Any:
    torch.manual_seed(2)
    config = MistralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, sliding_window=WINDOW, **changes,
    )  # fmt: skip
    model = MistralForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)  # so that the text depends on what is read
    model.save_pretrained(folder)
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_long_requests_in_a_small_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    model = save(tmp_path / "mistral")
    wanted = [greedy(model, prompt) for prompt in PROMPTS]
    used: list[int] = []
    commit = KVManager.commit

    def noted(self: KVManager, *args: Any) -> None:
        commit(self, *args)
        used.append(self.num_used)

    monkeypatch.setattr(KVManager, "commit", noted)
    with LLM(
        str(tmp_path / "mistral"), device="cpu", dtype="float32", skip_tokenizer_init=True, num_kv_blocks=60,
        max_model_len=900, max_num_batched_tokens=128, async_scheduling=ahead, speculation_control="static",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    ) as llm:  # fmt: skip
        for method in ("none", "ngram"):
            used.clear()
            params = SamplingParams(
                temperature=0, max_tokens=LENGTH, ignore_eos=True, speculation={"method": method}
            )
            found = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in found] == wanted, method
            llm.check_integrity()
            assert (
                min(used[-LENGTH // 4 :]) <= (WINDOW + 256) // 16 + 3
            )  # one request alone, of 790 tokens or more
        # the same prompt again: what of its prefix is left is used, and the text is the same
        params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        again = llm.generate([{"prompt_token_ids": PROMPTS[1]}], params, use_tqdm=False)
        assert list(again[0].outputs[0].token_ids) == wanted[1]


@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_windows_of_a_model_that_was_put_together(tmp_path: Path) -> None:
    """They are read off its calls of attention."""
    architectures.save(architectures.small("starcoder2"), tmp_path / "model")
    with LLM(str(tmp_path / "model"), device="cpu", skip_tokenizer_init=True, num_kv_blocks=20) as llm:
        assert llm._engine is not None and llm._engine.device is not None
        assert _window(llm._engine.device.facts) == 8


def test_who_keeps_keys_of_all_tokens_keeps_all_blocks(tmp_path: Path) -> None:
    """A draft model may read further back; so may a layer without a window."""
    save(tmp_path / "mistral")
    common: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "num_kv_blocks": 60,
    }
    drafter = {"method": "draft_model", "model": str(tmp_path / "mistral")}
    for more, wanted in (({}, WINDOW), ({"speculative_config": drafter}, None)):
        with LLM(str(tmp_path / "mistral"), **common, **more) as llm:
            assert llm._engine is not None and llm._engine.device is not None
            assert _window(llm._engine.device.facts) == wanted
