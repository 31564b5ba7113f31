"""Starts the ranks of an engine that several processes share."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from draftwise.cluster.executor import RanksExecutor
from draftwise.cluster.messages import Start
from draftwise.cluster.processes import RankProcesses
from draftwise.config import EngineConfig
from draftwise.config.registry import third_party_methods
from draftwise.cpus import default_threads
from draftwise.engine.facts import DeviceFacts
from draftwise.models.loader import check_divided

_MODULE = "draftwise.engine.worker"


def start_ranks(config: EngineConfig) -> tuple[RanksExecutor, DeviceFacts]:
    """Start them and wait until they are built.

    Raises:
        ConfigError, ModelLoadError: what a rank raised.
        EngineDeadError: one died.
    """
    from draftwise.kernels.cpu.library import native_library
    from draftwise.kernels.cpu.ranks import shared_bytes

    size = config.tensor_parallel_size
    assert config.model is not None, "resolve_engine_config names the embedded model"
    check_divided(config.model, size, config.revision, config.max_model_len, config.enable_expert_parallel)
    threads = config.num_threads or max(1, default_threads(torch.get_num_threads()) // size)
    setting = replace(config, num_threads=threads)
    shared = native_library() is not None
    methods = third_party_methods()
    level = logging.getLogger("draftwise").getEffectiveLevel()

    def start(rank: int, memory: int) -> Start:
        return Start(
            rank,
            size,
            config.worker_timeout,
            None,
            memory if shared else None,
            level,
            methods,
            setting,
        )

    processes = RankProcesses(
        _MODULE, size, start, seconds=config.worker_timeout, memory_bytes=shared_bytes(size)
    )
    try:
        facts = processes.first_answer()
    except BaseException:
        processes.close()
        raise
    assert isinstance(facts, DeviceFacts)
    return RanksExecutor(processes), facts
