"""Passes of any ragged batch, captured between the calls of attention.

What a pass does outside of attention depends on the number of its rows alone, and is captured for some numbers of rows:
from the embedding to the first layer's queries, from attention's result to the next layer's queries, and so on to the
final norm. Attention itself looks at lengths on the host, and is run as it is, on the batch's own rows, between the
pieces. Prompts, chunks of them beside decoding requests, and trees of any shape take the same passes.

Example: 5 rows of a prompt and 3 decoding requests are 8 rows. Nine rows are filled up to 16; attention reads the
first nine queries and writes nine results. The other seven, which no real row reads, are what an earlier pass left
there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs.backend import GraphBackend, Pieces
from draftwise.graphs.buffers import captured_input
from draftwise.types import Attend, AttentionBatch, StepInput


class PieceMemory:
    """Buffers that all of a model's passes in pieces share, made for the largest of ``most`` rows.

    Attention's buffers are made when a pass first asks for them, in the run before its capture: the largest pass comes
    first.
    """

    def __init__(self, most: int, backend: GraphBackend) -> None:
        self.host = backend.host_buffer(4 * most)
        self.words = torch.zeros(4 * most, dtype=torch.int64, device=backend.device)
        self._most = most
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def buffer(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width], dense, at the same place for every pass."""
        found = self._buffers.get((name, dtype))
        if found is None or found.numel() < rows * width:
            # numbers from the start: rows that fill up go through the same products as others
            found = torch.zeros(self._most * width, dtype=dtype, device=self.words.device)
            self._buffers[name, dtype] = found
        return found[: rows * width].view(rows, width)

    @staticmethod
    def bytes(most: int, width: int, itemsize: int) -> int:
        """Bytes for passes of up to ``most`` rows whose queries and results are ``width`` wide."""
        return most * (4 * 8 + 2 * width * itemsize)


class _Noted:
    """`types.AttentionApart`: ends a piece at every call, and keeps what it was called with."""

    def __init__(self, memory: PieceMemory) -> None:
        self._memory = memory
        self._queries: Tensor | None = None  # [N, Hq, D] that was asked for last
        self.calls: list[tuple[Attend, Tensor, Tensor]] = []  # of the layers: queries, results, of all N rows
        self.cut: Callable[[], None] = lambda: None

    def queries(self, rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        flat = self._memory.buffer("queries", rows, num_heads * head_dim, dtype)
        self._queries = flat.view(rows, num_heads, head_dim)
        return self._queries

    def __call__(self, attend: Attend, q: Tensor, width: int) -> Tensor:
        place = q
        if q is not self._queries:
            rows, num_heads, head_dim = q.shape
            place = self.queries(rows, num_heads, head_dim, q.dtype)
            place.copy_(q)
        out = self._memory.buffer("attended", q.shape[0], width, q.dtype)
        self.calls.append((attend, place, out))
        self.cut()
        return out


class PiecewisePass:
    """A pass of ``rows`` rows. Made, captured, then run any number of times."""

    def __init__(self, rows: int, memory: PieceMemory, block_size: int, spare_slot: int) -> None:
        self.rows = rows
        self._spare_slot = spare_slot
        self._host = memory.host[: 4 * rows]
        self._device = memory.words[: 4 * rows]
        self._tokens, self._positions, self._slots, self._picks = self._host.numpy().reshape(4, rows)
        tokens, positions, slots, self._picked = self._device.view(4, rows)
        self._noted = _Noted(memory)
        self.batch = captured_input(tokens, positions, slots, block_size, apart=self._noted)
        self._pieces: Pieces | None = None

    def capture(self, forward: Callable[[StepInput], None], backend: GraphBackend) -> None:
        """Capture what ``forward`` does with `batch`, with rows that only fill up."""
        self._tokens[:] = self._positions[:] = self._picks[:] = 0
        self._slots[:] = self._spare_slot
        self._device.copy_(self._host)

        def run(cut: Callable[[], None]) -> None:
            self._noted.calls.clear()
            self._noted.cut = cut
            forward(self.batch)

        self._pieces, _ = backend.capture_pieces(run)

    def fill(self, batch: StepInput, picks: npt.NDArray[np.int64] | None = None) -> Tensor | None:
        """Take the rows of a batch of at most as many, whose tensors lie on the host, and ``picks``, some of them.

        Returns:
            The picks on the device, int64, if there are any.
        """
        total = batch.token_ids.shape[0]
        self._tokens[:total] = batch.token_ids.numpy()
        self._positions[:total] = batch.positions.numpy()
        self._slots[:total] = batch.slots.numpy()
        self._tokens[total:] = self._positions[total:] = 0
        self._slots[total:] = self._spare_slot
        if picks is not None:
            self._picks[: len(picks)] = picks
        self._device.copy_(self._host, non_blocking=True)
        return None if picks is None else self._picked[: len(picks)]

    def replay(self, batch: StepInput) -> None:
        """Run it, on the rows of the last `fill`; ``batch`` says where these look."""
        assert self._pieces is not None, "capture comes first"
        self._pieces.replay(partial(self._attend, batch.attention, batch.token_ids.shape[0]))

    def _attend(self, attention: AttentionBatch, total: int, layer: int) -> None:
        attend, queries, out = self._noted.calls[layer]
        attend(queries[:total], attention, out[:total])
