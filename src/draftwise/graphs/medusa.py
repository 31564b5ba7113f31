"""Medusa heads whose drafts are captured as one graph: nothing but products and draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwise.graphs.backend import GraphBackend
from draftwise.graphs.buffers import Tables
from draftwise.graphs.capture import Captures, Loops, capture_loops
from draftwise.graphs.loop import Drafter

if TYPE_CHECKING:  # it reads files with safetensors, which `bench gpu` does without
    from draftwise.models.heads.medusa import MedusaHeads


class GraphedMedusa:
    """Loops of one row per request, the root, which nobody reads: drafts are made of its target's hidden state."""

    def __init__(
        self,
        heads: MedusaHeads,
        hidden_size: int,
        dtype: torch.dtype,
        captures: Captures,
        block_size: int,
        backend: GraphBackend,
    ) -> None:
        self._heads = heads
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._captures = captures
        self._block_size = block_size
        self._backend = backend
        self.loops = Loops([], [])
        """What was captured."""

    def static_bytes(self) -> int:
        """Bytes that they will keep."""
        return self._captures.loop_bytes(
            self._heads.draft_vocab_size, self._hidden_size * self._dtype.itemsize
        )

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture them."""
        captures, heads = self._captures, self._heads

        def logits(hidden: Tensor) -> Tensor:
            return heads.logits(hidden, captures.steps if captures.tree is None else captures.tree.levels)

        drafter = Drafter(
            None,
            logits,
            heads.draft_vocab_size,
            max_position=captures.max_keys,
            target_ids=heads.target_ids,
            feature_size=self._hidden_size,
            dtype=self._dtype,
        )
        # the spare slot is never written
        tables = Tables(captures.max_requests, captures.max_keys, self._block_size, 0, self._backend)
        self.loops = capture_loops(captures, drafter, tables)
