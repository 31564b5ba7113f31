"""What an engine captures: the choice of shapes for its target and its drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from draftwise.graphs.backend import CudaGraphs, GraphBackend
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.head import GraphedHead
from draftwise.graphs.sizes import loop_shapes, pass_shapes
from draftwise.graphs.trees import TreePlan
from draftwise.models.base import DecoderModel
from draftwise.models.heads.base import HeadModel
from draftwise.propose.tree_spec import parse_tree
from draftwise.types import TreeShape

if TYPE_CHECKING:
    from draftwise.config import SpeculativeConfig


def backend_for(device: torch.device) -> GraphBackend | None:
    """What captures passes on a device; None: nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None


def capturable(model: DecoderModel) -> bool:
    """Whether the model's kernels can be captured."""
    try:
        return model.shared_weights().ops.capturable
    except NotImplementedError:
        return False


def tree_plan(config: SpeculativeConfig) -> TreePlan | None:
    """The tree that a drafter is configured with; None: chains."""
    dynamic = config.speculative_dynamic_tree
    if dynamic is not None:
        return TreePlan(None, dynamic.top_k, dynamic.depth)
    if config.speculative_token_tree is None:
        return None
    return TreePlan(TreeShape(*parse_tree(config.speculative_token_tree)))


def levels(tree: TreePlan) -> int:
    """Most tokens of one path."""
    if tree.shape is None:
        return tree.depth
    depths: list[int] = []
    for parent in tree.shape.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


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

    def draft_model(self, model: DecoderModel, steps: int, tree: TreePlan | None = None) -> DecoderModel:
        """A draft model with its loop captured, of ``steps`` drafts, or of a tree. It has not seen one or two tokens
        when it begins: the root, and behind a chain that was accepted whole its last draft; behind a tree, the whole
        accepted path."""
        if not capturable(model):
            return model
        rows = 2 if tree is None else 1 + levels(tree)
        return GraphedDecoder(model, self._loops(rows, steps, tree), self.block_size, self.backend)

    def head(self, head: HeadModel, steps: int, tree: TreePlan | None = None) -> HeadModel:
        """A draft head likewise. It has not seen the tokens of the last step: the accepted ones, and the root."""
        rows = 1 + (steps if tree is None else levels(tree))
        return GraphedHead(head, self._loops(rows, steps, tree), self.block_size, self.backend)

    def tree_of(self, config: SpeculativeConfig) -> TreePlan | None:
        """See `tree_plan`."""
        return tree_plan(config)

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

    def _loops(self, rows: int, steps: int, tree: TreePlan | None = None) -> Captures:
        steps = steps if tree is None else 0
        shapes = loop_shapes(rows=rows, max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len)
        return Captures((), shapes, steps, tree)
