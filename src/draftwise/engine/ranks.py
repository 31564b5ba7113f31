"""Starts the ranks of an engine that several processes share."""

from __future__ import annotations

import logging
import shutil
import tempfile
from dataclasses import replace

import torch

from draftwise.cluster.executor import RanksExecutor
from draftwise.cluster.messages import Start
from draftwise.cluster.processes import RankProcesses
from draftwise.config import EngineConfig
from draftwise.config.registry import third_party_methods
from draftwise.cpus import default_threads
from draftwise.engine.facts import DeviceFacts
from draftwise.errors import ConfigError
from draftwise.models.loader import check_divided

_MODULE = "draftwise.engine.worker"
_BUILDING = 1800.0
"""Seconds that a rank waits for another at least: one may be built much later. In a step the host gives up before that,
and ends both."""


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
    on_cuda = torch.device(config.device).type == "cuda"
    if on_cuda and torch.cuda.device_count() < size:
        raise ConfigError(f"tensor_parallel_size: {size} ranks on {torch.cuda.device_count()} CUDA devices")
    shared = native_library() is not None and not on_cuda
    methods = third_party_methods()
    level = logging.getLogger("draftwise").getEffectiveLevel()
    folder = tempfile.mkdtemp(prefix="draftwise-")

    def start(rank: int, memory: int) -> Start:
        device = f"cuda:{rank}" if on_cuda else config.device
        return Start(
            rank,
            size,
            max(config.worker_timeout, _BUILDING),
            None if shared else f"file://{folder}/meeting",
            memory if shared else None,
            device,
            level,
            methods,
            replace(config, num_threads=threads, device=device),
        )

    try:
        processes = RankProcesses(
            _MODULE, size, start, seconds=config.worker_timeout, memory_bytes=shared_bytes(size)
        )
        return _built(processes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _built(processes: RankProcesses) -> tuple[RanksExecutor, DeviceFacts]:
    try:
        facts = processes.first_answer()
    except BaseException:
        processes.close()
        raise
    assert isinstance(facts, DeviceFacts)
    return RanksExecutor(processes), facts
