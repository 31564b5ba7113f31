"""The graphs that an engine captures: the choice of shapes for its target and its drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from draftwise.config import SpeculativeConfig
from draftwise.config.graphs import GraphMode
from draftwise.config.trees import parse_tree
from draftwise.graphs.backend import CudaGraphs, GraphBackend
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.head import GraphedHead
from draftwise.graphs.medusa import GraphedMedusa
from draftwise.graphs.plans import TreePlan
from draftwise.graphs.sizes import key_limits, pass_shapes, piece_rows, request_counts
from draftwise.models.base import DecoderModel
from draftwise.models.heads.base import HeadModel
from draftwise.models.heads.block import BlockHead
from draftwise.models.lora.decoder import AdaptedDecoder
from draftwise.types import TreeShape

if TYPE_CHECKING:  # it reads files with safetensors, which `bench gpu` does without
    from draftwise.models.heads.medusa import MedusaHeads


def backend_for(device: torch.device) -> GraphBackend | None:
    """The backend that captures passes on a device; None: there is none."""
    return CudaGraphs(device) if device.type == "cuda" else None


def capturable(model: DecoderModel) -> bool:
    """Whether the model's passes can be captured."""
    try:
        return model.capturable and model.shared_weights().ops.capturable
    except NotImplementedError:
        return False


def tree_plan(config: SpeculativeConfig) -> TreePlan | None:
    """The tree that a drafter is configured with; None: chains."""
    dynamic = config.speculative_dynamic_tree
    if dynamic is not None:
        return TreePlan(None, dynamic.top_k, dynamic.depth, config.num_speculative_tokens)
    if config.speculative_token_tree is None:
        return None
    return TreePlan(TreeShape(*parse_tree(config.speculative_token_tree)))


@dataclass(frozen=True, slots=True)
class GraphSetup:
    """``sizes``: rows of passes to capture, see `graphs.sizes`; None: a choice. ``largest``: no pass has more.
    ``unseen``: most drafts of a step that a drafter may not have made itself, and reads when they are accepted.
    ``tree``: what a drafter drafts, whatever its own configuration says; None: what that says.
    ``planned``: what `target`, `draft_model` and `head` were asked for, by name: it is captured when storage is there.
    """

    backend: GraphBackend
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    sizes: tuple[int, ...] | None = None
    largest: int | None = None
    mode: GraphMode = "full_and_piecewise"
    unseen: int = 0
    tree: TreePlan | None = None
    planned: dict[str, Captures] = field(default_factory=dict)

    def target(self, model: DecoderModel, widths: Sequence[int]) -> DecoderModel:
        """The target with passes of ``widths`` rows per request captured, and others in pieces; or itself if its
        kernels cannot be."""
        if not capturable(model):
            return model
        adapted = isinstance(model, AdaptedDecoder) and model.captures_adapters
        captures = Captures(self._passes(widths), pieces=self._pieces(), adapted=adapted)
        self._plan("target", captures)
        return GraphedDecoder(model, captures, self.block_size, self.backend)

    def draft_model(
        self,
        model: DecoderModel,
        steps: int,
        tree: TreePlan | None = None,
        *,
        shares: bool = False,
        mask: int | None = None,
    ) -> DecoderModel:
        """A draft model with its loop captured, of ``steps`` drafts, or of a tree. It has not seen one or two tokens
        when it begins: the root, and behind a chain that was accepted whole its last draft; behind a tree, and behind
        drafts that one pass over ``mask`` tokens has made, the whole accepted path. Prompts that it catches up on are
        passes in pieces. One that ``shares`` the target's storage has seen all but the root."""
        if not capturable(model):
            return model
        masked = mask is not None
        captures = self._loops(0 if shares else steps if masked else 1, steps, tree, masked)
        if not shares:
            captures = replace(captures, pieces=self._pieces(), mask=mask)
        self._plan(f"draft model {model.config.architecture}", captures)
        return GraphedDecoder(model, captures, self.block_size, self.backend)

    def head(self, head: HeadModel, steps: int, tree: TreePlan | None = None) -> HeadModel:
        """A draft head likewise. It has not seen the tokens of the last step: the accepted ones, and the root."""
        if not head.capturable:
            return head
        block = head if isinstance(head, BlockHead) else None
        captures = self._loops(steps, steps, tree, head.mask_token is not None and block is None)
        if head.num_depths > 1 and (tree is not None or steps < head.num_depths):
            captures = Captures(())  # a tree's layers read what other nodes have been given
        elif block is not None and captures.loops:
            captures = replace(captures, block=block.rows_of(steps if tree is None else tree.levels))
        self._plan(f"head {type(head).__name__}", captures)
        return GraphedHead(head, captures, self.block_size, self.backend)

    def medusa(
        self,
        heads: MedusaHeads,
        steps: int,
        hidden_size: int,
        dtype: torch.dtype,
        tree: TreePlan | None = None,
    ) -> GraphedMedusa | None:
        """Medusa heads, for steps that stay on the device; None: they cannot be captured. Their loops are captured
        once for every number of requests, since no context matters to them."""
        if not heads.capturable:
            return None
        if tree is not None and tree.shape is None:
            tree = replace(tree, depth=min(tree.depth, heads.num_heads), asked=tree.depth)
        captures = self._loops(0, steps, tree)
        reach = captures.max_keys
        captures = replace(captures, loops=tuple(s for s in captures.loops if s.keys == reach))
        self._plan("Medusa heads", captures)
        return GraphedMedusa(heads, hidden_size, dtype, captures, self.block_size, self.backend)

    def tree_of(self, config: SpeculativeConfig) -> TreePlan | None:
        """See `tree_plan`."""
        return self.tree or tree_plan(config)

    @property
    def count(self) -> int:
        """Passes and loops that are planned. One in pieces counts as two: it has no more operations than a whole one,
        but a graph for every layer."""
        return sum(captures.count + len(captures.pieces) for captures in self.planned.values())

    def __str__(self) -> str:
        """The plan as a text."""
        return "; ".join(f"{name}: {captures}" for name, captures in self.planned.items())

    def _plan(self, name: str, captures: Captures) -> None:
        same = sum(1 for known in self.planned if known.split(" #")[0] == name)
        self.planned[f"{name} #{same + 1}" if same else name] = captures

    def _pieces(self) -> tuple[int, ...]:
        if self.mode not in ("piecewise", "full_and_piecewise"):
            return ()
        return piece_rows(
            max_num_batched_tokens=self.max_num_batched_tokens, sizes=self.sizes, largest=self.largest
        )

    def _passes(self, widths: Sequence[int]) -> tuple[Shape, ...]:
        if self.mode in ("none", "piecewise"):
            return ()
        return pass_shapes(
            widths=widths,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            sizes=self.sizes,
            largest=self.largest,
        )

    def _loops(self, unseen: int, steps: int, tree: TreePlan | None = None, masked: bool = False) -> Captures:
        """``unseen``: accepted drafts of a chain that the first pass reads, besides the root; 0: it never reads any.
        ``masked``: masks stand behind them."""
        if self.mode in ("none", "piecewise"):
            return Captures(())
        if unseen:
            unseen = max(unseen if tree is None else tree.levels, self.unseen)
        rows = 1 + unseen + (steps - 1 if masked else 0)
        steps = steps if tree is None else 0
        reach, counts = key_limits(self.max_model_len), request_counts(self.max_num_seqs)
        shapes = tuple(Shape(count, rows, keys) for keys in reach for count in counts)
        return Captures((), shapes, steps, tree)
