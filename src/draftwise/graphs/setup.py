"""What an engine captures: the choice of shapes for its target and its drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwise.graphs.backend import CudaGraphs, GraphBackend
from draftwise.graphs.buffers import Shape
from draftwise.graphs.decoder import Captures, GraphedDecoder
from draftwise.graphs.head import GraphedHead
from draftwise.graphs.sizes import loop_shapes, pass_shapes
from draftwise.models.base import DecoderModel
from draftwise.models.heads.base import HeadModel


def backend_for(device: torch.device) -> GraphBackend | None:
    """What captures passes on a device; None: nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


def capturable(model: DecoderModel) -> bool:
    """Whether the model's kernels can be captured."""
    try:
        return model.shared_weights().ops.capturable
    except NotImplementedError:
        return False


@dataclass(frozen=True, slots=True)
class GraphSetup:
    """``sizes``: rows of whole passes to capture, see `graphs.sizes.pass_shapes`; None: a choice."""

    backend: GraphBackend
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    sizes: tuple[int, ...] | None = None

    def target(self, model: DecoderModel, widths: Sequence[int]) -> DecoderModel:
        """The target with passes of ``widths`` rows per request captured, or itself if its kernels cannot be."""
        if not capturable(model):
            return model
        return GraphedDecoder(model, Captures(self._passes(widths)), self.block_size, self.backend)

    def draft_model(self, model: DecoderModel, steps: int) -> DecoderModel:
        """A draft model with its loop of ``steps`` drafts captured. It has not seen one or two tokens when it begins:
        the root, and behind a chain that was accepted whole its last draft."""
        if not capturable(model):
            return model
        return GraphedDecoder(model, self._loops(2, steps), self.block_size, self.backend)

    def head(self, head: HeadModel, steps: int) -> HeadModel:
        """A draft head likewise. It has not seen the tokens of the last step: up to ``steps`` accepted ones, and the
        root."""
        return GraphedHead(head, self._loops(1 + steps, steps), self.block_size, self.backend)

    def count(self, widths: Sequence[int], num_drafters: int) -> int:
        """Graphs of the target and of so many drafters, about."""
        passes = self._passes(widths)
        return len(passes) + num_drafters * self._loops(1, 1).count

    def _passes(self, widths: Sequence[int]) -> tuple[Shape, ...]:
        return pass_shapes(
            widths=widths,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            sizes=self.sizes,
        )

    def _loops(self, rows: int, steps: int) -> Captures:
        shapes = loop_shapes(rows=rows, max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len)
        return Captures((), shapes, steps)
