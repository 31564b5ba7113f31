"""A draft head whose loop of K passes is captured as one graph and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwise.graphs.backend import GraphBackend
from draftwise.graphs.buffers import Tables
from draftwise.graphs.capture import Captures, Loops, capture_loops
from draftwise.graphs.decoder import on_device
from draftwise.graphs.loop import BlockPass, Drafter
from draftwise.kv.storage import KVStorage
from draftwise.models.heads.base import HeadModel, HeadOutput
from draftwise.models.heads.block import BLOCK, BlockHead
from draftwise.models.heads.wrapped import WrappedHead
from draftwise.types import ChainDraws, DraftedTree, StepInput, TreeDraws


class GraphedHead(WrappedHead):
    """Behaves as the head it wraps, whose loops are captured. All else, such as the rows of a prompt, runs as it would
    without it."""

    pads = True
    inputs_on = torch.device("cpu")

    def __init__(self, inner: HeadModel, captures: Captures, block_size: int, backend: GraphBackend) -> None:
        super().__init__(inner)
        self.captures = captures
        self._block_size = block_size
        self._backend = backend
        self._kv: KVStorage | None = None
        self.loops = Loops()
        """What was captured."""
        self.num_replays = 0

    @torch.inference_mode()
    def prepare(self, kv: KVStorage) -> None:
        assert kv.spare_slot is not None, "storage of a head that pads has a spare slot"
        self._kv, captures, size = kv, self.captures, self._block_size
        self.loops = Loops()  # those of another storage go first
        tables = Tables(captures.max_requests, captures.max_keys, size, kv.spare_slot, self._backend)
        self.loops = capture_loops(captures, self._drafter(kv), tables)

    def draft_chains(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None,
        steps: int,
        draws: ChainDraws | None = None,
    ) -> tuple[npt.NDArray[np.int64], Tensor | None] | None:
        loop = self.loops.chain_for(batch, steps, draws)
        if loop is None or kv is not self._kv or not self.inner.recordable():
            return None
        self.num_replays += 1
        return loop.run(batch, features, steps, draws)

    def draft_trees(
        self,
        batch: StepInput,
        features: Tensor,
        kv: KVStorage,
        rows: Sequence[int] | None,
        draws: Sequence[TreeDraws],
    ) -> Sequence[DraftedTree] | None:
        loop = self.loops.tree_for(batch, draws)
        if loop is None or kv is not self._kv or not self.inner.recordable():
            return None
        self.num_replays += 1
        return loop.run(batch, features, draws)

    def loop_of(
        self, batch: StepInput, features: Tensor, kv: KVStorage, steps: int
    ) -> Callable[[], None] | None:
        """The captured greedy loop for a batch, after it was run once: for those who measure it alone."""
        loop = self.loops.chain_for(batch, steps, None)
        return None if loop is None or kv is not self._kv else loop.replay_of(batch, features, steps)

    def _drafter(self, kv: KVStorage) -> Drafter:
        inner = self.inner  # not self, which holds the loops: they would keep each other alive

        def advance(depth: int, batch: StepInput, features: Tensor | None) -> tuple[Tensor, Tensor]:
            assert features is not None
            output = inner.forward(batch, features, kv, depth)
            return output.hidden, output.features

        first, *deeper = (partial(advance, depth) for depth in range(self.num_depths))
        return Drafter(
            first,
            inner.logits,
            self.draft_vocab_size,
            max_position=self.max_model_len - 1,
            position_offset=-1,
            target_ids=self.target_ids,
            feature_size=self.feature_size,
            dtype=self.dtype,
            mask_token=self.mask_token,
            mask_feature=self.mask_feature,
            deeper=deeper,
            block=None if not isinstance(inner, BlockHead) else self._block_pass(inner, kv),
        )

    def _block_pass(self, inner: BlockHead, kv: KVStorage) -> BlockPass:
        nothing = torch.empty((0, self.feature_size), dtype=self.dtype, device=self.device)

        def advance(batch: StepInput) -> Tensor:
            return inner.forward(batch, nothing, kv, BLOCK).hidden

        correction = inner.correction
        correct = None if correction is None else correction.correct
        return BlockPass(advance, self.captures.block, inner.first_row, correct)

    # ------------------------------------------------------------------------------- what is handed through

    def forward(self, batch: StepInput, features: Tensor, kv: KVStorage, depth: int = 0) -> HeadOutput:
        return self.inner.forward(on_device(batch, self.device), features, kv, depth)

    def recordable(self) -> bool:
        return self.inner.recordable()

    def static_bytes(self) -> int:
        return self.captures.loop_bytes(
            self.draft_vocab_size, self.feature_size * self.dtype.itemsize, self.num_depths
        )
