"""From a head's folder to a head that fits the target it is loaded for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from draftwise.config import SpeculativeConfig
from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.select import default_ops
from draftwise.kernels.split import ranks_of
from draftwise.kernels.torch_ops import TorchOps
from draftwise.models.base import ModelConfig, SharedWeights
from draftwise.models.checkpoint import read_json
from draftwise.models.config import RawConfig
from draftwise.models.heads.base import HeadModel, TargetLink
from draftwise.models.heads.block import BlockHead
from draftwise.models.heads.block_formats import block_options, block_windows, rename_block
from draftwise.models.heads.eagle import EagleHead
from draftwise.models.heads.eagle3 import Eagle3Head
from draftwise.models.heads.formats import (
    check_target,
    draft_ids,
    eagle3_options,
    eagle_options,
    head_settings,
    head_windows,
    layer_config,
    mask_token,
    number_of_layers,
    rename_eagle,
    sparse_layers,
)
from draftwise.models.heads.medusa import MedusaHeads, medusa_shape, rename_medusa
from draftwise.models.heads.mtp import MtpHead
from draftwise.models.heads.mtp_gated import gated_layers, unstacked
from draftwise.models.heads.mtp_names import mtp_form, renamer
from draftwise.models.heads.tensors import HeadTensors, scan_head
from draftwise.models.layers import LayerWeights
from draftwise.models.paths import resolve_path
from draftwise.models.weights import WeightPlan
from draftwise.quantization.scheme import parse_scheme


class HeadTarget(Protocol):
    """The interface of a target for its heads."""

    @property
    def config(self) -> ModelConfig: ...

    def shared_weights(self) -> SharedWeights:
        """As `DecoderModel.shared_weights`."""


class HeadContext(Protocol):
    """The facts about an engine that loading a head needs."""

    @property
    def speculative(self) -> SpeculativeConfig:
        """The entry of ``speculative_config`` that names the head."""

    @property
    def target_model(self) -> HeadTarget: ...

    @property
    def target_path(self) -> str | None:
        """Where the target was loaded from: folder or hub id."""

    @property
    def target_revision(self) -> str | None: ...

    @property
    def max_model_len(self) -> int:
        """Tokens; no position reaches it."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the target."""

    @property
    def device(self) -> torch.device: ...


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
        raise ModelLoadError(f"{folder} is not a folder of a draft head: config.json is missing")
    return read_json(path)


def target_link(
    target: HeadTarget,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
) -> tuple[TargetLink, Ops]:
    """The parts that a target lends its heads, and the operations that they run on.

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
    scheme = parse_scheme(quantization, device=device.type) if quantization else None
    ops = default_ops(dtype, device, scheme, ranks=ranks_of(shared.ops))
    if not isinstance(shared.ops, type(ops)) and not isinstance(ops, type(shared.ops)):
        ops = shared.ops  # the user chose the target's kernels: its output layer is packed for them
    config = target.config
    link = TargetLink(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        max_model_len=max_model_len,
        embedding=shared.embedding,
        head=shared.head,
        tail=shared.tail,
    )
    return link, ops


@dataclass(frozen=True, slots=True)
class DeclaredHead:
    """A head whose parameters are declared and not read yet, and what they will be read from."""

    model: HeadModel | MedusaHeads
    plan: WeightPlan
    tensors: HeadTensors
    ops: Ops
    known: frozenset[str] = frozenset()
    """Tensors that are there and not needed, besides those that the plan ignores."""


def load_eagle(context: HeadContext) -> HeadModel:
    """The EAGLE head that a ``speculative_config`` names.

    Raises:
        ConfigError: it names none, or the target lends no embedding.
        ModelLoadError: it cannot be loaded, or is for another target; what is wrong is named.
    """
    return _filled(declare_eagle(context))


def declare_eagle(context: HeadContext) -> DeclaredHead:
    """`load_eagle` as far as headers of files tell. Raises as that does."""
    folder, raw, link, ops = _opened(context)
    with _named(folder):
        tensors = scan_head(folder).renamed(rename_eagle).stored()
        check_target(raw, link)
        config = layer_config(raw, tensors, number_of_layers(tensors))
        config = replace(config, sliding_window=head_windows(raw, config.num_layers))
        plan = _plan(tensors, ops, context)
        head = EagleHead(config, eagle_options(raw, tensors), link, ops, plan)
    return DeclaredHead(head, plan, tensors, ops)


def load_eagle3(context: HeadContext) -> HeadModel:
    """The EAGLE-3 head, or with ``parallel_drafting`` the P-EAGLE head, that a ``speculative_config`` names. Raises as
    `load_eagle`."""
    return _filled(declare_eagle3(context))


def declare_eagle3(context: HeadContext) -> DeclaredHead:
    """`load_eagle3` as far as headers of files tell. Raises as that does."""
    folder, raw, link, ops = _opened(context)
    with _named(folder):
        tensors = scan_head(folder).renamed(rename_eagle).stored()
        check_target(raw, link)
        config = layer_config(raw, tensors, number_of_layers(tensors), latent=True)
        config = replace(config, sliding_window=head_windows(raw, config.num_layers))
        plan = _plan(tensors, ops, context)
        options = eagle3_options(raw, tensors, link)
        mask_shape: tuple[int, ...] = ()
        if context.speculative.parallel_drafting:
            options = replace(options, mask_token=mask_token(raw, tensors))
            mask_shape = tensors["mask_hidden"].shape
        head = Eagle3Head(config, options, link, ops, plan, draft_ids(tensors), mask_shape)
    return DeclaredHead(head, plan, tensors, ops)


def load_block(context: HeadContext) -> HeadModel:
    """The block drafter (DFlash, DSpark) that a ``speculative_config`` names. Raises as `load_eagle`."""
    return _filled(declare_block(context))


def declare_block(context: HeadContext) -> DeclaredHead:
    """`load_block` as far as headers of files tell. Raises as that does."""
    folder, raw, link, ops = _opened(context)
    with _named(folder):
        tensors = scan_head(folder).renamed(rename_block).stored()
        options = block_options(raw, tensors, link)
        check_target(raw, link)
        settings = {**raw, "final_logit_softcapping": None}  # `block_options` has read it
        config = layer_config(settings, tensors, number_of_layers(tensors))
        windows, causal = block_windows(raw, config.num_layers)
        config = replace(config, sliding_window=windows)
        plan = _plan(tensors, ops, context)
        head = BlockHead(config, replace(options, causal=causal), link, ops, plan, draft_ids(tensors))
    unread = frozenset(name for name in tensors if name.startswith(("confidence_head.", "verifier_")))
    return DeclaredHead(head, plan, tensors, ops, unread)


def load_mtp(context: HeadContext) -> HeadModel:
    """The MTP layers of a folder of their own, or, where ``speculative_config`` names none, of the target's own
    checkpoint. Raises as `load_eagle`."""
    return _filled(declare_mtp(context))


def declare_mtp(context: HeadContext, *, compare: bool = True) -> DeclaredHead:
    """`load_mtp` as far as headers of files tell. Raises as that does.

    ``compare``: find out whether an embedding beside the layers is the target's, which reads both.
    """
    own = context.speculative.model is None
    folder, raw, link, ops = _opened(context)
    found = scan_head(folder)
    form = mtp_form(found.keys(), "speculators_model_type" in raw)
    if form is None:
        where = "the target's own checkpoint" if own else str(folder)
        raise ModelLoadError(
            f"{where} has no MTP layers (tensors such as model.layers.{link.num_layers}.eh_proj.weight, "
            "mtp.fc.weight or model.mtp_layers.0.input_proj.weight)"
        )
    names = renamer(found.keys(), form)
    if not own:  # a folder of their own may bring embedding and output layer under their usual names
        usual = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
        names |= {name: f"0.{part}.weight" for part, name in usual.items() if name in found}
    with _named(folder):
        tensors = unstacked(found.renamed(names.get).stored())
        check_target(raw, link)
        count = number_of_layers(tensors)
        config, experts, weights = (
            gated_layers(raw, tensors, count)
            or sparse_layers(raw, tensors, count)
            or (layer_config(raw, tensors, count), None, LayerWeights)
        )
        if config.latent is not None:  # DeepSeek's own layers
            form = replace(form, normed_feature=True)
        lent = {
            part for part in ("embed_tokens", "lm_head") if compare and own and _is_copy(found, tensors, part)
        }
        plan = _plan(tensors, ops, context)
        brought = {part for part in ("embed_tokens", "lm_head") if f"0.{part}.weight" in tensors} - lent
        head = MtpHead(
            config,
            form,
            link,
            ops,
            plan,
            own_embedding="embed_tokens" in brought,
            own_head="lm_head" in brought,
            experts=experts,
            weights=weights,
        )
        if compare:
            _check_shared(tensors, config.num_layers)
    return DeclaredHead(head, plan, tensors, ops, frozenset(f"0.{part}.weight" for part in lent))


def _is_copy(found: HeadTensors, tensors: HeadTensors, part: str) -> bool:
    """Whether the first layer's embedding or output layer is the target's, stored a second time."""
    original = "lm_head.weight" if part == "lm_head" else "model.embed_tokens.weight"
    if part == "lm_head" and original not in found:
        original = "model.embed_tokens.weight"  # tied
    name = f"0.{part}.weight"
    return name in tensors and original in found and torch.equal(tensors.read(name), found.read(original))


def _check_shared(tensors: HeadTensors, num_layers: int) -> None:
    """Layers behind the first use its embedding and output layer: theirs must be the same."""
    for part in ("embed_tokens", "lm_head"):
        for i in range(1, num_layers):
            name = f"{i}.{part}.weight"
            first = f"0.{part}.weight"
            if name in tensors and not (
                first in tensors and torch.equal(tensors.read(first), tensors.read(name))
            ):
                raise ModelLoadError(
                    f"{tensors[name].origin} differs from that of the first MTP layer, which is not supported"
                )


def _opened(context: HeadContext) -> tuple[Path, RawConfig, TargetLink, Ops]:
    """Folder and settings of the head that a context asks for, and what the target lends it."""
    spec = context.speculative
    model, revision = spec.model, spec.revision
    if model is None and spec.method == "mtp":
        model, revision = context.target_path, context.target_revision
    folder = head_folder(model, revision, spec.method)
    with _named(folder):
        raw = head_settings(head_config(folder), spec.method)
    link, ops = target_link(
        context.target_model, context.max_model_len, context.dtype, context.device, spec.quantization
    )
    return folder, raw, link, ops


def _plan(tensors: HeadTensors, ops: Ops, context: HeadContext) -> WeightPlan:
    """A plan for a head's parameters. Raises ModelLoadError if ``speculative_config.quantization`` asks for other codes
    than the folder has."""
    name = context.speculative.quantization
    if tensors.layout is not None and name is not None:
        tensors.layout.check_scheme(parse_scheme(name, device=ops.device.type), name)
    return tensors.plan(ops.dtype, ops.device)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Let errors begin with the folder they are about."""
    try:
        yield
    except ModelLoadError as error:
        if str(error).startswith(str(folder)):
            raise
        raise ModelLoadError(f"{folder}: {error}") from error


def _filled(declared: DeclaredHead) -> HeadModel:
    """Fill and pack a head's parameters; say which tensors it has no use for."""
    plan, tensors, head = declared.plan, declared.tensors, declared.model
    assert isinstance(head, HeadModel)
    used = set(plan.targets) | plan.ignored | declared.known
    with torch.no_grad():
        tensors.fill(plan)
        head.finish()
    tensors.note_unused(used)
    return recorded(head, declared.ops)


def recorded(head: HeadModel, ops: Ops) -> HeadModel:
    """Replay the passes in one native call where the kernels can."""
    if isinstance(ops, TorchOps):
        return head
    from draftwise.models.heads.recorded import recorded_head

    return recorded_head(head, ops)


def load_medusa(folder: Path, link: TargetLink, ops: Ops) -> MedusaHeads:
    """Medusa heads, in the form of their authors or in vLLM's.

    Raises:
        ModelLoadError: no Medusa heads, heads for another target, or tensors that are missing or do not fit; named.
    """
    declared = declare_medusa(folder, link, ops)
    heads, plan, tensors = declared.model, declared.plan, declared.tensors
    assert isinstance(heads, MedusaHeads)
    used = plan.targets.keys() | declared.known
    with torch.no_grad():
        tensors.fill(plan)
        heads.finish()
    tensors.note_unused(used)
    return heads


def declare_medusa(folder: Path, link: TargetLink, ops: Ops) -> DeclaredHead:
    """`load_medusa` as far as headers of files tell. Raises as that does."""
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
    return DeclaredHead(heads, plan, tensors, ops, frozenset(used))
