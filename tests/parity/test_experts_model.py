"""Models with experts in the whole engine: one text whatever drafts, in every format of weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.errors import ModelLoadError
from draftwise.kernels.cpu.experts import NativeExperts
from draftwise.models.dense import DenseDecoder
from draftwise.models.loader import load_config, load_model
from tests.native import native_or_skip
from tests.parity.helpers import Driver, MakeModel, expected_logits, tokens_of

QWEN = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**QWEN, "shared_expert_intermediate_size": 64}
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "quantization",
    [None, "int8", "int8_weight_only", "int4", "int4_weight_only"],
    ids=lambda name: name or "float",
)
def test_same_text_with_and_without_speculation(make_checkpoint: MakeModel, quantization: str | None) -> None:
    native_or_skip()
    family, settings = ("Qwen2Moe", SHARED) if quantization in (None, "int4") else ("Qwen3Moe", QWEN)
    settings = {name: value for name, value in settings.items() if family == "Qwen3Moe" or name != "head_dim"}
    _, folder = make_checkpoint(family, hidden_size=64, num_attention_heads=4, **settings)
    drafters = [
        {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 4},
    ]
    methods = [
        {"method": "draft_model"},
        {"method": "draft_model", "speculative_token_tree": [[0], [1], [0, 0]]},
        {"method": "ngram"},
    ]
    with LLM(
        str(folder), device="cpu", dtype="bfloat16", quantization=quantization, skip_tokenizer_init=True,
        num_kv_blocks=40, max_num_batched_tokens=24, speculative_config=drafters, speculation_control="static",
    ) as llm:  # fmt: skip
        assert llm.guarantees.same_bits

        def run(prompts: list[list[int]], speculation: dict[str, object]) -> list[tuple[int, ...]]:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation=speculation)
            found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            return [tuple(out.outputs[0].token_ids) for out in found]

        prompts = [tokens_of(seed, 7 + 9 * seed) for seed in range(3)]
        alone = [run([prompt], {"method": "none"})[0] for prompt in prompts]
        assert len(set(alone)) == len(alone)
        assert run(prompts, {"method": "none"}) == alone
        for method in methods:
            assert run(prompts, method) == alone, method
        assert llm.stats().speculation.num_accepted_tokens > 20


def test_memory_is_that_of_all_experts(make_checkpoint: MakeModel) -> None:
    """Rounded weights take less, the router stays as it is, and `weight_bytes` counts both."""
    native_or_skip()
    _, folder = make_checkpoint("Qwen3Moe", hidden_size=64, num_attention_heads=4, **QWEN)
    sizes = {}
    for quantization in (None, "int8", "int4"):
        model = load_model(folder, dtype=torch.bfloat16, device=CPU, quantization=quantization)
        mlps = [layer.mlp for layer in model.inner._layers]  # type: ignore[attr-defined]
        assert all(isinstance(mlp.experts, NativeExperts) for mlp in mlps)
        assert all(
            mlp.router.num_bytes == 64 * 32 * 2 for mlp in mlps
        )  # six scores, in a panel of 32 outputs
        sizes[quantization] = sum(mlp.experts.num_bytes for mlp in mlps)
        assert model.weight_bytes() > sizes[quantization]
    parameters = 3 * 6 * 3 * 64 * 32
    assert 2 * parameters <= sizes[None] < 2.1 * parameters
    assert sizes["int8"] < 0.6 * sizes[None] and sizes["int4"] < 0.8 * sizes["int8"]


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("Qwen3Moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 6 experts"),
        ("Qwen3Moe", {"num_local_experts": 0}, "num_local_experts"),
        ("Qwen3Moe", {"mlp_only_layers": "all"}, "mlp_only_layers"),
        ("Qwen3Moe", {"num_local_experts": 5}, "does not have: .*experts.5"),
        ("Qwen3Moe", {"moe_intermediate_size": 16}, "has shape"),
        ("Qwen3Moe", {"hidden_act": "gelu"}, "gelu"),
        ("Olmoe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4 experts"),
    ],
)
def test_what_does_not_fit_is_named(
    make_checkpoint: MakeModel, tmp_path: Path, family: str, change: dict[str, object], words: str
) -> None:
    settings = {
        "Qwen3Moe": QWEN,
        "Qwen2Moe": {**SHARED, "head_dim": 8},
        "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    }
    _, folder = make_checkpoint(family, **settings[family])
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelLoadError, match=words):
        load_config(tmp_path)
        load_model(tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
        ("Qwen2Moe", {**SHARED, "head_dim": 8, "use_sliding_window": True, "sliding_window": 7}),
        ("Gemma2", {"head_dim": 16, "hidden_activation": "gelu"}),
    ],
)
def test_what_own_code_lacks_goes_the_general_way(
    make_checkpoint: MakeModel, family: str, settings: dict[str, object]
) -> None:
    reference, folder = make_checkpoint(family, **settings)
    model = load_model(folder, dtype=torch.float32, device=CPU)
    assert not isinstance(getattr(model, "inner", model), DenseDecoder)
    tokens = tokens_of(3, 45)
    torch.testing.assert_close(
        Driver(model).whole(0, tokens, 16), expected_logits(reference, tokens), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_of_a_quantised_checkpoint(
    make_checkpoint: MakeModel, tmp_path: Path, quantization: str
) -> None:
    """Rounded experts are kept as a compressed-tensors checkpoint, and read from it: the bits of rounding at load."""
    native_or_skip()
    _, folder = make_checkpoint(
        "Qwen3Moe", **{**QWEN, "hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 64}
    )
    tokens = tokens_of(3, 40)
    found = []
    for cache in (None, tmp_path, tmp_path):
        model = load_model(
            folder, dtype=torch.bfloat16, device=CPU, quantization=quantization, quantization_cache=cache
        )
        found.append(Driver(model).whole(0, tokens))
    (kept,) = tmp_path.iterdir()
    raw = json.loads((kept / "config.json").read_text())
    assert raw["quantization_config"]["quant_method"] == "compressed-tensors"
    assert any(
        ".mlp.experts.5.down_proj.weight_packed" in n
        for n in (kept / "model.safetensors.index.json").read_text().split('"')
    )
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
