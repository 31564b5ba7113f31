"""Loads a Transformers model, finds out how its layers attend, puts our kernels in, and checks the result."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.split import ranks_of
from draftwise.models.base import DecoderModel
from draftwise.models.checkpoint import TensorEntry
from draftwise.models.config import ModelConfig
from draftwise.models.general.assembling import WrongAssembly, assembled
from draftwise.models.general.attention import PAGED, NotCausal, register
from draftwise.models.general.carried import Unit
from draftwise.models.general.check import Reference, check, sample
from draftwise.models.general.config import is_made_for, transformers_config
from draftwise.models.general.exchanging import restore_read, stored_bytes
from draftwise.models.general.experts import (
    ExpertsMisread,
    ExpertsUse,
    PackedExperts,
    exchange_experts,
    stacks_of,
)
from draftwise.models.general.filling import build_filled
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.general.modules import PackedLinear, exchange
from draftwise.models.general.nodes import CannotAssemble
from draftwise.models.general.parts import Called, body_of, other_inputs, text_model
from draftwise.models.general.probing import (
    attend_with,
    explained,
    first_position,
    probed,
    probed_cache,
    units_of,
)
from draftwise.models.general.quiet import quiet
from draftwise.models.general.stored import StoredLinear
from draftwise.models.general.ways import Interface, Way
from draftwise.models.gguf.reader import is_gguf
from draftwise.models.weights import release_freed_memory
from draftwise.quantization.checkpoint import CheckpointFormat

logger = logging.getLogger("draftwise")


def load_general(
    folder: Path,
    config: ModelConfig,
    ops: Ops,
    entries: Mapping[str, TensorEntry],
    layout: CheckpointFormat | None = None,
    *,
    rounded: bool = False,
    noted: set[str] | None = None,
    experts_by_rank: bool = False,
) -> DecoderModel:
    """Load a causal model of Transformers: one whose attention goes through its attention interface, or that keeps
    keys and values in a cache it is given.

    ``entries``: the checkpoint's tensors; ``layout``: how its quantised layers are stored, None: it has none.
    ``rounded``: ``ops`` packs weights in few bits. ``noted``: gets the names of float tensors that were packed as the
    model was built, each a linear layer. ``experts_by_rank``: where ranks share it, each has some experts whole.

    Raises:
        ModelLoadError: it cannot be served; says what about it.
    """
    register()
    try:
        try:
            return _attempt(folder, config, ops, entries, layout, rounded, noted, experts_by_rank)
        except ExpertsMisread as error:
            logger.info("%s keeps its experts as they are: %s", config.architecture, error)
            gc.collect()  # what was built holds itself, and the collector rests while models load
            return _attempt(
                folder, config, ops, entries, layout, rounded, noted, experts_by_rank, experts=False
            )
    except ModelLoadError as error:
        if str(error).startswith(f"{folder}: "):
            raise
        raise ModelLoadError(f"{folder}: {config.architecture} cannot be served: {error}") from error


def _attempt(
    folder: Path,
    config: ModelConfig,
    ops: Ops,
    entries: Mapping[str, TensorEntry],
    layout: CheckpointFormat | None,
    rounded: bool,
    noted: set[str] | None,
    experts_by_rank: bool,
    *,
    experts: bool = True,
) -> DecoderModel:
    """``experts``: mixtures are packed as the model is built."""
    model = _loaded(folder, config, ops, entries, layout, rounded, noted, experts)
    try:
        with quiet():
            found = _prepared(model, config, ops, rounded, experts_by_rank)
        release_freed_memory()
        return found
    except WrongAssembly as error:
        if ranks_of(ops) is not None:
            raise ModelLoadError(f"divided among ranks, it does not give its numbers: {error}") from error
        logger.warning(
            "%s, put together from our operations, does not give its numbers (%s): it runs on its own code",
            config.architecture, error,
        )  # fmt: skip
    del model
    gc.collect()  # as above
    model = _loaded(folder, config, ops, entries, layout, rounded, noted, experts)
    return _prepared(model, config, ops, rounded, experts_by_rank, assemble=False)


def _loaded(
    folder: Path,
    config: ModelConfig,
    ops: Ops,
    entries: Mapping[str, TensorEntry],
    layout: CheckpointFormat | None,
    rounded: bool,
    noted: set[str] | None,
    experts: bool,
) -> Any:
    if noted is not None:
        noted.clear()  # of an attempt before
    raw = {name: value for name, value in config.raw.items() if name != "quantization_config"}
    if layout is None and len(raw) != len(config.raw):
        raise ModelLoadError(
            f"{folder}: {config.architecture} runs on Transformers' code, for which its quantised form is not read"
        )
    try:
        cls, own = _class_and_config(replace(config, raw=raw))
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    with quiet():
        return build_filled(
            folder, entries, layout, cls, own, ops,
            whole=is_gguf(folder), rounded=rounded, experts=experts, noted=noted, made_up=ranks_of(ops) is not None,
        )  # fmt: skip


def _class_and_config(config: ModelConfig) -> tuple[Any, Any]:
    """The model's class, and its configuration: a part of the folder's where the class is that of a text part.

    Raises:
        ModelLoadError: the class is of another model than the configuration.
    """
    import transformers

    cls: Any = getattr(transformers, config.architecture)
    whole = transformers_config(config.raw)
    for found in (whole, whole.get_text_config(decoder=True)):
        if isinstance(found, cls.config_class):
            return cls, found
    if is_made_for(config.architecture, whole.model_type):
        return cls, whole
    raise ModelLoadError(
        f"config.json: {config.architecture} is not a model of model_type {config.raw.get('model_type')!r}"
    )


def _prepared(
    model: Any, config: ModelConfig, ops: Ops, rounded: bool, experts_by_rank: bool, *, assemble: bool = True
) -> DecoderModel:
    with torch.inference_mode():
        _freeze_rotations(model, config.max_model_len)
        with ExpertsUse(model) as mixtures:
            model = _text_part(model, config)
            if ranks_of(ops) is not None:
                restore_read(model)  # before numbers are compared: what else there is, is made up
            units = units_of(model, config.vocab_size)
            reference = Reference.of(model, config.vocab_size, config.max_model_len, chain=bool(units))
        if restore_read(model) and rounded:
            # what was read is floats again, and was not: Mamba's output layer
            reference = Reference.of(model, config.vocab_size, config.max_model_len, chain=bool(units))
        rows = any(isinstance(m, StoredLinear) and m.layer.rounds_rows for m in model.modules())
        decoder, linears = _served(model, config, ops, reference, units, rounded or rows)
        stacks = stacks_of(mixtures.calls)
        if assemble and isinstance(decoder.way, Interface) and not units:
            try:
                return assembled(model, decoder, decoder.way, reference, rounded, stacks, experts_by_rank)
            except CannotAssemble as error:
                logger.info("%s runs on Transformers' code: %s", config.architecture, error)
        if ranks_of(ops) is not None:
            raise ModelLoadError("it runs on Transformers' code, which is not divided among ranks")
        head = model.get_output_embeddings()
        packed = exchange(model, linears, ops, head) + exchange_experts(model, stacks, ops)
        packed += stored_bytes(list(model.modules()))
        decoder.renew()
        check(decoder, reference, exchanged=True, rounded=rounded, rounded_rows=rows)
    rest = {id(p): p for p in [*model.parameters(), *model.buffers()]}
    decoder.weight_size = packed + sum(p.numel() * p.element_size() for p in rest.values())
    count = sum(isinstance(module, PackedLinear) for module in model.modules())
    mixed = sum(isinstance(module, PackedExperts) for module in model.modules())
    logger.info("%s runs on Transformers' code, %s, %d linear layers and %d mixtures of experts on own kernels%s",
                config.architecture, decoder.way.name, count, mixed, decoder.way.cost)  # fmt: skip
    if units:
        logger.info("%d of its modules carry recurrent state, and are computed per request", len(units))
    return decoder


def _text_part(model: Any, config: ModelConfig) -> Any:
    """``model``, or what of a model of text and more reads and writes text."""
    tokens = torch.tensor([sample(config.vocab_size, 4, seed=7)], device=model.device)
    try:
        with Called(model) as called, explained():
            wanted = model(input_ids=tokens, use_cache=False).logits
    except ModelLoadError as error:
        more = other_inputs(model, str(error))
        if more:
            raise ModelLoadError(
                f"it reads no text alone: its code wants {' or '.join(more)}, too"
            ) from error
        raise
    dropped = called.drop_others(tokens)
    if dropped:
        logger.info("%s is served as its text part: images, sound and the like are not (%s)",
                    config.architecture, ", ".join(dropped))  # fmt: skip
    text = text_model(model)
    if text is not model:
        with explained():
            found = text(input_ids=tokens, use_cache=False).logits
        if not torch.equal(found, wanted):
            raise ModelLoadError("the model for text inside of it does not write what it writes")
    return text


def _served(
    model: Any,
    config: ModelConfig,
    ops: Ops,
    reference: Reference,
    units: Sequence[Unit],
    rounded_rows: bool,
) -> tuple[GeneralDecoder, list[nn.Linear]]:
    """The first of the ways that gives the model's own logits, and the linear layers that may be exchanged.
    ``rounded_rows``: see `check`."""
    refusals: list[str] = []
    told = "position_ids" in signature(body_of(model)[1].forward).parameters
    for prepare in (_by_interface, _by_cache, _by_cache_with_positions)[: 3 if told else 2]:
        try:
            way, linears = prepare(model, config, ops, reference)
            if not way.layout and not units:
                raise ModelLoadError("no layer attends through Transformers' attention interface")
        except NotCausal:
            raise
        except ModelLoadError as error:
            refusals.append(str(error))
            continue
        decoder = GeneralDecoder(config, ops, model, way, _blocks(model, config.num_layers), units)
        try:
            check(decoder, reference, rounded_rows=rounded_rows)
        except ModelLoadError as error:
            decoder.release()
            refusals.append(str(error))
            continue
        if refusals:
            logger.info(
                "%s is served in another way than the first: %s", config.architecture, "; ".join(refusals)
            )
        return decoder, linears
    raise ModelLoadError("; and ".join(dict.fromkeys(refusals)))


_Prepared = tuple[Way, list[nn.Linear]]


def _by_interface(model: Any, config: ModelConfig, ops: Ops, reference: Reference) -> _Prepared:
    """All rows as one sequence, attention taken by us."""
    first = first_position(model, reference)
    calls, linears = probed(model, config.vocab_size)
    attend_with(model, PAGED)
    return Interface(calls, ops, first), linears


def _by_cache(model: Any, config: ModelConfig, ops: Ops, reference: Reference) -> _Prepared:
    """Each request as a sequence with a cache, attention and positions are the model's own."""
    from draftwise.models.general.cached import Cached

    layout, linears = probed_cache(model, config)
    return Cached(layout, None), linears


def _by_cache_with_positions(model: Any, config: ModelConfig, ops: Ops, reference: Reference) -> _Prepared:
    """The same for models that count positions from 0 whatever the cache holds, if they are not told."""
    from draftwise.models.general.cached import Cached

    layout, linears = probed_cache(model, config)
    return Cached(layout, first_position(model, reference)), linears


def _blocks(model: Any, num_layers: int) -> list[nn.Module]:
    """The decoder layers; none if they are not one list."""
    for module in body_of(model)[1].modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    return []


def _freeze_rotations(model: Any, max_model_len: int) -> None:
    """Rotations that Transformers chooses by the longest position of whatever batch it is given (dynamic, longrope)
    are chosen once, for the longest position that there can be: a token's numbers depend on no other request."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        moving = (
            [kinds] if isinstance(kinds, str) else list(kinds.values()) if isinstance(kinds, dict) else []
        )
        if not any("dynamic" in kind or kind == "longrope" for kind in moving):
            continue
        x = torch.zeros((1, 1, 1), dtype=model.dtype, device=model.device)
        last = torch.tensor([[max_model_len - 1]], device=model.device)
        if isinstance(kinds, dict):
            for layer_type in kinds:
                module(x, last, layer_type)
            module.rope_type = dict.fromkeys(kinds, "default")
        else:
            module(x, last)
            module.rope_type = "default"
