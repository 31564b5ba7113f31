"""How experts are chosen, found out by what comes of it; and models with experts put together from our operations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.general import logits_of, made
from tests.native import native_or_skip
from torch import Tensor, nn

from draftwise.kernels.mixture import route
from draftwise.kernels.routing import Routing
from draftwise.kv.storage import KVStorage
from draftwise.models.general import assembling
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.general.experts import ExpertsUse, stacks_of
from draftwise.models.general.mixing import following, routing_of
from draftwise.models.general.model import GeneralDecoder
from draftwise.models.general.nodes import Add, CannotAssemble, Mixture, Node
from draftwise.models.general.trace import Traced, Tracer
from draftwise.models.inputs import RowInput
from draftwise.models.loader import load_model
from draftwise.models.recorded import RecordedDecoder

CPU = torch.device("cpu")
ROWS, E, K, H = 40, 8, 3, 24
SCORES = torch.randn(ROWS, E, generator=torch.Generator().manual_seed(3)) * 1.5
CORRECTION = torch.randn(E, generator=torch.Generator().manual_seed(4)) * 0.3
NO_GROUPS = (1, 1, 1)


@pytest.mark.parametrize("groups", [NO_GROUPS, (2, 1, 2), (4, 2, 2), (4, 2, 1)], ids=str)
@pytest.mark.parametrize(
    ("scoring", "normalise", "scale", "corrected"),
    [*product(("softmax", "sigmoid"), (True, False), (1.0, 2.5), (True, False))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_routing_is_told_from_what_it_chooses(
    scoring: Any,
    normalise: bool,
    scale: float,
    corrected: bool,
    groups: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    wanted = Routing(E, K, scoring, normalise, scale, *groups)
    correction = CORRECTION if corrected else None
    chosen, weights = route(SCORES, wanted, correction)
    order = torch.rand(chosen.shape).argsort(-1)  # an order that nobody promises
    found = routing_of(
        SCORES,
        chosen.gather(1, order),
        weights.gather(1, order).to(dtype),
        (torch.zeros(E), CORRECTION, 1e-20, scale),
    )
    assert found is not None
    assert found[0] == wanted
    assert (
        found[1] is None or not bool(found[1].any())
        if correction is None
        else torch.equal(found[1], CORRECTION)
    )  # type: ignore[arg-type]


def test_a_factor_that_nobody_wrote_down_is_measured() -> None:
    wanted = Routing(E, K, "sigmoid", True, 1.7)
    found = routing_of(SCORES, *route(SCORES, wanted, None))
    assert found is not None and found[0].scale == pytest.approx(1.7, rel=1e-5)
    assert replace(found[0], scale=1.7) == wanted


def test_the_worked_example() -> None:
    scores = torch.tensor([[2.0, 0.0, 1.0, 0.0]])
    found = routing_of(scores, torch.tensor([[0, 2]]), torch.tensor([[0.731059, 0.268941]]))
    assert found == (Routing(4, 2, "softmax", True), None)


@pytest.mark.parametrize(
    ("chosen", "weights"),
    [
        (SCORES.topk(K, largest=False).indices, torch.full((ROWS, K), 1 / K)),  # the worst ones
        (SCORES.topk(K).indices, SCORES.topk(K).values.sigmoid() ** 2),
        (SCORES.topk(K).indices, torch.rand(ROWS, K)),
        (SCORES.topk(K).indices, SCORES.topk(K).values),
    ],
    ids=["the worst", "squared", "by chance", "plain scores"],
)
def test_what_no_routing_chooses_is_none(chosen: Tensor, weights: Tensor) -> None:
    assert routing_of(SCORES, chosen, weights) is None


def test_of_equal_scores_nothing_is_told() -> None:
    scores = torch.zeros(ROWS, E)
    assert routing_of(scores, *route(scores, Routing(E, K), None)) is None


# --------------------------------------------------------------------------------------------------- a trace


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.gate_up_proj = nn.Parameter(torch.randn(E, 20, H))
        self.down_proj = nn.Parameter(torch.randn(E, H, 10))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for k in range(chosen.shape[1]):
            gate, up = torch.einsum("eoh,th->teo", self.gate_up_proj, x).chunk(2, -1)
            made = torch.einsum("eho,teo->teh", self.down_proj, nn.functional.silu(gate) * up)
            rows = torch.arange(len(x))
            out = out + made[rows, chosen[:, k]] * weights[:, k, None]
        return out


class Block(nn.Module):
    def __init__(self, choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.experts = Experts()
        self.gate = nn.Linear(H, E, bias=False)
        self.correction = nn.Parameter(CORRECTION.clone())
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, H)
        chosen, weights = self.choose(self.gate(flat), self.correction)
        out = self.experts(flat, chosen, weights).view(x.shape) + x
        assert isinstance(out, Tensor)
        return out


def corrected(scores: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    shares = scores.float().sigmoid()
    chosen = torch.topk(shares + correction, K, sorted=False)[1]
    weights = shares.gather(1, chosen)
    weights /= weights.sum(-1, keepdim=True) + 1e-20
    return chosen, weights * 2.5


def late(scores: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = scores.topk(K, dim=-1)
    return chosen, torch.softmax(best, dim=1, dtype=torch.float)


def traced(block: Block) -> Node:
    positions = torch.arange(ROWS)
    x = torch.randn(1, ROWS, H, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        with ExpertsUse(block) as use:
            block(x)
        stacks = stacks_of(use.calls)
        tracer = Tracer(positions, frozenset({E}))
        tracer.put_tokens(positions)
        with following(stacks, tracer), tracer:
            return tracer.node_of(block(nn.functional.embedding(positions[None], x[0])))


@pytest.mark.parametrize(
    ("choose", "routing", "has_correction"),
    [(corrected, Routing(E, K, "sigmoid", True, 2.5), True), (late, Routing(E, K, "softmax", True), False)],
)
def test_a_mixture_is_a_node(choose: Any, routing: Routing, has_correction: bool) -> None:
    block = Block(choose)
    node = traced(block)
    assert isinstance(node, Add)
    mixture = node.a if isinstance(node.a, Mixture) else node.b
    assert isinstance(mixture, Mixture) and mixture.routing == routing
    assert torch.equal(mixture.scores.weight, block.gate.weight) and mixture.scores.x is mixture.x
    assert (mixture.correction is not None) == has_correction
    if mixture.correction is not None:
        assert torch.equal(mixture.correction, CORRECTION)


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda s, c: (s.topk(K)[1], s.topk(K)[0].sigmoid() ** 2), "in a way that is not known"),
        (
            lambda s, c: (s[:, :6].topk(K)[1], s.softmax(-1).topk(K)[0]),
            "in a way that is not known|more than",
        ),
        (
            lambda s, c: (torch.arange(K).expand(ROWS, K), torch.ones(ROWS, K)),
            "something else than one linear",
        ),
        (lambda s, c: corrected(s * s, c), "more than their scores"),
    ],
    ids=["squares", "some experts alone", "always the same", "squared scores"],
)
def test_a_choice_that_is_not_known_is_said(choose: Any, words: str) -> None:
    with pytest.raises(CannotAssemble, match=words):
        traced(Block(choose))


# ------------------------------------------------------------------------------------------------ whole models


TOKENS = [5 + (7 * i) % 90 for i in range(23)]
MINE, OTHER = np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32)


KINDS: dict[str, dict[str, Any]] = {
    "dots1": {"num_local_experts": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "ernie4_5_moe": {},
    "granitemoe": {},
    "afmoe": {},
}


@pytest.mark.parametrize(
    ("dtype", "kind", "sizes"),
    [  # each in one of the types; --all: in both
        pytest.param(
            getattr(torch, dtype),
            kind,
            sizes,
            id=f"{dtype}-{kind}",
            marks=[] if (i + j) % 2 else pytest.mark.slow,
        )
        for i, dtype in enumerate(("float32", "bfloat16"))
        for j, (kind, sizes) in enumerate(KINDS.items())
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_a_model_with_experts_has_the_same_bits_in_any_batch(
    kind: str, sizes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    native_or_skip()
    folder, model = made(kind, tmp_path, **sizes)
    decoder = load_model(folder, dtype=dtype, device=CPU)
    assert isinstance(decoder, RecordedDecoder) and isinstance(decoder.inner, AssembledDecoder)
    assert decoder.same_bits
    whole = logits_of(decoder, RowInput(TOKENS, 0, MINE))
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    limit = 1e-4 if dtype is torch.float32 else 0.1
    assert float((whole - wanted).abs().mean()) < limit * float(wanted.std())
    kv = KVStorage(decoder.kv_layout(), 8, 16, dtype, CPU)
    first = logits_of(decoder, RowInput(TOKENS[:7], 0, MINE), kv=kv)
    second = logits_of(decoder, RowInput(TOKENS[:3], 0, OTHER), RowInput(TOKENS[7:], 7, MINE), kv=kv)
    assert torch.equal(torch.cat([first, second[3:]]), whole)
    assert torch.equal(second[:3], whole[:3])


@pytest.mark.parametrize(
    "quantization", ["int8", "int4", pytest.param("int8_weight_only", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore")
def test_experts_in_formats_of_few_bits(quantization: str, tmp_path: Path) -> None:
    native_or_skip()
    folder, model = made("hy_v3", tmp_path)
    decoder = load_model(folder, dtype=torch.bfloat16, device=CPU, quantization=quantization)
    assert isinstance(decoder, RecordedDecoder) and isinstance(decoder.inner, AssembledDecoder)
    plain = load_model(folder, dtype=torch.bfloat16, device=CPU)
    assert decoder.weight_bytes() < plain.weight_bytes()
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    off = float((logits_of(decoder, RowInput(TOKENS, 0, MINE)) - wanted).abs().mean())
    assert off < (0.2 if "int8" in quantization else 0.6) * float(wanted.std())


@pytest.mark.filterwarnings("ignore")
def test_plain_torch_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    folder, model = made("exaone_moe", tmp_path)
    decoder = load_model(folder, dtype=torch.float32, device=CPU)
    assert isinstance(decoder, AssembledDecoder) and not decoder.same_bits
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(decoder, RowInput(TOKENS, 0, MINE)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_routing_is_found_out_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = made("dots1", tmp_path)
    right = assembling.trace

    def wrong(*args: Any) -> Traced:
        found = right(*args)
        nodes = list(found.entering.values())
        while nodes:
            node = nodes.pop()
            if isinstance(node, Mixture):
                node.routing = replace(node.routing, scale=9.0)
            nodes += node.inputs()
        return found

    monkeypatch.setattr(assembling, "trace", wrong)
    with caplog.at_level(logging.WARNING, logger="draftwise"):
        decoder = load_model(folder, dtype=torch.float32, device=CPU)
    assert "does not give its numbers" in caplog.text and isinstance(decoder, GeneralDecoder)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(decoder, RowInput(TOKENS, 0, MINE)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_experts_are_given_up_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer's experts are packed, those of the layers before it are gone."""
    folder, _ = made("granitemoe", tmp_path)
    real = assembling.Assembler.make
    left: list[int] = []

    def counted(self: Any, free: Callable[[int], None]) -> Any:
        freed: list[int] = []

        def noted(name: int) -> None:
            freed.append(name)
            free(name)

        parts = real(self, noted)
        for plan in self._plans:
            if isinstance(plan.node, Mixture):
                left.append(sum(p.numel() for p in plan.node.experts.module.parameters()))
        return parts

    monkeypatch.setattr(assembling.Assembler, "make", counted)
    load_model(folder, dtype=torch.float32, device=CPU)
    assert left == [0, 0, 0]
