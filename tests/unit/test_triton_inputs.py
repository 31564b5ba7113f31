"""What stands between two passes of a drafter, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from draftwise.graphs.backend import CudaGraphs, Rerun
from draftwise.graphs.buffers import PassBuffers, Shape, Tables
from draftwise.graphs.chains import ChainLoop
from draftwise.graphs.loop import Drafter, LoopKind, LoopMemory
from draftwise.kernels.select import KERNELS_VARIABLE
from draftwise.kernels.triton import inputs
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.inputs import (
    EXCLUDED,
    DraftSlots,
    add_biases,
    best_tokens,
    next_rows,
    sample_tokens,
)
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.names import SHARED
from draftwise.sampling.draw import pick
from draftwise.sampling.noise import NoiseKey, gumbel, row_key
from draftwise.types import ChainDraws, ChainKey, StepInput

DEVICE = torch.device("cpu" if interpreted() else "cuda")
SPARE = 999
TABLES = torch.tensor([[5, 2, 9], [7, 1, 3], [4, 8, 6]], dtype=torch.int32, device=DEVICE)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def test_the_next_rows_of_drafts() -> None:
    """Keys at borders of blocks of 4; a request that drafts no more; one that is past the model's length."""
    where = DraftSlots(TABLES, 4, SPARE, max_position=9)
    rows = next_rows(longs(2, 3, 8), longs(5, 2, 5), 1, where)
    assert rows.context.tolist() == [3, 4, 9]
    assert rows.positions.tolist() == [3, 4, 9]
    # request 1: draft 1 is its last, nothing reads what it would store
    assert rows.slots.tolist() == [5 * 4 + 3, SPARE, 6 * 4 + 1]
    rows = next_rows(longs(2, 3, 8), longs(5, 5, 5), 2, where)
    assert rows.slots.tolist() == [2 * 4 + 0, 1 * 4 + 1, SPARE]
    assert rows.positions.tolist() == [4, 5, 9]
    heads = where._replace(position_offset=-1)
    assert next_rows(longs(0, 3, 8), longs(5, 5, 5), 0, heads).positions.tolist() == [0, 2, 7]
    assert next_rows(longs(2, 3, 12), longs(9, 9, 9), 3, where).slots.tolist() == [
        2 * 4 + 1,
        1 * 4 + 2,
        SPARE,
    ]


@pytest.mark.parametrize("vocab", [3, 70, 300])
@pytest.mark.parametrize("count", [1, 3])
def test_the_best_tokens(vocab: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_PART", 64)
    draws = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 9, (4, vocab), generator=draws).float()  # with equals
    logits[1] = -float("inf")
    logits[1, vocab // 2] = 2.0
    logits[2] = torch.randn(vocab, generator=draws)
    found = best_tokens(logits.to(DEVICE), count, totals=True)
    ranked = sorted(range(vocab), key=lambda v: (-float(logits[0, v]), v))[:count]
    assert found.tokens[0].tolist() == ranked
    expected = logits.topk(count, dim=-1)
    assert torch.equal(found.values.cpu(), expected.values)
    assert found.tokens[2].tolist() == expected.indices[2].tolist()
    assert int(found.tokens[1, 0]) == vocab // 2
    assert found.log_totals is not None
    torch.testing.assert_close(found.log_totals.cpu(), logits.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert best_tokens(logits[:0].to(DEVICE), count).tokens.shape == (0, count)


def test_draws_with_shared_noise_over_a_reduced_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_PART", 64)
    ids = torch.arange(0, 600, 4)
    logits = torch.randn((5, 150), generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0])
    keys = [NoiseKey(2**64 - 1 - r, r, SHARED, 7 * r) for r in range(5)]
    words = [row_key(*key) for key in keys]
    signed = torch.tensor([word - (1 << 64) if word >> 63 else word for word in words])
    scores = logits * scales[:, None] + gumbel(keys, 600, token_ids=ids)
    found = best_tokens(
        logits.to(DEVICE), 2, scales=scales.to(DEVICE), keys=signed.to(DEVICE), ids=ids.to(DEVICE)
    )
    assert found.tokens.tolist() == ids[scores.topk(2, dim=-1).indices].tolist()
    assert found.log_totals is None


@pytest.mark.parametrize("vocab", [3, 150])
def test_draws_from_what_is_kept(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_PART", 64)
    logits = torch.randn((6, vocab), generator=torch.Generator().manual_seed(vocab)) * 3
    logits[1, : vocab - 1] = -float("inf")
    scales = torch.linspace(0.5, 2.0, 6)
    uniforms = torch.tensor([0.0, 0.5, 0.3, 0.999999, 1 - 2.0**-53, 0.7], dtype=torch.float64)
    kept = torch.full((6, 2, vocab), -1.0, device=DEVICE)
    ids = torch.arange(vocab) * 2
    found = sample_tokens(
        logits.to(DEVICE), kept[:, 1], uniforms.to(DEVICE), scales=scales.to(DEVICE), ids=ids.to(DEVICE)
    )
    expected = (logits * scales[:, None]).softmax(-1)
    torch.testing.assert_close(kept[:, 1].cpu(), expected, atol=1e-6, rtol=1e-5)
    assert (kept[:, 0] == -1).all()
    assert found.tolist() == [2 * token for token in pick(kept[:, 1].cpu(), uniforms.tolist())]


@pytest.mark.parametrize("kind", ["argmax", "shared", "draft"])
@pytest.mark.parametrize("mapped", [False, True])
@torch.inference_mode()
def test_a_loop_makes_the_same_rows_and_tokens_as_with_torch(
    kind: LoopKind, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests, filled up to three, whose drafts reach the model's length."""
    draws = torch.Generator().manual_seed(4)
    embedding = torch.randn((40, 8), generator=draws).to(DEVICE)
    weight = torch.randn((8, 20 if mapped else 40), generator=draws).to(DEVICE)
    ids = torch.arange(0, 40, 2, device=DEVICE) if mapped else None
    shape, steps = Shape(3, 2, 24), 3
    backend = Rerun(DEVICE) if interpreted() else CudaGraphs(DEVICE)
    batch = build_step_input(
        [
            RowInput([5, 6], 6, np.arange(0, 5, dtype=np.int32)),
            RowInput([7], 2, np.arange(5, 10, dtype=np.int32)),
        ],
        4,
        torch.device("cpu"),
    )
    asked = None
    if kind != "argmax":
        asked = ChainDraws(kind, (ChainKey(2**63 + 1, 0, 9, 0, 1.4), ChainKey(3, 1, 4, 0, 0.6)))
    results = []
    for name in ("torch", "triton"):
        monkeypatch.setenv(KERNELS_VARIABLE, name)
        seen: list[StepInput] = []

        def advance(
            rows: StepInput, features: torch.Tensor | None, seen: list[StepInput] = seen
        ) -> tuple[torch.Tensor, None]:
            seen.append(rows)
            return embedding[rows.token_ids] + 0.1 * rows.positions[:, None], None

        drafter = Drafter(
            advance, lambda hidden: hidden @ weight, weight.shape[1], 9, position_offset=-1, target_ids=ids
        )
        rows = PassBuffers(shape, Tables(3, 24, 4, SPARE, backend))
        memory = LoopMemory([shape], steps, drafter, DEVICE)
        loop = ChainLoop(kind, drafter, rows, memory)
        loop.capture()
        tokens, q = loop.run(batch, None, steps, asked)
        assert (q is None) == (kind != "draft")
        made = [(r.positions.tolist(), r.slots.tolist(), r.attention.static) for r in seen[-steps + 1 :]]
        results.append(
            (
                tokens.tolist(),
                [(p, s, static.context.tolist()) for p, s, static in made if static is not None],
            )
        )
    assert results[0] == results[1]
    assert len(results[0][1]) == steps - 1
    assert SPARE in results[0][1][0][1] and results[0][1][0][1].count(SPARE) < 3


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("vocab", [7, 5000])
def test_biases_are_added_where_somebody_has_one(vocab: int, mapped: bool) -> None:
    """Three requests of two rows each, of which the second has one."""
    logits = torch.randn((6, vocab), generator=torch.Generator().manual_seed(vocab)).to(DEVICE)
    bias = torch.randn(2 * vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    bias[3] = -float("inf")
    ids = torch.arange(vocab, device=DEVICE) * 2 if mapped else None
    at = torch.tensor([0, bias.data_ptr(), 0], device=DEVICE)
    wanted = logits.clone()
    wanted[2:4] += (bias[:vocab] if ids is None else bias[ids]).clamp(min=EXCLUDED)
    assert torch.equal(add_biases(logits.clone(), at, ids), wanted)
