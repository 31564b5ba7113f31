"""The embedded target as a teacher of draft heads: frozen, with the hidden states heads eat."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from .demo_model import DemoLlama, rotate
from .demo_recipe import TARGET

FEATURE_LAYERS = (2, TARGET.num_layers // 2, TARGET.num_layers - 3)
"""Layers whose entering hidden states EAGLE-3 eats, as the paper chooses them."""

BLOCK_LAYERS = (*FEATURE_LAYERS, TARGET.num_layers)
"""The layers that a block drafter reads: also the output of the last layer."""


class DemoTeacher:
    """The embedded target in bfloat16.

    Args:
        folder: the target's folder (config, weights).
    """

    def __init__(self, folder: Path) -> None:
        self.model = DemoLlama(TARGET, seed=0)
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        self.model.to(torch.bfloat16).requires_grad_(False)
        state = self.model.state_dict()

        def joined(i: int, *names: str) -> Tensor:
            return torch.cat([state[f"model.layers.{i}.{name}.weight"] for name in names])

        self._layers = [
            (
                (
                    joined(i, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    joined(i, "self_attn.o_proj"),
                ),
                (joined(i, "mlp.gate_proj", "mlp.up_proj"), joined(i, "mlp.down_proj")),
                joined(i, "input_layernorm").float(),
                joined(i, "post_attention_layernorm").float(),
            )
            for i in range(TARGET.num_layers)
        ]
        self._final = state["model.norm.weight"].float()

    @property
    def embedding(self) -> Tensor:
        """The matrix [V, H] that embeds, and that gives logits too."""
        weight = self.model.model.embed_tokens.weight
        assert isinstance(weight, Tensor)
        return weight.detach()

    @torch.no_grad()
    def __call__(self, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden [B, S, H], features [B, S, 4 H] of `BLOCK_LAYERS` and probs [B, S, V], bfloat16.

        Args:
            ids: [B, S] int64.
            positions: [S] int64.
            mask: [S, S] float32, 0 or -inf.
        """
        hidden, features, probs = self._pass(ids, positions, mask)
        return hidden, features, probs

    def _pass(self, ids: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.model.shape
        half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = positions.float()[:, None] * shape.rope_theta ** -half[None, :]
        cos, sin = angles.cos(), angles.sin()
        batch, tokens = ids.shape
        heads, kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        group = heads // kv
        masks = mask.to(torch.bfloat16).repeat(group, 1)[None]
        x = F.embedding(ids, self.embedding)
        entering: list[Tensor] = []
        for i, (attention, mlp, first, second) in enumerate(self._layers):
            if i in BLOCK_LAYERS:
                entering.append(x)
            split = F.linear(_norm(x, first, shape.norm_eps), attention[0])
            split = split.view(batch, tokens, -1, dim).transpose(1, 2)
            q, k, v = torch.split(split, [heads, kv, kv], dim=1)
            q = (rotate(q, cos, sin) * dim**-0.5).reshape(batch * kv, group * tokens, dim)
            k = rotate(k, cos, sin).reshape(batch * kv, tokens, dim)
            v = v.reshape(batch * kv, tokens, dim)
            weights = torch.softmax(torch.baddbmm(masks, q, k.transpose(1, 2)), -1)
            out = torch.bmm(weights, v).view(batch, heads, tokens, dim).transpose(1, 2)
            x = x + F.linear(out.reshape(batch, tokens, -1), attention[1])
            gate, up = F.linear(_norm(x, second, shape.norm_eps), mlp[0]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, mlp[1])
        entering.append(x)
        hidden = _norm(x, self._final, shape.norm_eps)
        return hidden, torch.cat(entering, -1), torch.softmax(F.linear(hidden, self.embedding), -1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)
