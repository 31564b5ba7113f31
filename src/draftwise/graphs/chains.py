"""Chains of drafts as one captured graph: K passes, and a draw behind each.

What a drafter needs of the host is known before the loop begins: the rows that it has not seen, where each request's
drafts will stand, and the uniforms of its draws. Tokens go from one pass into the next without leaving the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from draftwise.graphs.buffers import Need, PassBuffers, captured_input, static_of
from draftwise.graphs.loop import Drafter, DraftLoop, LoopKind, LoopMemory, inverse_cdf
from draftwise.kernels.triton.inputs import DraftSlots, NextRows, next_rows, sample_tokens
from draftwise.names import DRAFT, SHARED
from draftwise.sampling.noise import row_key, signed_word, uniform
from draftwise.types import ChainDraws, StepInput


class ChainLoop(DraftLoop):
    """Chains of up to ``steps`` drafts below every request of a pass."""

    def __init__(self, kind: LoopKind, drafter: Drafter, rows: PassBuffers, memory: LoopMemory) -> None:
        """See `DraftLoop`."""
        tokens = memory.tokens[: rows.shape.requests]
        reach = torch.arange(tokens.shape[1] + 1, device=tokens.device)
        super().__init__(kind, drafter, rows, memory, tokens, reach, reach[:-1], reach[:-1])
        if drafter.mask_token is not None and drafter.block is None:
            self.masks = self.steps - 1
        self._alone = torch.ones(rows.shape.requests, dtype=torch.int64, device=tokens.device)

    def takes(self, need: Need, steps: int, draws: ChainDraws | None) -> bool:
        """Whether it can draft for requests with this need."""
        kind = "argmax" if draws is None else draws.stream
        # what a deeper layer goes on from is known to seats alone
        alone = self.at_once or bool(self.drafter.deeper)
        return not alone and steps <= self.steps and kind == self.kind and self.rows.fits(need)

    def run(
        self, batch: StepInput, features: Tensor | None, steps: int, draws: ChainDraws | None
    ) -> tuple[npt.NDArray[np.int64], Tensor | None]:
        """As `DecoderModel.draft_chains`; the loop must take it."""
        count = self._fill(batch, features, steps)
        if draws is not None:
            self._take_noise(draws, steps)
        self._draft()
        drafted = self.seats.tokens[:count, :steps].cpu().numpy()
        return drafted, None if self.seats.q is None else self.seats.q[:count, :steps].clone()

    def replay_of(self, batch: StepInput, features: Tensor | None, steps: int) -> Callable[[], None]:
        """The graph that `run` replays, after it was run once for these requests."""
        self.run(batch, features, steps, None)
        return self.replay

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
        if self.at_once:
            self._draw_all()
            return
        deeper = self.drafter.deeper
        hidden, given = self._advance(self.rows.batch, self.seats.features)
        hidden = hidden.index_select(0, self.seats.last)
        features = None if given is None else given.index_select(0, self.seats.last)
        for step in range(self.steps):
            tokens = self._draw(self.drafter.logits(hidden), step)
            self.seats.tokens[:, step].copy_(tokens)
            if step < len(deeper):
                assert given is not None
                hidden, features, given = self._deepen(step + 1, given)
            elif step + 1 < self.steps:
                alone = deeper[-1] if deeper else self._advance
                hidden, features = alone(self._next(tokens, step), features)

    def _deepen(self, depth: int, given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pass of a deeper layer over the rows of the first pass and ``depth`` drafts behind them. Row j reads what
        the layer above gave for row j - 1, the first one what is carried.

        Args:
            depth: of the layer, from 1 on.
            given: [R * (rows + depth - 1), F] features from the layer above.

        Returns:
            Hidden states and features of the last draft's row, [R, H] and [R, F], and the features of all rows.
        """
        first, (requests, width) = self.rows.batch, (self.shape.requests, self.shape.rows)
        static = static_of(first)
        assert self.seats.carried is not None
        features = self.seats.deeper[depth - 1]
        features[:, 0].copy_(self.seats.carried[:, depth - 1])
        features[:, 1:].copy_(given.view(requests, width + depth - 1, -1))
        place = torch.arange(width + depth, device=given.device)
        request = torch.arange(requests, device=given.device)
        known = (self.seats.last - request * width + 1)[:, None]  # rows of known tokens
        draft = place - known
        is_known = draft < 0
        drafted = self.seats.tokens.gather(1, draft.clamp(0, self.steps - 1))
        tokens, slots = (pad(x.view(requests, width), (0, depth)) for x in (first.token_ids, first.slots))
        drafting = (draft < depth) & (draft + 1 < self.seats.length[:, None])
        stored = torch.where(is_known, (slots != self.rows.tables.spare_slot) & (place < width), drafting)
        keys = static.context[:, None].long() + place
        positions = (keys + self.drafter.position_offset).clamp(0, self.drafter.max_position)
        batch = self._rows_at(
            torch.where(is_known, tokens, drafted),
            keys,
            positions,
            stored,
            context=static.context,
            first_key=self._first_key(depth, static.context),
        )
        hidden, own = self.drafter.deeper[depth - 1](batch, features.flatten(0, 1))
        assert own is not None
        row = request * (width + depth) + known.squeeze(1) + depth - 1
        return hidden.index_select(0, row), own.index_select(0, row), own

    def _first_key(self, depth: int, context: Tensor) -> Tensor:
        """[R] int32: a layer has no rows before its own first key, which stands one behind that of the layer above.
        Requests that fill up see some key all the same."""
        static = static_of(self.rows.batch)
        return torch.minimum(static.first_key + depth, context) if depth else static.first_key

    def _draw_all(self) -> None:
        every, hidden = self._in_one_pass()
        block = self.drafter.block
        tokens = self.rows.batch.token_ids.index_select(0, self.seats.last)
        state: Tensor | None = None
        for step, logits in enumerate(every):
            if block is not None and block.correct is not None:
                assert hidden is not None
                logits, state = block.correct(logits, tokens, hidden[step], state, step)
            tokens = self._draw(logits, step)
            self.seats.tokens[:, step].copy_(tokens)

    def _draw(self, logits: Tensor, step: int) -> Tensor:
        """``logits`` [R, Vd] float32 -> tokens of the target, int64 [R]."""
        logits = self._biased(logits)
        if self.kind == "argmax":
            return self._best(logits)[:, 0]
        scales, noise = self.seats.scale.float(), self.seats.noise[:, step]
        if self.seats.q is None:
            return self._best(logits, 1, scales, noise)[:, 0]
        q, uniforms = self.seats.q[:, step], noise.view(torch.float64)
        if self._fused:
            return sample_tokens(logits, q, uniforms, scales=scales, ids=self.drafter.target_ids)
        q.copy_((logits * scales[:, None]).softmax(-1))
        return self._ids(inverse_cdf(q, uniforms).clamp(min=0))

    def _next(self, tokens: Tensor, step: int) -> StepInput:
        """The pass of draft ``step`` of every request: key start + step, stored if another draft of it follows."""
        drafter, static, tables = self.drafter, static_of(self.rows.batch), self.rows.tables
        limits = drafter.max_position, drafter.position_offset
        where = DraftSlots(static.tables, tables.block_size, tables.spare_slot, *limits)
        made = next_rows if self._fused else next_rows_in_torch
        positions, slots, context = made(self.seats.start, self.seats.length, step, where)
        alone = replace(
            static,
            rows=1,
            max_keys=static.max_keys + self.steps,
            context=context,
            first_key=self._first_key(len(drafter.deeper), context),
            is_tree=self._zeros,
            ancestors=self._alone,
        )
        return captured_input(tokens, positions, slots, tables.block_size, alone)


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
