"""Long chunks of prompts: keys and values are gathered once, then torch's flash attention does the chunk.

A chunk of n rows reads its keys n / 4 times in `partial_attention`, four rows at a time, and without the products of
whole tiles that a Hopper has. Flash attention reads them n / 128 times, but knows no pages that suit us, so a copy of
the keys and values in one piece comes first. `PROMPT_ROWS` says from how many rows on that pays, by arithmetic:

    per key, Llama-3.1-8B, 4.3 TB/s: ours 0.22 ns x rows; the copy 2.9 ns; flash attention 0.05 ns x rows, but with
    fewer than 128 rows no less than with 128, and with 32 heads and 128 rows on a quarter of 132 multiprocessors

Example: 128 rows: 28 ns against 2.9 + 24; 512 rows: 112 ns against 2.9 + 24; 32 rows: 7 against 2.9 + 24.

Which rows come this way depends on their number, so a row's bits depend on how a prompt is cut. Operations that promise
that they do not (``batch_invariant``) do without.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.attention.base import first_key, request_slots
from draftwise.transfer import parts_to_device
from draftwise.types import AttentionBatch

logger = logging.getLogger("draftwise")

PROMPT_ROWS: Final = 128
"""Rows of a request in a pass from which on flash attention does them."""

_GATHERED_KEYS: Final = 16384
"""Most keys that are gathered at once, unless one request has more: 64 MiB of Llama-3.1-8B's."""


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Requests whose rows stand one behind the other, and their keys in one piece."""

    first: int  # row of the pass
    rows: int
    slots: Tensor  # [K] int32: where the keys stand, request by request
    query_start: Tensor  # [R + 1] int32, from 0 on
    key_start: Tensor  # [R + 1] int32
    most_rows: int  # of one request
    most_keys: int


def flash_serves(q: Tensor, kv: tuple[Tensor, ...], softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether flash attention takes such a layer: float16 or bfloat16 like its cache, heads of at most 256 numbers and
    a multiple of 8, no soft cap, no sinks, on a device of compute capability 8.0 or more."""
    dim = q.shape[2]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and len(kv) == 1
        and kv[0].dtype is q.dtype
        and dim % 8 == 0
        and dim <= 256
        and softcap is None
        and sinks is None
        and has_flash(q.device)
    )


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Whether this torch has flash attention for this device. The first call takes FA3 into use where it is installed,
    for all of torch."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    if capability[0] == 9 and importlib.util.find_spec("flash_attn_interface") is not None:
        from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl

        try:
            if current_flash_attention_impl() is None:
                activate_flash_attention_impl("FA3")
        except Exception as error:  # whatever a package of another version raises: torch's own serves, too
            logger.warning("flash_attn_interface is installed, but cannot be used for prompts: %s", error)
    return capability >= (8, 0)


def prompt_requests(batch: AttentionBatch, least: int) -> npt.NDArray[np.bool_]:
    """[R] which requests of a batch are chunks of prompts: of ``least`` rows and more."""
    counts = np.diff(batch.query_start_np)
    return np.asarray((counts >= least) & ~batch.is_tree_np)


def prompt_runs(
    batch: AttentionBatch, least: int, window: int | None, device: torch.device
) -> list[PromptRun]:
    """What `prompt_attention` is called with for each layer of a pass, in order; made once per window.

    Keys that the window hides from all rows of a chunk are left out. Example: a window of 4096 and 512 rows behind
    20000 tokens: keys 15905 to 20511.
    """
    name = f"prompts/{window}"
    found = batch.cache.get(name)
    if isinstance(found, list):
        return found
    groups: list[list[int]] = []
    keys = 0
    for r in np.flatnonzero(prompt_requests(batch, least)).tolist():
        own = _num_keys(batch, r) - _seen_from(batch, r, window)
        keys += own
        if not groups or groups[-1][-1] != r - 1 or keys > _GATHERED_KEYS:
            groups.append([])
            keys = own
        groups[-1].append(r)
    runs = [_run(batch, members, window, device) for members in groups]
    batch.cache[name] = runs
    return runs


def prompt_attention(
    q: Tensor, kv: Tensor, run: PromptRun, num_kv_heads: int, scale: float, window: int | None, out: Tensor
) -> None:
    """One layer's attention of the rows of ``run``.

    Args:
        q: [T, Hq, D] queries of the whole pass; rows may be strided.
        kv: [slots, 2 * Hkv, D], of q's dtype.
        out: [T, Hq * D], of which the run's rows are written.
    """
    taken = kv.index_select(0, run.slots)  # [K, 2 * Hkv, D]
    rows = slice(run.first, run.first + run.rows)
    result = flash(
        q[rows],
        taken[:, :num_kv_heads],
        taken[:, num_kv_heads:],
        run.query_start,
        run.key_start,
        run.most_rows,
        run.most_keys,
        0.0,
        window is None,
        False,
        scale=scale,
        # keys before a row's own that it sees; behind it, none
        window_size_left=-1 if window is None else window - 1,
        window_size_right=0,
    )
    out[rows].view(run.rows, q.shape[1], q.shape[2]).copy_(result)


def flash(*args: object, **named: object) -> Tensor:
    """torch's flash attention of sequences one behind the other (FA2, or FA3 where it is in use). The last row of a
    sequence stands at its last key.

    This is what `torch.nn.attention.varlen.varlen_attn` calls; importing that takes seconds (it brings the compiler),
    and each call of it goes through Python again."""
    result: Tensor = torch.ops.aten._flash_attention_forward(*args, **named)[0]
    return result


def _num_keys(batch: AttentionBatch, r: int) -> int:
    return int(batch.context_len_np[r] + batch.query_start_np[r + 1] - batch.query_start_np[r])


def _seen_from(batch: AttentionBatch, r: int, window: int | None) -> int:
    """The first key that a row of request r sees."""
    hidden = 0 if window is None else int(batch.context_len_np[r]) - window + 1
    return max(first_key(batch, r), hidden)


def _run(batch: AttentionBatch, members: list[int], window: int | None, device: torch.device) -> PromptRun:
    starts = batch.query_start_np[[*members, members[-1] + 1]]
    slots = [
        request_slots(batch, r, _seen_from(batch, r, window), _num_keys(batch, r)).astype(np.int32)
        for r in members
    ]
    keys = np.array([0, *(len(part) for part in slots)])
    on_device = parts_to_device(
        [np.concatenate(slots), (starts - starts[0]).astype(np.int32), np.cumsum(keys).astype(np.int32)],
        device,
    )
    return PromptRun(
        first=int(starts[0]),
        rows=int(starts[-1] - starts[0]),
        slots=on_device[0],
        query_start=on_device[1],
        key_start=on_device[2],
        most_rows=int(np.diff(starts).max()),
        most_keys=int(keys.max()),
    )
