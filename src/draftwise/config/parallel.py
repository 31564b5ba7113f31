"""Checks of settings for several processes that share a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from draftwise.config.speculative import SpeculativeConfig
from draftwise.errors import ConfigError


class ParallelSettings(Protocol):
    """The fields of an `EngineConfig` that the checks read."""

    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def distributed_executor_backend(self) -> str | None: ...
    @property
    def enable_expert_parallel(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def quantization_cache(self) -> str | None: ...
    @property
    def speculative(self) -> Sequence[SpeculativeConfig]: ...


def check_parallel(config: ParallelSettings, has_ranks: bool) -> None:
    """Raise ConfigError for parallel settings that are not supported, or do not go together.

    ``has_ranks``: the model runs in other processes than the engine's own.
    """
    for name, why in (
        ("pipeline_parallel_size", "layers are not spread over stages; use tensor_parallel_size"),
    ):
        if getattr(config, name) > 1:
            raise ConfigError(f"{name}: {getattr(config, name)} is not supported, only 1: {why}")
    backend, size = config.distributed_executor_backend, config.tensor_parallel_size
    if backend == "external_launcher":
        raise ConfigError(
            "distributed_executor_backend: 'external_launcher' is not supported: an engine starts its ranks itself; "
            "use mp, or ray"
        )
    if backend == "uni" and size > 1:
        raise ConfigError(f"distributed_executor_backend: 'uni' is one process, not {size}; use mp")
    for spec in config.speculative:
        drafting = spec.draft_tensor_parallel_size
        if drafting not in (None, 1, size):
            raise ConfigError(
                f"speculative_config.draft_tensor_parallel_size: {drafting} is neither 1 nor the target's {size}"
            )
        if drafting == 1 and size > 1 and spec.method == "early_exit":
            raise ConfigError(
                "speculative_config.draft_tensor_parallel_size: method 'early_exit' drafts with the target's own "
                "layers, which are on all ranks; leave it out"
            )
    if config.enable_expert_parallel and size == 1:
        raise ConfigError(
            "enable_expert_parallel: needs tensor_parallel_size over 1, because ranks divide the experts"
        )
    if config.data_parallel_size > 1 and sys.platform == "win32":
        raise ConfigError(
            "data_parallel_size: engines need sockets that processes inherit, which Windows lacks"
        )
    if not has_ranks:
        return
    if sys.platform == "win32":
        raise ConfigError(
            "tensor_parallel_size: ranks need descriptors that processes inherit, which Windows lacks"
        )
    if config.quantization_cache is not None:
        raise ConfigError(f"quantization_cache: not supported with {_ranks(size)}")
    if any(spec.method == "extract_hidden_states" for spec in config.speculative):
        raise ConfigError(f"method 'extract_hidden_states': not supported with {_ranks(size)}")
    if config.device.startswith("cuda:"):
        raise ConfigError(f"device: {config.device} names one device, but every rank needs its own; use cuda")


def _ranks(size: int) -> str:
    """The setting that makes a model run in other processes, as a text for errors."""
    return "tensor_parallel_size over 1" if size > 1 else "distributed_executor_backend 'ray'"
