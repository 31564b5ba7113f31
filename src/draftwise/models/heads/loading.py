"""From a head's folder to a head that fits the target it is loaded for."""

from __future__ import annotations

from pathlib import Path

import torch

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.select import default_ops
from draftwise.models.base import DecoderModel
from draftwise.models.checkpoint import read_json
from draftwise.models.config import RawConfig
from draftwise.models.heads.base import TargetLink
from draftwise.models.heads.medusa import MedusaHeads, medusa_shape, rename_medusa
from draftwise.models.heads.tensors import scan_head
from draftwise.models.loader import resolve_path
from draftwise.models.weights import WeightPlan
from draftwise.quantization.scheme import parse_scheme


def head_folder(model: str | None, revision: str | None, method: str) -> Path:
    """The folder of the head that a ``speculative_config`` names.

    Raises:
        ConfigError: it names none.
        ModelLoadError: it cannot be had.
    """
    if model is None:
        raise ConfigError(
            f"speculative_config.model: method {method!r} needs a model, the head's folder or hub id"
        )
    return resolve_path(model, revision, pickles=True)


def head_config(folder: Path) -> RawConfig:
    """A head's config.json, as it is."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{folder} is no folder of a draft head: config.json is missing")
    return read_json(path)


def target_link(
    target: DecoderModel,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
) -> tuple[TargetLink, Ops]:
    """What a target lends its heads, and the operations that they run on.

    Args:
        max_model_len: of the engine.
        quantization: a format that the head's linear layers are rounded to; None: none, whatever the target's is.

    Raises:
        ConfigError: the target's family lends nothing, or ``quantization`` cannot be had.
    """
    try:
        shared = target.shared_weights()
    except NotImplementedError as error:
        raise ConfigError(f"draft heads: {error}") from error
    ops = default_ops(dtype, device, parse_scheme(quantization) if quantization else None)
    if not isinstance(shared.ops, type(ops)) and not isinstance(ops, type(shared.ops)):
        ops = shared.ops  # somebody chose the target's kernels: its output layer is packed for those
    config = target.config
    link = TargetLink(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        max_model_len=max_model_len,
        embedding=shared.embedding,
        head=shared.head,
    )
    return link, ops


def load_medusa(folder: Path, link: TargetLink, ops: Ops) -> MedusaHeads:
    """Medusa heads, in the form of their authors or in vLLM's.

    Raises:
        ModelLoadError: no Medusa heads, heads for another target, or tensors that are missing or do not fit; named.
    """
    raw = head_config(folder)
    tensors = scan_head(folder, "medusa_lm_head.safetensors", "medusa_lm_head.pt").renamed(rename_medusa)
    shape = medusa_shape(raw, tensors)
    if shape.output == "shared" and "head.weight" not in tensors:
        tensors = tensors.renamed(lambda name: "head.weight" if name == "head.0.weight" else name)
    target_ids = None
    used = set()
    if "token_map" in tensors:
        used.add("token_map")
        if shape.vocab_size != link.vocab_size:  # else the output layers say more than the map keeps
            target_ids = tensors.read("token_map").to(torch.int64)
    plan = WeightPlan(ops.dtype, ops.device)
    try:
        heads = MedusaHeads(shape, link, ops, plan, target_ids, scale=float(raw.get("logit_scale", 1.0)))
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    used |= plan.targets.keys()
    with torch.no_grad():
        tensors.fill(plan)
        heads.finish()
    tensors.note_unused(used)
    return heads
