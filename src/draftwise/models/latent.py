"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), absorbed.

A token stores one vector, shared by all heads: the normalised latent c [C], and a rotated key k_r [R]. Keys and values
of head h are W_k[h] c and W_v[h] c. Neither is made: with ``q . (W_k c) = (W_k^T q) . c`` queries go to the latent's
space before attention, attention gives a weighted sum of latents, and W_v is applied behind it. So the cache has C + R
numbers per token, and attention is that of one key/value head whose keys are their own values.

Kernels rotate dimension i of a head with i + D / 2, D = C + R. Vectors are therefore kept as

    [first halves of the rotated pairs, R / 2 | c, first half | second halves, R / 2 | c, second half]

and the latent is rotated by nothing (`RopeConfig.order` does the same for heads that are rotated in part).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.kernels.base import Ops
from draftwise.kernels.handles import Heads, Linear, Norm
from draftwise.kernels.split import summed
from draftwise.models.config import LatentConfig, ModelConfig
from draftwise.models.cuts import BY_INPUTS, Split, by_outputs
from draftwise.models.layers import DenseLayer, DenseNames, LayerWeights
from draftwise.models.mlp import LoadedLinear, SparseWeights, declare_linear, load_linear
from draftwise.models.weights import QuantizedLinear, WeightPlan

_EPS = 1e-6
"""The epsilon of the norms of latents, independent of the config's for other norms."""


@dataclass(frozen=True, slots=True)
class LatentQkv:
    """Packed projections of a layer; see the module's text."""

    q_a: Linear | None  # [Cq, H]; None: queries are not compressed
    q_norm: Norm | None  # [Cq]
    q: Linear  # [Hq * (N + R), Cq or H]
    absorbed: Heads  # of each head, [D, N + R]
    c: Linear  # [C, H]
    c_norm: Norm  # [C]
    rotated: Linear  # [R, H]: first halves, second halves
    sizes: LatentConfig

    def run(self, ops: Ops, x: Tensor) -> Tensor:
        """``x`` [T, H] -> [T, (Hq + 1) * D]: queries of all heads, then what is stored."""
        hidden = x
        if self.q_a is not None:
            assert self.q_norm is not None
            x = ops.rms_norm(ops.linear(hidden, self.q_a), self.q_norm)
        queries = ops.heads(ops.linear(x, self.q), self.absorbed)
        c = ops.rms_norm(ops.linear(hidden, self.c), self.c_norm)
        key = ops.linear(hidden, self.rotated)
        half, part = self.sizes.latent // 2, self.sizes.rotated // 2
        first = ops.concat(ops.columns(key, 0, part), ops.columns(c, 0, half))
        second = ops.concat(ops.columns(key, part, part), ops.columns(c, half, half))
        return ops.concat(queries, ops.concat(first, second))

    @property
    def num_bytes(self) -> int:
        parts = (self.q_a, self.q, self.absorbed, self.c, self.rotated)
        return sum(part.num_bytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class LatentOut:
    """The part of a layer behind attention."""

    values: Heads  # of each head, [V, D]
    o: Linear  # [H, Hq * V]

    def run(self, ops: Ops, x: Tensor) -> Tensor:
        """``x`` [T, Hq * D] -> [T, H]."""
        return ops.linear(ops.heads(x, self.values), self.o)

    @property
    def num_bytes(self) -> int:
        return self.values.num_bytes + self.o.num_bytes


class LatentWeights(LayerWeights):
    """One layer's parameters as loaded; gone once packed."""

    def __init__(
        self,
        config: ModelConfig,
        names: DenseNames,
        plan: WeightPlan,
        i: int,
        *,
        input_norm: bool = True,
        qkv_inputs: int | None = None,
        sparse: type[SparseWeights] = SparseWeights,
    ) -> None:
        assert config.latent is not None and input_norm
        sizes, hidden, heads = config.latent, config.hidden_size, config.num_heads
        self._sizes, self._heads, self._interleaved = sizes, heads, config.rope.interleaved
        at = names.q.format(i=i).removesuffix("q_proj.weight")

        inputs = qkv_inputs or hidden

        def linear(name: str, rows: int, columns: int, split: Split | None = None) -> LoadedLinear:
            return declare_linear(plan, [(f"{at}{name}.weight", rows)], columns, split=split)

        self.input_norm = plan.tensor(names.input_norm.format(i=i), (hidden,))
        self.q_a: LoadedLinear | None = None
        self.q_a_norm: Tensor | None = None
        width = heads * (sizes.plain + sizes.rotated)
        if sizes.queries is None:
            self.q_all = linear("q_proj", width, inputs, by_outputs(width))
        else:
            self.q_a = linear("q_a_proj", sizes.queries, inputs)
            self.q_a_norm = plan.tensor(at + "q_a_layernorm.weight", (sizes.queries,))
            self.q_all = linear("q_b_proj", width, sizes.queries, by_outputs(width))
        self.kv_a = linear("kv_a_proj_with_mqa", sizes.latent + sizes.rotated, inputs)
        self.kv_a_norm = plan.tensor(at + "kv_a_layernorm.weight", (sizes.latent,))
        expanded = heads * (sizes.plain + sizes.values)
        self.kv_b = linear("kv_b_proj", expanded, sizes.latent, by_outputs(expanded))
        plan.exact.add(f"{at}kv_b_proj.weight")  # `pack` takes it apart, as floats
        self.o = linear("o_proj", hidden, heads * sizes.values, BY_INPUTS)
        self.post_norm = plan.tensor(names.post_norm.format(i=i), (hidden,))
        self.mlp = self.declared_mlp(config, names, plan, i, sparse)

    def pack(self, ops: Ops, plan: WeightPlan, eps: float, window: int | None) -> DenseLayer:
        sizes, heads = self._sizes, self._heads

        def norm(weight: Tensor, eps: float = _EPS) -> Norm:
            plan.fill(weight)
            return ops.pack_norm(weight, eps)

        half = sizes.rotated // 2
        pairs = torch.arange(sizes.rotated)  # first halves, then second halves
        if self._interleaved:
            pairs = torch.cat((pairs[0::2], pairs[1::2]))
        expand = _floats(plan, self.kv_b).view(heads, sizes.plain + sizes.values, sizes.latent)
        of_keys, of_values = expand[:, : sizes.plain], expand[:, sizes.plain :]
        whole = sizes.latent + sizes.rotated
        # where the numbers of the latent and of the rotated key stand in what is stored
        part = torch.arange(sizes.latent // 2) + half
        latent = torch.cat((part, part + whole // 2))
        keys = torch.cat((torch.arange(half), torch.arange(half) + whole // 2))
        absorbed = expand.new_zeros((heads, whole, sizes.plain + sizes.rotated))
        absorbed[:, latent, : sizes.plain] = of_keys.transpose(1, 2)
        absorbed[:, keys, sizes.plain + pairs] = 1.0
        values = expand.new_zeros((heads, sizes.values, whole))
        values[:, :, latent] = of_values
        q_a = None if self.q_a is None else load_linear(ops, plan, *self.q_a)
        kv_a = _floats(plan, self.kv_a) if isinstance(self.kv_a[0], Tensor) else None
        if kv_a is None:
            codes = self.kv_a[0]
            assert isinstance(codes, QuantizedLinear)
            plan.fill(codes)
            stored = codes.weight()
            c = ops.pack_quantized(stored.in_order(torch.arange(sizes.latent)), None, dynamic=codes.dynamic)
            rotated = ops.pack_quantized(stored.in_order(sizes.latent + pairs), None, dynamic=codes.dynamic)
        else:
            c = ops.pack_linear(kv_a[: sizes.latent].contiguous())
            rotated = ops.pack_linear(kv_a[sizes.latent + pairs])
        qkv = LatentQkv(
            q_a,
            None if self.q_a_norm is None else norm(self.q_a_norm),
            load_linear(ops, plan, *self.q_all),
            ops.pack_heads(absorbed),
            c,
            norm(self.kv_a_norm),
            rotated,
            sizes,
        )
        assert self.input_norm is not None
        layer = DenseLayer(
            input_norm=norm(self.input_norm, eps),
            qkv=qkv,
            q_norm=None,
            k_norm=None,
            o=LatentOut(ops.pack_heads(values), summed(plan.part, load_linear(ops, plan, *self.o))),
            post_norm=norm(self.post_norm, eps),
            mlp=self.mlp.pack(ops, plan),
            window=window,
        )
        self.__dict__.clear()
        return layer


def _floats(plan: WeightPlan, linear: LoadedLinear) -> Tensor:
    """A linear layer's weight as floats of the model's type, however it is stored."""
    weight, _ = linear
    plan.fill(weight)
    if isinstance(weight, QuantizedLinear):
        return weight.weight().dequantize(plan.dtype).to(plan.device)
    return weight
