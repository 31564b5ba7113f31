"""A small Llama for training: plain torch, parameter names as in Hugging Face's checkpoints.

Weights are kept in float32 and cast to bfloat16 where they are used; attention is two batched products, which
compiles to about twice the speed of the fused kernel for models this small on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .demo_recipe import LlamaShape


class _Weight(nn.Module):
    """A bare matrix, so that the parameter's name ends in `.weight` as in a Linear."""

    def __init__(self, rows: int, columns: int, std: float, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns, generator=generator) * std)


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention as two batched products."""

    def __init__(self, shape: LlamaShape, generator: torch.Generator) -> None:
        super().__init__()
        self.shape = shape
        hidden, std = shape.hidden_size, shape.hidden_size**-0.5
        self.q_proj = _Weight(shape.num_heads * shape.head_dim, hidden, std, generator)
        self.k_proj = _Weight(shape.num_kv_heads * shape.head_dim, hidden, std, generator)
        self.v_proj = _Weight(shape.num_kv_heads * shape.head_dim, hidden, std, generator)
        # Zero outputs: every layer starts as the identity, which trains faster.
        self.o_proj = _Weight(hidden, shape.num_heads * shape.head_dim, 0.0, generator)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """x: (batch, tokens, hidden); cos, sin: (tokens, head_dim / 2); mask: (tokens, tokens), 0 or -inf."""
        s = self.shape
        batch, tokens, _ = x.shape
        group = s.num_heads // s.num_kv_heads
        stacked = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(x.dtype)
        heads = F.linear(x, stacked).view(batch, tokens, -1, s.head_dim).transpose(1, 2)
        q, k, v = torch.split(heads, [s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
        q, k = rotate(q, cos, sin) * s.head_dim**-0.5, rotate(k, cos, sin)
        # The heads of a group are rows of one product, so that keys and values are never copied.
        q = q.reshape(batch * s.num_kv_heads, group * tokens, s.head_dim)
        k = k.reshape(batch * s.num_kv_heads, tokens, s.head_dim)
        v = v.reshape(batch * s.num_kv_heads, tokens, s.head_dim)
        scores = torch.bmm(q, k.transpose(1, 2)).view(-1, group, tokens, tokens)
        weights = torch.softmax(scores.float() + mask, -1).to(x.dtype)
        out = torch.bmm(weights.view(-1, group * tokens, tokens), v)
        out = out.view(batch, s.num_heads, tokens, s.head_dim).transpose(1, 2).reshape(batch, tokens, -1)
        return F.linear(out, self.o_proj.weight.to(x.dtype))


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: LlamaShape, generator: torch.Generator) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = _Weight(inner, hidden, hidden**-0.5, generator)
        self.up_proj = _Weight(inner, hidden, hidden**-0.5, generator)
        self.down_proj = _Weight(hidden, inner, 0.0, generator)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]).to(x.dtype)).chunk(
            2, -1
        )
        return F.linear(F.silu(gate) * up, self.down_proj.weight.to(x.dtype))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: LlamaShape, generator: torch.Generator) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape, generator)
        self.post_attention_layernorm = _Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = MLP(shape, generator)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class _Body(nn.Module):
    def __init__(self, shape: LlamaShape, generator: torch.Generator) -> None:
        super().__init__()
        self.embed_tokens = _Weight(shape.vocab_size, shape.hidden_size, 0.02, generator)
        self.layers = nn.ModuleList(Layer(shape, generator) for _ in range(shape.num_layers))
        self.norm = _Norm(shape.hidden_size, shape.norm_eps)


class DemoLlama(nn.Module):
    """A Llama whose `state_dict()` is a Hugging Face checkpoint with tied embeddings."""

    def __init__(self, shape: LlamaShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.model = _Body(shape, torch.Generator().manual_seed(seed))

    def rope(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the rotation's cosines and sines, each (tokens, head_dim / 2) float32."""
        half = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32) / self.shape.head_dim
        angles = torch.arange(tokens, dtype=torch.float32)[:, None] * self.shape.rope_theta ** -half[None, :]
        angles = angles.to(self.model.embed_tokens.weight.device)
        return angles.cos(), angles.sin()

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return logits (batch, tokens, vocab) in `dtype` for ids (batch, tokens) int64, positions from 0."""
        tokens = ids.shape[1]
        cos, sin = self.rope(tokens)
        mask = torch.full((tokens, tokens), float("-inf"), device=ids.device).triu(1)
        embedding = self.model.embed_tokens.weight
        x = F.embedding(ids, embedding).to(dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return F.linear(self.model.norm(x), embedding.to(dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (batch, heads, tokens, head_dim), halves paired as Hugging Face's Llama pairs them."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
