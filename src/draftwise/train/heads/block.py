"""Block drafters for training: DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147).

Blocks begin at random tokens of the text, their *anchors*. A block is the anchor and masks; its rows read the features
of all tokens before the anchor, and one another. Row r of the shared numbering (`batch`) stands for the block whose
anchor is token r+1, and its draft i is held against the target's distribution after token r+1+i, as unroll i of
other heads. Worked example, K = 3 drafts, tokens a b c d e at positions 0..4, row 0::

    features seen       a                        position 0
    block fed           b     mask  mask (mask)  positions 1, 2, 3, (4)
    DFlash says               c     d     e      a mask says what comes to its own place
    DSpark says         c     d     e            a row says what comes behind it: one mask less

DSpark corrects the logits of draft i by the token before it (`MarkovCorrection`), in training the text's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch import HeadBatch, at, row_weights
from .layers import MLP, HeadShape, Norm, Weight, rotate
from .losses import Distillation, Lesson, Lessons


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The settings of a block drafter, beside the shape of its layers."""

    layers: int
    drafts: int
    mask_token: int
    from_root: bool = False
    """The anchor's row says the first draft (DSpark)."""
    causal: bool = False
    """Rows do not see those behind them (JetSpec, arXiv:2606.18394)."""
    markov_kind: str = "vanilla"
    markov_rank: int = 0
    """0: no correction."""
    confidence: bool = False
    """A head that says how likely each draft is to be accepted."""

    @property
    def block_size(self) -> int:
        """Rows of a block."""
        return self.drafts if self.from_root else self.drafts + 1


class BlockAttention(nn.Module):
    """Grouped-query attention of blocks over the features of the text before them, and within each block."""

    def __init__(self, shape: HeadShape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        hidden, dim = shape.hidden_size, shape.head_dim
        std = hidden**-0.5
        self.q_proj = Weight(shape.num_heads * dim, hidden, std, generator)
        self.k_proj = Weight(shape.num_kv_heads * dim, hidden, std, generator)
        self.v_proj = Weight(shape.num_kv_heads * dim, hidden, std, generator)
        self.o_proj = Weight(hidden, shape.num_heads * dim, 0.0, generator)
        self.q_norm = Norm(dim, shape.norm_eps)
        self.k_norm = Norm(dim, shape.norm_eps)

    def _keys(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [.., KV, D] of rows x [.., H] at angles [.., D / 2]."""
        cos, sin = angles
        split = (self.shape.num_kv_heads, self.shape.head_dim)
        keys = self.k_norm(self.k_proj(x).unflatten(-1, split))
        keys = rotate(keys, cos[..., None, :], sin[..., None, :])
        return keys, self.v_proj(x).unflatten(-1, split)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        features: Tensor,
        feature_angles: tuple[Tensor, Tensor],
        mask: Tensor,
        own_mask: Tensor | None,
    ) -> Tensor:
        """Attend from blocks.

        Args:
            x: [B, M, R, H], R rows of each of M blocks.
            angles: [B, M, R, D / 2] each.
            features: [B, S, H].
            feature_angles: [S, D / 2] each.
            mask: [B, M, S] in x's type: which features a block sees.
            own_mask: [R, R], which rows of its block a row sees; None: all.

        Returns:
            [B, M, R, H].
        """
        s = self.shape
        batch, blocks, rows, _ = x.shape
        group, dim, kv = s.num_heads // s.num_kv_heads, s.head_dim, s.num_kv_heads
        q = self.q_norm(self.q_proj(x).unflatten(-1, (s.num_heads, dim)))
        q = rotate(q, angles[0][..., None, :], angles[1][..., None, :]) * dim**-0.5
        # [B, M, R, KV, G, D] -> [B, KV, M, G, R, D]: a block's queries lie side by side, for both products
        q = q.unflatten(3, (kv, group)).permute(0, 3, 1, 4, 2, 5).contiguous()
        keys, values = (t.transpose(1, 2).flatten(0, 1) for t in self._keys(features, feature_angles))
        own_keys, own_values = (
            t.permute(0, 3, 1, 2, 4).reshape(batch * kv * blocks, rows, dim) for t in self._keys(x, angles)
        )
        seen = torch.bmm(q.view(batch * kv, -1, dim), keys.transpose(1, 2))
        seen = seen.view(batch, kv, blocks, group * rows, -1) + mask[:, None, :, None]
        own = torch.bmm(q.view(batch * kv * blocks, group * rows, dim), own_keys.transpose(1, 2))
        if own_mask is not None:
            own = (own.view(-1, group, rows, rows) + own_mask).view_as(own)
        scores = torch.cat([seen, own.view(batch, kv, blocks, group * rows, rows)], -1)
        weights = torch.softmax(scores, -1)
        tokens = features.shape[1]
        out = torch.bmm(weights[..., :tokens].reshape(batch * kv, -1, tokens), values)
        within = torch.bmm(weights[..., tokens:].reshape(-1, group * rows, rows), own_values)
        out = (out.view_as(q) + within.view_as(q)).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(out.reshape(batch, blocks, rows, -1))  # type: ignore[no-any-return]


class BlockLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: HeadShape, generator: torch.Generator) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = BlockAttention(shape, generator)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape, generator)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        features: Tensor,
        feature_angles: tuple[Tensor, Tensor],
        mask: Tensor,
        own_mask: Tensor | None,
    ) -> Tensor:
        """As `BlockAttention.forward`."""
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, angles, features, feature_angles, mask, own_mask)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class MarkovCorrection(nn.Module):
    """The addition of the token before a draft to its logits; the kinds are those of `models.heads.markov`.

    The output matrix starts at zero: training begins with a plain block drafter.
    """

    def __init__(
        self, kind: str, rank: int, vocab: int, drafted: int, hidden: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.markov_w1 = Weight(vocab, rank, rank**-0.5, generator)
        self.markov_w2 = Weight(drafted, rank, 0.0, generator)
        if kind == "gated":
            self.gate_proj = _Affine(rank, hidden + rank, generator)
        elif kind == "rnn":
            self.joint_proj = _Affine(3 * rank, 2 * rank + hidden, generator)

    def forward(
        self, previous: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One place of blocks.

        Args:
            previous: [B, M] int64, the token before.
            hidden: [B, M, H] of the row that says the place.
            state: [B, M, r] behind the place before; None: this is the first.

        Returns:
            [B, M, Vd] to add to the logits, [B, M, r] the token's row, and the state behind this place.
        """
        row = F.embedding(previous, self.markov_w1.weight).to(hidden.dtype)
        said = row
        if self.kind == "gated":
            said = torch.sigmoid(self.gate_proj(torch.cat([hidden, row], -1))) * row
        elif self.kind == "rnn":
            state = torch.zeros_like(row) if state is None else state
            gate, candidate, out = self.joint_proj(torch.cat([state, row, hidden], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            said = torch.tanh(out)
        return self.markov_w2(said), row, state


class _Affine(nn.Module):
    def __init__(self, rows: int, columns: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns, generator=generator) * columns**-0.5)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Confidence(nn.Module):
    """How likely a draft is to be accepted if all before it were, as a logit, from its row and the token before it."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.proj = _Affine(1, width, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., width] -> [..] float32."""
        return self.proj(x).float()[..., 0]  # type: ignore[no-any-return]


class BlockDrafter(nn.Module):
    """DFlash, or with a Markov head and ``from_root`` DSpark.

    Args:
        shape: sizes of a layer; the hidden size is the target's.
        embedding, lm_head: the target's matrices [V, H] in the type to compute in; not trained.
        num_features: captured layers of the target.
        draft_ids: target ids of the draft vocabulary, ascending, int64 [Vd], with an output matrix of its own; None:
            the target's.
    """

    embedding: Tensor
    lm_head_shared: Tensor
    inv_freq: Tensor
    draft_ids: Tensor | None

    def __init__(
        self,
        shape: HeadShape,
        form: BlockForm,
        embedding: Tensor,
        lm_head: Tensor,
        generator: torch.Generator,
        *,
        num_features: int,
        draft_ids: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.form = shape, form
        hidden = shape.hidden_size
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("lm_head_shared", lm_head, persistent=False)
        self.register_buffer("inv_freq", shape.rope.inv_freq(), persistent=False)
        self.register_buffer("draft_ids", draft_ids)
        width = num_features * hidden
        self.fc = Weight(hidden, width, width**-0.5, generator)
        self.hidden_norm = Norm(hidden, shape.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape, generator) for _ in range(form.layers))
        self.norm = Norm(hidden, shape.norm_eps)
        if draft_ids is not None:
            self.lm_head = Weight(len(draft_ids), hidden, 0.0, generator)
            with torch.no_grad():
                self.lm_head.weight.copy_(lm_head[draft_ids])
        rank = form.markov_rank
        if rank:
            drafted = len(lm_head) if draft_ids is None else len(draft_ids)
            self.markov_head = MarkovCorrection(
                form.markov_kind, rank, len(embedding), drafted, hidden, generator
            )
        if form.confidence:
            self.confidence_head = Confidence(hidden + rank, generator)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * self.inv_freq
        scale = self.shape.rope.attention_factor
        return angles.cos() * scale, angles.sin() * scale

    def blocks(self, batch: HeadBatch, rows: Tensor) -> Tensor:
        """Return what says each draft: [B, M, K, H], of the blocks of row numbers `rows` [M] or [B, M]."""
        form, dtype = self.form, self.embedding.dtype
        rows = rows.to(batch.ids.device)
        rows = rows.expand(len(batch.ids), -1) if rows.ndim == 1 else rows
        features = self.hidden_norm(self.fc(batch.features))
        ids = batch.ids.new_full((*rows.shape, form.block_size), form.mask_token)
        ids[..., 0] = at(batch.ids, rows + 1)
        x = F.embedding(ids, self.embedding)
        places = batch.positions[rows + 1][..., None] + torch.arange(form.block_size, device=ids.device)
        angles, feature_angles = self._angles(places), self._angles(batch.positions)
        mask = batch.mask[rows].to(
            dtype
        )  # row r sees token r and those before it: what stands before the anchor
        own_mask = None
        if form.causal:
            own_mask = torch.full((form.block_size,) * 2, float("-inf"), dtype=dtype, device=ids.device).triu(
                1
            )
        for layer in self.layers:
            x = layer(x, angles, features, feature_angles, mask, own_mask)
        return self.norm(x if form.from_root else x[:, :, 1:])  # type: ignore[no-any-return]

    def _places(self, batch: HeadBatch, rows: Tensor, unrolls: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits [B, M, Vd] of each draft, along the text, and what its confidence is read from."""
        hidden = self.blocks(batch, rows)
        state: Tensor | None = None
        for i in range(unrolls):
            said = hidden[:, :, i]
            logits = F.linear(said, self.lm_head_shared) if self.draft_ids is None else self.lm_head(said)
            if self.form.markov_rank:
                more, row, state = self.markov_head(at(batch.ids, rows + 1 + i), said, state)
                logits, said = logits + more, torch.cat([said, row], -1)
            yield logits, said

    def predictions(self, batch: HeadBatch, rows: Tensor, unrolls: int) -> Iterator[Tensor]:
        """Yield the logits [B, M, Vd] of each draft."""
        for logits, _ in self._places(batch, rows, unrolls):
            yield logits

    def loss(
        self,
        batch: HeadBatch,
        rows: Tensor,
        unrolls: int,
        decay: float,
        variation: float,
        distil: Distillation,
    ) -> Lesson:
        """Return what the drafts say, draft i weighing decay^i. A confidence head learns beside, and moves nothing
        else."""
        lessons = Lessons(distil, decay, variation)
        whole: Tensor | None = None
        for i, (logits, said) in enumerate(self._places(batch, rows, unrolls)):
            probs = at(batch.probs, rows + 1 + i)
            if self.draft_ids is not None:
                probs = probs.index_select(-1, self.draft_ids)
            weights = row_weights(batch, rows, i)
            whole = weights if whole is None else whole * weights  # nothing is learned behind a gap
            overlap = lessons.add(logits, probs, whole)
            if self.form.confidence:
                confidence = self.confidence_head(said.detach())
                missed = F.binary_cross_entropy_with_logits(confidence, overlap.clamp(0, 1), reduction="none")
                lessons.also((missed * whole).sum())
        return lessons.done()
