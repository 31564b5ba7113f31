"""Where a captured pass finds its rows: buffers on the device that are filled before every replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs.backend import Graph, GraphBackend
from draftwise.types import AttentionApart, AttentionBatch, IntArray, StaticRows, StepInput, TargetOutput

_BEYOND = 128
"""Keys past a pass's longest context that its tables reach: rows of its own, drafts behind them, nodes of a tree."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A captured pass: ``requests`` of ``rows`` rows each, none with more than ``keys`` keys, its own rows included."""

    requests: int
    rows: int
    keys: int

    @property
    def size(self) -> int:
        return self.requests * self.rows


class Need(NamedTuple):
    """A batch's demands on a captured pass: requests, rows of the widest, keys and blocks of the longest."""

    requests: int
    rows: int
    keys: int
    blocks: int

    @classmethod
    def of(cls, batch: StepInput) -> Need:
        """The demands of a batch, from its host arrays."""
        attention = batch.attention
        counts = np.diff(attention.query_start_np)
        if not len(counts):
            return cls(0, 0, 0, 0)
        own = counts if attention.tree_start_np is None else counts + attention.tree_start_np
        keys = int((attention.context_len_np + own).max())
        return cls(len(counts), int(counts.max()), keys, attention.block_tables_np.shape[1])


class Tables:
    """Block tables of the requests in a pass, shared by all passes of a model over one storage. ``spare_slot``: of
    that, for rows that fill up."""

    def __init__(
        self, requests: int, keys: int, block_size: int, spare_slot: int, backend: GraphBackend
    ) -> None:
        self.block_size, self.spare_slot, self.backend = block_size, spare_slot, backend
        self.width = -(-(keys + _BEYOND) // block_size)
        device = backend.device
        self.tables = torch.zeros((requests, self.width), dtype=torch.int32, device=device)
        self._flat = torch.zeros(requests * self.width, dtype=torch.int32, device=device)
        self._host = backend.host_buffer((requests * self.width + 1) // 2).view(torch.int32)
        self._host_np: IntArray = self._host.numpy()

    def fill(self, tables_np: IntArray) -> None:
        """``tables_np`` [r, w], w at most `width`. What stands in other places stays: blocks of earlier passes, which
        are read by rows that do not count, and are blocks."""
        r, w = tables_np.shape
        count = r * w
        self._host_np[:count].reshape(r, w)[:] = tables_np
        flat = self._flat[:count]
        flat.copy_(self._host[:count], non_blocking=True)
        self.tables[:r, :w].copy_(flat.view(r, w))


class PassBuffers:
    """The rows of one shape, filled up. One copy to the device, and two operations for the tables.

    Example: shape 2 x 3, requests of 2 and 1 rows: rows 0, 1 and 3 of the pass are theirs (``place`` 0, 1, 3); rows 2,
    4 and 5 are written to the spare slot.
    """

    def __init__(self, shape: Shape, tables: Tables, *, adapted: bool = False) -> None:
        """``adapted``: its requests may have adapters."""
        self.shape = shape
        self.adapted = adapted
        self.tables = tables
        backend, n, requests = tables.backend, shape.size, shape.requests
        small = (requests + 1) // 2  # int32 entries, two to a word
        sizes = [n, n, n, n, n, n, small, small, small, small]
        self._host = backend.host_buffer(sum(sizes))
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=backend.device)
        host = [part.numpy() for part in torch.split(self._host, sizes)]
        parts = torch.split(self._device, sizes)
        self._tokens, self._positions, self._slots, self._masks, self._place, self._picks = host[:6]
        self._context, self._first_key, self._is_tree, self._adapters = (
            part.view(np.int32)[:requests] for part in host[6:]
        )
        context, first_key, is_tree, adapters = (part.view(torch.int32)[:requests] for part in parts[6:])
        self.place, self.picks = parts[4], parts[5]  # [n] int64, of rows that count; see `fill`
        static = StaticRows(
            rows=shape.rows,
            max_keys=shape.keys,
            context=context,
            first_key=first_key,
            is_tree=is_tree,
            tables=tables.tables[:requests],
            ancestors=parts[3],
            adapters=adapters if adapted else None,
        )
        self.batch = captured_input(parts[0], parts[1], parts[2], tables.block_size, static)
        self.clear()

    def clear(self) -> None:
        """Rows that fill up, and nothing else: for captures."""
        self._fill_up()
        self._device.copy_(self._host)

    def _fill_up(self) -> None:
        self._host.zero_()
        self._slots[:] = self.tables.spare_slot
        self._masks[:] = 1

    def take_over(self, tables: Tensor, adapters: Tensor | None = None) -> None:
        """On the device: what the host said of first keys is gone, and these are the block tables. Behind a request's
        own blocks they may name scratch blocks of another storage; here the spare one stands for them.

        Args:
            tables: [>= requests, >= blocks, or fewer] int32.
            adapters: [>= requests] places of adapters, for a pass with adapters.
        """
        static = static_of(self.batch)
        width = min(tables.shape[1], static.tables.shape[1])
        own, spare_block = static.tables[:, :width], self.tables.spare_slot // self.tables.block_size
        torch.clamp(tables[: self.shape.requests, :width], max=spare_block, out=own)
        static.first_key.zero_()
        if static.adapters is not None:
            assert adapters is not None
            static.adapters.copy_(adapters[: self.shape.requests])

    def fits(self, need: Need) -> bool:
        """Whether a batch's rows can be filled in."""
        shape = self.shape
        return (
            need.requests <= shape.requests
            and 0 < need.rows <= shape.rows
            and need.keys <= shape.keys
            and need.blocks <= self.tables.width
        )

    def fill(
        self,
        batch: StepInput,
        rows: npt.NDArray[np.int64] | None = None,
        adapters: Sequence[int] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Take the rows of a ragged batch, whose tensors lie on the host. It must fit.

        Args:
            rows: some of the batch's rows: where they stand in the pass is in `picks` then.
            adapters: the place of each request's adapter, 0: none; None: nobody has one.

        Returns:
            Row of the pass of each row of the batch, int64 [T]; on the device they are in `place`.
        """
        attention, width = batch.attention, self.shape.rows
        starts = attention.query_start_np
        counts = np.diff(starts)
        count, total = len(counts), int(starts[-1])
        place = np.arange(total) + np.repeat(np.arange(count) * width - starts[:-1], counts)
        self._fill_up()
        self._tokens[place] = batch.token_ids.numpy()
        self._positions[place] = batch.positions.numpy()
        self._slots[place] = batch.slots.numpy()
        if attention.ancestors_np is not None:
            masks = attention.ancestors_np.view(np.int64)  # bit 63 is the sign
            self._masks[place] = np.where(masks == 0, 1, masks)  # of a causal request they say nothing
        self._place[:total] = place
        if rows is not None:
            self._picks[: len(rows)] = place[rows]
        self._context[:count] = attention.context_len_np
        if attention.first_key_np is not None:
            self._first_key[:count] = attention.first_key_np
        self._is_tree[:count] = attention.is_tree_np
        if adapters is not None:
            assert self.adapted
            self._adapters[:count] = adapters
        self._device.copy_(self._host, non_blocking=True)
        self.tables.fill(attention.block_tables_np)
        return place


def captured_input(
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    block_size: int,
    static: StaticRows | None = None,
    apart: AttentionApart | None = None,
) -> StepInput:
    """Rows [R * N] of a captured pass. Where they stand is read in ``static``; None: they are one request's, whose
    attention is ``apart``. Of the host's arrays only the shapes count."""
    rows, requests = token_ids.shape[0], 1 if static is None else static.context.shape[0]
    attention = AttentionBatch(
        query_start_np=np.arange(0, rows + 1, rows // requests, dtype=np.int32),
        context_len_np=np.zeros(requests, np.int32),
        is_tree_np=np.zeros(requests, np.bool_),
        block_tables_np=np.zeros((requests, 1), np.int32),
        ancestors_np=None,
        block_size=block_size,
        static=static,
        apart=apart,
    )
    return StepInput(token_ids, positions, slots, attention)


def static_of(batch: StepInput) -> StaticRows:
    """A captured pass's description of its rows."""
    static = batch.attention.static
    assert static is not None
    return static


class PassSeats(NamedTuple):
    """A captured pass of the target, and what a replay of it leaves behind: for those who fill in its rows on the
    device. ``pools``: its storage, see `KVStorage.pools`."""

    rows: PassBuffers
    graph: Graph
    output: TargetOutput
    logits: Tensor  # [>= rows of the pass, V] float32
    pools: tuple[Tensor, ...]
