"""Models put together from our operations: what is seen in a trace, what is refused, and what falls back."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.general import logits_of, made
from tests.native import native_or_skip
from torch import Tensor, nn

from draftwise.kv.storage import KVStorage
from draftwise.models.general import assembling, loading
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.general.nodes import (
    Add,
    CannotAssemble,
    Embed,
    LayerNorm,
    Linear,
    Mul,
    Node,
    Norm,
    Scale,
    Select,
    Turn,
    Unary,
)  # fmt: skip
from draftwise.models.general.rotations import rotation_of
from draftwise.models.general.trace import Traced, Tracer
from draftwise.models.inputs import RowInput
from draftwise.models.loader import load_model
from draftwise.models.recorded import RecordedDecoder

CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 1, 2, 7, 40])
T, H = 5, 12


def traced(compute: Any, width: int = H) -> Node:
    """The node of ``compute(x)``, where x [1, T, width] are the rows of an embedding."""
    tracer = Tracer(POSITIONS)
    table = torch.randn(20, width)
    tokens = torch.arange(T)[None]
    tracer.put_tokens(tokens)
    with torch.no_grad(), tracer:
        return tracer.node_of(compute(nn.functional.embedding(tokens, table)))


def linear(outputs: int, inputs: int = H) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def test_a_projection_cut_into_heads_in_any_way_is_rows_of_its_weight() -> None:
    fused = linear(24)

    def compute(x: Tensor) -> Tensor:
        # [1, T, 2 heads, 3 kinds, 4] -> the keys, as attention has them: [1, 2, T, 4]
        return fused(x).view(1, T, 2, 3, 4)[..., 1, :].transpose(1, 2)

    node = traced(compute)
    assert isinstance(node, Select) and isinstance(node.x, Linear)
    assert node.columns.tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert torch.equal(node.x.weight, fused.weight) and torch.equal(node.x.bias, fused.bias)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def test_norms_whatever_formula() -> None:
    weight = torch.randn(H)
    node = traced(lambda x: rms(x.float(), weight))
    assert isinstance(node, Norm) and node.eps == pytest.approx(1e-5) and node.group == H
    assert node.weight is not None and torch.equal(node.weight, weight)
    built_in = traced(nn.RMSNorm(H, eps=1e-4))
    assert isinstance(built_in, Norm) and built_in.eps == pytest.approx(1e-4)

    def by_hand(x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-3) * weight

    for compute in (by_hand, nn.LayerNorm(H, eps=1e-3)):
        found = traced(compute)
        assert isinstance(found, LayerNorm) and found.eps == pytest.approx(1e-3)


def test_sums_products_and_factors() -> None:
    gate, up = linear(8), linear(8)
    node = traced(lambda x: x + linear(H, 8)(nn.functional.silu(gate(x)) * up(x)) * 0.5)
    assert isinstance(node, Add) and isinstance(node.a, Embed) and isinstance(node.b, Scale)
    assert node.b.factor == 0.5 and isinstance(node.b.x, Linear)
    product = node.b.x.x
    assert isinstance(product, Mul) and isinstance(product.a, Unary) and product.a.function == "silu"
    assert isinstance(product.b, Linear) and product.a.x is not product.b
    squared = traced(lambda x: torch.relu(x).pow(2))
    assert isinstance(squared, Mul) and squared.a is squared.b and isinstance(squared.a, Unary)


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda x: x.cumsum(1), "cumsum"),
        (lambda x: x.softmax(-1), "softmax"),
        (lambda x: x * torch.arange(float(T))[None, :, None], "depends on their position"),
        (lambda x: x.roll(1, 1), "roll"),
        (lambda x: x[:, [1, 0, 2, 3, 4]], "index"),
        (lambda x: rms(x, torch.ones(H)) + x.transpose(1, 2).reshape(1, T, H), "moves numbers between rows"),
        (lambda x: torch.cat([x[:, :1], x[:, :-1]], 1), "moves numbers between rows"),
        (lambda x: x @ x.transpose(1, 2), "bmm"),
        (lambda x: 1.0 + rms(x, torch.ones(H)), "adds a constant"),
        (lambda x: linear(4)(x) + linear(4)(x).flip(-1), "flip"),
    ],
)
def test_what_has_no_name_is_refused_with_words(compute: Any, words: str) -> None:
    with pytest.raises(CannotAssemble, match=words):
        traced(compute)


def test_what_nobody_wants_may_be_anything() -> None:
    def compute(x: Tensor) -> Tensor:
        x.softmax(-1).topk(2)
        return x * 2.0

    assert isinstance(traced(compute), Scale)


# ------------------------------------------------------------------------------------------------ rotations


FREQUENCIES = torch.tensor([1.0, 0.25])


def tables(neighbours: bool) -> tuple[Tensor, Tensor]:
    angles = POSITIONS[:, None] * FREQUENCIES
    angles = angles.repeat_interleave(2, -1) if neighbours else torch.cat([angles, angles], -1)
    return angles.cos()[None, None], angles.sin()[None, None]


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def turned(rotate: Any, cos: Tensor, sin: Tensor, rest: bool = False) -> Node:
    project = linear(12 if rest else 8)

    def compute(x: Tensor) -> Tensor:
        heads = project(x).view(1, T, 2, -1).transpose(1, 2)
        part, still = heads[..., :4], heads[..., 4:]
        part = part * cos + rotate(part) * sin
        return torch.cat([part, still], -1) if rest else part

    return traced(compute)


@pytest.mark.parametrize(
    ("rotate", "apart", "rest", "order"),
    [
        (halves, False, False, [0, 1, 2, 3]),
        (neighbours, True, False, [0, 2, 1, 3]),
        (halves, False, True, [0, 1, 4, 2, 3, 5]),
        (neighbours, True, True, [0, 2, 4, 1, 3, 5]),
    ],
)
def test_rotations_of_halves_neighbours_and_parts(
    rotate: Any, apart: bool, rest: bool, order: list[int]
) -> None:
    node = turned(rotate, *tables(apart), rest=rest)
    assert isinstance(node, Turn)
    found = rotation_of(node, 6 if rest else 4, POSITIONS, [(FREQUENCIES, 1.0)])
    assert found.order.tolist() == order and found.scaling == 1.0
    assert found.inv_freq.tolist() == [1.0, 0.25, *([0.0] if rest else [])]


def test_rotations_that_are_none_are_refused() -> None:
    cos, sin = tables(False)
    with pytest.raises(CannotAssemble, match="no frequency"):
        rotation_of(turned(halves, cos, sin), 4, POSITIONS, [(FREQUENCIES * 1.5, 1.0)])  # type: ignore[arg-type]
    swapped = turned(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1), cos, sin)
    with pytest.raises(CannotAssemble, match="not a rotation"):
        rotation_of(swapped, 4, POSITIONS, [(FREQUENCIES, 1.0)])  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- models


TOKENS = [5 + (7 * i) % 90 for i in range(23)]
MINE, OTHER = np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [  # each in one of the types; --all: in both
        pytest.param(
            getattr(torch, dtype), kind, id=f"{dtype}-{kind}", marks=[] if (i + j) % 2 else pytest.mark.slow
        )
        for i, dtype in enumerate(("float32", "bfloat16"))
        for j, kind in enumerate(("granite", "gpt_neox", "cohere", "gpt2", "opt", "glm4", "olmo2", "smollm3"))
    ],
)
def test_rows_have_the_same_bits_in_any_batch(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    native_or_skip()
    folder, model = made(kind, tmp_path)
    decoder = load_model(folder, dtype=dtype, device=CPU)
    assert isinstance(decoder, RecordedDecoder) and isinstance(decoder.inner, AssembledDecoder)
    assert decoder.same_bits
    whole = logits_of(decoder, RowInput(TOKENS, 0, MINE))
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    limit = 1e-3 if dtype is torch.float32 else 0.1
    assert float((whole - wanted).abs().mean()) < limit * float(wanted.std())
    kv = KVStorage(decoder.kv_layout(), 8, 16, dtype, CPU)
    first = logits_of(decoder, RowInput(TOKENS[:7], 0, MINE), kv=kv)
    second = logits_of(decoder, RowInput(TOKENS[:3], 0, OTHER), RowInput(TOKENS[7:], 7, MINE), kv=kv)
    assert torch.equal(torch.cat([first, second[3:]]), whole)
    assert torch.equal(second[:3], whole[:3])


@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
def test_formats_of_few_bits(quantization: str, tmp_path: Path) -> None:
    native_or_skip()
    folder, model = made("stablelm", tmp_path)
    decoder = load_model(folder, dtype=torch.bfloat16, device=CPU, quantization=quantization)
    assert isinstance(decoder, RecordedDecoder) and isinstance(decoder.inner, AssembledDecoder)
    plain = load_model(folder, dtype=torch.bfloat16, device=CPU)
    assert decoder.weight_bytes() < plain.weight_bytes()
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    found = logits_of(decoder, RowInput(TOKENS, 0, MINE))
    assert float((found - wanted).abs().mean()) < (0.15 if quantization == "int8" else 0.6) * float(
        wanted.std()
    )


def test_plain_torch_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    folder, model = made("gpt_neox", tmp_path)
    decoder = load_model(folder, dtype=torch.float32, device=CPU)
    assert isinstance(decoder, AssembledDecoder) and not decoder.same_bits
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(decoder, RowInput(TOKENS, 0, MINE)), wanted, rtol=1e-4, atol=1e-4)


def test_a_wrong_graph_is_found_out_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trace that misreads the model costs its speed, never its text."""
    folder, model = made("granite", tmp_path)
    right = assembling.trace

    def wrong(*args: Any) -> Traced:
        found = right(*args)
        node = found.hidden
        assert isinstance(node, Norm)
        node.eps = 5.0
        return found

    monkeypatch.setattr(assembling, "trace", wrong)
    with caplog.at_level(logging.WARNING, logger="draftwise"):
        decoder = load_model(folder, dtype=torch.float32, device=CPU)
    assert "does not give its numbers" in caplog.text
    assert isinstance(decoder, GeneralDecoder)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(decoder, RowInput(TOKENS, 0, MINE)), wanted, rtol=1e-4, atol=1e-4)


def test_a_model_that_has_no_such_graph_runs_on_its_own_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = made("persimmon", tmp_path)
    with caplog.at_level(logging.INFO, logger="draftwise"):
        assert isinstance(load_model(folder, dtype=torch.float32, device=CPU), GeneralDecoder)
    assert "runs on Transformers' code: it normalises heads with their mean" in caplog.text


def test_weights_are_given_up_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is packed, those packed before it are gone."""
    folder, _ = made("granite", tmp_path)
    models: list[Any] = []
    left: list[int] = []
    real, from_folder = assembling.Assembler._packed, loading._loaded

    def kept(*args: Any) -> Any:
        models.append(from_folder(*args))
        return models[-1]

    def counted(self: Any, parts: Any, paired: bool) -> Any:
        left.append(sum(p.numel() for p in models[0].parameters()))
        return real(self, parts, paired)

    monkeypatch.setattr(loading, "_loaded", kept)
    monkeypatch.setattr(assembling.Assembler, "_packed", counted)
    load_model(folder, dtype=torch.float32, device=CPU)
    assert len(left) == 12 and all(b < a for a, b in pairwise(left))
