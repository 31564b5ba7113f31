"""Corrections of a block's logits by what was drafted before a place: their contract, Domino's and DFlash2's.

=============  =============================================================================================
DSpark         `models.heads.markov`
Domino         (arXiv:2605.29707) a GRU reads the tokens from the root on; ``embed_proj.2 SiLU(embed_proj.0
               [hidden | its state])`` is added to the logits, from draft ``pure_draft_prefix_len`` on
DFlash2        a path selector: of the ``selector_top_k`` most likely tokens of a place, each gets
               ``(predecessor[token before] * hidden_projection(hidden)) . successor[token]`` added, and nothing else is
               drafted there. Likeliest first it is the authors' path; sampled, the distribution over the k
               tokens is what is drawn from and reported
=============  =============================================================================================
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.blocks import CorrectionParts
from draftwise.kernels.handles import Linear
from draftwise.models.weights import WeightPlan


class Correction(Protocol):
    """A block drafter's correction of its logits, place by place."""

    @property
    def carries(self) -> bool:
        """Whether a state is carried from place to place."""
        ...

    def finish(self, ops: Ops, plan: WeightPlan) -> None:
        """Every parameter can be filled: pack them."""
        ...

    def parts(self) -> CorrectionParts:
        """The parts of the correction, for kernels that draw whole blocks; after `finish`."""
        ...

    def correct(
        self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of one place of several blocks, or of several nodes of a tree at one depth.

        Args:
            logits: [M, Vd] float32 of the place, as the block gave them.
            previous: [M] int64, the target's id of the token before it.
            hidden: [M, H] of the block's row that gave the logits.
            state: [M, r] float32 behind the place before; None: this is the first one.
            place: number of the draft, from 0.

        Returns:
            [M, Vd] float32, and the state behind this place if one is carried. Row by row the same bits in any company.
        """
        ...


class DominoHead:
    """See the module's text.

    Args:
        width: of the GRU's state.
        inner: of the projection.
        first: number of the first draft that is corrected.
        embedding: [V, E] of the tokens that the GRU reads.
    """

    def __init__(
        self,
        width: int,
        inner: int,
        first: int,
        embedding: Tensor,
        draft_vocab_size: int,
        hidden_size: int,
        plan: WeightPlan,
    ) -> None:
        """Declare the parameters.

        Raises:
            ModelLoadError: a size that is not positive, or ``first`` below 0.
        """
        if width < 1 or inner < 1 or first < 0:
            raise ModelLoadError(
                f"gru_hidden_dim {width}, emb_dim {inner} and pure_draft_prefix_len {first} must be positive"
            )
        self._first, self._width = first, width
        self._embedding = embedding
        self._loaded = (
            plan.tensor("prefix_gru.weight_ih_l0", (3 * width, embedding.shape[1])),
            plan.tensor("prefix_gru.weight_hh_l0", (3 * width, width)),
            plan.tensor("embed_proj.0.weight", (inner, hidden_size + width)),
            plan.tensor("embed_proj.2.weight", (draft_vocab_size, inner)),
        )

    carries = True

    def finish(self, ops: Ops, plan: WeightPlan) -> None:
        """As `Correction.finish`."""
        for weight in self._loaded:
            plan.fill(weight)
        self._ops = ops
        self._input, self._state, self._inner = (ops.pack_exact(weight) for weight in self._loaded[:3])
        self._out: Linear = ops.pack_head(self._loaded[3])
        del self._loaded

    def parts(self) -> CorrectionParts:
        """As `Correction.parts`."""
        return CorrectionParts(
            "domino",
            self._embedding,
            join=self._input,
            state_join=self._state,
            inner=self._inner,
            out=self._out,
            number=self._first,
            state_width=self._width,
        )

    def correct(
        self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor | None]:
        """As `Correction.correct`."""
        ops, dtype = self._ops, hidden.dtype
        embedded = ops.embedding(previous, self._embedding).to(dtype)
        if state is None:
            state = torch.zeros((len(previous), self._width), dtype=torch.float32, device=hidden.device)
        # torch's GRU: parts are reset, update, candidate; without biases
        reset, update, new = ops.linear(embedded, self._input).float().chunk(3, dim=-1)
        reset2, update2, new2 = ops.linear(state.to(dtype), self._state).float().chunk(3, dim=-1)
        update = torch.sigmoid(update + update2)
        new = torch.tanh(new + torch.sigmoid(reset + reset2) * new2)
        state = (1.0 - update) * new + update * state
        if place < self._first:
            return logits, state
        inner = ops.linear(torch.cat((hidden, state.to(dtype)), dim=-1), self._inner)
        return logits + ops.logits(torch.nn.functional.silu(inner.float()).to(dtype), self._out), state


class PathSelector:
    """See the module's text. ``rank``: of its tables; ``top_k``: candidates of a place."""

    def __init__(self, rank: int, top_k: int, vocab_size: int, hidden_size: int, plan: WeightPlan) -> None:
        """Declare the parameters.

        Raises:
            ModelLoadError: more candidates than tokens, or none.
        """
        if not 1 <= top_k <= vocab_size:
            raise ModelLoadError(f"selector_top_k {top_k} is not from 1 to the {vocab_size} tokens there are")
        self._top_k = top_k
        self._before = plan.tensor("candidate_selector.predecessor_codebook", (vocab_size, rank))
        self._after = plan.tensor("candidate_selector.successor_codebook", (vocab_size, rank))
        self._loaded = plan.tensor("candidate_selector.hidden_projection.weight", (rank, hidden_size))

    carries = False

    def finish(self, ops: Ops, plan: WeightPlan) -> None:
        """As `Correction.finish`."""
        for weight in (self._before, self._after, self._loaded):
            plan.fill(weight)
        self._ops = ops
        self._projection: Linear = ops.pack_exact(self._loaded)
        del self._loaded

    def parts(self) -> CorrectionParts:
        """As `Correction.parts`."""
        return CorrectionParts(
            "selector", self._before, self._after, join=self._projection, number=self._top_k
        )

    def correct(
        self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor | None]:
        """As `Correction.correct`; tokens that are no candidates get minus infinity."""
        best, ids = logits.topk(self._top_k, dim=-1)
        context = self._before[previous].float() * self._ops.linear(hidden, self._projection).float()
        scores = best + (self._after[ids].float() * context[:, None]).sum(-1)
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, scores), None
