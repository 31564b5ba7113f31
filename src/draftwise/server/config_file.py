"""``--config FILE``: YAML with the options of ``draftwise serve``, with vLLM's, or with those of TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from draftwise.config.engine import ENGINE_OPTIONS
from draftwise.config.foreign import FOREIGN, HARMLESS
from draftwise.config.foreign_server import SERVER_FLAGS, check_server_flag
from draftwise.config.resolve import ALIASES, OLD_SPECULATIVE
from draftwise.errors import ConfigError, suggest
from draftwise.server.config import ServerConfig

_SERVER_NAMES = ({f.name for f in fields(ServerConfig)} | {"api_key"}) - {"model_names", "api_keys"}
_ENGINE_NAMES = {*ENGINE_OPTIONS, *ALIASES, *HARMLESS, *FOREIGN, *OLD_SPECULATIVE, "speculative_config"}

_RENAMED = {
    "max_batch_size": "max_num_seqs",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "backend": None,
    "print_iter_log": None,
    "gpus_per_node": None,
    "disable_overlap_scheduler": None,
    "cuda_graph_config": None,
    "scheduler_config": None,
    "enable_iter_perf_stats": None,
    "enable_iter_req_stats": None,
    "return_perf_metrics": None,
    "moe_config": None,
    "attn_backend": None,
    "attention_dp_config": None,
    "enable_autotuner": None,
    "torch_compile_config": None,
    "allreduce_strategy": None,
    "num_postprocess_workers": None,
}
"""TensorRT-LLM's names and ours; None: no effect here (kernels, graphs, its own loops, its logs)."""
_SERVER_RENAMED = {"uvicorn_log_level": "log_level"}
_OF_COURSE = ("enable_auto_tool_choice",)
"""Switches of vLLM for what happens anyway."""
_MUST_BE = {"moe_cluster_parallel_size": 1, "context_parallel_size": 1, "enable_attention_dp": False}
"""TensorRT-LLM's names of what is not there, and the values that switch it off."""
_EXPERTS = ("moe_expert_parallel_size", "moe_tensor_parallel_size")

_METHODS = {
    "ngram": "ngram",
    "drafttarget": "draft_model",
    "draft_target": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "medusa": "medusa",
}
_DRAFT_FIELDS = {
    "max_draft_len": "num_speculative_tokens",
    "num_nextn_predict_layers": "num_speculative_tokens",
    "max_total_draft_tokens": None,
    "speculative_model": "model",
    "speculative_model_dir": "model",
    "max_matching_ngram_size": "prompt_lookup_max",
    "is_keep_all": None,
    "is_use_oldest": None,
    "is_public_pool": None,
    "eagle3_one_model": None,
    "mtp_eagle_one_model": None,
    "use_mtp_vanilla": None,
}
"""Fields of TensorRT-LLM's ``speculative_config`` and ours; None: how it works inside, no effect here."""


def read_config_file(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the engine, options of the server). Raises ConfigError that names the file and the field."""
    import yaml

    try:
        loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(f"config: cannot read {path!r}: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path!r} is not valid YAML: {error}") from None
    if loaded is None:
        return {}, {}
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"config: {path!r} must hold names and values")
    return split_options({str(name).replace("-", "_"): value for name, value in loaded.items()})


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate and sort options by whom they are for. Raises ConfigError.

    Example: {"max_batch_size": 8, "port": 80, "speculative_config": {"decoding_type": "NGram",
    "max_draft_len": 4}} gives {"max_num_seqs": 8, "speculative_config": {"method": "ngram",
    "num_speculative_tokens": 4}} and {"port": 80}.
    """
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}

    def put(name: str, value: Any) -> None:
        if name in engine:
            raise ConfigError(f"config: {name} is given twice")
        engine[name] = value

    for name, value in options.items():
        if value is None:
            continue
        name, value = _as_said(name, value)
        if name == "kv_cache_config":
            for inner, translated in _kv_cache(value).items():
                put(inner, translated)
        elif name == "speculative_config":
            put(name, _speculative(value))
        elif name in _EXPERTS:
            if _by_rank(options, name, value):
                put("enable_expert_parallel", True)
        elif name in _MUST_BE:
            if value != _MUST_BE[name]:
                raise ConfigError(f"{name}: {value!r} is not supported; only {_MUST_BE[name]!r}")
        elif name in _RENAMED:
            if (target := _RENAMED[name]) is not None:
                put(target, value)
        elif name in SERVER_FLAGS:
            check_server_flag(name, value)
        elif name in _OF_COURSE:
            continue
        elif name in _SERVER_NAMES:
            server[name] = _server_value(name, value)
        elif name in _ENGINE_NAMES:
            put(name, value)
        else:
            valid = {*_SERVER_NAMES, *_ENGINE_NAMES, *_RENAMED, *_EXPERTS, *_MUST_BE, "kv_cache_config"}
            raise ConfigError(f"config: unknown option {name!r}{suggest(name, valid)}")
    return engine, server


def _as_said(name: str, value: Any) -> tuple[str, Any]:
    """An option under its own name. Example: ``no_enable_prefix_caching: true`` is ``enable_prefix_caching: false``."""
    positive = name.removeprefix("no_")
    if positive != name and isinstance(value, bool) and positive in _ENGINE_NAMES | _SERVER_NAMES:
        return positive, not value
    return _SERVER_RENAMED.get(name, name), value


def _by_rank(options: Mapping[str, Any], name: str, value: Any) -> bool:
    """Whether TensorRT-LLM's way of dividing experts has them whole, some on each rank.

    Example: of 4 ranks, ``moe_expert_parallel_size`` 4 is that, 1 is a part of each expert on all; 2 would be both.
    """
    size = options.get("tensor_parallel_size") or 1
    if value not in (1, size) or isinstance(value, bool):
        raise ConfigError(
            f"{name}: {value!r} is not supported with tensor_parallel_size {size}; only 1 or {size}: experts are "
            "divided or whole"
        )
    return name == "moe_expert_parallel_size" and value > 1


def _server_value(name: str, value: Any) -> Any:
    kinds: dict[str, Callable[[Any], bool]] = {
        "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
        "float": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
        "bool": lambda v: isinstance(v, bool),
        "str": lambda v: isinstance(v, str),
        "tuple[str, ...]": lambda v: isinstance(v, list) and all(isinstance(part, str) for part in v),
        "Mapping[str, Any]": lambda v: isinstance(v, dict),
    }
    declared = {f.name: str(f.type).removesuffix(" | None") for f in fields(ServerConfig)}
    declared["lora_modules"] = "tuple[str, ...]"  # name=path each, as in the flag
    kind = declared.get(name, "str")
    if name == "api_key" and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    if kind == "tuple[str, ...]" and isinstance(value, str):
        return (value,)
    if not kinds[kind](value):
        raise ConfigError(f"config: {name}: expected {kind}, got {value!r}")
    return tuple(value) if isinstance(value, list) else value


def _kv_cache(value: Any) -> dict[str, Any]:
    """TensorRT-LLM's ``kv_cache_config``."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"config: kv_cache_config: expected names and values, got {value!r}")
    names = {
        "free_gpu_memory_fraction": "gpu_memory_utilization",
        "enable_block_reuse": "enable_prefix_caching",
        "tokens_per_block": "block_size",
        "max_gpu_total_bytes": "kv_cache_memory",
        "dtype": "kv_cache_dtype",
    }
    out: dict[str, Any] = {}
    for name, inner in value.items():
        if inner is None:
            continue
        if name in ("enable_partial_reuse", "event_buffer_max_size"):
            continue  # how finely it shares: blocks are shared whole here; events are never held back
        if name not in names:
            hint = suggest(str(name), names)
            raise ConfigError(f"config: kv_cache_config.{name} is not supported{hint}")
        out[names[name]] = inner
    return out


def _speculative(value: Any) -> Any:
    """``speculative_config``: TensorRT-LLM's form has a ``decoding_type``; any other is ours."""
    if not isinstance(value, Mapping) or "decoding_type" not in value:
        return value
    kind = str(value["decoding_type"])
    method = _METHODS.get(kind.lower().replace("-", "_"))
    if method is None:
        raise ConfigError(
            f"speculative_config.decoding_type: {kind!r} is not supported{suggest(kind.lower(), _METHODS)}; "
            "there are NGram, DraftTarget, Eagle, Eagle3, MTP and Medusa"
        )
    out: dict[str, Any] = {"method": method}
    for name, inner in value.items():
        if name == "decoding_type" or inner is None:
            continue
        if name not in _DRAFT_FIELDS:
            raise ConfigError(
                f"speculative_config: unknown field {name!r}{suggest(str(name), _DRAFT_FIELDS)} "
                f"(of a {kind} decoding_type)"
            )
        target = _DRAFT_FIELDS[name]
        if target is not None:
            if target in out:
                raise ConfigError(f"speculative_config.{name}: {target} is given twice")
            out[target] = inner
    if method == "ngram" and "prompt_lookup_max" in out:
        out["prompt_lookup_min"] = 1  # it takes the longest match up to that size, however short
    return out
