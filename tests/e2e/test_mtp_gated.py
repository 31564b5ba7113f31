"""MTP layers of Qwen3-Next and Qwen3.5: attention with an output gate, norms that multiply by 1 + w, experts with a
shared one. The target keeps a recurrent state. Drafts are those of Transformers' own decoder layer over whole texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwise import LLM, SamplingParams
from draftwise.cli.main import main
from draftwise.errors import ModelLoadError, RequestError
from tests.e2e.conftest import token_ids
from tests.fakes.architectures import save, small

AUTO: Any = transformers.AutoModelForCausalLM
KINDS = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_5")
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "block_size": 4, "num_kv_blocks": 60,
    "speculation_control": "static", "max_num_seqs": 3, "max_num_batched_tokens": 24,
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 3}, "keep_trace": True,
}  # fmt: skip
PROMPTS = [
    {"prompt_token_ids": [(5 + 11 * i * (j + 1)) % 200 + 3 for i in range(9 + 8 * j)]} for j in range(4)
]


@dataclass(frozen=True)
class World:
    """A checkpoint, and the parts that its MTP layer is made of."""

    kind: str
    folder: Path
    model: Any
    rotary: Any
    layer: Any
    shared: dict[str, Tensor]  # mtp.*.weight but the layer's
    eps: float

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What the layer drafts behind a text."""
        embedding = self.model.get_input_embeddings().weight
        known = list(tokens)
        with torch.inference_mode():
            rows = self.model.model(torch.tensor([tokens])).last_hidden_state[0][:-1]
            for _ in range(count):
                embedded = embedding[torch.tensor(known[1:])]
                joined = torch.cat(
                    (self.norm(embedded, "pre_fc_norm_embedding"), self.norm(rows, "pre_fc_norm_hidden")), -1
                )
                x = (joined @ self.shared["fc"].T)[None]
                rope = self.rotary(x, torch.arange(x.shape[1])[None])
                mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
                out = self.layer(x, attention_mask=mask, position_embeddings=rope)
                normed = self.norm((out[0] if isinstance(out, tuple) else out).view(x.shape[1], -1), "norm")
                known.append(int((normed[-1] @ self.model.lm_head.weight.T).argmax()))
                rows = torch.cat((rows, normed[-1:]))
        return known[len(tokens) :]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.shared[name])


def make(kind: str, folder: Path) -> World:
    """``qwen3_5`` is a model of images and text."""
    made = small(kind, wrapper=kind == "qwen3_5")
    assert made.model is not None
    save(made, folder)
    text = made.config.get_text_config(decoder=True)
    settings = text.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    torch.manual_seed(4)
    inner: Any = AUTO.from_config(type(text)(**settings), attn_implementation="eager").float().eval()
    layer, hidden = inner.model.layers[0], text.hidden_size
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.2 if "norm" in name else 0.25))
        shared = {
            part: 0.2 * torch.randn(hidden)
            for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        }
        shared["fc"] = 0.3 * torch.randn(hidden, 2 * hidden)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"mtp.{part}.weight": value for part, value in shared.items()}
    for name, value in layer.state_dict().items():
        start = f"mtp.layers.0.{name}"
        if kind == "qwen3_next" and name == "mlp.experts.gate_up_proj":  # published one by one
            for e, both in enumerate(value):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors[f"mtp.layers.0.mlp.experts.{e}.{part}.weight"] = half.clone()
        elif kind == "qwen3_next" and name == "mlp.experts.down_proj":
            tensors |= {
                f"mtp.layers.0.mlp.experts.{e}.down_proj.weight": w.clone() for e, w in enumerate(value)
            }
        else:
            tensors[start] = value.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model: Any = made.model
    if kind == "qwen3_5":
        model = AUTO.from_config(text).float().eval()
        model.model.load_state_dict(made.model.model.language_model.state_dict())
        model.lm_head.load_state_dict(made.model.lm_head.state_dict())
    return World(kind, folder, model, inner.model.rotary_emb, layer, shared, text.rms_norm_eps)


# qwen3_5_text: its text is that of qwen3_5, a model of images and text
@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.slow) if kind == "qwen3_5_text" else kind for kind in KINDS],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llm(world: World) -> Iterator[LLM]:
    with LLM(str(world.folder), **OPTIONS) as made:
        yield made


def test_drafts_are_the_layers_own_and_the_text_is_the_targets(world: World, llm: LLM) -> None:
    runs = {
        method: llm.generate(
            PROMPTS,
            SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, speculation={"method": method}),
            use_tqdm=False,
        )
        for method in ("none", "mtp")
    }
    assert token_ids(runs["mtp"]) == token_ids(runs["none"])
    steps = 0
    for output in runs["mtp"]:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        known = len(output.prompt_token_ids)
        for step in output.outputs[0].trace or ():
            if step.draft_tokens:
                assert list(step.draft_tokens) == world.drafts(ids[:known], len(step.draft_tokens))
                steps += 1
            known += len(step.token_ids)
    assert steps > 20
    llm.check_integrity()


def test_seeded_text_is_the_same_and_trees_are_refused(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    texts = [
        token_ids(llm.generate(PROMPTS, params.replace(speculation={"method": m}), use_tqdm=False))
        for m in ("none", "mtp")
    ]
    assert texts[0] == texts[1]
    tree = {"method": "mtp", "speculative_token_tree": [[0], [1], [0, 0]]}
    with pytest.raises(RequestError, match="state"):
        llm.generate(PROMPTS[:1], params.replace(speculation=tree), use_tqdm=False)


def test_show_names_the_layers(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(world.folder)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "mtp" in line)
    assert "mtp (in the checkpoint, " in line


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    made = make("qwen3_next", tmp_path)
    tensors = load_file(made.folder / "model.safetensors")
    lost = "mtp.layers.0.mlp.shared_expert_gate.weight"
    save_file(
        {n: v for n, v in tensors.items() if n != lost}, made.folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ModelLoadError, match="shared_expert_gate"):
        LLM(str(made.folder), **OPTIONS)
    save_file(tensors, made.folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((made.folder / "config.json").read_text())
    (made.folder / "config.json").write_text(json.dumps(raw | {"hidden_act": "gelu"}))
    with pytest.raises(ModelLoadError, match="gelu"):
        LLM(str(made.folder), **OPTIONS)
