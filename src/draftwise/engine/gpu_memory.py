"""How many blocks of K/V a GPU has room for: measured passes, then `graphs.memory.plan_memory`."""

from __future__ import annotations

import logging

import numpy as np
import torch

from draftwise.graphs.memory import MemoryNeeds, MemoryPlan, plan_memory
from draftwise.kernels.triton.prompts import PROMPT_ROWS
from draftwise.kv.states import StateStore
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input

logger = logging.getLogger("draftwise")

_GRAPH_BYTES = 4 << 20
"""Bytes that the driver keeps for one captured pass, besides the memory of its tensors, which all passes share."""


@torch.inference_mode()
def measure_pass(model: DecoderModel, rows: int, logit_rows: int, block_size: int, context: int = 0) -> int:
    """The most bytes that a pass over ``rows`` rows of prompts with logits of ``logit_rows`` of them takes on the GPU,
    besides weights and cache. Runs one. ``context``: tokens before them, whole blocks, which all stand in one."""
    device = model.device
    length = min(rows, model.config.max_model_len - context)
    requests = -(-rows // length)
    blocks = -(-length // block_size)
    spec = model.state_spec()
    states = None if spec is None else StateStore(spec, requests, 1, device)
    kv = KVStorage(
        model.kv_layout(), blocks, block_size, model.dtype, device, spare=model.pads, states=states
    )
    table = np.pad(np.arange(blocks, dtype=np.int32), (context // block_size, 0))
    inputs = [
        RowInput([0] * length, context, table, state_slot=-1 if spec is None else r) for r in range(requests)
    ]
    batch = build_step_input(inputs, block_size, device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model.forward_logits(batch, kv, list(range(min(logit_rows, rows))))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del kv, batch
    torch.cuda.empty_cache()
    return peak


def measure_context(model: DecoderModel, rows: int, block_size: int) -> int:
    """Bytes by which a pass grows with the context: keys and values of long prompts are gathered. Runs two short
    passes, one behind as many tokens as the model may have."""
    context = (model.config.max_model_len - PROMPT_ROWS) // block_size * block_size
    if context < rows or model.state_spec() is not None:  # states of a context that nobody computed
        return 0
    short, long = (measure_pass(model, PROMPT_ROWS, 1, block_size, behind) for behind in (0, context))
    return max(0, long - short)


def plan_gpu(
    model: DecoderModel,
    *,
    utilization: float,
    rows: int,
    logit_rows: int,
    block_size: int,
    block_bytes: int,
    fixed: int,
    drafter_bytes: int,
    num_graphs: int,
    most_blocks: int,
) -> MemoryPlan:
    """Divide the model's GPU. Everything that has weights must be loaded.

    Args:
        rows: of the largest pass.
        logit_rows: of them, those with logits: roots and nodes of all requests.
        block_bytes: one block, in all storages.
        fixed: bytes of storage besides.
        drafter_bytes: what drafters' loops keep.
        num_graphs: how many passes and loops will be captured.
        most_blocks: the cache never needs more.

    Raises:
        ConfigError: no memory is left for the cache.
    """
    device = model.device
    activations = measure_pass(model, rows, logit_rows, block_size)
    context = measure_context(model, rows, block_size)
    free, total = torch.cuda.mem_get_info(device)
    needs = MemoryNeeds(
        used=total - free,
        activations=activations + context,
        logits=model.static_bytes(),
        drafts=drafter_bytes,
        graphs=(activations if num_graphs else 0) + num_graphs * _GRAPH_BYTES,
        fixed=fixed,
        block=block_bytes,
    )
    plan = plan_memory(total, utilization, needs, most_blocks)
    logger.info("GPU memory: %s; %s", needs, plan)
    return plan
