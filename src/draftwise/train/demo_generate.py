"""Text from the target itself, for the draft model to learn on what it will be asked to continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .demo_model import Attention, DemoLlama, Layer, rotate


@torch.no_grad()
def continue_windows(
    model: DemoLlama, prompts: Tensor, length: int, temperatures: Sequence[float], seed: int
) -> Tensor:
    """Continue prompts (rows, tokens) int64 to (rows, length) by sampling, in bfloat16, all rows in step.

    Args:
        model: gives the distribution.
        length: tokens per row in the end, at most the model's context.
        temperatures: rows take them in turn; 0 takes the most likely token.
        seed: of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, start = prompts.shape
    heat = torch.tensor([temperatures[i % len(temperatures)] for i in range(rows)])[:, None]
    greedy, safe = heat[:, 0] == 0, heat.clamp_min(1e-3)
    cast_model = _Cast(model, rows, length)
    text = torch.zeros(rows, length, dtype=torch.int64)
    text[:, :start] = prompts
    fed = 0
    for position in range(start, length):
        logits = cast_model.forward(text[:, fed:position], fed)
        drawn = torch.multinomial(torch.softmax(logits / safe, -1), 1, generator=generator)[:, 0]
        text[:, position] = torch.where(greedy, logits.argmax(-1), drawn)
        fed = position
    return text


class _Cast:
    """The model's weights in bfloat16 with a key/value cache of fixed size, for generation only."""

    def __init__(self, model: DemoLlama, rows: int, length: int) -> None:
        shape = model.shape
        self._shape = shape
        self._model = model
        self._layers = [cast(Layer, layer) for layer in model.model.layers]
        self._qkv = [_stack(layer.self_attn) for layer in self._layers]
        self._out = [layer.self_attn.o_proj.weight.bfloat16() for layer in self._layers]
        self._gate_up = [
            torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]).bfloat16()
            for layer in self._layers
        ]
        self._down = [layer.mlp.down_proj.weight.bfloat16() for layer in self._layers]
        self._embedding = model.model.embed_tokens.weight.bfloat16()
        size = (len(self._layers), rows * shape.num_kv_heads, length, shape.head_dim)
        self._keys = torch.zeros(size, dtype=torch.bfloat16)
        self._values = torch.zeros(size, dtype=torch.bfloat16)
        self._cos, self._sin = model.rope(length)

    def forward(self, ids: Tensor, first: int) -> Tensor:
        """Feed ids (rows, tokens) at positions from `first`; returns the last logits (rows, vocab) float32."""
        s = self._shape
        rows, tokens = ids.shape
        last = first + tokens
        group = s.num_heads // s.num_kv_heads
        cos, sin = self._cos[first:last], self._sin[first:last]
        mask = torch.full((tokens, last), float("-inf")).triu(first + 1)
        x = F.embedding(ids, self._embedding)
        for i, layer in enumerate(self._layers):
            heads = F.linear(layer.input_layernorm(x), self._qkv[i])
            heads = heads.view(rows, tokens, -1, s.head_dim).transpose(1, 2)
            q, k, v = torch.split(heads, [s.num_heads, s.num_kv_heads, s.num_kv_heads], dim=1)
            q = (rotate(q, cos, sin) * s.head_dim**-0.5).reshape(-1, group * tokens, s.head_dim)
            self._keys[i, :, first:last] = rotate(k, cos, sin).reshape(-1, tokens, s.head_dim)
            self._values[i, :, first:last] = v.reshape(-1, tokens, s.head_dim)
            scores = torch.bmm(q, self._keys[i, :, :last].transpose(1, 2)).view(-1, group, tokens, last)
            weights = torch.softmax(scores.float() + mask, -1).bfloat16()
            out = torch.bmm(weights.view(-1, group * tokens, last), self._values[i, :, :last])
            out = out.view(rows, s.num_heads, tokens, s.head_dim).transpose(1, 2).reshape(rows, tokens, -1)
            x = x + F.linear(out, self._out[i])
            gate, up = F.linear(layer.post_attention_layernorm(x), self._gate_up[i]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self._down[i])
        return F.linear(self._model.model.norm(x[:, -1]), self._embedding).float()


def _stack(attention: Attention) -> Tensor:
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return torch.cat([projection.weight for projection in projections]).bfloat16()
