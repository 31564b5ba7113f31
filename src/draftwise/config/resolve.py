"""Turns the keywords of `LLM` and the flags of the commands into an `EngineConfig`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftwise.config import coerce as to
from draftwise.config.embedded import embedded_path
from draftwise.config.engine import ENGINE_OPTIONS, EngineConfig, device_name
from draftwise.config.foreign import FOREIGN, HARMLESS, take_foreign
from draftwise.config.graphs import unused
from draftwise.config.heads import served_speculator
from draftwise.config.registry import canonical_name
from draftwise.config.speculative import SpeculativeConfig
from draftwise.errors import ConfigError, suggest
from draftwise.names import CAPTURED_METHODS, SHIPPED_HEADS

logger = logging.getLogger("draftwise")

EMBEDDED_NUM_SPECULATIVE_TOKENS = 4
CONTROL_VARIABLE = "DRAFTWISE_SPECULATION_CONTROL"
"""Environment variable: `EngineConfig.speculation_control` where it is not given."""
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
    notes = take_foreign(given)
    options: dict[str, Any] = {}
    for name, value in given.items():
        target = ALIASES.get(name, name)
        if target not in ENGINE_OPTIONS:
            raise _unknown(name)
        if target in options:
            raise ConfigError(f"{name}: is the same option as {target}; give one of them")
        options[target] = value
    if CONTROL_VARIABLE in os.environ:
        options.setdefault("speculation_control", os.environ[CONTROL_VARIABLE])
    device = _resolve_device(device_name("device", options.get("device", "auto")))
    options["device"] = device
    options.setdefault(
        "async_scheduling", device != "cpu"
    )  # a CPU that computes has no time of its own to plan in
    options.setdefault("max_num_seqs", _default_num_seqs(device, options))
    config = EngineConfig(**options)
    embedded = config.model is None
    model = str(embedded_path("target")) if config.model is None else config.model
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
    valid = [*ENGINE_OPTIONS, *ALIASES, *OLD_SPECULATIVE, *HARMLESS, *FOREIGN, "speculative_config"]
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
            raise ConfigError("speculative_config: method 'none' allows no other field and no other drafter")
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
            entry = {**entry, "model": str(embedded_path(part))}
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
    if config.device == "cpu" and any(s.enforce_eager and s.method in CAPTURED_METHODS for s in speculative):
        notes.append("speculative_config.enforce_eager has no effect: nothing is captured in graphs on a CPU")
    if config.disable_log_stats:
        notes.append("disable_log_stats has no effect: only draftwise serve logs statistics")
    if config.compilation_config is not None and config.device == "cpu":
        notes.append(
            "compilation_config has no effect on a CPU: models are not compiled, nothing is captured"
        )
    elif unused(config.compilation_config):
        notes.append("compilation_config has no effect but for graphs: models are not compiled")
    if config.distributed_executor_backend is not None and not config.has_ranks:
        notes.append("distributed_executor_backend has no effect: there is one rank")
    if config.served_model_name is not None:
        notes.append("served_model_name has no effect: it names the model of draftwise serve")
    if "gpu_memory_utilization" in given and config.device == "cpu":
        notes.append("gpu_memory_utilization has no effect on the CPU: use kv_cache_memory or num_kv_blocks")
    for spec in speculative:
        notes.extend(spec.notes)
    return notes
