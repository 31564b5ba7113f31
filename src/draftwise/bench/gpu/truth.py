"""Part: how far bfloat16 is from float32, here and in Transformers, for the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise.bench.gpu.models import llama_config, random_target, random_weights
from draftwise.bench.gpu.report import PartReport
from draftwise.bench.gpu.setting import BLOCK, Setting, tree_parents
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input

_LAYERS = 4
_CHAIN = 8
_MARGIN = 1.25
"""How much larger our error may be than that of Transformers: sums are ordered otherwise."""


@torch.inference_mode()
def measure_truth(setting: Setting, report: PartReport) -> None:
    """Logits of a prompt, of the prompt in two chunks, of a chain and of a tree behind it. The truth is Transformers in
    float32; errors are distances from it, as shares of its length."""
    try:
        import transformers
    except ImportError as error:
        report.skipped = f"Transformers is not installed ({error})"
        return
    size = setting.size
    layers, dtype = min(_LAYERS, size.layers), setting.dtype
    weights: dict[str, Tensor] = {}

    def keep(targets: Mapping[str, Tensor]) -> None:
        random_weights(targets)
        weights.update({name: tensor.clone() for name, tensor in targets.items()})

    model = random_target(setting, setting.ops(), layers, fill=keep)
    given: dict[str, Any] = llama_config(size, layers)
    config = transformers.LlamaConfig(
        **{k: v for k, v in given.items() if k not in ("architectures", "model_type")}
    )
    with torch.device(setting.device):
        theirs: Any = transformers.LlamaForCausalLM(config)
    theirs.eval()
    theirs.load_state_dict(weights)
    weights.clear()
    prompt, parents = size.context // 4, tree_parents(size.tree)
    rng = np.random.default_rng(0)
    tokens, chain, nodes = (rng.integers(0, size.vocab, n) for n in (prompt, _CHAIN, size.tree))
    ours = _ours(setting, model, tokens, chain, nodes, parents)
    del model
    truth = _theirs(theirs, setting.device, tokens, chain, nodes, parents)
    for parameter in theirs.parameters():  # not its buffers: a loaded checkpoint rotates in float32, too
        parameter.data = parameter.data.to(dtype)
    rounded = _theirs(theirs, setting.device, tokens, chain, nodes, parents)
    rounded["prompt in two chunks"] = rounded["prompt"]
    truth["prompt in two chunks"] = truth["prompt"]
    for name, found in ours.items():
        apart, other = (float((x - truth[name]).norm() / truth[name].norm()) for x in (found, rounded[name]))
        most = _MARGIN * other if dtype is not torch.float32 else 1e-4
        report.at_most(f"{name}: error", apart, most, note=f"Transformers in the same type {other:.2g}")
        agree = float((found.argmax(-1) == truth[name].argmax(-1)).float().mean())
        report.add(f"{name}: rows with the truth's best token", agree)


def _ours(
    setting: Setting,
    model: DecoderModel,
    tokens: np.ndarray[Any, Any],
    chain: np.ndarray[Any, Any],
    nodes: np.ndarray[Any, Any],
    parents: tuple[int, ...],
) -> dict[str, Tensor]:
    """Name -> logits of the rows, float32."""
    prompt = len(tokens)
    table = np.arange(-(-(prompt + 1 + len(nodes)) // BLOCK), dtype=np.int32)
    kv = KVStorage(model.kv_layout(), len(table), BLOCK, model.dtype, setting.device, spare=True)

    def run(own: np.ndarray[Any, Any], context: int, parents: tuple[int, ...] | None = None) -> Tensor:
        row = RowInput(own.astype(np.int32), context, table, parents)
        batch = build_step_input([row], BLOCK, setting.device)
        return model.forward_logits(batch, kv)[1].clone()

    half = prompt // 3
    chunks = [run(tokens[:half], 0), run(tokens[half:], half)]
    found = {"prompt in two chunks": torch.cat(chunks), "prompt": run(tokens, 0)}
    found["chain"] = run(chain, prompt)
    found["tree"] = run(np.concatenate((chain[:1], nodes)), prompt, parents)
    return found


def _theirs(
    model: Any,
    device: torch.device,
    tokens: np.ndarray[Any, Any],
    chain: np.ndarray[Any, Any],
    nodes: np.ndarray[Any, Any],
    parents: tuple[int, ...],
) -> dict[str, Tensor]:
    """The same of Transformers, a tree path by path: in a sequence of its own."""

    def run(own: np.ndarray[Any, Any]) -> Tensor:
        ids = torch.from_numpy(own.astype(np.int64)).to(device)
        logits: Tensor = model(ids[None], use_cache=False).logits[0]
        return logits.float()

    whole = run(np.concatenate((tokens, chain)))
    rows: dict[int, Tensor] = {}
    inner = set(parents)
    for leaf in (i for i in range(len(nodes)) if i not in inner):
        path: list[int] = []
        at = leaf
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        logits = run(np.concatenate((tokens, chain[:1], nodes[path])))
        rows[-1] = logits[len(tokens)]
        rows |= {node: logits[len(tokens) + 1 + depth] for depth, node in enumerate(path)}
    tree = torch.stack([rows[i] for i in range(-1, len(nodes))])
    return {"prompt": whole[: len(tokens)], "chain": whole[len(tokens) :], "tree": tree}
