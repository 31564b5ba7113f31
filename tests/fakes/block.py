"""Block drafters written out in plain float32 torch, over whole texts and with no cache: what the engine's have to
compute, and folders of them in the published forms."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class BlockShape:
    """Everything that config.json says of a block drafter. ``form``: who writes it."""

    form: str = "z-lab"  # or "deepspec", "speculators"
    hidden: int = 32
    vocab: int = 61
    target_layers: tuple[int, ...] = (0, 1)  # whose outputs are read
    num_target_layers: int = 2
    block: int = 5
    mask: int = 60
    layers: int = 2
    inner: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    theta: float = 10000.0
    eps: float = 1e-5
    windows: tuple[int | None, ...] = (None, None)
    causal: bool | None = None  # None: layers with a window are
    from_root: bool = False
    markov: str | None = None
    rank: int = 6
    domino: tuple[int, int, int] | None = (
        None  # width of the GRU, of its projection, first draft that is corrected
    )
    selector: tuple[int, int] | None = None  # rank, candidates
    conv: tuple[int, int] | None = None  # taps, channels of a group
    own: bool = False  # embedding and output layer
    draft_vocab: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # more of config.json

    def is_causal(self, layer: int) -> bool:
        if self.conv is not None and self.causal is None:
            return False
        return self.windows[layer] is not None if self.causal is None else self.causal


def random_weights(shape: BlockShape, seed: int = 0, scale: float = 0.25) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) * scale

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    h, d = shape.hidden, shape.head_dim
    out: Weights = {
        "fc.weight": normal(h, h * len(shape.target_layers)),
        "hidden_norm.weight": norm(h),
        "norm.weight": norm(h),
    }
    for i in range(shape.layers):
        at = f"layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", shape.heads * d, h),
            ("self_attn.k_proj", shape.kv_heads * d, h),
            ("self_attn.v_proj", shape.kv_heads * d, h),
            ("self_attn.o_proj", h, shape.heads * d),
            ("mlp.gate_proj", shape.inner, h),
            ("mlp.up_proj", shape.inner, h),
            ("mlp.down_proj", h, shape.inner),
        ):
            out[f"{at}{name}.weight"] = normal(rows, columns)
        for name, size in (("input_layernorm", h), ("post_attention_layernorm", h), ("self_attn.q_norm", d)):
            out[f"{at}{name}.weight"] = norm(size)
        out[f"{at}self_attn.k_norm.weight"] = norm(d)
    vocab = shape.draft_vocab or shape.vocab
    if shape.own:
        out["embed_tokens.weight"] = normal(shape.vocab, h) * 4
        out["lm_head.weight"] = normal(vocab, h)
    if shape.draft_vocab is not None:
        chosen = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab].sort().values
        out["d2t"] = chosen - torch.arange(shape.draft_vocab)
        out["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    if shape.markov is not None:
        r = shape.rank
        out["markov_head.markov_w1.weight"] = normal(shape.vocab, r) * 4
        out["markov_head.markov_w2.weight"] = normal(vocab, r) * 2
        if shape.markov == "gated":
            out["markov_head.gate_proj.weight"] = normal(r, h + r)
            out["markov_head.gate_proj.bias"] = normal(r)
        if shape.markov == "rnn":
            out["markov_head.joint_proj.weight"] = normal(3 * r, 2 * r + h)
            out["markov_head.joint_proj.bias"] = normal(3 * r)
        out["confidence_head.proj.weight"] = normal(1, h + r)
    if shape.domino is not None:
        width, inner, _ = shape.domino
        out["prefix_gru.weight_ih_l0"] = normal(3 * width, h) * 2
        out["prefix_gru.weight_hh_l0"] = normal(3 * width, width) * 2
        out["embed_proj.0.weight"] = normal(inner, h + width) * 2
        out["embed_proj.2.weight"] = normal(vocab, inner) * 2
    if shape.selector is not None:
        rank, _ = shape.selector
        out["candidate_selector.predecessor_codebook"] = normal(shape.vocab, rank) * 4
        out["candidate_selector.successor_codebook"] = normal(shape.vocab, rank) * 4
        out["candidate_selector.hidden_projection.weight"] = normal(rank, h)
    if shape.conv is not None:
        taps, group = shape.conv
        for i in range(shape.layers):
            for part in ("attention_conv", "mlp_conv"):
                out[f"layers.{i}.{part}.base_kernel"] = normal(2, taps, h) + 0.5
                out[f"layers.{i}.{part}.kernel_projection.weight"] = normal(2 * taps * (h // group), h) * 0.5
    return out


def save_block(folder: Path, shape: BlockShape, weights: Weights) -> str:
    """Write the drafter's folder in its form."""
    folder.mkdir(parents=True, exist_ok=True)
    layer: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": 192,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if any(shape.windows):
        layer["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in shape.windows]
        layer["sliding_window"] = next(w for w in shape.windows if w is not None)
        layer["use_sliding_window"] = True
    if shape.causal is not None:
        layer["is_causal"] = shape.causal
    dflash: dict[str, Any] = {"target_layer_ids": list(shape.target_layers), "mask_token_id": shape.mask}
    if shape.scale != 1.0:
        dflash["output_multiplier"] = shape.scale
    if shape.softcap is not None:
        dflash["final_logit_softcapping"] = shape.softcap
    markov: dict[str, Any] = {}
    if shape.markov is not None:
        markov = {"markov_rank": shape.rank, "markov_head_type": shape.markov, "enable_confidence_head": True}
    if shape.domino is not None:
        names = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
        dflash |= dict(zip(names, shape.domino, strict=True))
        dflash |= {"projector_type": "domino", "shift_label": shape.from_root}
    if shape.selector is not None:
        dflash |= {"selector_rank": shape.selector[0], "selector_top_k": shape.selector[1]}
    if shape.conv is not None:
        dflash |= {"conv_kernel_size": shape.conv[0], "conv_group_size": shape.conv[1]}
    if shape.form == "z-lab":
        config = layer | {
            "architectures": ["DFlash2DraftModel" if shape.conv is not None else "DFlashDraftModel"],
            "block_size": shape.block,
            "num_target_layers": shape.num_target_layers,
            "dflash_config": dflash,
        }
    elif shape.form == "deepspec":
        config = layer | dflash | markov | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": shape.block,
            "num_target_layers": shape.num_target_layers,
            "num_anchors": 8,
        }  # fmt: skip
    else:
        kind = (
            "dspark" if shape.markov else "dflash2" if shape.conv else "domino" if shape.domino else "dflash"
        )
        config = (
            markov
            | (dflash if shape.conv or shape.domino else {})
            | {
                "architectures": ["DSparkSpeculator" if shape.markov else "DFlashSpeculator"],
                "speculators_model_type": kind,
                "transformer_layer_config": layer,
                "aux_hidden_state_layer_ids": [i + 1 for i in shape.target_layers],
                "mask_token_id": shape.mask,
                "block_size": shape.block,
                "draft_vocab_size": shape.draft_vocab or shape.vocab,
                "sample_from_anchor": shape.from_root,
            }
        )
    (folder / "config.json").write_text(json.dumps(config | shape.extra))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return str(folder)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class ReferenceBlock:
    """What the papers' models compute. ``embedding``, ``output``: the target's."""

    def __init__(self, shape: BlockShape, weights: Weights, embedding: Tensor, output: Tensor) -> None:
        self.shape, self.weights = shape, weights
        self.embedding = weights.get("embed_tokens.weight", embedding)
        self.output = weights.get("lm_head.weight", output)
        self.target_ids = torch.arange(shape.vocab)
        if "d2t" in weights:
            self.target_ids = weights["d2t"] + torch.arange(len(weights["d2t"]))

    def features(self, states: list[Tensor]) -> Tensor:
        """[n, H] of the target's hidden states: ``states[i]`` enters layer i."""
        joined = torch.cat([states[layer + 1] for layer in self.shape.target_layers], dim=-1)
        return _norm(joined @ self.weights["fc.weight"].T, self.weights["hidden_norm.weight"], self.shape.eps)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        d = self.shape.head_dim
        angles = positions[:, None] / self.shape.theta ** (torch.arange(0, d, 2) / d)
        cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
        half = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), dim=-1)
        return x * cos + half * sin

    def block(self, tokens: list[int], features: Tensor, masks: int) -> Tensor:
        """Hidden states [1 + masks, H] of root and masks behind the final norm. ``features``: of all known tokens but
        the last one, the root."""
        shape, w = self.shape, self.weights
        ids = torch.tensor([tokens[-1]] + [shape.mask] * masks)
        x = self.embedding[ids]
        known = len(tokens) - 1
        places = torch.arange(known, known + len(ids))
        keys_at = torch.arange(known + len(ids))
        for i in range(shape.layers):
            at = f"layers.{i}."
            normed = _norm(x, w[at + "input_layernorm.weight"], shape.eps)
            normed, kernels = self._enter(normed, at + "attention_conv.")
            read = torch.cat((features, normed))
            q = (normed @ w[at + "self_attn.q_proj.weight"].T).unflatten(-1, (shape.heads, shape.head_dim))
            k = (read @ w[at + "self_attn.k_proj.weight"].T).unflatten(-1, (shape.kv_heads, shape.head_dim))
            v = (read @ w[at + "self_attn.v_proj.weight"].T).unflatten(-1, (shape.kv_heads, shape.head_dim))
            q = self._rotate(_norm(q, w[at + "self_attn.q_norm.weight"], shape.eps), places)
            k = self._rotate(_norm(k, w[at + "self_attn.k_norm.weight"], shape.eps), keys_at)
            seen = torch.ones(len(ids), len(keys_at), dtype=torch.bool)
            if shape.is_causal(i):
                seen &= keys_at <= places[:, None]
            window = shape.windows[i]
            if window is not None:
                seen &= places[:, None] - keys_at < window
            group = shape.heads // shape.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("nhd,lhd->hnl", q, k) * shape.head_dim**-0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            attended = torch.einsum("hnl,lhd->nhd", weights, v).flatten(1)
            x = x + self._leave(
                attended @ w[at + "self_attn.o_proj.weight"].T, kernels, at + "attention_conv."
            )
            normed = _norm(x, w[at + "post_attention_layernorm.weight"], shape.eps)
            normed, kernels = self._enter(normed, at + "mlp_conv.")
            inner = F.silu(normed @ w[at + "mlp.gate_proj.weight"].T) * (
                normed @ w[at + "mlp.up_proj.weight"].T
            )
            x = x + self._leave(inner @ w[at + "mlp.down_proj.weight"].T, kernels, at + "mlp_conv.")
        return _norm(x, w["norm.weight"], shape.eps)

    def _enter(self, x: Tensor, at: str) -> tuple[Tensor, Tensor | None]:
        """The convolution in front, and the kernels [rows, taps, groups] of the one behind."""
        if self.shape.conv is None:
            return x, None
        taps, group = self.shape.conv
        kernels = x @ self.weights[at + "kernel_projection.weight"].T
        kernels = kernels.view(len(x), 2, taps, x.shape[1] // group)
        return self._convolved(x, kernels[:, 0], self.weights[at + "base_kernel"][0]), kernels[:, 1]

    def _leave(self, x: Tensor, kernels: Tensor | None, at: str) -> Tensor:
        if kernels is None:
            return x
        return self._convolved(x, kernels, self.weights[at + "base_kernel"][1])

    def _convolved(self, x: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
        assert self.shape.conv is not None
        taps, group = self.shape.conv
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(taps, row + 1)):
                weight = base[tap] + kernels[row, tap].repeat_interleave(group)
                out[row] += weight * x[row - tap]
        return out

    def _domino(self, before: list[int], hidden: Tensor) -> Tensor:
        assert self.shape.domino is not None
        width, _, first = self.shape.domino
        if len(before) <= first:
            return torch.zeros(len(self.output))
        gru = torch.nn.GRU(self.shape.hidden, width, bias=False, batch_first=True)
        gru.load_state_dict({n: self.weights[f"prefix_gru.{n}"] for n in ("weight_ih_l0", "weight_hh_l0")})
        with torch.no_grad():
            states, _ = gru(self.embedding[before][None])
        joined = torch.cat((hidden, states[0, -1]))
        return self.weights["embed_proj.2.weight"] @ F.silu(self.weights["embed_proj.0.weight"] @ joined)

    def _selected(self, logits: Tensor, previous: int, hidden: Tensor) -> Tensor:
        assert self.shape.selector is not None
        w, at = self.weights, "candidate_selector."
        context = w[at + "predecessor_codebook"][previous] * (w[at + "hidden_projection.weight"] @ hidden)
        out = torch.full_like(logits, float("-inf"))
        for token in logits.topk(self.shape.selector[1]).indices.tolist():
            out[token] = logits[token] + context @ w[at + "successor_codebook"][token]
        return out

    def _corrections(self, previous: int, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        w = self.weights
        row = w["markov_head.markov_w1.weight"][previous]
        if self.shape.markov == "gated":
            joined = torch.cat((hidden, row))
            row = row * torch.sigmoid(
                w["markov_head.gate_proj.weight"] @ joined + w["markov_head.gate_proj.bias"]
            )
        elif self.shape.markov == "rnn":
            joined = torch.cat((state, row, hidden))
            gate, candidate, out = (
                w["markov_head.joint_proj.weight"] @ joined + w["markov_head.joint_proj.bias"]
            ).chunk(3)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            row = torch.tanh(out)
        return w["markov_head.markov_w2.weight"] @ row, state

    def logits(self, tokens: list[int], features: Tensor, drafts: list[int], count: int) -> Tensor:
        """[Vd] of the draft behind ``drafts``, in a block of ``count`` drafts."""
        return self.logits_of(self.places(tokens, features, count), tokens, drafts)

    def places(self, tokens: list[int], features: Tensor, count: int) -> Tensor:
        """Hidden states [count, H] of a block's drafts, whatever these are."""
        hidden = self.block(tokens, features, count - 1 if self.shape.from_root else count)
        return hidden if self.shape.from_root else hidden[1:]

    def logits_of(self, hidden: Tensor, tokens: list[int], drafts: list[int]) -> Tensor:
        """As `logits`, from the hidden states of `places`."""
        shape = self.shape
        state = torch.zeros(shape.rank)
        out = torch.empty(0)
        for place in range(len(drafts) + 1):
            out = hidden[place] @ self.output.T * shape.scale
            if shape.softcap is not None:
                out = shape.softcap * torch.tanh(out / shape.softcap)
            if shape.markov is not None:
                last = tokens[-1] if place == 0 else drafts[place - 1]
                more, state = self._corrections(last, hidden[place], state)
                out = out + more
            before = [tokens[-1], *drafts[:place]]
            if shape.domino is not None:
                out = out + self._domino(before, hidden[place])
            if shape.selector is not None:
                out = self._selected(out, before[-1], hidden[place])
        return out

    def draft(self, tokens: list[int], features: Tensor, count: int) -> list[int]:
        """The most likely drafts, one after another."""
        drafts: list[int] = []
        hidden = self.places(tokens, features, count)
        for _ in range(count):
            best = int(self.logits_of(hidden, tokens, drafts).argmax())
            drafts.append(int(self.target_ids[best]))
        return drafts
