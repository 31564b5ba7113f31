"""Latent attention put together from our operations, and what a trace needs to see of it: results side by side,
tensors that are filled piece by piece, and what is chosen by the ids of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.architectures import save, small
from tests.native import native_or_skip
from torch import Tensor, nn

from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.general.assembled import AssembledDecoder
from draftwise.models.general.nodes import Add, CannotAssemble, Concat, Embed, Linear, Node, Select, Turn
from draftwise.models.general.trace import Tracer
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.models.recorded import RecordedDecoder

CPU = torch.device("cpu")
POSITIONS = torch.tensor([0, 1, 2, 7, 40])
T, H = 5, 12


def traced(compute: Any, tokens: Tensor | None = None) -> Node:
    """The node of ``compute(x, ids)``, where x [1, T, H] are the rows of an embedding."""
    tracer = Tracer(POSITIONS)
    ids = torch.arange(T)[None] if tokens is None else tokens
    table = torch.randn(20, H)
    tracer.put_tokens(ids)
    with torch.no_grad(), tracer:
        return tracer.node_of(compute(nn.functional.embedding(ids, table), ids))


def test_results_of_two_nodes_side_by_side() -> None:
    a, b = nn.Linear(H, 4), nn.Linear(H, 3)
    node = traced(lambda x, _: torch.cat([b(x), a(x)], -1)[..., 1:5])
    assert isinstance(node, Select) and isinstance(node.x, Concat)
    first, second = node.x.parts
    assert isinstance(first, Linear) and torch.equal(first.weight, b.weight)
    assert isinstance(second, Linear) and torch.equal(second.weight, a.weight)
    assert node.columns.tolist() == [1, 2, 3, 4] and node.x.width == 7


def test_a_tensor_that_is_filled_piece_by_piece() -> None:
    a, b = nn.Linear(H, 8), nn.Linear(H, 2)

    def compute(x: Tensor, _: Tensor) -> Tensor:
        heads = a(x).view(1, T, 2, 4)
        whole = x.new_empty(1, T, 2, 6)
        whole[..., :4].copy_(heads)
        whole[..., 4:].copy_(b(x).view(1, T, 1, 2).expand(1, T, 2, 2))
        return whole.flatten(2)

    node = traced(compute)
    assert isinstance(node, Select) and isinstance(node.x, Concat)
    assert node.columns.tolist() == [0, 1, 2, 3, 8, 9, 4, 5, 6, 7, 8, 9]


def test_what_is_filled_in_part_is_nothing() -> None:
    def compute(x: Tensor, _: Tensor) -> Tensor:
        whole = x.new_empty(1, T, H)
        whole[..., :4].copy_(x[..., :4])
        return whole

    with pytest.raises(CannotAssemble):
        traced(compute)


def test_rotated_columns_that_heads_share_have_their_partner_in_their_own_head() -> None:
    own, common = nn.Linear(H, 6), nn.Linear(H, 2)
    angles = POSITIONS.float()[:, None]
    cos, sin = angles.cos().expand(T, 2)[None], angles.sin().expand(T, 2)[None]

    def compute(x: Tensor, _: Tensor) -> Tensor:
        k = common(x)
        turned = k * cos + torch.cat([-k[..., 1:], k[..., :1]], -1) * sin
        whole = x.new_empty(1, T, 2, 5)
        whole[..., :3].copy_(own(x).view(1, T, 2, 3))
        whole[..., 3:].copy_(turned[:, :, None].expand(1, T, 2, 2))
        return whole.flatten(2)

    node = traced(compute)
    assert isinstance(node, Turn)
    assert node.partner[[3, 4, 8, 9]].tolist() == [4, 3, 9, 8]


def test_sums_of_what_broadcasts() -> None:
    table = nn.Embedding(64, H)
    node = traced(lambda x, _: x + table(POSITIONS))  # [1, T, H] + [T, H]
    assert isinstance(node, Add) and isinstance(node.b, Embed) and node.b.by_position


@pytest.mark.parametrize("how", ["index", "index_select"])
def test_tables_of_positions_however_they_are_read(how: str) -> None:
    table = torch.randn(64, H)

    def compute(x: Tensor, _: Tensor) -> Tensor:
        rows = table[POSITIONS] if how == "index" else table.index_select(0, POSITIONS)
        return x + rows[None]

    node = traced(compute)
    assert isinstance(node, Add) and isinstance(node.b, Embed) and torch.equal(node.b.table, table)


IMAGE = 7


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, ids: x.masked_fill((ids == IMAGE)[..., None].expand_as(x), 0.0),
        lambda x, ids: torch.where(((ids == IMAGE) | (ids == 9))[..., None], torch.zeros(()), x),
        lambda x, ids: x.masked_scatter((ids == IMAGE)[..., None].expand_as(x), torch.zeros(T * H)),
    ],
    ids=["masked_fill", "where", "masked_scatter"],
)
def test_rows_of_special_tokens_are_other_ones(compute: Any) -> None:
    assert isinstance(traced(compute), Embed)
    with pytest.raises(CannotAssemble, match="it chooses between results"):
        traced(compute, torch.tensor([[1, 2, IMAGE, 3, 4]]))


def test_a_choice_by_numbers_is_none() -> None:
    with pytest.raises(CannotAssemble):
        traced(lambda x, _: x.masked_fill(x > 1e9, 0.0))


# ------------------------------------------------------------------------------------------------ whole models


TOKENS = [5 + (7 * i) % 90 for i in range(23)]
MINE, OTHER = np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32)


def logits_of(decoder: DecoderModel, *rows: RowInput, kv: KVStorage | None = None) -> Tensor:
    kv = kv or KVStorage(decoder.kv_layout(), 8, 16, decoder.dtype, CPU)
    with torch.inference_mode():
        return decoder.forward_logits(build_step_input(rows, 16, CPU), kv)[1]


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "interleaved": ("glm4_moe_lite", {}),
    "halves, queries as they are": ("glm4_moe_lite", {"rope_interleave": False, "q_lora_rank": None}),
    "youtu": ("youtu", {}),
    "minicpm3": ("minicpm3", {}),
}


@pytest.mark.parametrize(
    ("dtype", "kind", "sizes"),
    [  # each in one of the types; --all: in both
        pytest.param(
            getattr(torch, dtype), *form, id=f"{dtype}-{name}", marks=[] if (i + j) % 2 else pytest.mark.slow
        )
        for i, dtype in enumerate(("float32", "bfloat16"))
        for j, (name, form) in enumerate(FORMS.items())
    ],
)
@pytest.mark.filterwarnings("ignore")  # of Transformers' models
def test_models_with_latent_attention(
    kind: str, sizes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """The cache holds latents, rows have the same bits in any batch, and logits are Transformers'."""
    native_or_skip()
    made = small(kind, **sizes)
    save(made, tmp_path / kind)
    decoder = load_model(tmp_path / kind, dtype=dtype, device=CPU)
    assert isinstance(decoder, RecordedDecoder) and isinstance(decoder.inner, AssembledDecoder)
    assert {spec.tensors for spec in decoder.kv_layout()} == {(("latent", (1, 16 + 8)),)}
    whole = logits_of(decoder, RowInput(TOKENS, 0, MINE))
    with torch.inference_mode():
        wanted = made.model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]  # type: ignore[misc]
    limit = 1e-4 if dtype is torch.float32 else 0.1
    assert float((whole - wanted).abs().mean()) < limit * float(wanted.std())
    kv = KVStorage(decoder.kv_layout(), 8, 16, dtype, CPU)
    first = logits_of(decoder, RowInput(TOKENS[:7], 0, MINE), kv=kv)
    second = logits_of(decoder, RowInput(TOKENS[:3], 0, OTHER), RowInput(TOKENS[7:], 7, MINE), kv=kv)
    assert torch.equal(torch.cat([first, second[3:]]), whole)
    assert torch.equal(second[:3], whole[:3])


@pytest.mark.parametrize("quantization", [pytest.param("int8", marks=pytest.mark.slow), "int4"])
@pytest.mark.filterwarnings("ignore")
def test_latent_attention_in_formats_of_few_bits(quantization: str, tmp_path: Path) -> None:
    native_or_skip()
    made = small("glm4_moe_lite")
    save(made, tmp_path / "model")
    decoder = load_model(tmp_path / "model", dtype=torch.bfloat16, device=CPU, quantization=quantization)
    assert isinstance(decoder, RecordedDecoder) and isinstance(decoder.inner, AssembledDecoder)
    with torch.inference_mode():
        wanted = made.model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0]  # type: ignore[misc]
    off = float((logits_of(decoder, RowInput(TOKENS, 0, MINE)) - wanted).abs().mean())
    assert off < (0.2 if quantization == "int8" else 0.6) * float(wanted.std())
