"""From a model folder or hub id to a model that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from draftwise.errors import ConfigError, ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.ranks import Part, Ranks
from draftwise.kernels.torch_ops import TorchOps
from draftwise.models.base import DecoderModel
from draftwise.models.checkpoint import TensorEntry, copy_tensors, read_json, read_rows
from draftwise.models.config import ModelConfig, OwnCodeLacks, token_ids
from draftwise.models.general.config import parse_general
from draftwise.models.general.loading import load_general
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.heads.mtp_names import mtp_tensors
from draftwise.models.lora.merged import with_adapter
from draftwise.models.parts import check_divisible, entries_of_rank, of_rank
from draftwise.models.paths import resolve_path
from draftwise.models.progress import told
from draftwise.models.registry import resolve_model
from draftwise.models.rounded import cached_checkpoint, kept_checkpoint
from draftwise.models.self_test import settled_ops
from draftwise.models.source import checkpoint_format, read_raw, scan
from draftwise.models.text_part import PART_OF
from draftwise.models.unfollowed import Watched, refuse_unfollowed
from draftwise.models.weights import WeightPlan, freed_at_once, same_shape
from draftwise.models.words import shorten
from draftwise.quantization.scheme import Scheme, parse_scheme

logger = logging.getLogger("draftwise")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLOAT_NAMES = frozenset({"F64", "F32", "BF16", "F16"})


def load_config(
    path: str | Path,
    revision: str | None = None,
    *,
    max_model_len: int | None = None,
) -> ModelConfig:
    """Read a model's configuration without its weights.

    Args:
        max_model_len: model length asked for; None: the model's own. See `models.rope`.

    Raises:
        ModelLoadError: not a model, or one that is not supported.
    """
    return _read_config(resolve_path(path, revision, weights=False), max_model_len)[0]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
    quantization: str | None = None,
    quantization_cache: Path | None = None,
    batch_invariant: bool = False,
    adapter: str | None = None,
    adapters: bool = False,
    ops: Ops | None = None,
    ranks: Ranks | None = None,
    experts_by_rank: bool = False,
) -> DecoderModel:
    """Load a model. Peak memory is the weights, as the kernels pack them, plus the largest layer or some 20 MiB:
    tensors stream from the mapped files into place.

    Args:
        path: local folder, GGUF file or hub id.
        dtype: float32, bfloat16 or float16; None: what ``config.json`` says (float32 if it says nothing).
        trust_remote_code: accepted for the tokenizer's sake; models are never run from a checkpoint's own code.
        max_model_len: see `load_config`.
        quantization: a format of `quantization.scheme` that linear layers are rounded to; None: none. With a
            checkpoint that has weights of so many bits, it says whether rows are rounded, too, and rounds the output
            layer.
        quantization_cache: folder in which rounded weights are kept, see `models.rounded`; None: they are not.
        batch_invariant: a row's bits may not depend on the rows computed with it; see `kernels.select.default_ops`.
        adapter: folder or hub id of a LoRA adapter that is merged into the weights; None: none.
        adapters: requests will have adapters of their own (`models.lora`).
        ops: the kernels to run on; None: `self_test.settled_ops`.
        ranks: with whom the model is shared: a part of it is loaded. None: with nobody.
        experts_by_rank: each of them gets some experts whole, not a part of each.

    Raises:
        ConfigError: the model cannot be divided among ``ranks``; ``quantization`` is unknown, or what it needs is not
            there.
        ModelLoadError: not a model, unsupported, quantised, damaged, or its tensors do not fit; names what is wrong.
    """
    with freed_at_once():
        return _load(
            resolve_path(path, revision), dtype, device, max_model_len, quantization, quantization_cache,
            batch_invariant, adapter, adapters, ops, ranks, experts_by_rank,
        )  # fmt: skip


def _load(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    max_model_len: int | None,
    quantization: str | None,
    quantization_cache: Path | None,
    batch_invariant: bool,
    adapter: str | None,
    adapters: bool,
    ops: Ops | None,
    ranks: Ranks | None,
    experts_by_rank: bool,
) -> DecoderModel:
    config, cls = _read_config(folder, max_model_len)
    layout = checkpoint_format(folder)
    chosen = dtype or _config_dtype(config, folder)
    if chosen not in _DTYPES.values():
        raise ModelLoadError(f"dtype {chosen} is not supported (supported: {', '.join(_DTYPES)})")
    scheme = parse_scheme(quantization, device=device.type) if quantization else None
    if layout is not None and scheme is not None:
        try:
            layout.check_scheme(scheme, quantization)
        except ModelLoadError as error:
            raise ModelLoadError(f"{folder}: {error}") from error
    if ops is None:
        ops = settled_ops(
            config, chosen, device, scheme, batch_invariant=batch_invariant, ranks=ranks, adapters=adapters,
            stored=layout is not None or "quantization_config" in config.raw,
        )  # fmt: skip
    part = Part() if ranks is None else ranks.part
    if part.size > 1:
        check_divisible(kept=quantization_cache is not None)
        if not is_general(cls):  # of others, the trace tells what can be divided
            config = of_rank(config, part, experts_by_rank)
    if adapter is not None and (is_general(cls) or quantization_cache is not None):
        raise ConfigError(
            f"an adapter cannot be merged into {config.architecture} (it runs on Transformers' code), nor into weights "
            "that are kept rounded"
        )
    if is_general(cls):
        entries = scan(folder)
        if scheme is not None and quantization_cache is not None and layout is None:
            return _load_kept(folder, config, ops, entries, scheme, quantization_cache, chosen)
        with told(folder, entries):
            return load_general(
                folder, config, ops, entries, layout, rounded=scheme is not None,
                experts_by_rank=experts_by_rank,
            )  # fmt: skip
    entries = scan(folder)
    if adapter is not None:
        entries = with_adapter(entries, adapter)
    if (whole := config.raw.get(PART_OF)) is not None:
        logger.info(
            "%s is served as its text part, a %s: images, sound and the like are not",
            whole,
            config.architecture,
        )
    plan = WeightPlan(chosen, device, layout, entries.keys(), part)
    model = declare(folder, config, cls, plan, ops, entries)
    if scheme is not None and quantization_cache is not None and layout is None:
        linears = [parts for parts in plan.linears if plan.exact.isdisjoint(name for name, _ in parts)]
        kept = cached_checkpoint(folder, quantization_cache, scheme, chosen, entries, linears)
        if kept is not None:
            layout = checkpoint_format(kept)
            entries = scan(kept)
            plan = WeightPlan(chosen, device, layout, entries.keys())
            model = declare(kept, config, cls, plan, ops, entries)
    wanted = sum(target.dest.numel() for target in plan.targets.values())
    with torch.no_grad(), told(folder, entries, wanted):
        of_part = entries_of_rank(entries, plan.cuts)
        plan.fill_with(lambda targets: copy_tensors(of_part, targets))
        try:
            model.finish()
        except ModelLoadError as error:
            raise ModelLoadError(f"{folder}: {error}") from error
        assert not plan.targets, f"never filled: {sorted(plan.targets)[:4]}"
        return _recorded(model, ops)


def _load_kept(
    folder: Path,
    config: ModelConfig,
    ops: Ops,
    entries: Mapping[str, TensorEntry],
    scheme: Scheme,
    cache: Path,
    dtype: torch.dtype,
) -> DecoderModel:
    """A model without a file of its own from its rounded weights on disk. If there are none, it is loaded, and what was
    rounded is kept: which tensors these are shows as it loads."""
    kept = kept_checkpoint(folder, cache, scheme, dtype, entries)
    if kept is not None:
        entries, layout = scan(kept), checkpoint_format(kept)
        with told(folder, entries):
            return load_general(folder, config, ops, entries, layout, rounded=True)
    noted: set[str] = set()
    with told(folder, entries):
        model = load_general(folder, config, ops, entries, rounded=True, noted=noted)
    if noted:
        linears = [((name, entries[name].shape[0]),) for name in sorted(noted)]
        cached_checkpoint(folder, cache, scheme, dtype, entries, linears)
    else:
        logger.warning(
            "quantization_cache: %s is rounded in a form that is not kept on disk", config.architecture
        )
    return model


def check_divided(
    path: str | Path,
    size: int,
    revision: str | None = None,
    max_model_len: int | None = None,
    experts_by_rank: bool = False,
) -> None:
    """Raise ConfigError if a model cannot be divided among ``size`` ranks. No weights are read.

    Raises:
        ModelLoadError: as `load_config`.
    """
    config, cls = _read_config(resolve_path(path, revision, weights=False), max_model_len)
    if is_general(cls):  # its trace tells what can be divided
        return
    of_rank(config, Part(0, size), experts_by_rank)
    if experts_by_rank and config.experts is None:
        raise ConfigError(f"enable_expert_parallel: {config.architecture} has no experts")
    if experts_by_rank and not cls.experts_one_by_one():
        raise ConfigError(
            f"enable_expert_parallel: experts of {config.architecture} are stored together; leave it out"
        )


def declare(
    folder: Path,
    config: ModelConfig,
    cls: type[DecoderModel],
    plan: WeightPlan,
    ops: Ops,
    entries: Mapping[str, TensorEntry],
) -> DecoderModel:
    """A model whose parameters are declared on ``plan`` and not filled yet; what they will be filled from is checked.

    Raises:
        ModelLoadError: tensors of the checkpoint are missing, surplus, or of another shape.
    """
    if config.num_layers > len(entries):  # said before a million of them are declared
        raise ModelLoadError(
            f"{folder}: config.json names {config.num_layers} layers, but the checkpoint has {len(entries)} tensors"
        )
    try:
        model = cls(config, ops, plan)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    except (RuntimeError, MemoryError, OverflowError) as error:  # torch's words for sizes that cannot be
        raise ModelLoadError(f"{folder}: a model of these sizes does not fit into memory: {error}") from error
    _check(folder, entries_of_rank(entries, plan.cuts), plan)
    return model


def _recorded(model: DecoderModel, ops: Ops) -> DecoderModel:
    """Replay the forward in one native call where the kernels can."""
    if isinstance(ops, TorchOps):
        return model
    from draftwise.models.recorded import recorded

    return recorded(model, ops)


def checkpoint_num_parameters(path: str | Path, revision: str | None = None) -> int:
    """Elements of all tensors of a checkpoint, from the headers of its files alone.

    Raises:
        ModelLoadError: not a model folder, or its files cannot be read.
    """
    entries = scan(resolve_path(path, revision))
    return sum(prod(entry.shape) for entry in entries.values())


def is_quantized_checkpoint(path: str | Path, revision: str | None = None) -> bool:
    """Whether a model's linear layers are stored in quantised form.

    Raises:
        ModelLoadError: not a model, or its form is not supported.
    """
    return checkpoint_format(resolve_path(path, revision, weights=False)) is not None


def _read_config(folder: Path, max_model_len: int | None) -> tuple[ModelConfig, type[DecoderModel]]:
    raw = read_raw(folder)
    try:
        architecture, cls = resolve_model(raw)
        checkpoint_format(folder)  # refused here if it is not supported
        watched = Watched(raw)
        try:
            config = cls.parse(watched, architecture, max_model_len)
        except OwnCodeLacks as lack:
            config, cls = parse_general(raw, architecture, max_model_len), GeneralDecoder
            logger.info("%s runs on Transformers' code: %s", architecture, lack)
        if not is_general(cls) and cls.__module__.startswith("draftwise."):  # others may read it later
            refuse_unfollowed(watched, architecture)
        config = replace(config, raw=raw)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    return _with_generation_config(config, folder), cls


def is_general(cls: type[DecoderModel]) -> bool:
    """Whether models of a class run on Transformers' code."""
    return issubclass(cls, GeneralDecoder)


def _with_generation_config(config: ModelConfig, folder: Path) -> ModelConfig:
    """Chat models end a turn with a token that only generation_config.json names."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return config
    more = token_ids(read_json(path).get("eos_token_id"), "eos_token_id")
    return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))


def _config_dtype(config: ModelConfig, folder: Path) -> torch.dtype:
    name = config.dtype or "float32"
    if name not in _DTYPES:
        raise ModelLoadError(f"{folder}: dtype {name!r} is not supported (supported: {', '.join(_DTYPES)})")
    return _DTYPES[name]


def _check(
    folder: Path,
    entries: Mapping[str, TensorEntry],
    plan: WeightPlan,
) -> None:
    """Every declared tensor is there with its shape, and nothing else is: a silent difference is a wrong model. MTP
    layers may be; method ``mtp`` loads them."""
    targets = plan.targets
    ignored = plan.ignored | mtp_tensors(entries.keys())
    missing = sorted(targets.keys() - entries.keys())
    if missing:
        raise ModelLoadError(f"{folder}: tensors are missing: {shorten(missing)}")
    surplus = sorted(
        name for name in entries.keys() - targets.keys() - ignored if not _adds_nothing(entries, name)
    )
    if surplus:
        raise ModelLoadError(f"{folder}: tensors that this architecture does not have: {shorten(surplus)}")
    wrong = [
        f"{name} has shape {list(entries[name].shape)}, expected {list(target.dest.shape)}"
        for name, target in targets.items()
        if not same_shape(entries[name].shape, tuple(target.dest.shape))
    ]
    if wrong:
        raise ModelLoadError(f"{folder}: {'; '.join(wrong[:4])}")
    odd = sorted(n for n, t in targets.items() if entries[n].dtype not in (t.stored or _FLOAT_NAMES))
    if odd:
        kinds = ", ".join(sorted({entries[name].dtype for name in odd}))
        raise ModelLoadError(f"{folder}: tensors stored as {kinds} are not supported: {shorten(odd)}")


def _adds_nothing(entries: Mapping[str, TensorEntry], name: str) -> bool:
    """Whether a tensor is a buffer that is computed anew, or the bias of zeros that writers of GPTQ put beside layers
    that have none."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    base = name.removesuffix(".bias")
    if base == name or f"{base}.qweight" not in entries:
        return False
    return not bool(read_rows(entries[name], name, 0, entries[name].shape[0]).any())
