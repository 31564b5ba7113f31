"""The same folders of random heads in vLLM's CPU build and here: the same greedy drafts, step by step.

Runs where ``DRAFTWISE_VLLM_PYTHON`` names the Python of an environment with vLLM in it; skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from draftwise import LLM, SamplingParams
from draftwise.models.rope import RopeConfig
from draftwise.train.heads.block import BlockDrafter, BlockForm
from draftwise.train.heads.export import export_head
from draftwise.train.heads.layers import HeadShape as TrainedShape
from draftwise.train.heads.medusa import MedusaHeads
from draftwise.train.heads.sequential import Eagle3Head, EagleHead, MtpHead
from tests.fakes.head_target import as_speculator
from tests.fakes.heads import HeadShape, random_weights, save_head
from tests.fakes.medusa import random_heads, save_heads, vllm_names
from tests.fakes.mtp import MtpShape, add_to_target, random_layers

PYTHON = os.environ.get("DRAFTWISE_VLLM_PYTHON")
SCRIPT = Path(__file__).with_name("vllm_drafts.py")
VOCAB, HIDDEN, LAYERS, K = 256, 128, 6, 4
PROMPT = [7, 99, 140, 23, 8, 77, 201, 12, 12, 5, 61, 190, 44, 3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="DRAFTWISE_VLLM_PYTHON names no Python with vLLM"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Llama, with sizes that vLLM's attention takes."""
    torch.manual_seed(2)
    folder = str(tmp_path_factory.mktemp("target"))
    config = transformers.LlamaConfig(**_sizes())
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def vllm(model: str, speculative: dict[str, Any]) -> dict[str, Any]:
    assert PYTHON is not None
    asked = {"model": model, "speculative": speculative, "prompt": PROMPT, "max_tokens": 12}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, str(SCRIPT)], input=json.dumps(asked), capture_output=True, text=True, env=env, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("DRAFTS "):
            answer: dict[str, Any] = json.loads(line.removeprefix("DRAFTS "))
            return answer
    raise AssertionError(f"vLLM answered nothing:\n{done.stderr[-3000:]}")


def ours(model: str, speculative: dict[str, Any]) -> dict[str, Any]:
    with LLM(
        model,
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        num_kv_blocks=64,
        speculation_control="static",
        keep_trace=True,
        speculative_config=speculative,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
    trace = output.outputs[0].trace or ()
    drafts = [list(step.draft_tokens) for step in trace if step.draft_tokens]
    return {"tokens": list(output.outputs[0].token_ids), "drafts": drafts}


def eagle(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    shape = HeadShape(
        "eagle", HIDDEN, HIDDEN, VOCAB, inner=192, heads=4, kv_heads=2, head_dim=32, positions=256
    )
    return target, {"method": "eagle", "model": save_head(root, shape, random_weights(shape, scale=0.1))}


def eagle3(root: Path, target: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    shape = HeadShape(
        "eagle3", HIDDEN, HIDDEN, VOCAB, inner=192, heads=4, kv_heads=2, head_dim=32, positions=256
    )
    shape = replace(
        shape, feature_layers=(2, 3, 5), **({"draft_vocab": 100, "own_embedding": True} | changes)
    )
    return target, {"method": "eagle3", "model": save_head(root, shape, random_weights(shape, scale=0.1))}


def eagle3_norms(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    return eagle3(root, target, norm_before_residual=True, norm_before_fc=True)


def eagle31(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    return eagle3(root, target, fc_norm=True, norm_output=True)


def speculators(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    asked = eagle3(root, target, norm_before_residual=True)
    as_speculator(asked[1]["model"], target)
    return asked


def peagle(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    """As published for vLLM: the user says that it drafts in parallel."""
    target, speculative = eagle3(root, target, mask_token=VOCAB - 1, layers=2)
    return target, speculative | {"parallel_drafting": True}


def peagle_speculators(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    target, speculative = eagle3(root, target, mask_token=VOCAB - 1, norm_before_fc=True)
    outer = {"speculators_model_type": "peagle", "mask_token_id": VOCAB - 1}
    as_speculator(speculative["model"], target, **outer)
    return target, speculative | {"parallel_drafting": True}


def medusa(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    tensors = vllm_names(random_heads(HIDDEN, VOCAB, heads=K, bias=False))
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": K,
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
    }
    return target, {"method": "medusa", "model": save_heads(root, tensors, config, "model.safetensors")}


def mimo(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    torch.manual_seed(4)
    base = str(root / "base")
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_sizes())).save_pretrained(base)
    shape = MtpShape("mimo", HIDDEN, VOCAB, inner=192, heads=4, kv_heads=2, head_dim=32, qkv_bias=True)
    # published folders say model_type "mimo" and bring code that says it is Qwen2's configuration
    architecture = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    folder = add_to_target(root / "mimo", base, shape, random_layers(shape, scale=0.1), **architecture)
    return folder, {"method": "mtp"}


def exported_mtp(root: Path, target: str) -> tuple[str, dict[str, Any]]:
    """An exported head in the checkpoint of a target with Qwen2's layers: vLLM reads MTP layers from there alone."""
    torch.manual_seed(4)
    base, folder = root / "base", root / "merged"
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_sizes())).save_pretrained(base)
    config = json.loads((base / "config.json").read_text())
    generator = torch.Generator().manual_seed(6)
    table = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.15
    shape = TrainedShape(
        hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=192, norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=10000.0, head_dim=32),
    )  # fmt: skip
    head = MtpHead(shape, table, table, generator, normed=True)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))
    export_head(head, root / "head", config, dtype=torch.float32)
    folder.mkdir()
    more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | more))
    tensors = load_file(base / "model.safetensors") | load_file(root / "head" / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder), {"method": "mtp"}


def _trained(kind: str, root: Path, target: str) -> tuple[str, dict[str, Any]]:
    """A head of the trainer with random weights, as it exports it."""
    config = json.loads(Path(target, "config.json").read_text())
    generator = torch.Generator().manual_seed(6)
    table = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.15
    rope = RopeConfig(kind="default", theta=10000.0, head_dim=32)
    shape = TrainedShape(
        hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=192, norm_eps=1e-6, rope=rope
    )  # fmt: skip
    layers: tuple[int, ...] = (1, 2, 4, 5)
    head: torch.nn.Module
    if kind == "eagle":
        head = EagleHead(shape, table, table, generator)
    elif kind == "medusa":
        head = MedusaHeads(K, 1, table)
    else:
        ids = torch.arange(VOCAB) if kind == "eagle3 of all tokens" else torch.arange(0, VOCAB, 2)
        layers = layers if kind == "eagle3 of four layers" else (2, 3, 5)
        head = Eagle3Head(shape, table, table, generator, num_features=len(layers), draft_ids=ids)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 + (1.0 if parameter.ndim == 1 and kind != "medusa" else 0.0))
    export_head(head, root / "head", config, feature_layers=layers, dtype=torch.float32)
    return target, {"method": kind.split()[0], "model": str(root / "head")}


def _blocks(form: BlockForm, few: bool, root: Path, target: str) -> tuple[str, dict[str, Any]]:
    """A block drafter of the trainer with random weights, as it exports it; ``few``: with a draft vocabulary."""
    config = json.loads(Path(target, "config.json").read_text())
    generator = torch.Generator().manual_seed(8)
    table = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.15
    shape = TrainedShape(
        hidden_size=HIDDEN, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=192, norm_eps=1e-6,
        rope=RopeConfig(kind="default", theta=10000.0, head_dim=32),
    )  # fmt: skip
    ids = torch.arange(0, VOCAB, 2) if few else None
    head = BlockDrafter(shape, form, table, table, generator, num_features=3, draft_ids=ids)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))
        first: Any = head.layers[0]
        for layer in (
            head.layers
        ):  # vLLM's CPU kernel norms the text's keys of all layers with the first one's weights
            layer.self_attn.k_norm.weight.copy_(first.self_attn.k_norm.weight)  # type: ignore[union-attr, operator]
    export_head(head, root / "head", config, feature_layers=(2, 3, 5), dtype=torch.float32, verifier=target)
    return target, {"method": "dflash", "model": str(root / "head")}


# vLLM 0.32 runs DSpark on GPUs alone; `tests/unit/test_export_contract.py` holds such folders to its loader.
_FORMS = {
    "dflash": BlockForm(2, K, VOCAB - 1),
    "dflash, causal": BlockForm(2, K, VOCAB - 1, causal=True),
}

_TRAINED = ("eagle", "eagle3", "eagle3 of four layers", "eagle3 of all tokens", "medusa")


@pytest.mark.parametrize(
    "make",
    [
        *(
            eagle,
            eagle3,
            eagle3_norms,
            eagle31,
            speculators,
            peagle,
            peagle_speculators,
            medusa,
            mimo,
            exported_mtp,
        ),
        *(pytest.param(partial(_trained, kind), id=f"exported {kind}") for kind in _TRAINED),
        *(
            pytest.param(partial(_blocks, form, few), id=f"exported {name}{', draft vocabulary' * few}")
            for name, form in _FORMS.items()
            for few in (False, True)
        ),
    ],
)
def test_the_same_drafts(
    make: Callable[[Path, str], tuple[str, dict[str, Any]]], target: str, tmp_path: Path
) -> None:
    model, speculative = make(tmp_path, target)
    speculative["num_speculative_tokens"] = K
    theirs, mine = vllm(model, speculative), ours(model, speculative)
    assert mine["tokens"] == theirs["tokens"]
    assert len(mine["drafts"]) >= 3
    for step, (a, b) in enumerate(zip(mine["drafts"], theirs["drafts"], strict=False)):
        assert a == b[: len(a)], f"step {step}: {a} here, {b} there"
