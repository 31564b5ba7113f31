"""The decoder layer of sequential heads, written for training: unrolled over its own outputs.

Weights are float32 and cast to the type of the activations where they are used. Keys and values of unroll 0 are
computed for all rows, everything else only for the rows that are trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head's decoder layer; those of the target unless chosen otherwise."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope: RopeConfig


class Weight(nn.Module):
    """A bare matrix, so that the parameter's name ends in `.weight` as in a Linear."""

    def __init__(self, rows: int, columns: int, std: float, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns, generator=generator) * std)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., columns] -> [.., rows] in x's type."""
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [.., size] -> the same shape and type."""
        wide = x.float()
        return F.rms_norm(wide, (x.shape[-1],), self.weight, self.eps).to(x.dtype)


@dataclass(slots=True)
class Unrolled:
    """Keys and values that the unrolls so far have made, grouped by K/V head."""

    keys: Tensor  # [B, KV, S, D] of unroll 0, all rows
    values: Tensor  # [B, KV, S, D]
    own_keys: list[Tensor] = field(default_factory=list)  # per later unroll: [B, KV, M, D]
    own_values: list[Tensor] = field(default_factory=list)


class UnrolledAttention(nn.Module):
    """Grouped-query attention over unroll 0's keys and each row's own later ones.

    Args:
        input_size: width of what is projected to queries, keys and values (EAGLE-3: twice the hidden size).
    """

    def __init__(self, shape: HeadShape, input_size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        std = input_size**-0.5
        self.q_proj = Weight(shape.num_heads * shape.head_dim, input_size, std, generator)
        self.k_proj = Weight(shape.num_kv_heads * shape.head_dim, input_size, std, generator)
        self.v_proj = Weight(shape.num_kv_heads * shape.head_dim, input_size, std, generator)
        # Zero outputs: the layer starts as the identity, which trains faster.
        self.o_proj = Weight(shape.hidden_size, shape.num_heads * shape.head_dim, 0.0, generator)

    def _heads(self, x: Tensor, projection: Weight, heads: int) -> Tensor:
        """x [B, M, I] -> [B, heads, M, D]."""
        return projection(x).view(x.shape[0], x.shape[1], heads, self.shape.head_dim).transpose(1, 2)  # type: ignore[no-any-return]

    def start(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Unrolled:
        """Return unroll 0's keys and values: x [B, S, I], angles [S, D / 2] each."""
        kv = self.shape.num_kv_heads
        keys = rotate(self._heads(x, self.k_proj, kv), *angles)
        return Unrolled(keys, self._heads(x, self.v_proj, kv))

    def extend(self, past: Unrolled, x: Tensor, angles: tuple[Tensor, Tensor]) -> None:
        """Add a later unroll's keys and values: x [B, M, I], angles [M, D / 2] each."""
        kv = self.shape.num_kv_heads
        past.own_keys.append(rotate(self._heads(x, self.k_proj, kv), *angles))
        past.own_values.append(self._heads(x, self.v_proj, kv))

    def forward(self, past: Unrolled, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attend from x [B, M, I] to all that `past` holds; mask [M, S] in x's type. Returns [B, M, H]."""
        s = self.shape
        batch, rows, _ = x.shape
        group = s.num_heads // s.num_kv_heads
        q = rotate(self._heads(x, self.q_proj, s.num_heads), *angles) * s.head_dim**-0.5
        # The heads of a group are rows of one product, so that keys and values are never copied.
        q = q.reshape(batch * s.num_kv_heads, group * rows, s.head_dim)
        keys, values = past.keys.flatten(0, 1), past.values.flatten(0, 1)
        scores = torch.baddbmm(mask.repeat(group, 1)[None], q, keys.transpose(1, 2))
        by_row = q.view(batch, s.num_kv_heads, group, rows, s.head_dim)
        own = [
            (by_row * own_keys[:, :, None]).sum(-1).view(batch * s.num_kv_heads, group * rows, 1)
            for own_keys in past.own_keys
        ]
        weights = torch.softmax(torch.cat([scores, *own], -1) if own else scores, -1)
        columns = keys.shape[1]
        out = torch.bmm(weights[..., :columns], values).view(batch, s.num_kv_heads, group, rows, s.head_dim)
        for j, own_values in enumerate(past.own_values):
            share = weights[..., columns + j].view(batch, s.num_kv_heads, group, rows, 1)
            out = out + share * own_values[:, :, None]
        out = out.reshape(batch, s.num_heads, rows, s.head_dim).transpose(1, 2).reshape(batch, rows, -1)
        return self.o_proj(out)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: HeadShape, generator: torch.Generator) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = Weight(inner, hidden, hidden**-0.5, generator)
        self.up_proj = Weight(inner, hidden, hidden**-0.5, generator)
        self.down_proj = Weight(hidden, inner, 0.0, generator)

    def forward(self, x: Tensor) -> Tensor:
        """x [.., H] -> [.., H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, heads, M, D], halves paired as Hugging Face's Llama pairs them; cos, sin [M, D / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
