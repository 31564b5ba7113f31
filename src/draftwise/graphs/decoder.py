"""A decoder whose passes, and whole draft loops, are captured as graphs and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs.backend import Fence, GraphBackend
from draftwise.graphs.buffers import Need, PassBuffers, PassSeats, Tables
from draftwise.graphs.capture import Captures, Loops, capture_loops
from draftwise.graphs.loop import Drafter
from draftwise.graphs.pieces import PieceMemory, PiecewisePass
from draftwise.graphs.sizes import worth_filling
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel, SharedWeights
from draftwise.models.lora.decoder import AdaptedDecoder
from draftwise.models.wrapped import WrappedDecoder
from draftwise.types import ChainDraws, DraftedTree, StepInput, TargetOutput, TreeDraws

logger = logging.getLogger("draftwise")


class GraphedDecoder(WrappedDecoder):
    """Behaves as the model it wraps. Batches whose requests have about as many rows each are whole passes, others, such
    as chunks of prompts, passes in pieces; those that fit neither run as they would without it.

    A pass is filled up to the next captured shape with rows that touch nothing but the spare slot of the storage. The
    graphs belong to one storage and one set of layers, those of `prepare`.
    """

    pads = True
    inputs_on = torch.device("cpu")

    def __init__(
        self, inner: DecoderModel, captures: Captures, block_size: int, backend: GraphBackend
    ) -> None:
        super().__init__(inner)
        self.captures = captures
        self._block_size = block_size
        self.backend = backend
        """The backend that captured the passes."""
        self._passes: list[PassSeats] = []
        self._pieces: list[PiecewisePass] = []
        self.loops = Loops()
        """What was captured of it as a drafter."""
        # results of passes, one set for all graphs, because a graph's own could not be shared
        self._output: TargetOutput  # of the rows of the largest pass
        self._logits: Tensor  # [rows of the largest whole pass, V] float32
        self._kv: KVStorage | None = None
        self._layers: tuple[int, ...] = ()
        self._filled: Fence | None = None  # the host's buffers may be written again
        self._adapted = inner if isinstance(inner, AdaptedDecoder) and inner.captures_adapters else None
        self.num_replays = 0  # of whole passes and loops
        self.num_piecewise = 0  # passes in pieces

    @torch.inference_mode()
    def prepare(self, kv: KVStorage, capture: Sequence[int] = ()) -> None:
        """Capture everything, the largest first: smaller graphs then fit into its memory."""
        assert kv.spare_slot is not None, "storage of a model that pads has a spare slot"
        self._kv, self._layers = kv, tuple(capture)
        self._passes.clear()
        self._pieces, self.loops = [], Loops()
        if not self.captures.count:
            return
        backend, captures = self.backend, self.captures
        reach = captures.max_requests, captures.max_keys
        tables = Tables(*reach, self._block_size, kv.spare_slot, backend)
        whole = max((shape.size for shape in captures.passes), default=0)
        size, device = (max(whole, *captures.pieces, 0), self.config.hidden_size), backend.device
        hidden, *others = torch.zeros((1 + len(self._layers), *size), dtype=self.dtype, device=device)
        self._output = TargetOutput(hidden, dict(zip(self._layers, others, strict=True)))
        self._logits = torch.zeros((whole, self.config.vocab_size), dtype=torch.float32, device=device)
        if max(captures.pieces, default=0) > whole:
            self._capture_pieces(kv.spare_slot)
        for shape in sorted(captures.passes, key=lambda s: (s.size, s.keys), reverse=True):
            # with adapters apart: others need not run the kernels that add nothing to them
            for adapted in (False, True) if self._adapted is not None else (False,):
                rows = PassBuffers(shape, tables, adapted=adapted)
                graph, _ = backend.capture(partial(self._whole_pass, rows.batch))
                self._passes.append(PassSeats(rows, graph, self._output, self._logits, kv.pools))
        self._passes.reverse()
        if not self._pieces:
            self._capture_pieces(kv.spare_slot)
        self.loops = capture_loops(captures, self._drafter(kv), tables)
        logger.info("captured %s", captures)

    def _capture_pieces(self, spare_slot: int) -> None:
        if not self.captures.pieces:
            return
        memory = PieceMemory(max(self.captures.pieces), self.backend)
        for count in sorted(self.captures.pieces, reverse=True):
            self._pieces.insert(0, PiecewisePass(count, memory, self._block_size, spare_slot))
            self._pieces[0].capture(self._rows_alone, self.backend)

    def forward_logits(
        self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None = None, capture: Sequence[int] = ()
    ) -> tuple[TargetOutput, Tensor]:
        found = self._pass_for(batch, kv, capture)
        if isinstance(found, PiecewisePass):
            return self._in_pieces(found, batch, rows, capture)
        if found is None:
            return self.inner.forward_logits(on_device(batch, self.device), kv, rows, capture)
        picked = None if rows is None else np.asarray(rows, np.int64)
        self._wait()
        place = found.rows.fill(batch, picked, self._places_of(batch) if found.rows.adapted else None)
        self._filled = self.backend.fence()
        found.graph.replay()
        self.num_replays += 1
        total, logits = len(place), self._logits
        dense = total == 0 or int(place[-1]) == total - 1  # no gaps before the last row
        index = None if dense else found.rows.place[:total]
        output = self._left(total, capture, index)
        if picked is None:
            # not copied: they are large, and read before the next pass
            return output, logits[:total] if index is None else logits.index_select(0, index)
        return output, logits.index_select(0, found.rows.picks[: len(picked)])

    def _left(self, total: int, capture: Sequence[int], index: Tensor | None = None) -> TargetOutput:
        """What a pass left behind of ``total`` rows, the first ones or those at ``index``, copied: the next pass writes
        over it."""
        kept = (self._output.hidden, *(self._output.captured[layer] for layer in capture))
        hidden, *others = (x[:total].clone() if index is None else x.index_select(0, index) for x in kept)
        return TargetOutput(hidden, dict(zip(capture, others, strict=True)))

    def _in_pieces(
        self, found: PiecewisePass, batch: StepInput, rows: Sequence[int] | None, capture: Sequence[int]
    ) -> tuple[TargetOutput, Tensor]:
        self._wait()
        picks = found.fill(batch, None if rows is None else np.asarray(rows, np.int64))
        self._filled = self.backend.fence()
        found.replay(batch)
        self.num_piecewise += 1
        total = batch.token_ids.shape[0]
        output, hidden = self._left(total, capture), self._output.hidden[:total]
        if picks is not None:
            hidden = hidden.index_select(0, picks)
        if not hidden.shape[0]:
            return output, hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        # not captured: how many there are does not depend on the number of rows, and it is one product
        return output, self.inner.logits(hidden)

    def replay_of(self, batch: StepInput, kv: KVStorage) -> Callable[[], None] | None:
        """The whole pass captured for a batch, its rows filled in: for those who measure it alone. None: there is
        none."""
        found = self._pass_for(batch, kv, self._layers)
        if not isinstance(found, PassSeats):
            return None
        self._wait()
        found.rows.fill(batch, None, self._places_of(batch) if found.rows.adapted else None)
        return found.graph.replay

    def place_of(self, adapter: int) -> int | None:
        """Where captured passes find an adapter; None: it cannot be added in them."""
        return None if self._adapted is None else self._adapted.place_of(adapter)

    def pass_seats(self, rows: int, *, adapted: bool = False) -> list[PassSeats]:
        """The whole passes for requests of exactly ``rows`` rows, the smallest first. ``adapted``: those for requests
        with adapters."""
        return [p for p in self._passes if p.rows.shape.rows == rows and p.rows.adapted == adapted]

    def loop_of(self, batch: StepInput, kv: KVStorage, steps: int) -> Callable[[], None] | None:
        """The captured greedy loop for a batch, after it was run once."""
        loop = self.loops.chain_for(batch, steps, None)
        return None if loop is None or kv is not self._kv else loop.replay_of(batch, None, steps)

    def forward(self, batch: StepInput, kv: KVStorage, capture: Sequence[int] = ()) -> TargetOutput:
        return self.inner.forward(on_device(batch, self.device), kv, capture)

    def draft_chains(
        self,
        batch: StepInput,
        kv: KVStorage,
        rows: Sequence[int] | None,
        steps: int,
        draws: ChainDraws | None = None,
    ) -> tuple[npt.NDArray[np.int64], Tensor | None] | None:
        loop = self.loops.chain_for(batch, steps, draws)
        if loop is None or kv is not self._kv:
            return None
        self._wait()
        self.num_replays += 1
        return loop.run(batch, None, steps, draws)

    def draft_trees(
        self, batch: StepInput, kv: KVStorage, rows: Sequence[int] | None, draws: Sequence[TreeDraws]
    ) -> Sequence[DraftedTree] | None:
        loop = self.loops.tree_for(batch, draws)
        if loop is None or kv is not self._kv:
            return None
        self._wait()
        self.num_replays += 1
        return loop.run(batch, None, draws)

    def _pass_for(
        self, batch: StepInput, kv: KVStorage, capture: Sequence[int]
    ) -> PassSeats | PiecewisePass | None:
        if kv is not self._kv or not set(capture) <= set(self._layers):
            return None
        if batch.token_ids.device.type != "cpu":
            return None
        need, adapted = Need.of(batch), batch.adapters is not None and any(batch.adapters)
        if adapted and self._places_of(batch) is None:
            return None
        whole = next((p for p in self._passes if p.rows.adapted == adapted and p.rows.fits(need)), None)
        if adapted:
            return whole
        total = batch.token_ids.shape[0]
        pieces = next((p for p in self._pieces if p.rows >= total > 0), None)
        if whole is None or pieces is None:
            return whole or pieces
        return whole if worth_filling(whole.rows.shape.size, pieces.rows) else pieces

    def _places_of(self, batch: StepInput) -> list[int] | None:
        """The places of a batch's adapters, 0 for requests without one; None: some adapter has no place."""
        assert batch.adapters is not None
        places = [self.place_of(adapter) if adapter else 0 for adapter in batch.adapters]
        found = [place for place in places if place is not None]
        return found if len(found) == len(places) else None

    def _wait(self) -> None:
        if self._filled is not None:
            self._filled.synchronize()
            self._filled = None

    def _whole_pass(self, batch: StepInput) -> None:
        assert self._kv is not None
        batch.attention.cache.clear()  # what was prepared in another run would not be prepared again in a replay
        output, logits = self.inner.forward_logits(batch, self._kv, None, self._layers)
        self._take(output)
        self._logits[: logits.shape[0]].copy_(logits)
        batch.attention.cache.clear()  # its memory is free for the next graph

    def _rows_alone(self, batch: StepInput) -> None:
        """A pass without logits, and where ``batch`` says so, without attention."""
        assert self._kv is not None
        self._take(self.inner.forward(batch, self._kv, self._layers))

    def _take(self, output: TargetOutput) -> None:
        """Copy what a pass returned."""
        rows = output.hidden.shape[0]
        self._output.hidden[:rows].copy_(output.hidden)
        for layer, x in output.captured.items():
            self._output.captured[layer][:rows].copy_(x)

    def _drafter(self, kv: KVStorage) -> Drafter:
        inner = self.inner  # not self, which holds the loops: they would keep each other alive

        def advance(batch: StepInput, features: Tensor | None) -> tuple[Tensor, None]:
            return inner.forward(batch, kv).hidden, None

        return Drafter(
            advance,
            inner.logits,
            self.config.vocab_size,
            max_position=self.config.max_model_len - 1,
            mask_token=self.captures.mask,
        )

    # ------------------------------------------------------------------------------- what is handed through

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def shared_weights(self) -> SharedWeights:
        return self.inner.shared_weights()

    def first_layers(self, count: int) -> DecoderModel:
        return self.inner.first_layers(count)

    def static_bytes(self) -> int:
        config, captures, itemsize = self.config, self.captures, self.dtype.itemsize
        whole = max((shape.size for shape in captures.passes), default=0)
        pieces = max(captures.pieces, default=0)
        # captured layers, of which there are four at most, are counted whether they will be or not
        kept = max(whole, pieces) * 5 * config.hidden_size * itemsize + whole * 4 * config.vocab_size
        kept += PieceMemory.bytes(pieces, config.num_heads * config.head_dim, itemsize)
        return kept + captures.loop_bytes(config.vocab_size)


def on_device(batch: StepInput, device: torch.device) -> StepInput:
    """The batch with its tensors there."""
    if batch.token_ids.device == device:
        return batch
    return replace(
        batch,
        token_ids=batch.token_ids.to(device, non_blocking=True),
        positions=batch.positions.to(device, non_blocking=True),
        slots=batch.slots.to(device, non_blocking=True),
    )
