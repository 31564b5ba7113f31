"""Are the kernels right here? Every operation of a model, at its shapes and dtype, against plain torch in float32.

A kernel may be wrong on one machine alone: another compiler, another processor or driver. `check_kernels` runs each
operation on random rows and weights and says how far its results are from the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.attention.reference import ReferenceAttention
from draftwise.kernels.additions import Addition, AdditionSite, Up
from draftwise.kernels.base import HeadShape, Ops
from draftwise.kernels.stacked import StackedAdditions
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.config import ModelConfig
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.quantization.scheme import Scheme, parse_scheme
from draftwise.quantization.weights import E2M1, QuantizedWeight, quantize, quantize_rows
from draftwise.types import StepInput

LIMITS: Final = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference that rounding explains, as a part of the root of the mean square of the right results. Example: a
bfloat16 number has 8 bits, so that one five times as large as the others is wrong by up to 5 / 256 = 0.02 of them
when it is rounded once; queries, scores and results are rounded one after the other."""

_ROWS: Final = (1, 7, 80)
"""Rows of a product: one request, a few with drafts, a chunk of a prompt. Kernels choose other ways for them."""

_MANY: Final = 256
"""Rows of a long chunk, for which a GPU widens codes before their product (`kernels.triton.linear.WIDENED_ROWS`)."""

_VOCAB: Final = 8192
"""Rows of the output layer that are compared, at most: all of a large one would take gigabytes beside the model."""

_BLOCK: Final = 16
_CHUNK: Final = 40  # rows of a prompt's chunk
_LONG: Final = 160  # rows of one that may be computed in another way
_TREE: Final = (-1, -1, -1, 0, 0, 1, 3, 3, 4, 6, 6, 9, 11)
"""Parents of a tree's nodes: several at the root, forks further down, and a path of six."""

_IN_GROUPS: Final = parse_scheme("int4_weight_only_g32")

_Pair = tuple[Tensor, Tensor]  # what the kernel gave, and the same by plain torch
_Kind = Literal["ragged", "tree", "long"]


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """What came of one operation."""

    kernel: str  # which it runs on, of `kernels.replaced`
    name: str
    apart: float  # the largest difference, in the unit of `LIMITS`; not a number if the kernel gave one
    limit: float
    error: str | None = None  # of a kernel that does not compile or run; then ``apart`` says nothing

    @property
    def right(self) -> bool:
        """Whether it ran and its results are right."""
        return self.error is None and self.apart <= self.limit  # a comparison with not-a-number is false

    def __str__(self) -> str:
        if self.error is not None:
            return f"does not run: {self.error}"
        return f"{'right' if self.right else 'WRONG'}: at most {self.apart:.2g} apart (limit {self.limit:g})"


@torch.inference_mode()
def check_kernels(
    ops: Ops,
    config: ModelConfig,
    scheme: Scheme | None = None,
    *,
    adapters: bool = False,
    stored: bool = False,
) -> list[KernelCheck]:
    """Compare every operation that ``ops`` has for a model like ``config`` with plain torch. Takes seconds.

    Weights are random. Attention is compared over rows that decode, a chunk of a prompt and a tree, with the model's
    windows, soft cap and sinks. Latent attention is not compared.

    Args:
        scheme: what linear layers of ``ops`` are rounded to; they are compared with torch on the same rounded weights.
        adapters: requests may have adapters, in captured passes.
        stored: the checkpoint has codes, which kernels take as they are.

    Returns:
        One check per operation and kind of row, in a fixed order.
    """
    return [
        compare(kernel, name, LIMITS[ops.dtype], case)
        for kernel, name, case in (
            *_cases(ops, config, scheme),
            *(_adapter_cases(ops, config) if adapters else ()),
            *(_stored_cases(ops, config) if stored else ()),
        )
    ]


def compare(kernel: str, name: str, limit: float, compared: Callable[[], _Pair]) -> KernelCheck:
    """What comes of a pair of results, of a kernel and of plain torch; of whole numbers ``limit`` is 0."""
    try:
        got, wanted = compared()
        assert got.shape == wanted.shape, f"{name}: {tuple(got.shape)}, not {tuple(wanted.shape)}"
        wanted = wanted.double() if limit == 0.0 else wanted.float()
        unit = wanted.square().mean().sqrt().clamp(min=1e-30)
        return KernelCheck(kernel, name, float((got.to(wanted.dtype) - wanted).abs().max() / unit), limit)
    except Exception as error:  # whatever a compiler or a driver raises is a result here
        text = " ".join(str(error).split())[:200]
        return KernelCheck(kernel, name, float("nan"), limit, f"{type(error).__name__}: {text}")


def _cases(
    ops: Ops, config: ModelConfig, scheme: Scheme | None
) -> Iterator[tuple[str, str, Callable[[], _Pair]]]:
    for rows in _ROWS:
        yield "norm", f"norm, {rows} rows", partial(_norm, ops, config, rows)
        yield "linear", f"linear, {rows} rows", partial(_linear, ops, config, rows)
        if scheme is not None:
            yield (
                "linear",
                f"linear, {scheme.name}, {rows} rows",
                partial(_rounded, ops, config, rows, scheme),
            )
        yield "gated", f"gated, {rows} rows", partial(_gated, ops, config, rows)
        yield "linear", f"logits, {rows} rows", partial(_logits, ops, config, rows)
    yield "gather", "embedding", lambda: _embedding(ops, config)
    if config.latent is not None:
        return
    for normed in (False, True) if config.qk_norm else (False,):
        beside = ", normalised" if normed else ""
        yield "rotation", f"queries{beside}, rotated", partial(_queries, ops, config, normed)
        yield "rotation", f"keys and values{beside}, written", partial(_written, ops, config, normed)
    for window in dict.fromkeys(config.sliding_window):  # of several layers with the same one, the first
        behind = "" if window is None else f", window {window}"
        yield "attention", f"attention, ragged{behind}", partial(_attention, ops, config, window, "ragged")
        yield "attention", f"attention, tree{behind}", partial(_attention, ops, config, window, "tree")
        if config.max_model_len > _LONG:
            yield (
                "prompts",
                f"attention, long chunk{behind}",
                partial(_attention, ops, config, window, "long"),
            )


def _adapter_cases(ops: Ops, config: ModelConfig) -> Iterator[tuple[str, str, Callable[[], _Pair]]]:
    for rows in (1, 7):
        yield "low_rank", f"additions of adapters, {rows} rows each", partial(_adapted, ops, config, rows)


def _stored_cases(ops: Ops, config: ModelConfig) -> Iterator[tuple[str, str, Callable[[], _Pair]]]:
    for form in _FORMS:
        for rows in (_ROWS[0], _ROWS[-1], _MANY):
            yield "linear", f"linear, {form}, {rows} rows", partial(_stored, ops, config, rows, form)


def _random(ops: Ops, *shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Made on the device: a large layer's numbers would take the host seconds. Rounded to the dtype of ``ops``."""
    made = torch.empty(shape, device=ops.device)
    made.normal_(0.0, scale, generator=torch.Generator(ops.device).manual_seed(seed))
    return made.to(ops.dtype)


def _norm(ops: Ops, config: ModelConfig, rows: int) -> _Pair:
    """The sum of the residual and its norm, side by side."""
    x, residual = (_random(ops, rows, config.hidden_size, seed=seed) for seed in (0, 1))
    weight = _random(ops, config.hidden_size, seed=2)
    total = residual.clone()
    got = ops.add_rms_norm(x.clone(), total, ops.pack_norm(weight, config.norm_eps))
    summed = (x.float() + residual.float()).to(ops.dtype).float()
    wanted = F.rms_norm(summed, (config.hidden_size,), weight.float(), config.norm_eps)
    return torch.cat((total, got), dim=1), torch.cat((summed, wanted), dim=1)


def _linear(ops: Ops, config: ModelConfig, rows: int) -> _Pair:
    """The layer that makes queries, keys and values."""
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    x, weight = _layer(ops, config, rows, width)
    return ops.linear(x, ops.pack_exact(weight.clone())), x.float() @ weight.float().T


def _rounded(ops: Ops, config: ModelConfig, rows: int, scheme: Scheme) -> _Pair:
    """The same layer, rounded as it is packed; so are the rows, where the scheme says so."""
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    x, weight = _layer(ops, config, rows, width)
    codes = quantize(weight, scheme)
    seen = x.float()
    if scheme.dynamic:
        found, scales = quantize_rows(x, codes.codes.dtype if scheme.bits == 8 else torch.int8)
        seen = found.float() * scales[:, None]
    return ops.linear(x, ops.pack_linear(weight.clone())), seen @ codes.dequantize().float().T


def _stored(ops: Ops, config: ModelConfig, rows: int, form: str) -> _Pair:
    """A layer in a form that checkpoints have."""
    x, weight = _layer(ops, config, rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
    made = _FORMS[form](quantize(weight, _IN_GROUPS))
    return ops.linear(x, ops.pack_quantized(made, dynamic=False)), x.float() @ made.dequantize().T


def _zeros(integers: QuantizedWeight) -> QuantizedWeight:
    return replace(
        integers, zeros=torch.full(integers.scales.shape, 8, dtype=torch.uint8, device=integers.codes.device)
    )


def _offsets(integers: QuantizedWeight) -> QuantizedWeight:
    return replace(integers, offsets=-8.0 * integers.scales)


def _levels(integers: QuantizedWeight) -> QuantizedWeight:
    half = integers.scales.repeat_interleave(2, dim=1)[:, : -(-integers.codes.shape[1] // 16)]
    return replace(integers, scales=half, group=16, levels=E2M1)


def _bytes(integers: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(8, (integers.codes.int() - 8).to(torch.int8), integers.scales, group=32)


_FORMS: Final = {
    "4 bits, zeros": _zeros,
    "4 bits, offsets": _offsets,
    "4 bits, a table": _levels,
    "8 bits in groups": _bytes,
}
"""Forms of checkpoints, made of one in groups of 32 without zeros, which is compared where layers are rounded to it."""


def _gated(ops: Ops, config: ModelConfig, rows: int) -> _Pair:
    """An MLP's activation; whatever the model's own is, `Ops.silu_mul` is what has a kernel everywhere."""
    gate_up = _random(ops, rows, 2 * config.intermediate_size)
    gate, up = gate_up.float().chunk(2, dim=1)
    return ops.silu_mul(gate_up.clone()), F.silu(gate) * up


def _logits(ops: Ops, config: ModelConfig, rows: int) -> _Pair:
    x, weight = _layer(ops, config, rows, min(config.vocab_size, _VOCAB))
    return ops.logits(x, ops.pack_exact(weight.clone())), x.float() @ weight.float().T


def _layer(ops: Ops, config: ModelConfig, rows: int, width: int) -> _Pair:
    """Rows [rows, H] and a weight [width, H] whose products are about 1."""
    scale = config.hidden_size**-0.5
    return _random(ops, rows, config.hidden_size), _random(
        ops, width, config.hidden_size, scale=scale, seed=1
    )


def _embedding(ops: Ops, config: ModelConfig) -> _Pair:
    table = _random(ops, min(config.vocab_size, _VOCAB), config.hidden_size)
    ids = torch.tensor([0, len(table) - 1, len(table) // 2], device=ops.device)
    return ops.embedding(ids, table), table[ids]


def _adapted(ops: Ops, config: ModelConfig, rows: int) -> _Pair:
    """What two adapters add to queries, keys and values of four requests, one of which has none."""
    size, rank = config.hidden_size, 8
    widths = [
        heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    ]
    ends = np.cumsum([0, *widths]).tolist()
    parts = tuple((i, slice(*ends[i : i + 2])) for i in range(3))
    stacked = StackedAdditions([AdditionSite(size, ends[-1], parts)], 2, rank, ops.dtype, ops.device)
    places = torch.tensor([1, 0, 2, 1], dtype=torch.int32, device=ops.device)
    stacked.for_pass(places, rows)
    x = _random(ops, 4 * rows, size)
    wanted = torch.zeros((4, rows, ends[-1]), device=ops.device)
    for number in (1, 2):
        down = _random(ops, 3 * rank, size, scale=size**-0.5, seed=number)
        ups = [_random(ops, width, rank, scale=rank**-0.5, seed=number + i) for i, width in enumerate(widths)]
        own = [slice(i * rank, (i + 1) * rank) for i in range(3)]
        made = [Up(i, low, outputs, up) for low, (i, outputs), up in zip(own, parts, ups, strict=True)]
        stacked.put(number, [Addition(down, tuple(made))])
        low = (x.float() @ down.float().T).to(ops.dtype).float()
        added = torch.cat([low[:, one] @ up.float().T for one, up in zip(own, ups, strict=True)], dim=1)
        wanted += torch.where((places == number)[:, None, None], added.view(4, rows, -1), 0.0)
    out = torch.zeros((4 * rows, ends[-1]), dtype=ops.dtype, device=ops.device)
    ops.add_low_rank(x, out, stacked, 0)
    return out, wanted.view(4 * rows, -1)


def _queries(ops: Ops, config: ModelConfig, normed: bool) -> _Pair:
    return _rotated(ops, config, normed)[0]


def _written(ops: Ops, config: ModelConfig, normed: bool) -> _Pair:
    return _rotated(ops, config, normed)[1]


def _rotated(ops: Ops, config: ModelConfig, normed: bool) -> tuple[_Pair, _Pair]:
    """Queries, and what stands in the cache, after `Ops.qkv_rope_write`."""
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    batch = _batch(ops, config, "ragged")
    rows = len(batch.positions)
    qkv = _random(ops, rows, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
    inv_freq = 1e4 ** -(torch.arange(0, heads.head_dim, 2, dtype=torch.float32) / heads.head_dim)
    results = []
    for each, dtype in ((ops, ops.dtype), (TorchOps(torch.float32, ops.device), torch.float32)):
        kv = _storage(each, config, batch)
        rope = each.pack_rope(inv_freq.to(ops.device), 1.0, int(batch.positions.max()) + 1)
        turned = each.rope_rows(rope, batch.positions)
        q_norm, k_norm = (
            each.pack_norm(_random(ops, heads.head_dim, seed=seed).to(dtype), config.norm_eps)
            if normed
            else None
            for seed in (1, 2)
        )
        q = each.qkv_rope_write(
            qkv.to(dtype, copy=True), heads, turned, kv.layer(0), batch.slots, q_norm, k_norm
        )
        results.append(
            (q.reshape(rows, heads.num_heads, heads.head_dim).clone(), kv.layer(0)[0][batch.slots])
        )
    (q, stored), (wanted_q, wanted_stored) = results
    return (q, wanted_q), (stored, wanted_stored)


def _attention(ops: Ops, config: ModelConfig, window: int | None, kind: _Kind) -> _Pair:
    heads = HeadShape(config.num_heads, config.num_kv_heads, config.head_dim)
    scale = config.head_dim**-0.5 if config.attn_scale is None else config.attn_scale
    batch = _batch(ops, config, kind)
    kv = _storage(ops, config, batch)
    layer = kv.layer(0)
    layer[0].copy_(_random(ops, *layer[0].shape, seed=1))
    q = _random(ops, len(batch.positions), heads.num_heads, heads.head_dim)
    sinks = _random(ops, heads.num_heads, seed=2).float() if config.sinks else None
    got = ops.attention(q, layer, batch.attention, heads, scale, window, config.attn_softcap, sinks)
    wanted = ReferenceAttention().run(
        q.float(), tuple(part.float() for part in layer), batch.attention, num_kv_heads=heads.num_kv_heads,
        scale=scale, window=window, softcap=config.attn_softcap, sinks=sinks,
    )  # fmt: skip
    return got, wanted


def _batch(ops: Ops, config: ModelConfig, kind: _Kind) -> StepInput:
    """Two requests that decode and a chunk, one and a long chunk, or two requests with a tree; contexts as the model
    reaches.

    Example: a model of 512 positions and trees: contexts 448 and 149, 14 rows each.
    """
    most = min(700, max(0, config.max_model_len - 64))
    kinds = {
        "ragged": [(most, 1), (most // 3, 1), (most // 9, _CHUNK)],
        "long": [(most, 1), (most // 9, _LONG)],
        "tree": [(most, 14), (most // 3, 14)],
    }[kind]
    tree = kind == "tree"
    rows, block = [], 0
    for context, own in kinds:
        blocks = -(-(context + own) // _BLOCK)
        table = np.arange(block + blocks - 1, block - 1, -1, dtype=np.int32)  # not in the order of the cache
        rows.append(RowInput([1] * own, context, table, _TREE if tree else None))
        block += blocks
    return build_step_input(rows, _BLOCK, ops.device)


def _storage(ops: Ops, config: ModelConfig, batch: StepInput) -> KVStorage:
    blocks = int(batch.attention.block_tables_np.max()) + 1
    return KVStorage(
        (KVLayerSpec.dense(config.num_kv_heads, config.head_dim),), blocks, _BLOCK, ops.dtype, ops.device
    )
