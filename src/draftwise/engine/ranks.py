"""Starts the ranks of an engine that several processes share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from draftwise import lifetime
from draftwise.cluster.executor import RanksExecutor
from draftwise.cluster.group import RankGroup
from draftwise.cluster.messages import Start
from draftwise.cluster.processes import start_processes
from draftwise.config import EngineConfig
from draftwise.config.registry import third_party_methods
from draftwise.cpus import default_threads
from draftwise.engine.facts import DeviceFacts
from draftwise.errors import ConfigError
from draftwise.models.loader import check_divided

_MODULE = "draftwise.engine.worker"
_BUILDING = 1800.0
"""The least seconds that a rank waits for another, because one may be built much later. In a step the host gives up
earlier and ends both."""


def start_ranks(config: EngineConfig) -> tuple[RanksExecutor, DeviceFacts]:
    """Start the ranks and wait until they are built.

    Raises:
        ConfigError, ModelLoadError: a rank raised it, or the Ray cluster has no room for them.
        EngineDeadError: a rank died.
    """
    size = config.tensor_parallel_size
    assert config.model is not None, "resolve_engine_config names the embedded model"
    check_divided(config.model, size, config.revision, config.max_model_len, config.enable_expert_parallel)
    with lifetime.passing_folder("draftwise-ranks-") as folder:
        on_ray = config.distributed_executor_backend == "ray"
        group = _on_ray(config) if on_ray else _on_this_machine(config, folder)
        try:
            facts = group.first_answer()
        except BaseException:
            group.close()
            raise
    assert isinstance(facts, DeviceFacts)
    return RanksExecutor(group), facts


def _on_this_machine(config: EngineConfig, folder: str) -> RankGroup:
    """``folder``: where ranks may meet until they are built."""
    from draftwise.kernels.cpu.ranks import shared_bytes

    size = config.tensor_parallel_size
    threads = config.num_threads or max(1, default_threads(torch.get_num_threads()) // size)
    on_cuda = torch.device(config.device).type == "cuda"
    if on_cuda and torch.cuda.device_count() < size:
        raise ConfigError(f"tensor_parallel_size: {size} ranks on {torch.cuda.device_count()} CUDA devices")
    shared = _shares_memory(config)
    started = _starter(config)

    def start(rank: int, memory: int) -> Start:
        device = f"cuda:{rank}" if on_cuda else config.device
        meeting = None if shared else f"file://{folder}/meeting"
        return started(rank, device, threads, meeting, memory if shared else None, None)

    return start_processes(
        _MODULE, size, start, seconds=config.worker_timeout, memory_bytes=shared_bytes(size)
    )


def _on_ray(config: EngineConfig) -> RankGroup:
    from draftwise.cluster.rays import join_cluster, reserve
    from draftwise.cluster.remote import Where, start_remote
    from draftwise.kernels.cpu.ranks import shared_bytes

    ray = join_cluster()
    size, seconds = config.tensor_parallel_size, config.worker_timeout
    on_cuda = torch.device(config.device).type == "cuda"
    hands, holding = reserve(
        ray, size, cpus=config.num_threads or 1, gpus=1 if on_cuda else 0, seconds=seconds
    )
    shared = _shares_memory(config)
    started = _starter(config)

    def start(where: Where) -> Start:
        device = "cuda:0" if on_cuda else config.device  # Ray shows each actor its own device alone
        files = where.descriptors
        meeting = None if shared else where.meeting
        return started(where.rank, device, where.threads, meeting, files.memory, files.sockets)

    return start_remote(
        _MODULE,
        hands,
        holding,
        start,
        host=ray.util.get_node_ip_address(),
        threads=config.num_threads,
        seconds=seconds,
        memory_bytes=shared_bytes(size) if shared else None,
    )


def _shares_memory(config: EngineConfig) -> bool:
    """Whether native code sums over ranks; otherwise torch.distributed does."""
    from draftwise.kernels.cpu.library import native_library

    return native_library() is not None and torch.device(config.device).type != "cuda"


def _starter(
    config: EngineConfig,
) -> Callable[[int, str, int, str | None, int | None, tuple[int, ...] | None], Start]:
    """The first message to each rank: the settings that differ between ranks."""
    methods = third_party_methods()
    level = logging.getLogger("draftwise").getEffectiveLevel()

    def start(
        rank: int,
        device: str,
        threads: int,
        meeting: str | None,
        memory: int | None,
        sockets: tuple[int, ...] | None,
    ) -> Start:
        return Start(
            rank=rank,
            size=config.tensor_parallel_size,
            seconds=max(config.worker_timeout, _BUILDING),
            meeting=meeting,
            memory=memory,
            sockets=sockets,
            device=device,
            log_level=level,
            methods=methods,
            setting=replace(config, num_threads=threads, device=device),
        )

    return start
