"""Corrections of a block's logits by the tokens before them: the Markov heads of DSpark.

A block drafter says for each place what it takes to come there, without knowing what is drafted before it. DSpark
(arXiv:2607.05147) adds to the logits of a place what the token just before it says, through two thin matrices:
``logits + W2 f(W1[previous token])``, W1 [V, r], W2 [Vd, r]. What f is differs:

=========  ================================================================================================
vanilla    the row of W1 as it is
gated      times sigmoid(gate([hidden | row])); ``hidden`` is the block's, behind the final norm
rnn        a state s is carried along the block: [gate | candidate | out] = joint([s | row | hidden]),
           s' = sigmoid(gate) s + (1 - sigmoid(gate)) tanh(candidate), f = tanh(out); s is zero at the block's start
=========  ================================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftwise.errors import ModelLoadError
from draftwise.kernels.base import Ops
from draftwise.kernels.cpu.blocks import CorrectionParts
from draftwise.kernels.handles import Linear
from draftwise.models.weights import WeightPlan

MARKOV_KINDS: Final = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """``kind``: one of `MARKOV_KINDS`; ``rank``: r."""

    kind: str
    rank: int


class MarkovHead:
    """See the module's text. The life of a head's part: declared, filled by the loader, packed by `finish`."""

    def __init__(
        self, shape: MarkovShape, vocab_size: int, draft_vocab_size: int, hidden_size: int, plan: WeightPlan
    ) -> None:
        """Declare the parameters.

        Raises:
            ModelLoadError: a kind that is not known, or a rank that is no positive number.
        """
        if shape.kind not in MARKOV_KINDS:
            raise ModelLoadError(
                f"markov_head_type {shape.kind!r} is not supported (only {', '.join(MARKOV_KINDS)})"
            )
        if shape.rank < 1:
            raise ModelLoadError(f"markov_rank {shape.rank} must be positive")
        self.shape = shape
        rank = shape.rank
        self._rows = plan.tensor("markov_head.markov_w1.weight", (vocab_size, rank))
        self._loaded_out = plan.tensor("markov_head.markov_w2.weight", (draft_vocab_size, rank))
        self._loaded_join: tuple[Tensor, Tensor] | None = None
        if shape.kind == "gated":
            self._loaded_join = (
                plan.tensor("markov_head.gate_proj.weight", (rank, hidden_size + rank)),
                plan.tensor("markov_head.gate_proj.bias", (rank,)),
            )
        elif shape.kind == "rnn":
            self._loaded_join = (
                plan.tensor("markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden_size)),
                plan.tensor("markov_head.joint_proj.bias", (3 * rank,)),
            )

    def finish(self, ops: Ops, plan: WeightPlan) -> None:
        """Every parameter can be filled: pack them."""
        plan.fill(self._rows)
        plan.fill(self._loaded_out)
        self._ops = ops
        self._out: Linear = ops.pack_head(self._loaded_out)
        self._join: Linear | None = None
        if self._loaded_join is not None:
            weight, bias = self._loaded_join
            plan.fill(weight)
            plan.fill(bias)
            self._join = ops.pack_exact(weight)
            self._bias = bias.float().contiguous()
        del self._loaded_out, self._loaded_join

    @property
    def carries(self) -> bool:
        """Whether a state is carried from place to place."""
        return self.shape.kind == "rnn"

    def parts(self) -> CorrectionParts:
        """As `models.heads.corrections.Correction.parts`."""
        return CorrectionParts(
            self.shape.kind,
            self._rows,
            join=self._join,
            out=self._out,
            bias=None if self._join is None else self._bias,
            state_width=self.shape.rank if self.carries else 0,
        )

    def correct(
        self, logits: Tensor, previous: Tensor, hidden: Tensor, state: Tensor | None, place: int
    ) -> tuple[Tensor, Tensor | None]:
        """As `models.heads.corrections.Correction.correct`; all places alike."""
        rows = self._rows[previous]
        if self._join is None:
            return logits + self._ops.logits(rows.contiguous(), self._out), None
        if self.shape.kind == "gated":
            joined = torch.cat((hidden, rows), dim=-1)
            gate = torch.sigmoid(self._ops.linear(joined, self._join).float() + self._bias)
            rows = (gate * rows.float()).to(rows.dtype)
            return logits + self._ops.logits(rows, self._out), None
        if state is None:
            state = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        joined = torch.cat((state.to(rows.dtype), rows, hidden), dim=-1)
        parts = self._ops.linear(joined, self._join).float() + self._bias
        gate, candidate, out = parts.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1.0 - gate) * torch.tanh(candidate)
        return logits + self._ops.logits(torch.tanh(out).to(rows.dtype), self._out), state
