"""Heads that draft one token after another from their own output: EAGLE, EAGLE-3 and MTP.

All train by unrolling over their own outputs. EAGLE-3 calls this training-time test (arXiv:2503.01840, section 3.2);
MTP needs it where more tokens are drafted than the checkpoint has layers, since the last is applied again;
EAGLE (arXiv:2401.15077) has one unroll and learns the target's next hidden state beside its distribution.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch import HeadBatch, row_weights
from .layers import MLP, HeadShape, Norm, UnrolledAttention, Weight
from .losses import Distillation, Lesson, Lessons


class SequentialHead(nn.Module):
    """The part that the three have in common.

    Args:
        shape: sizes of the decoder layer.
        embedding: the target's embedding [V, H] in the type to compute in; not trained.
        lm_head: the target's output matrix [V, H]; not trained.
        generator: of the initial weights.
    """

    embedding: Tensor
    lm_head_shared: Tensor
    inv_freq: Tensor
    draft_ids: Tensor | None
    """Target ids of the draft vocabulary, ascending, int64 [Vd]; None: the whole vocabulary."""
    input_factor: ClassVar[int] = 1
    feature_weight: float = 0.0
    """Weight of the distance to the target's hidden state in the loss."""

    def __init__(
        self, shape: HeadShape, embedding: Tensor, lm_head: Tensor, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("lm_head_shared", lm_head, persistent=False)
        self.register_buffer("inv_freq", shape.rope.inv_freq(), persistent=False)
        self.register_buffer("draft_ids", None)
        hidden = shape.hidden_size
        self.self_attn = UnrolledAttention(shape, self.input_factor * hidden, generator)
        self.post_attention_layernorm = Norm(hidden, shape.norm_eps)
        self.mlp = MLP(shape, generator)

    def first_features(self, batch: HeadBatch) -> Tensor:
        """Return what unroll 0 eats beside the embedding: [B, S, H]."""
        return batch.hidden

    def inputs(self, embedded: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the attention reads and what its output is added to.

        Args:
            embedded, features: [B, M, H].
            positions: [M] int64.
        """
        raise NotImplementedError

    def fed_back(self, output: Tensor) -> Tensor:
        """Return the features of the next unroll, from the layer's output [.., H]."""
        return output

    def hidden_for_logits(self, output: Tensor) -> Tensor:
        """Return what the output matrix reads, from the layer's output [.., H]."""
        return output

    def logits(self, output: Tensor) -> Tensor:
        """Return logits [.., Vd] from the layer's output [.., H]."""
        return F.linear(self.hidden_for_logits(output), self.lm_head_shared)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * self.inv_freq
        scale = self.shape.rope.attention_factor
        return angles.cos() * scale, angles.sin() * scale

    def unroll(self, batch: HeadBatch, rows: Tensor, unrolls: int) -> list[Tensor]:
        """Return the layer's outputs [B, M, H] of each unroll for the row numbers `rows` [M]."""
        # the last row takes the window's first token; no row that is trained sees it
        following = torch.roll(batch.ids, -1, 1)
        x_all, residual_all = self.inputs(
            F.embedding(following, self.embedding), self.first_features(batch), batch.positions
        )
        past = self.self_attn.start(x_all, self._angles(batch.positions))
        x, residual = x_all[:, rows], residual_all[:, rows]
        mask = batch.mask[rows].to(x.dtype)
        outputs: list[Tensor] = []
        for i in range(unrolls):
            positions = batch.positions[rows] + i
            angles = self._angles(positions)
            if i > 0:
                tokens = batch.ids[:, rows + 1 + i]
                x, residual = self.inputs(
                    F.embedding(tokens, self.embedding), self.fed_back(outputs[-1]), positions
                )
                self.self_attn.extend(past, x, angles)
            residual = residual + self.self_attn(past, x, angles, mask)
            outputs.append(residual + self.mlp(self.post_attention_layernorm(residual)))
        return outputs

    def predictions(self, batch: HeadBatch, rows: Tensor, unrolls: int) -> list[Tensor]:
        """Return the logits [B, M, Vd] of each unroll."""
        return [self.logits(output) for output in self.unroll(batch, rows, unrolls)]

    def loss(
        self,
        batch: HeadBatch,
        rows: Tensor,
        unrolls: int,
        decay: float,
        variation: float,
        distil: Distillation,
    ) -> Lesson:
        """Return what the unrolls say, unroll i weighing decay^i."""
        probs = batch.probs if self.draft_ids is None else batch.probs.index_select(-1, self.draft_ids)
        lessons = Lessons(distil, decay, variation)
        for i, output in enumerate(self.unroll(batch, rows, unrolls)):
            weights = row_weights(batch, rows, i)
            lessons.add(self.logits(output), probs[:, rows + 1 + i], weights)
            if self.feature_weight:
                lessons.also(self.feature_loss(output, batch.hidden[:, rows + 1 + i], weights))
        return lessons.done()

    def feature_loss(self, output: Tensor, hidden: Tensor, weights: Tensor) -> Tensor:
        """Return the smooth L1 distance of the output [B, M, H] to the target's hidden state, added up over rows."""
        distance = F.smooth_l1_loss(output.float(), hidden.float(), reduction="none").mean(-1)
        return self.feature_weight * (distance * weights).sum()


class Eagle3Head(SequentialHead):
    """EAGLE-3: captured layers combined by `fc`; attention over [embedding; feature]; own draft vocabulary.

    Args:
        num_features: captured layers.
        draft_ids: target ids of the draft vocabulary, ascending, int64 [Vd].
    """

    input_factor = 2

    def __init__(
        self,
        shape: HeadShape,
        embedding: Tensor,
        lm_head: Tensor,
        generator: torch.Generator,
        *,
        num_features: int,
        draft_ids: Tensor,
    ) -> None:
        super().__init__(shape, embedding, lm_head, generator)
        hidden = shape.hidden_size
        self.fc = Weight(hidden, num_features * hidden, (num_features * hidden) ** -0.5, generator)
        self.input_layernorm = Norm(hidden, shape.norm_eps)
        self.hidden_norm = Norm(hidden, shape.norm_eps)
        self.norm = Norm(hidden, shape.norm_eps)
        self.lm_head = Weight(len(draft_ids), hidden, 0.0, generator)
        with torch.no_grad():
            self.lm_head.weight.copy_(lm_head[draft_ids])
        self.draft_ids = draft_ids

    def first_features(self, batch: HeadBatch) -> Tensor:
        # a teacher of several heads may capture more layers behind those that this one eats
        return self.fc(batch.features[..., : self.fc.weight.shape[1]])  # type: ignore[no-any-return]

    def inputs(self, embedded: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], -1), features

    def hidden_for_logits(self, output: Tensor) -> Tensor:
        return self.norm(output)  # type: ignore[no-any-return]

    def logits(self, output: Tensor) -> Tensor:
        return self.lm_head(self.hidden_for_logits(output))  # type: ignore[no-any-return]


class EagleHead(SequentialHead):
    """EAGLE: `fc` of [embedding; hidden] into a layer without input norm; learns the next hidden state too.

    Args:
        feature_weight: of the smooth L1 distance to the target's hidden state (the paper: 1, the cross-entropy 0.1).
    """

    def __init__(
        self,
        shape: HeadShape,
        embedding: Tensor,
        lm_head: Tensor,
        generator: torch.Generator,
        *,
        feature_weight: float = 10.0,
    ) -> None:
        super().__init__(shape, embedding, lm_head, generator)
        hidden = shape.hidden_size
        self.feature_weight = feature_weight
        self.fc = Weight(hidden, 2 * hidden, (2 * hidden) ** -0.5, generator)

    def inputs(self, embedded: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.fc(torch.cat([embedded, features], -1))
        return mixed, mixed


class MtpHead(SequentialHead):
    """A multi-token-prediction layer (DeepSeek-V3, arXiv:2412.19437, section 2.2): normed halves, `eh_proj`, a layer.

    The embedding of position 0 is zero. The layer's output is the next step's hidden state.

    Args:
        normed: it is so behind `shared_head_norm`, as in MiMo; else before it, as DeepSeek publishes its layers.
    """

    def __init__(
        self,
        shape: HeadShape,
        embedding: Tensor,
        lm_head: Tensor,
        generator: torch.Generator,
        *,
        normed: bool = False,
    ) -> None:
        super().__init__(shape, embedding, lm_head, generator)
        self.normed = normed
        hidden = shape.hidden_size
        self.enorm = Norm(hidden, shape.norm_eps)
        self.hnorm = Norm(hidden, shape.norm_eps)
        self.eh_proj = Weight(hidden, 2 * hidden, (2 * hidden) ** -0.5, generator)
        self.input_layernorm = Norm(hidden, shape.norm_eps)
        self.shared_head_norm = Norm(hidden, shape.norm_eps)

    def inputs(self, embedded: Tensor, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embedded = embedded * (positions != 0)[:, None].to(embedded.dtype)
        mixed = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(features)], -1))
        return self.input_layernorm(mixed), mixed

    def hidden_for_logits(self, output: Tensor) -> Tensor:
        return self.shared_head_norm(output)  # type: ignore[no-any-return]

    def fed_back(self, output: Tensor) -> Tensor:
        return self.shared_head_norm(output) if self.normed else output
