"""Paged attention as Triton kernels: prefill chunks, decoding rows and trees in one launch.

The context is cut by position into partitions, and these into tiles. A row has a fixed number of slots of partial
results at most, which programs of their own make (flash-decoding); partition i is summed in slot i modulo their number.
A second kernel adds a row's slots up in their order. So the memory of a row, and with it the number of launches of a
pass, does not grow with the longest context that a model may have.

There are two kernels for the slots, and one for their sum:

- `partial_attention`, with tiles and partitions of fixed size. Neither the other requests of a batch, nor the number
  of rows a request has, nor where keys stand, changes an operation that a row sees: a token verified in a tree has the
  bits of the same token decoded alone.
- `split_attention`, for those who promise nothing of that: the number of slots follows the number of programs that a
  device wants (`tiling.free_tiling`), more rows share a tile, and all rows of a tree see its nodes in one tile, through
  masks.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.attention.base import MAX_TREE_ROWS, AttentionBackend
from draftwise.kernels.triton import device
from draftwise.kernels.triton.availability import LAUNCH, interpreted
from draftwise.kernels.triton.prompts import flash_serves, prompt_attention, prompt_requests, prompt_runs
from draftwise.kernels.triton.rows import as_bytes, power_of_two
from draftwise.kernels.triton.tiling import Tiling, tiling_for
from draftwise.transfer import parts_to_device
from draftwise.types import AttentionBatch, StaticRows

_CACHE_KEY: Final = "triton"
_WORKSPACE_BYTES: Final = 64 << 20
"""The most bytes of partial results (unless one task needs more): a long prefill is launched in pieces."""

_PROGRAMS: Final = 2048
"""The approximate number of programs of a launch, for any context: enough for every device. Results do not depend on
it."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the rows of requests stand, on the device; int32."""

    tasks_np: npt.NDArray[np.int32]
    tasks: Tensor  # [N, 3] request, first row, rows; not of those that flash attention does
    starts: Tensor  # [R + 1]
    owners: Tensor  # [T]


@dataclass(slots=True)
class _Prepared:
    """Data on the device that depends only on the batch, int32, and what one small kernel makes of it."""

    layout: _Layout
    masks: Tensor  # [T] int64, of a tree's row the rows of the tree on its path
    context: Tensor  # [R]
    first_key: Tensor  # [R]
    is_tree: Tensor  # [R] 0 or 1
    tables: Tensor  # [R, max blocks]
    num_keys: int  # the largest position + 1 that any row may have
    last_rows: Tensor | None  # [T], of `whole` requests the position of their last row
    positions: Tensor = field(init=False)  # [T]
    ends: Tensor = field(init=False)  # [T], the last position that a row may see: its own, or `last_rows`
    lasts: Tensor = field(init=False)
    """[T], the last key that a row may see: of a tree's row where it stands itself, else `ends`."""
    paths: Tensor = field(init=False)
    """[T, 64]; of a tree's row, its d-th ancestor's row in the tree; else undefined."""

    def __post_init__(self) -> None:
        rows, layout, place = len(self.masks), self.layout, self.masks.device
        self.positions, self.lasts = torch.empty((2, rows), dtype=torch.int32, device=place)
        self.paths = torch.empty((rows, 64), dtype=torch.int32, device=place)
        given = (self.masks, layout.owners, layout.starts, self.context, self.is_tree)
        made = (self.positions, self.lasts, self.paths)
        device.attention.tree_rows[(rows,)](*given, *made, num_warps=1, **LAUNCH)
        self.ends = self.positions
        if self.last_rows is not None:
            self.ends = self.lasts = self.last_rows


class TritonAttention(AttentionBackend):
    """On a CUDA device, or on the CPU in Triton's interpreter.

    ``tiling``: the same for all batches; None: chosen for each (`tiling_for`).

    ``prompt_rows``: chunks of prompts of so many rows and more go through torch's flash attention where it serves
    (`triton.prompts`); their bits then depend on how a prompt is cut. None: no chunk does.
    """

    reads_static = True

    def __init__(
        self,
        tiling: Tiling | None = None,
        workspace_bytes: int = _WORKSPACE_BYTES,
        *,
        prompt_rows: int | None = None,
    ) -> None:
        self._tiling = tiling
        self._workspace_bytes = workspace_bytes
        self._prompt_rows = prompt_rows
        # Of static batches, by (requests, rows, rows of a task, device): made before anything is captured, and kept.
        self._layouts: dict[tuple[int, int, int, torch.device], _Layout] = {}

    def run(
        self,
        q: Tensor,
        kv: tuple[Tensor, ...],
        batch: AttentionBatch,
        *,
        num_kv_heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        rows, heads, dim = q.shape
        result = q.new_empty(rows, heads * dim) if out is None else out
        if rows == 0:
            return result
        assert q.stride(2) == 1 and q.stride(1) == dim and result.is_contiguous()
        group = heads // num_kv_heads
        tiling = self._tiling or tiling_for(q, batch, num_kv_heads, window)
        block_m = max(tiling.block_m, power_of_two(group))
        flash = self._prompt_rows
        if whole or batch.static is not None or not flash_serves(q, kv, softcap, sinks):
            flash = None
        prepared = self._prepare(batch, block_m // group, q.device, flash, whole)
        ends = prepared.ends if tiling.fixed else prepared.lasts
        num_slots = min(tiling.slots, -(-prepared.num_keys // tiling.partition))
        per_row = heads * num_slots * (dim + 2) * 4
        sizes = {"HEADS": heads, "DIM": dim, "DIM_PAD": max(16, power_of_two(dim))}
        common: dict[str, Any] = {**sizes, "WINDOWED": window is not None, **LAUNCH}
        parts = {"PARTITION": tiling.partition, "SLOTS": tiling.slots}
        shared: dict[str, Any] = {
            "PAGE": batch.block_size,
            "KV_HEADS": num_kv_heads,
            "ROWS": block_m // group,
            "BLOCK_M": block_m,
            "BLOCK_N": tiling.block_n,
            "CAPPED": softcap is not None,
            "CODES": len(kv) == 2,
            "FP8": kv[0].dtype is torch.float8_e4m3fn,
            # the interpreter's product of bfloat16 is not one
            "WIDE": interpreted() and q.dtype is torch.bfloat16,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
            **({} if tiling.most_registers is None else {"maxnreg": tiling.most_registers}),
            **common,
        }
        tasks_np = prepared.layout.tasks_np
        for begin, end in self._pieces(tasks_np, per_row):
            first = int(tasks_np[begin, 1])
            piece_rows = int(tasks_np[end - 1, 1] + tasks_np[end - 1, 2]) - first
            acc = torch.empty((piece_rows, heads, num_slots, dim), dtype=torch.float32, device=q.device)
            best, total = torch.empty((2, piece_rows, heads, num_slots), dtype=torch.float32, device=q.device)
            partial = (acc, best, total)
            tasks = prepared.layout.tasks[begin:end]
            given: tuple[Any, ...] = (q, as_bytes(kv[0]), kv[-1], prepared.tables, tasks)
            given += (prepared.context, prepared.first_key, prepared.is_tree, prepared.positions, ends)
            numbers = (q.stride(0), prepared.tables.stride(0), first, num_slots, scale, softcap or 1.0)
            if tiling.fixed:
                programs = min(num_slots, max(1, _PROGRAMS // ((end - begin) * num_kv_heads)))
                device.attention.partial_attention[(end - begin, num_kv_heads, programs)](
                    *given, prepared.paths, *partial, *numbers, window or 0, **parts, **shared
                )
            else:
                device.split.split_attention[(end - begin, num_kv_heads, num_slots)](
                    *given, prepared.masks, *partial, *numbers, window or 0, tiling.slots, **shared
                )
            device.attention.combine_partitions[(piece_rows, heads)](
                *partial,
                prepared.positions,
                ends,
                best if sinks is None else sinks,
                result,
                first,
                num_slots,
                window or 0,
                SLOTS_PAD=power_of_two(tiling.slots),
                SINKS=sinks is not None,
                num_warps=1 if tiling.slots <= 8 else 4,
                **parts,
                **common,
            )
        if flash is not None:
            for run in prompt_runs(batch, flash, window, q.device):
                prompt_attention(q, kv[0], run, num_kv_heads, scale, window, result)
        return result

    def _prepare(
        self,
        batch: AttentionBatch,
        rows_per_task: int,
        device: torch.device,
        flash: int | None,
        whole: bool,
    ) -> _Prepared:
        """One copy to the device and one small kernel per pass. ``flash``: without chunks of so many rows and more."""
        key = f"{_CACHE_KEY}/{rows_per_task}/{flash}/{whole}"
        found = batch.cache.get(key)
        if isinstance(found, _Prepared):
            return found
        if batch.static is not None:
            made = self._prepare_static(batch.static, rows_per_task, device, whole)
            batch.cache[key] = made
            return made
        starts = batch.query_start_np.astype(np.int32)
        counts = np.diff(starts)
        requests, rows = len(counts), int(starts[-1])
        stored = np.zeros(requests, np.int32) if batch.tree_start_np is None else batch.tree_start_np
        assert not batch.is_tree_np.any() or (counts + stored)[batch.is_tree_np].max() <= MAX_TREE_ROWS
        # rows that are ours
        own = counts if flash is None else np.where(prompt_requests(batch, flash), 0, counts)
        tasks = _tasks(own, starts, rows_per_task)
        masks = np.zeros(rows, np.uint64) if batch.ancestors_np is None else batch.ancestors_np
        tables = batch.block_tables_np
        parts = [
            masks.view(np.int32),  # first: its 64-bit words stay aligned
            starts,
            np.repeat(np.arange(requests, dtype=np.int32), counts),
            batch.context_len_np,
            np.zeros(requests, np.int32) if batch.first_key_np is None else batch.first_key_np,
            batch.is_tree_np,
            tables.reshape(-1),
            tasks.reshape(-1),
            np.repeat(batch.context_len_np + counts - 1, counts if whole else 0).astype(np.int32),
        ]
        words, query_start, row_request, context, first_key, is_tree, flat_tables, flat_tasks, last_rows = (
            parts_to_device(parts, device)
        )
        made = _Prepared(
            _Layout(tasks, flat_tasks.view(-1, 3), query_start, row_request),
            words.view(torch.int64),
            context,
            first_key,
            is_tree,
            flat_tables.view(tables.shape),
            num_keys=int((batch.context_len_np + stored + counts)[own > 0].max(initial=1)),
            last_rows=last_rows if whole else None,
        )
        batch.cache[key] = made
        return made

    def _prepare_static(
        self, static: StaticRows, rows_per_task: int, device: torch.device, whole: bool
    ) -> _Prepared:
        """One small kernel; nothing is read of the host but what is the same in every replay. The first call with a
        layout copies it to the device: run a pass once before it is captured."""
        requests, n = static.context.shape[0], static.rows
        layout = self._layouts.get((requests, n, rows_per_task, device))
        if layout is None:
            starts = np.arange(0, requests * n + 1, n, dtype=np.int32)
            tasks = _tasks(np.diff(starts), starts, rows_per_task)
            owners = np.repeat(np.arange(requests, dtype=np.int32), n)
            copies = [torch.from_numpy(part).to(device) for part in (tasks, starts, owners)]
            layout = _Layout(tasks, *copies)
            self._layouts[requests, n, rows_per_task, device] = layout
        assert static.ancestors.is_contiguous() and static.context.is_contiguous()
        last_rows = (static.context + (n - 1))[:, None].repeat(1, n).flatten() if whole else None
        given = (static.ancestors, static.context, static.first_key, static.is_tree, static.tables)
        return _Prepared(layout, *given, num_keys=static.max_keys + n, last_rows=last_rows)

    def _pieces(self, tasks: npt.NDArray[np.int32], bytes_per_row: int) -> list[tuple[int, int]]:
        """Runs of tasks whose rows stand one behind the other and whose partial results fit the workspace."""
        most = max(1, self._workspace_bytes // bytes_per_row)
        ends = tasks[:, 1] + tasks[:, 2]  # ascending
        gaps = [*(np.flatnonzero(tasks[1:, 1] != ends[:-1]) + 1).tolist(), len(tasks)]
        pieces = []
        begin = 0
        while begin < len(tasks):
            end = int(np.searchsorted(ends, tasks[begin, 1] + most, side="right"))
            end = min(end, gaps[bisect_right(gaps, begin)])
            end = max(end, begin + 1)
            pieces.append((begin, end))
            begin = end
        return pieces


def _tasks(
    counts: npt.NDArray[np.int32], starts: npt.NDArray[np.int32], rows_per_task: int
) -> npt.NDArray[np.int32]:
    """Cut every request's rows into tasks: int32 [N, 3] of request, first row, rows.

    Example: 5 and 2 rows, 4 to a task: (0, 0, 4), (0, 4, 1), (1, 5, 2).
    """
    per_request = -(-counts // rows_per_task)
    request = np.repeat(np.arange(len(counts), dtype=np.int32), per_request)
    before = np.concatenate(([0], np.cumsum(per_request)))[:-1]
    nth = np.arange(len(request)) - np.repeat(before, per_request)
    offset = nth * rows_per_task
    size = np.minimum(rows_per_task, counts[request] - offset)
    return np.stack((request, starts[request] + offset, size), axis=1).astype(np.int32)
