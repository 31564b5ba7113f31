"""The whole draft loop as one captured graph: K passes, with the draws between them on the device.

What a drafter needs of the host is known before the loop begins: the rows that it has not seen, where each request's
drafts will stand, and the uniforms of its draws. Tokens go from one pass into the next without leaving the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs.backend import Graph, GraphBackend
from draftwise.graphs.buffers import Need, PassBuffers, Shape
from draftwise.kernels.select import on_triton
from draftwise.kernels.triton.inputs import DraftSlots, NextRows, best_tokens, next_rows, sample_tokens
from draftwise.names import DRAFT, SHARED
from draftwise.sampling.noise import gumbel_of_keys, row_key, signed_word, token_counters, uniform
from draftwise.types import AttentionBatch, ChainDraws, StaticRows, StepInput

LoopKind = Literal["argmax", "draft", "shared"]
"""How tokens are drawn: the most likely ones, or as the streams of `ChainDraws` say."""
KINDS: tuple[LoopKind, ...] = ("argmax", "draft", "shared")

Advance = Callable[[StepInput, Tensor | None], tuple[Tensor, Tensor | None]]
"""One pass: its rows, and their features if the drafter is a head -> hidden states [T, H], the next rows' features."""

_BELOW_ONE = 1.0 - 2.0**-52


class LoopSeats(NamedTuple):
    """What a replay of a `ChainLoop` over R requests reads besides the rows of its first pass, and what it leaves
    behind, ``tokens`` and ``q``: for those who fill it in on the device."""

    last: Tensor  # [R] int64, row of the first pass from which each request drafts
    start: Tensor  # [R] int64, key of its first draft
    length: Tensor  # [R] int64, drafts that count
    scale: Tensor  # [R] float64, one over its temperature
    noise: Tensor  # [R, draws] int64, `row_key` as signed words, or the bits of float64 uniforms
    depths: Tensor  # [draws] int64, from the first draft's place to that of the token drawn
    nodes: Tensor  # [draws] int64, of the draw's key: of a chain the draft itself, of a tree its parent
    features: Tensor | None  # [rows of the first pass, F] of heads
    tokens: Tensor  # [R, steps] int64
    q: Tensor | None  # [R, draws, Vd] float32; None: nothing is drawn from it
    reach: Tensor  # [levels + 1] int64, leading drafts that stand on no more than so many levels


@dataclass(frozen=True, slots=True)
class Drafter:
    """The model that a loop calls.

    ``advance``: None: there are no passes, and ``logits`` makes all at once, [R, F] -> [steps, R, Vd] float32, of the
    target's hidden state.
    ``position_offset``: from a row's key to its position, -1 for heads. ``target_ids`` [Vd] int64: the target's id of
    each of its tokens; None: they are the same.
    """

    advance: Advance | None
    logits: Callable[[Tensor], Tensor]
    vocab_size: int
    max_position: int
    position_offset: int = 0
    target_ids: Tensor | None = None
    feature_size: int | None = None
    dtype: torch.dtype = torch.float32


class LoopMemory:
    """What the loops of a drafter read and leave behind, one set for all of them: ``features`` [rows of the largest
    first pass, F], ``tokens`` of chains [R, steps] int64, ``q`` [R, draws, Vd] float32, ``counters`` [Vd] of the
    noise. ``draws``: distributions of a request; None: one for each of ``steps``."""

    def __init__(
        self,
        shapes: Sequence[Shape],
        steps: int,
        drafter: Drafter,
        device: torch.device,
        draws: int | None = None,
    ) -> None:
        requests = max(shape.requests for shape in shapes)
        size = (requests, steps if draws is None else draws, drafter.vocab_size)
        self.tokens = torch.zeros((requests, steps), dtype=torch.int64, device=device)
        self.q = torch.zeros(size, dtype=torch.float32, device=device)
        self.counters = token_counters(drafter.vocab_size, device, drafter.target_ids)
        self.features: Tensor | None = None
        if drafter.feature_size is not None:
            rows = max(shape.size for shape in shapes)
            self.features = torch.zeros((rows, drafter.feature_size), dtype=drafter.dtype, device=device)


class ChainLoop:
    """Chains of up to ``steps`` drafts below every request of a pass. Made with everything it needs, captured, then run
    any number of times.

    A request that drafts fewer has its later tokens thrown away, and nothing of them is stored: their K/V goes to the
    spare slot, as that of rows past the model's length does.
    """

    def __init__(
        self,
        shape: Shape,
        steps: int,
        kind: LoopKind,
        drafter: Drafter,
        rows: PassBuffers,
        memory: LoopMemory,
        spare_slot: int,
        backend: GraphBackend,
    ) -> None:
        """``rows``: of the first pass, which catches up on tokens that the drafter has not seen."""
        self.shape, self.steps, self.kind = shape, steps, kind
        self.drafter = drafter
        self.rows = rows
        self._spare_slot = spare_slot
        requests, device = shape.requests, backend.device
        sizes = [requests, requests, requests, requests, requests * steps]
        self._host = backend.host_buffer(sum(sizes))
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        host = [part.numpy() for part in torch.split(self._host, sizes)]
        parts = torch.split(self._device, sizes)
        self._last_np, self._start_np, self._length_np = host[:3]
        self._scale_np = host[3].view(np.float64)
        self._noise_np = host[4].reshape(requests, steps)
        self._last, self._start, self._length = parts[:3]  # [R] int64
        self._scale = parts[3].view(torch.float64)  # [R]
        self._noise = parts[4].view(requests, steps)  # int64 keys, or the bits of float64 uniforms
        self._features: Tensor | None = None  # [R * N, F] of the first pass's rows
        if memory.features is not None:
            self._features = memory.features[: shape.size]
        self._zeros = torch.zeros(requests, dtype=torch.int32, device=device)
        self._ones = torch.ones(requests, dtype=torch.int64, device=device)
        self._reach = torch.arange(steps + 1, device=device)
        self._tokens = memory.tokens[:requests]
        self._q = memory.q[:requests] if kind == "draft" else None  # [R, steps, Vd]
        self._counters = memory.counters
        self._fused = on_triton(device)
        self._graph: Graph | None = None

    def capture(self, backend: GraphBackend) -> None:
        """Capture it, with rows that only fill up."""
        self.rows.clear()
        self._host.zero_()
        self._device.copy_(self._host)
        self._graph, _ = backend.capture(self._run)

    def takes(self, need: Need, steps: int, draws: ChainDraws | None) -> bool:
        """Whether it can draft for requests with this need."""
        kind = "argmax" if draws is None else draws.stream
        return steps <= self.steps and kind == self.kind and self.rows.fits(need)

    def run(
        self, batch: StepInput, features: Tensor | None, steps: int, draws: ChainDraws | None
    ) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        """As `DecoderModel.draft_chains`; the loop must take it."""
        assert self._graph is not None, "capture comes first"
        starts = batch.attention.query_start_np
        counts = np.diff(starts)
        count, total = len(counts), int(starts[-1])
        self.rows.fill(batch)
        if self._features is not None:
            assert features is not None
            if total == self.shape.size or count == 1:
                self._features[:total].copy_(features)
            else:
                self._features.index_copy_(0, self.rows.place[:total], features)
        self._last_np[:] = np.arange(self.shape.requests) * self.shape.rows
        self._last_np[:count] += counts - 1
        self._start_np[:] = self._length_np[:] = 0
        self._start_np[:count] = batch.attention.context_len_np + counts
        self._length_np[:count] = steps
        if draws is not None:
            self._take_noise(draws, steps)
        self._device.copy_(self._host, non_blocking=True)
        self._graph.replay()
        drafted = self._tokens[:count, :steps].cpu().numpy()
        return drafted, None if self._q is None else self._q[:count, :steps].clone()

    def replay_of(self, batch: StepInput, features: Tensor | None, steps: int) -> Callable[[], None]:
        """The graph that `run` replays, after it was run once for these requests."""
        self.run(batch, features, steps, None)
        assert self._graph is not None
        return self._graph.replay

    @property
    def seats(self) -> LoopSeats:
        """For callers that fill in a replay's rows (``rows``) and their data on the device."""
        return LoopSeats(
            self._last,
            self._start,
            self._length,
            self._scale,
            self._noise,
            self._reach[:-1],
            self._reach[:-1],
            self._features,
            self._tokens,
            self._q,
            self._reach,
        )

    def replay(self) -> None:
        """Draft for what the device has filled in."""
        assert self._graph is not None, "capture comes first"
        self._graph.replay()

    def _take_noise(self, draws: ChainDraws, steps: int) -> None:
        uniforms_np = self._noise_np.view(np.float64)
        for r, key in enumerate(draws.keys):
            self._scale_np[r] = key.scale
            for node in range(key.node, key.node + steps):
                place = key.base + node
                if draws.stream == "draft":
                    u = uniform(key.seed, key.sample_index, DRAFT, place, node, key.base)
                    uniforms_np[r, node - key.node] = u
                else:
                    word = row_key(key.seed, key.sample_index, SHARED, place, node, key.base)
                    self._noise_np[r, node - key.node] = signed_word(word)

    # ----------------------------------------------------------------------------------- what is captured

    def _run(self) -> None:
        self.rows.batch.attention.cache.clear()  # of another run; it would be missing in a replay
        if self.drafter.advance is None:
            assert self._features is not None
            for step, logits in enumerate(self.drafter.logits(self._features)):
                self._tokens[:, step].copy_(self._draw(logits, step))
            return
        hidden, features = self.drafter.advance(self.rows.batch, self._features)
        hidden = hidden.index_select(0, self._last)
        if features is not None:
            features = features.index_select(0, self._last)
        for step in range(self.steps):
            tokens = self._draw(self.drafter.logits(hidden), step)
            self._tokens[:, step].copy_(tokens)
            if step + 1 < self.steps:
                hidden, features = self.drafter.advance(self._next(tokens, step), features)

    def _draw(self, logits: Tensor, step: int) -> Tensor:
        """``logits`` [R, Vd] float32 -> tokens of the target, int64 [R]."""
        ids = self.drafter.target_ids
        if self._fused and self._q is not None:
            uniforms = self._noise.view(torch.float64)[:, step]
            q = self._q[:, step]
            return sample_tokens(logits, q, uniforms, scales=self._scale.float(), ids=ids)
        if self._fused:
            noisy = self.kind == "shared"
            scales = self._scale.float() if noisy else None
            return best_tokens(
                logits, scales=scales, keys=self._noise[:, step] if noisy else None, ids=ids
            ).tokens[:, 0]
        if self.kind != "argmax":
            logits = logits * self._scale[:, None].float()
        if self.kind == "shared":
            logits = logits + gumbel_of_keys(self._noise[:, step], self._counters)
        if self._q is None:
            drawn = logits.argmax(-1)
        else:
            q = logits.softmax(-1)
            self._q[:, step].copy_(q)
            sums = q.cumsum(-1, dtype=torch.float64)
            # the first sum above u * total: a token of weight 0 is never drawn, u being below 1
            uniforms = self._noise.view(torch.float64)[:, step : step + 1]
            targets = uniforms.clamp(max=_BELOW_ONE) * sums[:, -1:]
            drawn = torch.searchsorted(sums, targets, right=True).squeeze(1)
            drawn = drawn.clamp(max=q.shape[1] - 1)
        return drawn if ids is None else ids.index_select(0, drawn)

    def _next(self, tokens: Tensor, step: int) -> StepInput:
        """The pass of draft ``step`` of every request: key start + step, stored if another draft of it follows."""
        drafter, first = self.drafter, self.rows.batch.attention
        static = first.static
        assert static is not None
        size = first.block_size
        where = DraftSlots(
            static.tables, size, self._spare_slot, drafter.max_position, drafter.position_offset
        )
        made = next_rows if self._fused else next_rows_in_torch
        positions, slots, context = made(self._start, self._length, step, where)
        requests = self.shape.requests
        return StepInput(
            token_ids=tokens,
            positions=positions,
            slots=slots,
            attention=AttentionBatch(
                query_start_np=np.arange(requests + 1, dtype=np.int32),
                context_len_np=np.zeros(requests, np.int32),
                is_tree_np=np.zeros(requests, np.bool_),
                block_tables_np=np.zeros((requests, 1), np.int32),
                ancestors_np=None,
                block_size=size,
                static=StaticRows(
                    rows=1,
                    max_keys=static.max_keys + self.steps,
                    context=context,
                    first_key=static.first_key,
                    is_tree=self._zeros,
                    tables=static.tables,
                    ancestors=self._ones,
                ),
            ),
        )


def next_rows_in_torch(start: Tensor, length: Tensor, step: int, where: DraftSlots) -> NextRows:
    """As `next_rows`."""
    size = where.block_size
    keys = start + step
    wanted = keys + where.position_offset
    pages = (keys // size).clamp(max=where.tables.shape[1] - 1)
    slots = where.tables.gather(1, pages[:, None]).squeeze(1).long() * size + keys % size
    stored = (step + 1 < length) & (wanted <= where.max_position)
    slots = slots.masked_fill(~stored, where.spare_slot)
    return NextRows(wanted.clamp(0, where.max_position), slots, keys.to(torch.int32))
