"""From a model of Transformers to one of our operations alone: watch it, put it together, compare."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from draftwise.errors import ModelLoadError
from draftwise.kernels.split import ranks_of
from draftwise.models.base import DecoderModel
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.general.assembler import Assembler
from draftwise.models.general.attention import LayerCall
from draftwise.models.general.check import Reference, check
from draftwise.models.general.dividing import Dividing
from draftwise.models.general.experts import Stack
from draftwise.models.general.imagined import ImaginedEmbedding, with_imagined
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.general.plans import id_of
from draftwise.models.general.rotations import frequencies
from draftwise.models.general.stored import StoredLinear
from draftwise.models.general.trace import trace
from draftwise.models.general.ways import Interface
from draftwise.models.recorded import recorded
from draftwise.models.weights import release_freed_memory

logger = logging.getLogger("draftwise")


class WrongAssembly(Exception):
    """The assembled decoder differs from the model, whose weights are packed already."""


def assembled(
    model: Any,
    decoder: GeneralDecoder,
    way: Interface,
    reference: Reference,
    rounded: bool,
    stacks: Mapping[nn.Module, Stack],
    experts_by_rank: bool = False,
) -> DecoderModel:
    """The model out of our operations. ``decoder`` runs on its code; ``rounded``: weights get few bits; ``stacks``: its
    mixtures of experts; ``experts_by_rank``: each of several ranks has some of them whole.

    Raises:
        CannotAssemble: our operations do not compute it. Nothing has changed then.
        ModelLoadError: it cannot be divided among the ranks that ``ops`` works with.
        WrongAssembly: it gives other numbers. The model's weights are gone.
    """
    config, ops = decoder.config, decoder.ops
    calls: Sequence[LayerCall] = way.calls
    names: dict[Hashable, str] = {}
    freeing: dict[Hashable, list[Callable[[], None]]] = {}
    stored: dict[Hashable, StoredLinear] = {}
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear):
            names[module.layer] = name
            stored[module.layer] = module
            freeing[module.layer] = [module.release]
        for part, parameter in module.named_parameters(recurse=False):
            freeing.setdefault(id_of(parameter), []).append(partial(_empty, parameter))
            if part == "weight" and parameter.ndim == 2:
                names[id_of(parameter)] = name
    traced = trace(decoder, way, stacks)
    rounded_rows = any(module.layer.rounds_rows for module in stored.values())

    def maker() -> Assembler:
        found = Assembler(ops, calls, frequencies(model), config.max_model_len, traced, names, stored)
        found.plan()
        return found

    ranks = ranks_of(ops)
    if ranks is not None:
        tables = {id_of(m.table): m.layer for m in model.modules() if isinstance(m, ImaginedEmbedding)}
        divided = Dividing(traced, calls, ranks.part, tables, experts_by_rank=experts_by_rank)
        calls = divided.calls
        logger.info("%d pairs of layers are divided among %d ranks", divided.count, ranks.part.size)
        known = dict(ranks.tables)
        with with_imagined(divided.nodes):  # what is made up is compared: the rest of it is nowhere
            _compare(
                AssembledDecoder(config, ops, maker().make(lambda _: None)), reference, rounded, rounded_rows
            )
        ranks.tables.clear()  # of made-up ones
        ranks.tables.update(known)
        gc.collect()  # what was put together holds itself, and the collector rests while models load
        release_freed_memory()
        stored.clear()
    last = maker()

    def free(name: Hashable) -> None:
        for each in freeing.pop(name, ()):
            each()

    parts = last.make(free)
    ops.release_freed()
    if len(calls) == config.num_layers:
        config = replace(config, sliding_window=tuple(call.window for call in calls))
    found = AssembledDecoder(config, ops, parts)
    if ranks is None:
        _compare(found, reference, rounded, rounded_rows)
    logger.info("%s runs on own operations: %d attention layers, %d linear layers, %d mixtures of experts",
                config.architecture, len(calls), parts.num_linears, parts.num_mixtures)  # fmt: skip
    return recorded(found, ops)


def _compare(decoder: AssembledDecoder, reference: Reference, rounded: bool, rounded_rows: bool) -> None:
    try:
        check(decoder, reference, exchanged=True, rounded=rounded, rounded_rows=rounded_rows)
    except ModelLoadError as error:
        raise WrongAssembly(str(error)) from error


def _empty(parameter: nn.Parameter) -> None:
    parameter.data = torch.empty(0)
