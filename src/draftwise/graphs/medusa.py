"""Medusa heads whose drafts are captured as one graph: nothing but products and draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftwise.graphs.backend import GraphBackend
from draftwise.graphs.buffers import Tables
from draftwise.graphs.capture import Captures, Loops, capture_loops
from draftwise.graphs.loop import Drafter

if TYPE_CHECKING:  # it reads files with safetensors, which `bench gpu` does without
    from draftwise.models.heads.medusa import MedusaHeads


@dataclass(eq=False)
class GraphedMedusa:
    """Loops of one row per request, the root, which nobody reads: drafts are made of its target's hidden state.

    ``loops``: what was captured.
    """

    heads: MedusaHeads
    hidden_size: int
    dtype: torch.dtype
    captures: Captures
    block_size: int
    backend: GraphBackend
    loops: Loops = field(default_factory=Loops)

    def static_bytes(self) -> int:
        """Bytes that they will keep."""
        return self.captures.loop_bytes(self.heads.draft_vocab_size, self.hidden_size * self.dtype.itemsize)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture them."""
        captures, heads = self.captures, self.heads

        def logits(hidden: Tensor) -> Tensor:
            return heads.logits(hidden, captures.steps if captures.tree is None else captures.tree.levels)

        drafter = Drafter(
            None,
            logits,
            heads.draft_vocab_size,
            max_position=captures.max_keys,
            target_ids=heads.target_ids,
            feature_size=self.hidden_size,
            dtype=self.dtype,
        )
        # the spare slot is never written
        tables = Tables(captures.max_requests, captures.max_keys, self.block_size, 0, self.backend)
        self.loops = capture_loops(captures, drafter, tables)
