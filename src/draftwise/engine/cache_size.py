"""How large the caches of an engine are: blocks of keys and values, and recurrent states."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from draftwise.config import EngineConfig
from draftwise.engine.gpu_memory import plan_gpu
from draftwise.engine.states import StatePlan
from draftwise.errors import ConfigError
from draftwise.graphs.seats.memory import seats_bytes
from draftwise.graphs.setup import GraphSetup
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.propose.base import Proposer

_CPU_CACHE_LIMIT = 4 << 30
"""The most bytes of K/V cache on a CPU, unless the user asks for more."""


@contextmanager
def cache_memory(num_blocks: int, nbytes: int) -> Iterator[None]:
    """Around the allocation of caches. Raises ConfigError if there is no memory for them."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"there is no memory for a K/V cache of {num_blocks} blocks, {nbytes} bytes: lower kv_cache_memory or "
            f"num_kv_blocks ({reason})"
        ) from error


def cache_blocks(
    config: EngineConfig,
    model: DecoderModel,
    proposers: Sequence[Proposer],
    max_model_len: int,
    device: torch.device,
    graphs: GraphSetup | None,
    states: StatePlan | None,
) -> tuple[int, int]:
    """The number of blocks, and their bytes for the target and all drafters, scratch included. Raises ConfigError if
    no block fits."""
    block_bytes = bytes_of_block(config, model, proposers)
    fixed = sum(p.memory_fixed() for p in proposers) + (0 if states is None else states.nbytes)
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks, config.num_kv_blocks * block_bytes + fixed
    # More than every sequence at full length is never used.
    useful = (config.max_num_seqs or 64) * -(-max_model_len // config.block_size)
    if config.kv_cache_memory is not None:
        blocks = (config.kv_cache_memory - fixed) // block_bytes
        if blocks < 1:
            scratch = f"; drafters and recurrent states need {fixed} bytes besides" if fixed else ""
            raise ConfigError(
                f"kv_cache_memory: {config.kv_cache_memory} bytes hold no block of {config.block_size} tokens, "
                f"which takes {block_bytes} bytes{scratch}"
            )
    elif device.type == "cuda":
        plan = plan_gpu(
            model,
            utilization=config.gpu_memory_utilization,
            rows=config.max_num_batched_tokens,
            logit_rows=(config.max_num_seqs or 64) * step_widths(config)[-1],
            block_size=config.block_size,
            block_bytes=block_bytes,
            fixed=fixed,
            drafter_bytes=sum(p.memory_static() for p in proposers)
            + _seats_bytes(config, model, max_model_len),
            num_graphs=0 if graphs is None else graphs.count,
            most_blocks=useful,
        )
        blocks = plan.num_blocks
    else:
        memory = _free_memory(config) // config.tensor_parallel_size - fixed
        blocks = max(1, min(useful, memory // block_bytes))
    return blocks, blocks * block_bytes + fixed


def bytes_of_block(config: EngineConfig, model: DecoderModel, proposers: Sequence[Proposer]) -> int:
    """Bytes of one block of tokens, for the target and all drafters."""
    target = KVStorage.bytes_per_block(model.kv_layout(), config.block_size, kv_dtype(config, model))
    return max(target + sum(p.memory_per_block() for p in proposers), 1)  # 1: of a model without attention


def _seats_bytes(config: EngineConfig, model: DecoderModel, max_model_len: int) -> int:
    """Further bytes for steps that stay on a GPU."""
    if not config.async_scheduling:
        return 0
    widest = step_widths(config)[-1] - 1
    return seats_bytes(config.max_num_seqs or 64, widest, model.config.vocab_size, max_model_len)


def _free_memory(config: EngineConfig) -> int:
    """Bytes of the cache on a CPU when the user gives none. Engines behind one port share them."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_CPU_CACHE_LIMIT, available // 4) // config.data_parallel_size


def state_memory(config: EngineConfig, device: torch.device) -> int | None:
    """Bytes for recurrent states: half of the cache's. None: the user gives the number of blocks."""
    if config.num_kv_blocks is not None:
        return None
    if config.kv_cache_memory is None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return (config.kv_cache_memory or _free_memory(config)) // 2


def kv_dtype(config: EngineConfig, model: DecoderModel) -> torch.dtype:
    """The dtype of the target's K/V cache. Drafters' caches are small and have the dtype of their models."""
    if config.kv_cache_dtype == "auto":
        return model.dtype
    name = "float8_e4m3fn" if config.kv_cache_dtype == "fp8" else config.kv_cache_dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def step_widths(config: EngineConfig) -> list[int]:
    """Rows of a request in a step: 1, or a root with the drafts of a configured drafter."""
    return sorted({1, *(1 + spec.num_speculative_tokens for spec in config.speculative)})
