"""`EngineConfig` and how the keywords of `LLM` and the flags of the commands become one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from draftwise.config import coerce as to
from draftwise.config.coerce import option
from draftwise.config.extraction import METHOD as EXTRACTION
from draftwise.config.extraction import transfer_folder
from draftwise.config.graphs import LARGEST, SIZES, GraphOptions, compilation, graph_options, unused
from draftwise.config.heads import SHIPPED_HEADS, served_speculator
from draftwise.config.speculative import SpeculativeConfig
from draftwise.errors import ConfigError, suggest
from draftwise.propose.registry import canonical_name
from draftwise.quantization.scheme import parse_scheme

logger = logging.getLogger("draftwise")

EMBEDDED_NUM_SPECULATIVE_TOKENS = 4
CONTROL_VARIABLE = "DRAFTWISE_SPECULATION_CONTROL"
"""Environment variable: `EngineConfig.speculation_control` where it is not given."""
_DTYPE_ALIASES = {
    "half": "float16",
    "float": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
}


def _dtype(name: str, value: Any) -> str:
    """A dtype as its name; torch's dtype objects are taken by their name too."""
    text = value if isinstance(value, str) else str(value).removeprefix("torch.")
    return str(to.choice("auto", "float32", "bfloat16", "float16", aliases=_DTYPE_ALIASES)(name, text))


def _device(name: str, value: Any) -> str:
    """auto, cpu, cuda or cuda:N; torch's device objects are taken by their name too."""
    text = to.string(name, value if isinstance(value, str) else str(value))
    kind, _, index = text.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise ConfigError(f"{name}: expected auto, cpu, cuda or cuda:N, got {text!r}")
    return text


def _quantization(name: str, value: Any) -> str:
    """A weight format, in its canonical spelling."""
    return parse_scheme(to.string(name, value), name).name


def _names(name: str, value: Any) -> tuple[str, ...]:
    """One name or several."""
    if isinstance(value, str):
        return (to.string(name, value),)
    return tuple(to.sequence_of(to.string, "a name or a list of names")(name, value))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from. Made by `resolve_engine_config`, which fills in what depends on the
    device; each value is checked on construction.

    Raises:
        ConfigError: a value is out of range, two contradict each other, or one asks for what is not supported
            yet.
    """

    model: str | None = option(
        None, to.string, "target model: local folder or hub id; omitted: the embedded model"
    )
    tokenizer: str | None = option(None, to.string, "tokenizer folder or hub id (the model's)")
    revision: str | None = option(None, to.string, "revision of the model on the hub")
    tokenizer_revision: str | None = option(None, to.string, "revision of the tokenizer on the hub")
    dtype: str = option("auto", _dtype, "auto, float32, bfloat16 or float16")
    device: str = option("auto", _device, "auto, cpu, cuda or cuda:N")
    max_model_len: int | None = option(None, to.size(), "longest prompt + output in tokens (the model's)")
    max_num_seqs: int | None = option(
        None, to.integer(1), "most requests in one step (64 on CPU, 256 on CUDA)"
    )
    max_num_batched_tokens: int = option(2048, to.size(), "most tokens in one step")
    block_size: int = option(16, to.integer(1, 1024), "tokens per block of the K/V cache")
    num_kv_blocks: int | None = option(None, to.integer(1), "blocks of the K/V cache")
    kv_cache_memory: int | None = option(None, to.size(), "bytes of the K/V cache, for example 2GiB")
    kv_cache_dtype: str = option(
        "auto",
        to.choice("auto", "float32", "bfloat16", "float16", "int8", aliases=_DTYPE_ALIASES),
        "the K/V cache in float32, bfloat16, float16 or int8 (auto: as the model computes)",
    )
    gpu_memory_utilization: float = option(0.9, to.number(0, 1, open_low=True), "share of GPU memory to use")
    enable_prefix_caching: bool = option(True, to.boolean, "share K/V of equal prompt beginnings")
    enable_chunked_prefill: bool = option(True, to.boolean, "compute long prompts in chunks")
    seed: int | None = option(0, to.integer(0, 2**64 - 1), "seed from which requests without one draw theirs")
    speculation_control: str = option(
        "adaptive",
        to.choice("adaptive", "static"),
        "adaptive: draft only where it pays; static: what each request asks for",
    )
    enforce_eager: bool = option(False, to.boolean, "do not capture graphs")
    async_scheduling: bool = option(
        False, to.boolean, "plan each step while the one before it runs (speculation_control static)"
    )
    tensor_parallel_size: int = option(1, to.integer(1), "ranks that share the model; 1")
    data_parallel_size: int = option(1, to.integer(1), "replicas of the model; 1")
    pipeline_parallel_size: int = option(1, to.integer(1), "stages of the model; 1")
    distributed_executor_backend: str | None = option(
        None, to.choice("uni", "mp", "ray", "external_launcher"), "where the workers run"
    )
    enable_expert_parallel: bool = option(False, to.boolean, "spread experts over ranks")
    quantization: str | None = option(
        None,
        _quantization,
        "weights in int8, int8_dynamic, int4, int4_dynamic or, on CUDA, fp8 (as the checkpoint has them)",
    )
    batch_invariant: bool = option(
        False,
        to.boolean,
        "on CUDA: products whose bits do not depend on the batch (native CPU kernels have no others)",
    )
    quantization_cache: str | None = option(
        None, to.string, "folder that keeps rounded weights for the next start, or auto (they are not kept)"
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = option(
        None, SIZES, "row counts captured in CUDA graphs"
    )
    max_cudagraph_capture_size: int | None = option(
        None, LARGEST, "most rows captured in CUDA graphs (512 for passes without attention)"
    )
    compilation_config: Any = option(
        None,
        compilation,
        "settings of a compiler, as JSON; of these, cudagraph_mode and sizes have an effect",
    )
    kv_transfer_config: dict[str, Any] | None = option(
        None, to.mapping, "connector for K/V or hidden states, as JSON"
    )
    served_model_name: tuple[str, ...] | None = option(
        None, _names, "name of the model in the server's answers"
    )
    trust_remote_code: bool = option(False, to.boolean, "run code that comes with a checkpoint")
    skip_tokenizer_init: bool = option(False, to.boolean, "token ids in and out, no tokenizer")
    disable_log_stats: bool = option(False, to.boolean, "do not log statistics")
    num_threads: int | None = option(None, to.integer(1, 4096), "threads of the CPU kernels")
    speculative: tuple[SpeculativeConfig, ...] = ()
    embedded: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if "to" not in f.metadata or value is f.default:
                continue
            value = f.default if value is None else f.metadata["to"](f.name, value)
            object.__setattr__(self, f.name, value)
        self._refuse_unsupported()
        self._refuse_contradictions()

    @property
    def default_method(self) -> str:
        """What a request without a choice of its own speculates with; "none": it decodes plainly."""
        return self.speculative[0].method if self.speculative else "none"

    @property
    def graphs(self) -> GraphOptions:
        """What is captured in CUDA graphs, where anything is."""
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        return graph_options(self.compilation_config, sizes, largest)

    @property
    def drafters(self) -> tuple[SpeculativeConfig, ...]:
        """Every drafter a request may name: those configured, and n-gram and suffix look-up, which cost nothing
        until a request uses them."""
        given = {spec.method for spec in self.speculative}
        more = [SpeculativeConfig(method=name) for name in ("ngram", "suffix") if name not in given]
        return (*self.speculative, *more)

    def _refuse_unsupported(self) -> None:
        for name in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not supported yet; only 1")
        if self.enable_expert_parallel:
            raise ConfigError("enable_expert_parallel: not supported yet")
        if self.quantization_cache is not None and self.quantization == "fp8":
            raise ConfigError("quantization_cache: keeps weights in int8 and int4, not in fp8; leave it out")
        if self.quantization_cache is not None and self.quantization is None:
            raise ConfigError("quantization_cache: keeps weights that quantization= rounds; give that, too")
        transfer_folder(self.kv_transfer_config)
        if self.distributed_executor_backend in ("ray", "external_launcher"):
            raise ConfigError(
                f"distributed_executor_backend: {self.distributed_executor_backend!r} is not supported yet; "
                "leave it out, or use uni or mp with one rank"
            )

    def _refuse_contradictions(self) -> None:
        _ = self.graphs  # says what contradicts what
        if self.num_kv_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigError("num_kv_blocks and kv_cache_memory contradict each other: give one of them")
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is under "
                f"max_num_seqs = {self.max_num_seqs}; a step needs a token per request"
            )
        if self.async_scheduling and self.speculation_control != "static":
            raise ConfigError(
                f"async_scheduling: speculation_control {self.speculation_control!r} contradicts it: it learns from "
                "what each step takes, and steps that overlap cannot be told apart; use static"
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError("tokenizer and skip_tokenizer_init contradict each other: give one of them")
        methods = [spec.method for spec in self.speculative]
        if self.speculative and self.kv_transfer_config is not None and EXTRACTION not in methods:
            raise ConfigError(f"kv_transfer_config: only for method {EXTRACTION!r} of a speculative_config")
        for method in methods:
            if methods.count(method) > 1:
                raise ConfigError(
                    f"speculative_config: method {method!r} stands there twice; requests choose by method"
                )


ENGINE_OPTIONS: tuple[str, ...] = tuple(f.name for f in fields(EngineConfig) if "to" in f.metadata)
"""The names a user may give, without the speculative ones."""

ALIASES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_kv_blocks",
    "max_seq_len": "max_model_len",
}
OLD_SPECULATIVE = {
    "speculative_model": "model",
    "speculative_method": "method",
    "num_speculative_tokens": "num_speculative_tokens",
}
HARMLESS = {
    "max_parallel_loading_workers": "weights stream from the file",
    "disable_custom_all_reduce": "there is one rank",
    "max_seq_len_to_capture": "graphs are captured for every length",
    "swap_space": "preempted requests are computed again, not swapped",
    "use_v2_block_manager": "there is one block manager",
    "disable_log_requests": "requests are not logged",
}
"""Options of other engines that change nothing here whatever they say, and why."""
SERVER_ONLY = ("host", "port", "api_key")


def resolve_engine_config(**kwargs: Any) -> EngineConfig:
    """Turn keywords of `LLM` (or flags of a command) into a resolved config; log what has no effect, once.

    Besides the fields of `EngineConfig` it takes ``speculative_config`` (a dict, the JSON text of one, a
    `SpeculativeConfig`, or a list of those: several drafters, the first is the default), and the older
    ``speculative_model``, ``speculative_method``, ``num_speculative_tokens``. None stands for "not given".
    ``speculative_config={"method": "none"}`` (or an empty list) loads no drafter besides n-gram and suffix look-up and
    decodes plainly by default. Without a model the embedded target is used, by default with its own draft model.

    Raises:
        ConfigError: an unknown name (with the closest valid one), a value out of range, contradictory values,
            or something that is not supported yet (by name).
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    speculative_config = given.pop("speculative_config", None)
    old = {new: given.pop(name) for name, new in OLD_SPECULATIVE.items() if name in given}
    notes: list[str] = []
    for name, reason in HARMLESS.items():
        if given.pop(name, None) is not None:
            notes.append(f"{name} has no effect: {reason}")
    options: dict[str, Any] = {}
    for name, value in given.items():
        target = ALIASES.get(name, name)
        if target not in ENGINE_OPTIONS:
            raise _unknown(name)
        if target in options:
            raise ConfigError(f"{name}: is the same option as {target}; give one of them")
        options[target] = value
    if "async_scheduling" in options and to.boolean("async_scheduling", options["async_scheduling"]):
        options.setdefault("speculation_control", "static")
    if CONTROL_VARIABLE in os.environ:
        options.setdefault("speculation_control", os.environ[CONTROL_VARIABLE])
    device = _resolve_device(_device("device", options.get("device", "auto")))
    options["device"] = device
    options.setdefault("max_num_seqs", _default_num_seqs(device, options))
    config = EngineConfig(**options)
    embedded = config.model is None
    model = str(_embedded("target")) if config.model is None else config.model
    served = None if embedded else served_speculator(model, config.revision)
    if served is not None:  # a head was named: its verifier is the target
        if speculative_config is None and not {"model", "method"} & old.keys():
            speculative_config = {"method": served.method, "model": model, "revision": config.revision, **old}
            old = {}
        model = served.verifier
        config = replace(config, revision=None)
    speculative = _resolve_speculative(speculative_config, old, embedded)
    notes += _notes(config, given, speculative)
    config = replace(config, model=model, embedded=embedded, speculative=speculative, notes=tuple(notes))
    for note in config.notes:
        logger.warning(note)
    return config


def _unknown(name: str) -> ConfigError:
    if name in SERVER_ONLY:
        return ConfigError(f"{name}: an option of the HTTP server: draftwise serve")
    valid = [*ENGINE_OPTIONS, *ALIASES, *OLD_SPECULATIVE, *HARMLESS, "speculative_config"]
    return ConfigError(f"unknown engine option {name!r}{suggest(name, valid)}")


def _default_num_seqs(device: str, options: Mapping[str, Any]) -> int:
    """64 on the CPU, 256 on CUDA, and never more than a small token budget the user chose allows."""
    default = 64 if device == "cpu" else 256
    budget = options.get("max_num_batched_tokens")
    return default if budget is None else min(default, to.size()("max_num_batched_tokens", budget))


def _resolve_device(device: str) -> str:
    if device == "cpu":
        return device
    import torch  # late: commands that need no engine start without it

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise ConfigError(f"device: {device!r} asked for, but torch sees no CUDA device; use cpu or auto")
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {device!r} asked for, but there are {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _embedded(part: str) -> Any:
    from draftwise.models.embedded import embedded_path

    return embedded_path(part)


def _resolve_speculative(given: Any, old: Mapping[str, Any], embedded: bool) -> tuple[SpeculativeConfig, ...]:
    if given is not None:
        if old:
            name = next(name for name, new in OLD_SPECULATIVE.items() if new in old)
            raise ConfigError(f"{name}: contradicts speculative_config; put it into speculative_config")
        entries = _entries(given)
    elif "model" in old or "method" in old:
        entries = [dict(old)]
    elif embedded:
        k = old.get("num_speculative_tokens", EMBEDDED_NUM_SPECULATIVE_TOKENS)
        entries = [{"method": method, "num_speculative_tokens": k} for method in ("mtp", "draft_model")]
    elif old:
        raise ConfigError(
            "num_speculative_tokens: needs a speculative_model, speculative_method or speculative_config"
        )
    else:
        entries = []
    if any(isinstance(e, Mapping) and e.get("method") == "none" for e in entries):
        if len(entries) > 1 or len(_given(entries[0])) > 1:
            raise ConfigError(
                "speculative_config: method 'none' stands alone, with no other field or drafter"
            )
        return ()
    return tuple(_build(entry, embedded) for entry in entries)


def _given(entry: Mapping[str, Any]) -> list[str]:
    return [name for name, value in entry.items() if value is not None]


def _entries(given: Any) -> list[Any]:
    if isinstance(given, SpeculativeConfig | Mapping):
        return [given]
    loaded = to.from_json("speculative_config", given, "a mapping, a list of mappings, or their JSON text")
    if loaded is None:
        return []
    if isinstance(loaded, Mapping):
        return [loaded]
    if isinstance(loaded, Sequence) and not isinstance(loaded, str | bytes):
        return [
            e if isinstance(e, SpeculativeConfig) else to.mapping("speculative_config", e) for e in loaded
        ]
    raise ConfigError(f"speculative_config: expected a mapping or a list of mappings, got {given!r}")


def _build(entry: Any, embedded: bool) -> SpeculativeConfig:
    if isinstance(entry, SpeculativeConfig):
        return entry
    if embedded and entry.get("model") is None:
        # the embedded target comes with a draft model and heads
        method = canonical_name(str(entry.get("method")))
        if method in ("draft_model", *SHIPPED_HEADS):
            part = "draft" if method == "draft_model" else method
            entry = {**entry, "model": str(_embedded(part))}
        elif method == "hybrid":
            inner = entry.get("hybrid_drafter") or {"method": "draft_model"}
            if isinstance(inner, Mapping):
                entry = {**entry, "hybrid_drafter": _build(inner, embedded)}
    return SpeculativeConfig.from_dict(entry)


def _notes(
    config: EngineConfig, given: Mapping[str, Any], speculative: tuple[SpeculativeConfig, ...]
) -> list[str]:
    notes = []
    if config.enforce_eager and config.device == "cpu":
        notes.append("enforce_eager has no effect: nothing is captured in graphs on a CPU")
    for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if getattr(config, name) is not None and config.device == "cpu":
            notes.append(f"{name} has no effect: nothing is captured in graphs on a CPU")
    if config.disable_log_stats:
        notes.append("disable_log_stats has no effect: only draftwise serve logs statistics")
    if config.compilation_config is not None and config.device == "cpu":
        notes.append(
            "compilation_config has no effect on a CPU: models are not compiled, nothing is captured"
        )
    elif unused(config.compilation_config):
        notes.append("compilation_config has no effect but for graphs: models are not compiled")
    if config.distributed_executor_backend is not None:
        notes.append("distributed_executor_backend has no effect: there is one rank")
    if config.served_model_name is not None:
        notes.append("served_model_name has no effect: it names the model of draftwise serve")
    if "gpu_memory_utilization" in given and config.device == "cpu":
        notes.append("gpu_memory_utilization has no effect on the CPU: use kv_cache_memory or num_kv_blocks")
    for spec in speculative:
        notes.extend(spec.notes)
    return notes
