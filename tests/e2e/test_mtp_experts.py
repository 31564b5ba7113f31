"""MTP layers with experts, as GLM-4.5 and DeepSeek-V3 carry them, in floats and in fp8 by blocks, as DeepSeek publishes
them: drafts of the very layers, the text of the target."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftwise import LLM, SamplingParams
from tests.unit.test_quantized_checkpoints import CASES

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "pad_token_id": None,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Glm4Moe": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True},
    "DeepseekV3": {
        **SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    """A target of two layers and one MTP layer, whose decoder layer is made as the target's second one."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    target = tmp_path_factory.mktemp(family)
    model.save_pretrained(target)
    tensors = load_file(target / "model.safetensors")
    layer = {name: value for name, value in tensors.items() if name.startswith("model.layers.1.")}
    for name, value in layer.items():
        tensors[name.replace("layers.1.", "layers.2.")] = value + 0.05 * torch.randn_like(value)
    h = config.hidden_size
    for part in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"model.layers.2.{part}.weight"] = 1 + 0.2 * torch.randn(h)
    tensors["model.layers.2.eh_proj.weight"] = 0.3 * torch.randn(h, 2 * h)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module", params=["float32", "fp8 blocks"])
def served(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The folder that is served, and one of the floats that it stands for. Of the fp8 one, all linear layers are
    codes, those of experts and of the MTP layer, too; routers, embedding and output layer are not."""
    if request.param == "float32":
        return folder, folder
    writer, description = CASES[request.param]
    codes, plain = load_file(folder / "model.safetensors"), load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim == 2 and not any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.")):
            written, weight = writer(*tensor.shape, generator)
            del codes[name]
            codes |= {name.removesuffix(".weight") + suffix: value for suffix, value in written.items()}
            plain[name] = weight.float().contiguous()
    assert "model.layers.2.eh_proj.weight_scale_inv" in codes
    assert "model.layers.2.mlp.experts.3.up_proj.weight_scale_inv" in codes
    config = json.loads((folder / "config.json").read_text())
    made = []
    for tensors, more in ((codes, {"quantization_config": description}), (plain, {})):
        made.append(tmp_path_factory.mktemp("served"))
        (made[-1] / "config.json").write_text(json.dumps({**config, **more}))
        save_file(tensors, made[-1] / "model.safetensors", {"format": "pt"})
    return made[0], made[1]


@functools.cache
def modules_of(family: str, folder: Path) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """The target and the layer in Transformers' modules, and all tensors of the layer by name; loaded once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = load_file(folder / "model.safetensors")
    part = {
        n.removeprefix("model.layers.2."): v for n, v in tensors.items() if n.startswith("model.layers.2.")
    }
    settings = {**FAMILIES[family], "num_hidden_layers": 1, "first_k_dense_replace": 0}
    config = getattr(transformers, f"{family}Config")(**settings)
    inner = transformers.AutoModelForCausalLM.from_config(config).eval()
    layer = inner.model.layers[0]
    stack = torch.stack
    experts = [f"mlp.experts.{e}." for e in range(4)]
    state = {n: v for n, v in part.items() if n in layer.state_dict()}
    state["mlp.experts.gate_up_proj"] = stack(
        [torch.cat((part[e + "gate_proj.weight"], part[e + "up_proj.weight"])) for e in experts]
    )
    state["mlp.experts.down_proj"] = stack([part[e + "down_proj.weight"] for e in experts])
    layer.load_state_dict(state)
    return model, layer, part


def mtp_drafts(family: str, folder: Path, tokens: list[int], count: int) -> list[int]:
    """What the layer drafts behind a text, computed over the whole text each time with Transformers' modules. The
    feature of the next row is DeepSeek's after the last norm, GLM's before it."""
    model, layer, part = modules_of(family, folder)
    eps = model.config.rms_norm_eps

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * part[name + ".weight"]

    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    text, drafts = list(tokens), []
    with torch.inference_mode():
        features = model.model(torch.tensor([text])).last_hidden_state[0]  # of tokens 0 .. n - 1
        rows = features[:-1]  # row i: token i + 1 and the feature of token i
        while len(drafts) < count:
            known = [*text, *drafts]
            embedded = embedding[torch.tensor(known[1 : len(rows) + 1])].clone()
            embedded[0] = 0.0
            x = torch.cat((norm(embedded, "enorm"), norm(rows, "hnorm")), -1) @ part["eh_proj.weight"].T
            positions = torch.arange(len(x))[None]
            rope = model.model.rotary_emb(x[None], positions)
            mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
            out = layer(x[None], attention_mask=mask, position_embeddings=rope).view(len(x), -1)
            normed = norm(out[-1:], "shared_head.norm")
            drafts.append(int((normed @ head.T).argmax()))
            rows = torch.cat((rows, normed if family == "DeepseekV3" else out[-1:]))
    return drafts


def test_the_text_is_the_targets_and_drafts_are_the_layers(family: str, served: tuple[Path, Path]) -> None:
    folder, plain_folder = served
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    prompt = [(5 + 11 * i) % 61 for i in range(14)]
    with LLM(
        str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, num_kv_blocks=40,
        speculative_config=spec, speculation_control="static", keep_trace=True,
    ) as llm:  # fmt: skip
        runs = {}
        for method in ("none", "mtp"):
            params = SamplingParams(
                temperature=0, max_tokens=20, ignore_eos=True, speculation={"method": method}
            )
            runs[method] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        plain, drafted = (list(run.outputs[0].token_ids) for run in (runs["none"], runs["mtp"]))
        assert drafted == plain
        known, steps = len(prompt), 0
        for step in runs["mtp"].outputs[0].trace or ():
            if step.draft_tokens:
                wanted = mtp_drafts(family, plain_folder, [*prompt, *drafted][:known], len(step.draft_tokens))
                assert list(step.draft_tokens) == wanted
                steps += 1
            known += len(step.token_ids)
        assert steps > 3
