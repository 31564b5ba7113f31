"""A Transformers model filled from a checkpoint, tensor by tensor, without twice the memory.

Transformers knows which tensor of a checkpoint goes where, renamed, stacked or cut; it is given objects that read a
tensor when it is asked for, in bounded pieces and not through mapped pages, which would count as this process's memory
for as long as a file is open. Linear layers that kernels will keep in few bits are given as tensors of one number that
say they are as large as the layer: whatever module has one of these afterwards becomes a `StoredLinear`, see
`exchanging`. Experts, and what else is stacked, are given as `deferred.Deferred`, and `settling` does the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.models.checkpoint import TensorEntry, copy_tensors, read_rows
from draftwise.models.general.deferred import Source, deferred
from draftwise.models.general.exchanging import as_linear, exchange, numbers_of_experts
from draftwise.models.general.imagined import ImaginedLinear
from draftwise.models.general.quiet import alone
from draftwise.models.general.settling import settle
from draftwise.models.general.stored import (
    FloatLayer,
    MatrixOfStack,
    QuantizedLayer,
    StoredLayer,
    StoredLinear,
)
from draftwise.models.weights import release_freed_memory
from draftwise.models.words import shorten
from draftwise.quantization.checkpoint import CheckpointFormat

_EXPERT = re.compile(r"\.experts\.\d+\.|^experts\.\d+\.")
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_DTYPES = _FLOATS | {
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Lazy:
    """A tensor of the checkpoint, read where Transformers takes ``[...]`` of it."""

    name: str
    entries: Mapping[str, TensorEntry]
    dtype: torch.dtype

    def __getitem__(self, all_of_it: Any) -> Tensor:
        value = torch.empty(self.entries[self.name].shape, dtype=self.dtype)
        copy_tensors(self.entries, {self.name: value})
        return value


@dataclass(frozen=True, slots=True)
class _Later:
    """A tensor that is read when its numbers are needed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Source
    turned: bool = False

    def __getitem__(self, all_of_it: Any) -> Tensor:
        value: Tensor = deferred(self.shape, self.dtype, self.source)
        return value.t() if self.turned else value


@dataclass(frozen=True, slots=True)
class _Place:
    """One number that stands for a stored layer's weight."""

    number: Tensor  # [1, 1]
    shape: tuple[int, int]

    def __getitem__(self, all_of_it: Any) -> Tensor:
        return self.number.expand(self.shape)


def build_filled(
    place: Path,
    entries: Mapping[str, TensorEntry],
    layout: CheckpointFormat | None,
    cls: Any,
    model_config: Any,
    ops: Ops,
    *,
    whole: bool = False,
    rounded: bool = False,
    experts: bool = True,
    noted: set[str] | None = None,
    made_up: bool = False,
) -> Any:
    """A model of Transformers with a checkpoint's weights in the type of ``ops``, on its device. Peak memory is the
    weights, as they are kept, and one layer.

    Args:
        place: what errors name.
        entries: the checkpoint's tensors.
        layout: how quantised layers are stored; None: there are none.
        cls, model_config: Transformers' class and configuration object.
        ops: what packs linear layers that are quantised, or rounded.
        whole: a tensor that is no parameter of the model is an error.
        rounded: ``ops`` rounds linear layers: these are packed at once, too.
        experts: mixtures of experts are packed at once, whose kernels understand them.
        noted: gets the names of float tensors that were packed.
        made_up: matrices are made up (`imagined`), and nothing of them is read or packed.

    Raises:
        ModelLoadError: Transformers cannot build it, or the tensors are not its parameters; names them.
    """
    try:
        layers = _stored_layers(entries, layout, ops.dtype, noted, all_matrices=rounded or made_up)
    except ModelLoadError as error:
        raise ModelLoadError(f"{place}: {error}") from error
    turned = _turned_layers(cls, model_config)
    later = {base for base in layers if _EXPERT.search(base)}
    while True:
        state, places = _state(entries, layers, later, turned, _type_of_floats(cls, ops.dtype), ops.dtype)
        model, surplus = _from_state(place, cls, model_config, ops.dtype, state, whole=whole)
        _refuse_biases(place, entries, layers, surplus)
        lost = places.keys() - _kept(model, places)
        if not lost:
            break
        later |= lost  # stacked, cut or kept in another type on the way
        del model
    as_linear(model)
    try:
        with torch.no_grad():
            scores = numbers_of_experts(model)
            settle(model, ops, rounded=rounded, experts=experts, made_up=made_up)
            exchange(model, layers, places, scores, ops, ImaginedLinear if made_up else StoredLinear)
    except ModelLoadError as error:
        raise ModelLoadError(f"{place}: {error}") from error
    release_freed_memory()
    return model.to(ops.device)


def _stored_layers(
    entries: Mapping[str, TensorEntry],
    layout: CheckpointFormat | None,
    dtype: torch.dtype,
    noted: set[str] | None,
    *,
    all_matrices: bool,
) -> dict[str, StoredLayer]:
    """The layers that stay in the checkpoint, by their names in it: quantised ones, or all matrices."""
    found: dict[str, StoredLayer] = {}
    missing: list[str] = []
    for base in dict.fromkeys(name.rpartition(".")[0] for name in entries):
        if layout is not None:
            form = layout.of([base], entries.keys())
            if form is not None:
                outputs, inputs = form.shape(lambda suffix, base=base: entries[base + suffix].shape)  # type: ignore[misc]
                found[base] = layer = QuantizedLayer(base, outputs, inputs, entries, dtype, form)
                missing += layer.check()
        if base not in found and all_matrices:
            entry = entries.get(f"{base}.weight")
            if (
                entry is not None
                and len(entry.shape) == 2
                and 0 not in entry.shape
                and entry.dtype in _FLOATS
            ):
                found[base] = FloatLayer(base, *entry.shape, entries, dtype, noted)
    if missing:
        raise ModelLoadError(f"tensors are missing: {shorten(sorted(missing))}")
    return found


def _turned_layers(cls: Any, model_config: Any) -> frozenset[str]:
    """Last names of modules that keep their weight as [inputs, outputs], as GPT-2 does."""
    from transformers.pytorch_utils import Conv1D

    try:
        with alone(), torch.device("meta"):
            model = cls._from_config(model_config, attn_implementation="eager")
    except Exception:  # whatever a model's code raises: it will be said where it is built
        return frozenset()
    return frozenset(name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, Conv1D))


def _type_of_floats(cls: Any, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that floats are read as; None: as stored, because the model keeps some of them in float32."""
    kept = (getattr(cls, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
    return None if any(kept) else dtype


def _state(
    entries: Mapping[str, TensorEntry],
    layers: Mapping[str, StoredLayer],
    later: set[str],
    turned: frozenset[str],
    floats: torch.dtype | None,
    dtype: torch.dtype,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The tensors for Transformers, and the numbers that stand for layers, by name.

    Args:
        later: layers that are given as what is read later: these may be stacked, cut and so on.

    Raises:
        ModelLoadError: weights are codes of no known form. Transformers would take them for numbers, whatever scales
            stand beside them.
    """
    state: dict[str, Any] = {}
    places: dict[str, Tensor] = {}
    hidden: set[str] = set()
    for base, layer in layers.items():
        is_turned = isinstance(layer, QuantizedLayer) and base.rpartition(".")[2] in turned
        shape = (layer.outputs, layer.inputs)
        if base in later:
            state[f"{base}.weight"] = _Later(shape, dtype, Source(layer.floats, layer), is_turned)
        else:
            places[base] = torch.zeros((1, 1), dtype=dtype)
            state[f"{base}.weight"] = _Place(places[base], shape[::-1] if is_turned else shape)
        if isinstance(layer, QuantizedLayer):
            suffixes = layer.form.tensors(layer.outputs, layer.inputs).keys()
            hidden.update(base + suffix for suffix in suffixes)
            hidden.update(layer.form.unneeded([base]))
    for name, entry in entries.items():
        if name in state or name in hidden or entry.dtype not in _DTYPES:
            continue
        if entry.source is not None and entry.dtype == "U8":
            continue  # the bytes of a layer whose numbers stand there, too
        if entry.dtype.startswith(("F8", "I8")) or (entry.dtype not in _FLOATS and name.endswith(".weight")):
            raise ModelLoadError(f"{name} is stored as {entry.dtype}, and nothing says what that stands for")
        own = _DTYPES[entry.dtype]
        lazy = _Lazy(name, entries, floats if floats is not None and entry.dtype in _FLOATS else own)
        state[name] = lazy
        if entry.dtype in _FLOATS and (_EXPERT.search(name) or len(entry.shape) == 3):
            state[name] = _Later(entry.shape, lazy.dtype, _source(lazy, dtype))
    return state, places


def _source(lazy: _Lazy, dtype: torch.dtype) -> Source:
    """A float tensor of the checkpoint: a matrix, or a stack of matrices, may be that of linear layers of ``dtype``."""
    entry = lazy.entries[lazy.name]

    def read() -> Tensor:
        return lazy[...]

    if len(entry.shape) == 3:
        outputs, inputs = entry.shape[1:]

        def matrix(i: int) -> Source:
            layer = MatrixOfStack(lazy.name, outputs, inputs, lazy.entries, dtype, index=i)
            return Source(lambda: layer.floats().to(lazy.dtype), layer)

        return Source(read, part=matrix)
    base = lazy.name.removesuffix(".weight")
    if len(entry.shape) == 2 and base != lazy.name:
        return Source(read, FloatLayer(base, *entry.shape, lazy.entries, dtype))
    return Source(read)


def _from_state(
    place: Path, cls: Any, model_config: Any, dtype: torch.dtype, state: dict[str, Any], *, whole: bool
) -> tuple[Any, list[str]]:
    """The model, and names of tensors that it has not."""
    try:
        with alone():
            model, info = cls.from_pretrained(
                None,
                config=model_config,
                state_dict=state,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                attn_implementation="eager",
            )
    except ModelLoadError as error:
        raise ModelLoadError(f"{place}: {error}") from error
    except Exception as error:  # whatever a model's code raises
        raise ModelLoadError(
            f"{place}: Transformers cannot load it: {type(error).__name__}: {error}"
        ) from error
    wrong = [("missing", info["missing_keys"]), ("of another shape", info["mismatched_keys"])]
    if whole:
        wrong.append(("not of this architecture", info["unexpected_keys"]))
    for what, names in wrong:
        if names:
            raise ModelLoadError(f"{place}: tensors are {what}: {shorten(sorted(map(str, names)))}")
    return model.eval(), sorted(map(str, info["unexpected_keys"]))


def _refuse_biases(
    place: Path, entries: Mapping[str, TensorEntry], layers: Mapping[str, StoredLayer], surplus: Sequence[str]
) -> None:
    """Writers of GPTQ put biases of zeros beside layers that have none; others are no part of the model.

    Raises:
        ModelLoadError: there is one that is not zero.
    """
    for name in surplus:
        if not name.endswith(".bias") or name.removesuffix(".bias") not in layers or name not in entries:
            continue
        if bool(read_rows(entries[name], name, 0, entries[name].shape[0]).any()):
            raise ModelLoadError(f"{place}: a tensor that this architecture does not have: {name}")


def _kept(model: Any, places: Mapping[str, Tensor]) -> set[str]:
    """Which of the numbers are still what some parameter is made of."""
    known = {number.data_ptr(): base for base, number in places.items()}
    return {known[p.data_ptr()] for p in model.parameters() if p.data_ptr() in known}
