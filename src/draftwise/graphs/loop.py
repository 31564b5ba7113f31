"""A whole draft loop as one captured graph: passes, with the draws between them on the device. Chains and trees share
what is here.

What a drafter needs of the host is known before the loop begins: the rows that it has not seen, where each request's
drafts will stand, and the uniforms of its draws. Tokens go from one pass into the next without leaving the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwise.graphs.backend import Graph
from draftwise.graphs.buffers import PassBuffers, Shape, captured_input, static_of
from draftwise.kernels.select import on_triton
from draftwise.kernels.triton.inputs import add_biases, best_tokens
from draftwise.sampling.noise import gumbel_of_keys, token_counters
from draftwise.sampling.rows import top_rows
from draftwise.types import StepInput

_BELOW_ONE = 1.0 - 2.0**-52

LoopKind = Literal["argmax", "draft", "shared"]
"""How tokens are drawn: the most likely ones, or as the streams of `ChainDraws` say."""
KINDS: tuple[LoopKind, ...] = ("argmax", "draft", "shared")

Advance = Callable[[StepInput, Tensor | None], tuple[Tensor, Tensor | None]]
"""One pass: its rows, and their features if the drafter is a head -> hidden states [T, H], the next rows' features."""


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws from ``weights`` [n, V] by ``uniforms`` [n] float64, int64 [n]: the first token whose sum is above u times
    the total; -1: no weight. A token of weight 0 is never drawn, u being below 1."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    targets = uniforms[:, None].clamp(max=_BELOW_ONE) * total
    found = torch.searchsorted(sums, targets, right=True).squeeze(1).clamp(max=weights.shape[1] - 1)
    return torch.where(total[:, 0] > 0.0, found, -1)


class LoopSeats(NamedTuple):
    """What a replay of a loop over R requests reads besides the rows of its first pass, and what it leaves
    behind, ``tokens`` and ``q``: for those who fill it in on the device."""

    last: Tensor  # [R] int64, row of the first pass from which each request drafts
    start: Tensor  # [R] int64, key of its first draft
    length: Tensor  # [R] int64, drafts that count, of a dynamic tree candidates
    scale: Tensor  # [R] float64, one over its temperature
    noise: Tensor  # [R, draws] int64, `row_key` as signed words, or the bits of float64 uniforms
    depths: Tensor  # [draws] int64, from the first draft's place to that of the token drawn
    nodes: Tensor  # [draws] int64, of the draw's key: of a chain the draft itself, of a tree its parent
    features: Tensor | None  # [rows of the first pass, F] of heads
    tokens: Tensor  # [R, steps] int64
    q: Tensor | None  # [R, draws, Vd] float32; None: nothing is drawn from it
    reach: Tensor  # [levels + 1] int64, leading drafts or candidates that are on no more than so many levels
    steered: (
        Tensor  # [R] int64: the address of what is added to a request's logits, [V] float32; 0: nothing is
    )
    form: Tensor | None = None
    """[R, 3, steps + 1] int64, left behind of dynamic trees: see `seats.memory.form_of`."""
    carried: Tensor | None = None  # [R, depths - 1, F] of heads with several layers
    deeper: tuple[Tensor, ...] = ()
    """Of each deeper layer the features that it has read: [R, rows + depth, F]."""
    bias: Tensor | None = None
    """[R, Vd] float32, where kernels do not run: what is added where ``steered`` is not 0."""


class BlockPass(NamedTuple):
    """A second pass, which fills in a block (`models.heads.block`): over the last known token and masks behind it,
    which all see one another. Drafts are drawn from its rows, from number ``first`` on.

    ``advance``: rows -> hidden states [T, H]. ``rows``: of a request, all of which are fed whatever is verified.
    ``correct``: `Correction.correct`; None: a draft does not depend on those before it.
    """

    advance: Callable[[StepInput], Tensor]
    rows: int
    first: int
    correct: Callable[[Tensor, Tensor, Tensor, Tensor | None, int], tuple[Tensor, Tensor | None]] | None


@dataclass(frozen=True, slots=True)
class Drafter:
    """The model that a loop calls.

    ``advance``: None: there are no passes, and ``logits`` makes all at once, [R, F] -> [levels, R, Vd] float32, of the
    target's hidden state.
    ``position_offset``: from a row's key to its position, -1 for heads. ``target_ids`` [Vd] int64: the target's id of
    each of its tokens; None: they are the same. ``mask_token``: it drafts all tokens in one pass, over rows of this;
    None: one after the other. These rows stand behind those of the first pass, with ``mask_feature`` [1, F] if it is a
    head, or in a pass of their own, ``block``. ``deeper``: passes of a head's further layers, each of which makes one
    more draft and reads what the one before it gave (`propose.heads.state`); the last one makes all that follow.
    """

    advance: Advance | None
    logits: Callable[[Tensor], Tensor]
    vocab_size: int
    max_position: int
    position_offset: int = 0
    target_ids: Tensor | None = None
    feature_size: int | None = None
    dtype: torch.dtype = torch.float32
    mask_token: int | None = None
    mask_feature: Tensor | None = None
    block: BlockPass | None = None
    deeper: Sequence[Advance] = ()


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
        self.bias: Tensor | None = None  # see `LoopSeats`
        if not on_triton(device):
            self.bias = torch.zeros((requests, drafter.vocab_size), dtype=torch.float32, device=device)
        self.features: Tensor | None = None
        if drafter.feature_size is not None:
            rows = max(shape.size for shape in shapes)
            self.features = torch.zeros((rows, drafter.feature_size), dtype=drafter.dtype, device=device)
        self.deeper = [
            torch.zeros((size, drafter.feature_size or 0), dtype=drafter.dtype, device=device)
            for size in deeper_rows(shapes, len(drafter.deeper))
        ]
        """What goes into each deeper layer; before these what is carried."""


def deeper_rows(shapes: Sequence[Shape], deeper: int) -> list[int]:
    """Sizes of `LoopMemory.deeper`.

    Example: loops of 2 requests with 4 rows each, two deeper layers: 4 vectors that are carried, 10 and 12 rows.
    """
    if not deeper:
        return []
    rows = [max(s.size + depth * s.requests for s in shapes) for depth in range(1, deeper + 1)]
    return [deeper * max(s.requests for s in shapes), *rows]


class DraftLoop(ABC):
    """Drafts below every request of a pass, in one graph. Made with everything it needs, captured, then run any number
    of times.

    A request that drafts fewer has its later tokens thrown away, and nothing of them is stored: their K/V goes to the
    spare slot, as that of rows past the model's length does. Of a dynamic tree all is stored, in scratch blocks.
    """

    masks: int = 0
    """Rows of masks that its first pass has behind a request's last token: all drafts come from this pass."""

    def __init__(
        self,
        kind: LoopKind,
        drafter: Drafter,
        rows: PassBuffers,
        memory: LoopMemory,
        tokens: Tensor,
        reach: Tensor,
        depths: Tensor,
        nodes: Tensor,
        form: Tensor | None = None,
    ) -> None:
        """``rows``: of the first pass, which catches up on tokens that the drafter has not seen. ``tokens`` and what
        follows: see `LoopSeats`."""
        shape, backend = rows.shape, rows.tables.backend
        self.shape, self.kind = shape, kind
        self.drafter, self.rows = drafter, rows
        requests, device, draws = shape.requests, backend.device, len(nodes)
        sizes = [requests, requests, requests, requests, requests * draws, requests]
        self._host = backend.host_buffer(sum(sizes))
        self._device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        host = [part.numpy() for part in torch.split(self._host, sizes)]
        parts = torch.split(self._device, sizes)
        self._last_np, self._start_np, self._length_np = host[:3]
        self._scale_np = host[3].view(np.float64)
        self._noise_np = host[4].reshape(requests, draws)
        deeper: tuple[Tensor, ...] = ()
        carried: Tensor | None = None
        if memory.deeper:
            first, *given = memory.deeper
            carried = first[: requests * len(given)].view(requests, len(given), -1)
            deeper = tuple(
                x[: shape.size + d * requests].view(requests, shape.rows + d, -1)
                for d, x in enumerate(given, 1)
            )
        self.seats = LoopSeats(
            last=parts[0],
            start=parts[1],
            length=parts[2],
            scale=parts[3].view(torch.float64),
            noise=parts[4].view(requests, draws),
            depths=depths,
            nodes=nodes,
            features=None if memory.features is None else memory.features[: shape.size],
            tokens=tokens,
            q=memory.q[:requests, :draws] if kind == "draft" else None,
            reach=reach,
            steered=parts[5],  # the host's are 0: it steers nobody
            form=form,
            carried=carried,
            deeper=deeper,
            bias=None if memory.bias is None else memory.bias[:requests],
        )
        """For callers that fill in a replay's rows (``rows``) and their data on the device."""
        self._counters = memory.counters
        self._fused = on_triton(device)
        self._zeros = torch.zeros(requests, dtype=torch.int32, device=device)
        self._ones = torch.ones_like(self._zeros)
        self._graph: Graph | None = None

    @property
    def steps(self) -> int:
        """Drafts of a request."""
        return self.seats.tokens.shape[1]

    @property
    def levels(self) -> int:
        """Most drafts of one path."""
        return len(self.seats.reach) - 1

    @property
    def at_once(self) -> bool:
        """Whether what all drafts are drawn from comes from one pass. Such loops are for seats alone: the host makes
        rows of masks itself."""
        return self.drafter.advance is None or self.drafter.mask_token is not None

    @abstractmethod
    def _run(self) -> None:
        """What is captured."""

    def capture(self) -> None:
        """Capture it, with rows that only fill up."""
        self.rows.clear()
        self._host.zero_()
        self._device.copy_(self._host)
        self._graph, _ = self.rows.tables.backend.capture(self._run)

    def replay(self) -> None:
        """Draft for what the device has filled in."""
        assert self._graph is not None, "capture comes first"
        self._graph.replay()

    def _fill(self, batch: StepInput, features: Tensor | None, steps: int) -> int:
        """Say what a batch is, all but its noise. Returns its requests."""
        starts = batch.attention.query_start_np
        counts = np.diff(starts)
        count, total = len(counts), int(starts[-1])
        self.rows.fill(batch)
        if self.seats.features is not None:
            assert features is not None
            if total == self.shape.size or count == 1:
                self.seats.features[:total].copy_(features)
            else:
                self.seats.features.index_copy_(0, self.rows.place[:total], features)
        self._last_np[:] = np.arange(self.shape.requests) * self.shape.rows
        self._last_np[:count] += counts - 1
        self._start_np[:] = self._length_np[:] = 0
        self._start_np[:count] = batch.attention.context_len_np + counts
        self._length_np[:count] = steps
        return count

    def _draft(self) -> None:
        """Draft for what was filled in on the host."""
        self._device.copy_(self._host, non_blocking=True)
        self.replay()

    # ----------------------------------------------------------------------------------- what is captured

    def _biased(self, logits: Tensor) -> Tensor:
        """``logits`` [R * n, Vd] float32, which are consumed, with what steers each request added."""
        if self.seats.bias is None:
            return add_biases(logits, self.seats.steered, self.drafter.target_ids)
        wide = logits.view(self.shape.requests, -1, logits.shape[1])
        steered = (self.seats.steered != 0)[:, None, None]
        return torch.where(steered, wide + self.seats.bias[:, None], wide).flatten(0, 1)

    def _best(
        self, logits: Tensor, most: int = 1, scales: Tensor | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """``logits`` [n, Vd] float32 -> the target's ids of the ``most`` best tokens of each row, int64 [n, most].
        ``scales`` [n] float32: factors of the rows; ``keys`` [n] int64: of the noise that is added then."""
        if self._fused:
            return best_tokens(logits, most, scales=scales, keys=keys, ids=self.drafter.target_ids).tokens
        scores = logits if scales is None else logits * scales[:, None]
        if keys is not None:
            scores = scores + gumbel_of_keys(keys, self._counters)
        return self._ids(scores.argmax(-1, keepdim=True) if most == 1 else top_rows(scores, most).indices)

    def _ids(self, drawn: Tensor) -> Tensor:
        """The target's ids of a drafter's."""
        ids = self.drafter.target_ids
        return drawn if ids is None else ids[drawn]

    def _advance(self, batch: StepInput, features: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A pass of the drafter."""
        assert self.drafter.advance is not None
        return self.drafter.advance(batch, features)

    def _in_one_pass(self) -> tuple[Tensor, Tensor | None]:
        """Logits [levels, R, Vd] behind the drafts of all levels, and the hidden states [levels, R, H] that they are
        of; None: nobody needs these."""
        drafter, features = self.drafter, self.seats.features
        if drafter.advance is None:
            assert features is not None
            return drafter.logits(features), None
        hidden = self._masked_rows() if drafter.block is None else self._block_rows(drafter.block)
        logits = drafter.logits(hidden)
        shape = (self.levels, self.shape.requests, -1)
        return logits.view(shape), hidden.view(shape)

    def _masked_rows(self) -> Tensor:
        """Hidden states [levels * R, H], of masks in the rows behind a request's last token, of which only place and
        position were filled in.

        Example: 3 drafts, 6 rows each, of which two requests have filled 1 and 3: ``last`` is 0 and 8, and drafts are
        drawn from rows 0, 1, 2 and 8, 9, 10.
        """
        drafter, features = self.drafter, self.seats.features
        batch, (requests, width) = self.rows.batch, (self.shape.requests, self.shape.rows)
        row = torch.arange(requests * width, device=self.seats.last.device)
        masked = row > self.seats.last[:, None].expand(-1, width).flatten()
        assert drafter.mask_token is not None
        batch = replace(batch, token_ids=batch.token_ids.masked_fill(masked, drafter.mask_token))
        if features is not None:
            assert drafter.mask_feature is not None
            features = torch.where(masked[:, None], drafter.mask_feature, features)
        hidden, _ = self._advance(batch, features)
        return hidden.index_select(0, (row[: self.levels, None] + self.seats.last).flatten())

    def _block_rows(self, block: BlockPass) -> Tensor:
        """Hidden states [levels * R, H] of blocks, behind a pass that stores what the target has read."""
        drafter, requests = self.drafter, self.shape.requests
        assert drafter.mask_token is not None
        self._advance(self.rows.batch, self.seats.features)
        place = torch.arange(block.rows, device=self.seats.start.device)
        last = self.rows.batch.token_ids.index_select(0, self.seats.last)
        tokens = torch.where(place == 0, last[:, None], drafter.mask_token)
        keys = self.seats.start[:, None] + place
        stored = (self.seats.length > 0)[:, None].expand_as(keys)
        positions = (keys + drafter.position_offset).clamp(min=0)
        hidden = block.advance(self._rows_at(tokens, keys, positions, stored))
        drawn_from = hidden.view(requests, block.rows, -1)[:, block.first : block.first + self.levels]
        return drawn_from.transpose(0, 1).flatten(0, 1)

    def _rows_at(
        self,
        tokens: Tensor,
        keys: Tensor,
        positions: Tensor,
        stored: Tensor,
        masks: Tensor | None = None,
        **others: Tensor,
    ) -> StepInput:
        """A pass over ``tokens`` [R, n] at these ``keys`` and ``positions``, of which some are ``stored``.

        Args:
            masks: [R, n] int64, ancestors among all rows behind a request's ``start``; None: no trees.
            others: of `StaticRows`, where they are not as in the first pass; ``context`` is ``start`` otherwise.
        """
        static, size, n = static_of(self.rows.batch), self.rows.tables.block_size, tokens.shape[1]
        pages = (keys // size).clamp(max=static.tables.shape[1] - 1)
        slots = static.tables.gather(1, pages).long() * size + keys % size
        own = replace(
            static,
            rows=n,
            max_keys=static.max_keys + 64,
            **({"context": self.seats.start.to(torch.int32)} | others),
            is_tree=self._zeros if masks is None else self._ones,
            ancestors=torch.ones_like(keys).flatten() if masks is None else masks.flatten(),
        )
        # of one request one position may be expanded to n
        return captured_input(
            tokens.flatten(),
            positions.flatten().contiguous(),
            slots.masked_fill(~stored, self.rows.tables.spare_slot).flatten(),
            size,
            own,
        )
