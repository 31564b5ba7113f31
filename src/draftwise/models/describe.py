"""Describes a checkpoint from its config.json and the headers of its files. No weight is read."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from draftwise.errors import ConfigError, DraftwiseError, ModelLoadError
from draftwise.kernels.handles import Linear
from draftwise.kernels.ranks import Part
from draftwise.kernels.select import native_reason
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.states import StateSpec
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import DecoderModel, SharedWeights
from draftwise.models.checkpoint import TensorEntry
from draftwise.models.config import ModelConfig, RawConfig
from draftwise.models.cuts import vocabulary_cut
from draftwise.models.general.shapes import call_shapes, empty_model, state_shapes
from draftwise.models.loader import check_divided, declare, is_general, load_config
from draftwise.models.parts import of_rank
from draftwise.models.paths import resolve_path
from draftwise.models.registry import resolve_model
from draftwise.models.source import checkpoint_format, read_raw, scan, written_form
from draftwise.models.weights import WeightPlan
from draftwise.quantization.scheme import Scheme, parse_scheme

META = torch.device("meta")
FORMATS = ("float32", "bfloat16", "int8", "int4")
CACHE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "BF16": 16, "F16": 16, "I16": 16}  # others: 8


@dataclass(frozen=True, slots=True)
class Parameters:
    """Elements of a model's weights, by their form after loading."""

    linear: int = 0  # in linear layers other than the output layer
    linear_outputs: int = 0  # rows of these: each has a scale of its own in int8
    head: int = 0  # the output layer; also where it is the embedding table
    head_outputs: int = 0
    table: int = 0  # embedding tables
    other: int = 0  # norms, biases, experts that are computed as they are
    tied: bool = False

    @property
    def total(self) -> int:
        """Each weight once."""
        return self.linear + self.table + self.other + (0 if self.tied else self.head)

    def bytes_in(self, scheme: Scheme | None, dtype: torch.dtype) -> int:
        """Bytes as kernels on a CPU keep them. None: in ``dtype``, nothing is rounded."""
        width = dtype.itemsize
        head = self.head * width
        if self.tied and native_reason(dtype, torch.device("cpu")) is not None:
            head = 0  # plain torch multiplies with the table itself
        if scheme is None:
            return self.linear * width + head + (self.table + self.other) * width
        scales = 0 if scheme.group else 4 * self.linear_outputs
        linear = int(self.linear * scheme.bytes_per_weight()) + scales
        return linear + self.head + 4 * self.head_outputs + (self.table + self.other) * width


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The part of a model that one of several ranks has (`tensor_parallel_size`)."""

    rank: int
    heads: int
    kv_heads: int
    parameters: Parameters | None  # None: of a quantised checkpoint, of which ``read_bytes`` are known
    layout: tuple[KVLayerSpec, ...]
    read_bytes: int
    quantized: str | None

    def weight_bytes(self) -> dict[str, int]:
        """As `ModelFacts.weight_bytes`, of this rank."""
        return _weight_bytes(self.parameters, self.quantized, self.read_bytes)

    def cache_bytes(self) -> dict[str, int]:
        """As `ModelFacts.cache_bytes`, of this rank."""
        return _cache_bytes(self.layout)


def _weight_bytes(parameters: Parameters | None, quantized: str | None, stored: int) -> dict[str, int]:
    if quantized is not None:
        return {quantized: stored} if stored else {}
    if parameters is None:
        return {}
    out = {}
    for name in FORMATS:
        scheme = parse_scheme(name) if name.startswith("int") else None
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        out[name] = parameters.bytes_in(scheme, dtype)
    return out


def _cache_bytes(layout: tuple[KVLayerSpec, ...]) -> dict[str, int]:
    if not layout:
        return {}
    return {name: KVStorage.bytes_per_block(layout, 1, d) for name, d in CACHE_DTYPES.items()}


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint. ``refused``: why no engine is built of it; then what could not be found out is None or empty."""

    folder: Path
    architecture: str
    model_type: str | None
    way: str  # "own": a file of ours computes it; "general": Transformers' code on our cache; "": neither
    refused: str | None = None
    config: ModelConfig | None = None
    layout: tuple[KVLayerSpec, ...] = ()
    layout_is_exact: bool = True  # else from sizes in config.json
    state: StateSpec | None = None  # what is kept of a request besides, as far as it can be found out
    parameters: Parameters | None = None
    stored: Mapping[str, int] = field(default_factory=dict)  # elements by dtype of the file
    stored_bytes: int = 0
    quantized: str | None = None  # in which form the checkpoint's linear layers are
    lends_to_heads: bool = False  # whether draft heads can use its embedding and hidden states
    cuts: bool = False  # whether its first layers are a drafter
    names: Collection[str] = ()  # of its tensors

    def weight_bytes(self) -> dict[str, int]:
        """Bytes per format that ``dtype`` or ``quantization`` may name; of a quantised checkpoint as it is."""
        return _weight_bytes(self.parameters, self.quantized, self.stored_bytes)

    def cache_bytes(self) -> dict[str, int]:
        """Bytes of one token's keys and values in all layers, per dtype of the cache."""
        return _cache_bytes(self.layout)

    def unread_bytes(self, context: int) -> dict[str, int]:
        """Bytes of a request of ``context`` tokens that stand behind the windows of some layers, by type.
        Nobody reads them, and they stay, since other layers read all tokens, and all share a table of blocks. Empty:
        there are none.

        Example: 1000 tokens, half of the layers with a window of 256: 744 tokens in half of the layers.
        """
        windows = () if self.config is None else self.config.sliding_window
        if len(windows) != len(self.layout) or all(window is not None for window in windows):
            return {}
        out = dict.fromkeys(CACHE_DTYPES, 0)
        for window, layer in zip(windows, self.layout, strict=True):
            for name, count in _cache_bytes((layer,)).items():
                out[name] += count * max(0, context - (context if window is None else window))
        return out if any(out.values()) else {}


def describe(path: str | Path, revision: str | None = None, max_model_len: int | None = None) -> ModelFacts:
    """The description of a model before it is loaded. A model that cannot be served is described, too (`refused`).
    Of a folder that has a config.json and no weights, sizes are those of the model that it describes; then ``stored``
    is empty.

    Raises:
        ModelLoadError: there is no such model, or its config.json or weights cannot be read at all.
    """
    folder = resolve_path(path, revision, weights=False)
    raw = read_raw(folder)
    bare = _has_no_weights(folder) and Path(path).expanduser().exists()
    entries = {} if bare else _headers(folder, str(path), revision)
    stored: dict[str, int] = {}
    for entry in entries.values():
        stored[entry.dtype] = stored.get(entry.dtype, 0) + prod(entry.shape)
    names = raw.get("architectures") or []
    found: dict[str, Any] = {
        "folder": folder,
        "architecture": " / ".join(map(str, names)) if isinstance(names, list) and names else "unknown",
        "model_type": raw.get("model_type"),
        "way": "",
        "stored": stored,
        "stored_bytes": sum(count * _BITS.get(kind, 8) // 8 for kind, count in stored.items()),
        "names": entries.keys(),
    }
    try:
        architecture, cls = resolve_model(raw)
        general = is_general(cls)
        found |= {"architecture": architecture, "way": "general" if general else "own"}
        config = load_config(folder, max_model_len=max_model_len)
        found["config"] = config
        layout = checkpoint_format(folder)
        found["quantized"] = None if layout is None else layout.name
        if general or bare:
            found |= _of_general(raw, config, experts=not general)
        else:
            found |= _of_own(folder, config, cls, entries)
        found.pop("read_bytes", None)
        found["lends_to_heads"] = cls.shared_weights is not DecoderModel.shared_weights
        found["cuts"] = cls.first_layers is not DecoderModel.first_layers
    except DraftwiseError as error:
        reason = str(error).removeprefix(f"{folder}: ")
        return ModelFacts(**found, refused=reason)
    return ModelFacts(**found)


def describe_ranks(facts: ModelFacts, size: int, *, experts_by_rank: bool = False) -> list[RankFacts]:
    """The part of a local model that each of ``size`` ranks has. No weight is read.

    Raises:
        ConfigError: it cannot be divided so.
        ModelLoadError: as `describe`.
    """
    if facts.config is None or facts.refused is not None:
        raise ModelLoadError(facts.refused or "the model cannot be served")
    check_divided(facts.folder, size, experts_by_rank=experts_by_rank)
    _, cls = resolve_model(read_raw(facts.folder))
    if is_general(cls):
        raise ConfigError(
            f"tensor_parallel_size: {facts.config.architecture} is put together from a trace as it is loaded: what "
            "each rank would have cannot be shown before"
        )
    entries, found = scan(facts.folder), []
    for rank in range(size):
        part = Part(rank, size)
        config = of_rank(facts.config, part, experts_by_rank)
        own = _of_own(facts.folder, config, cls, entries)
        heads = (config.num_heads, config.num_kv_heads)
        found.append(
            RankFacts(rank, *heads, own["parameters"], own["layout"], own["read_bytes"], facts.quantized)
        )
    return found


def _has_no_weights(folder: Path) -> bool:
    """Whether nothing in a folder could be weights, in any form: somebody has fetched its small files alone."""
    if not folder.is_dir():
        return False
    kinds = (".safetensors", ".json", ".bin", ".pt", ".pth", ".gguf")
    files = [file.name for file in folder.iterdir() if file.suffix in kinds]
    return not any(name.endswith(".index.json") or not name.endswith(".json") for name in files)


def _headers(folder: Path, path: str, revision: str | None) -> Mapping[str, TensorEntry]:
    """The headers of all weight files. Files of a hub id that are not in the cache are not downloaded: only their
    headers are requested."""
    if Path(path).expanduser().exists() or any(folder.glob("*.safetensors")):
        return scan(folder)
    from huggingface_hub import get_safetensors_metadata

    try:
        found = get_safetensors_metadata(path, revision=revision)
    except Exception as error:  # offline, no safetensors, gated: all end here
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(
            f"the hub does not give the headers of {path!r}: {type(error).__name__}: {reason}"
        ) from error
    return {
        name: TensorEntry(folder / file, tuple(info.shape), str(info.dtype))
        for file, header in found.files_metadata.items()
        for name, info in header.tensors.items()
    }


def _of_own(
    folder: Path, config: ModelConfig, cls: type[DecoderModel], entries: Mapping[str, TensorEntry]
) -> dict[str, Any]:
    """A family of ours declares its parameters without memory behind them; that the files have them is checked."""
    ops = TorchOps(torch.bfloat16, META)
    layout = checkpoint_format(folder)
    plan = WeightPlan(torch.bfloat16, META, layout, entries.keys(), config.part)
    model = declare(folder, config, cls, plan, ops, entries)
    stacked = {name for parts in plan.linears for name, _ in parts}
    shapes = {name: tuple(target.dest.shape) for name, target in plan.targets.items()}
    ((first, end),) = vocabulary_cut(config.part, config.vocab_size, config.hidden_size).ranges[0]
    rows = end - first
    tables = {name for name, shape in shapes.items() if shape and shape[0] == rows}
    tables = {name for name in tables if len(shapes[name]) == 2 and name not in stacked}
    table = rows * config.hidden_size
    linear = sum(prod(shapes[name]) for name in stacked)
    counts = Parameters(
        linear=linear,
        linear_outputs=sum(shapes[name][0] for name in stacked),
        head=table,
        head_outputs=rows,
        table=table,
        other=sum(prod(shape) for name, shape in shapes.items() if name not in stacked | tables),
        tied=config.tied,
    )
    quantized = layout is not None
    return {
        "layout": model.kv_layout(),
        "parameters": None if quantized else counts,
        "read_bytes": plan.num_bytes,
    }


def _of_general(raw: RawConfig, config: ModelConfig, *, experts: bool = False) -> dict[str, Any]:
    """A model of Transformers without memory behind it: its modules are counted, and the shapes of its layers' calls of
    attention are looked at. Where its code wants numbers to look at, sizes of config.json are taken.
    ``experts``: stacked ones [E, out, in] are linear layers, too, as in a family of ours."""
    model = empty_model(raw)
    shapes: tuple[KVLayerSpec, ...] | None = None
    with contextlib.suppress(Exception):  # a model's code on tensors without values: whatever it raises
        shapes = call_shapes(model)
    state: StateSpec | None = None
    with contextlib.suppress(Exception):
        state = state_shapes(model)
    if not shapes and state is None:
        shapes = None
    head = model.get_output_embeddings()
    table = model.get_input_embeddings().weight
    tied = head is not None and head.weight is table
    linears = [
        m for m in model.modules() if type(m) is torch.nn.Linear and m is not head and m.weight is not table
    ]
    linear = sum(m.weight.numel() for m in linears)
    stacks = [p for p in model.parameters() if experts and p.dim() == 3]
    linear += sum(p.numel() for p in stacks)
    total = sum(p.numel() for p in model.parameters())
    own_head = 0 if head is None or tied else head.weight.numel()
    counts = Parameters(
        linear=linear,
        linear_outputs=sum(m.out_features for m in linears) + sum(p.shape[0] * p.shape[1] for p in stacks),
        head=table.numel() if tied else own_head,
        head_outputs=config.vocab_size,
        table=table.numel(),
        other=total - linear - own_head - table.numel(),
        tied=tied,
    )
    estimate = (KVLayerSpec.dense(config.num_kv_heads, config.head_dim),) * config.num_layers
    sizes = [size for name in ("kv_lora_rank", "qk_rope_head_dim") if isinstance(size := raw.get(name), int)]
    latent = len(sizes) == 2
    if latent:
        # put together, it keeps what keys and values are computed from; numbers decide whether it can be
        estimate = (KVLayerSpec((("latent", (1, sum(sizes))),)),) * config.num_layers
    return {
        "layout": estimate if shapes is None or latent else shapes,
        "layout_is_exact": shapes is not None and not latent,
        "state": state,
        "parameters": None if written_form(raw) is not None else counts,
    }


class DescribedTarget:
    """A target that draft heads can be declared for (`heads.loading.HeadTarget`), with shapes and no weights."""

    def __init__(self, facts: ModelFacts) -> None:
        assert facts.config is not None
        self.config: ModelConfig = facts.config
        self._architecture = facts.architecture
        self._lends = facts.lends_to_heads

    def shared_weights(self) -> SharedWeights:
        if not self._lends:
            raise NotImplementedError(f"{self._architecture} cannot lend its embedding to a draft head")
        table = torch.empty(
            (self.config.vocab_size, self.config.hidden_size), dtype=torch.bfloat16, device=META
        )
        return SharedWeights(table, Linear(), TorchOps(torch.bfloat16, META))
