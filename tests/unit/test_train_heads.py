"""Training modules of heads against the engine's heads: the same weights, unrolled, give the same logits."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.head_target import TOKENS, Target
from torch import Tensor, nn

from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.heads.base import HeadModel
from draftwise.models.heads.loading import load_eagle, load_eagle3, load_medusa, load_mtp, target_link
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.rope import RopeConfig
from draftwise.train.heads.batch import HeadBatch, block_mask, causal_mask, chosen_rows, row_weights
from draftwise.train.heads.evaluate import evaluate_head
from draftwise.train.heads.export import export_head, offsets
from draftwise.train.heads.layers import HeadShape
from draftwise.train.heads.losses import Distillation
from draftwise.train.heads.medusa import MedusaHeads
from draftwise.train.heads.sequential import Eagle3Head, EagleHead, MtpHead, SequentialHead

CPU = torch.device("cpu")
LAYERS = (1, 2, 4)
SHAPE = HeadShape(
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    norm_eps=1e-5,
    rope=RopeConfig(kind="default", theta=10000.0, head_dim=8),
)
TARGET_CONFIG = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}
UNROLLS = 4


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWISE_KERNELS", "torch")
    torch.set_num_threads(1)


@pytest.fixture
def target() -> Target:
    return Target(TorchOps(torch.float32, CPU), layers=5)


def captured(target: Target) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(TOKENS, 32, generator=generator) for _ in LAYERS]


def batch_of(target: Target) -> HeadBatch:
    ids = torch.tensor(target.tokens)[None]
    return HeadBatch(
        ids,
        torch.arange(TOKENS),
        causal_mask(TOKENS),
        torch.zeros_like(ids),
        torch.ones_like(ids, dtype=torch.bool),
        target.hidden[None],
        torch.cat(captured(target), -1)[None],
        torch.softmax(target.hidden @ target.output.T, -1)[None],
    )


def shaken(head: nn.Module) -> Any:
    """Give every parameter random values: many start as zeros or ones."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    return head


def make(kind: str, target: Target) -> SequentialHead:
    generator = torch.Generator().manual_seed(5)
    matrices = target.embedding, target.output
    if kind == "eagle3":
        ids = torch.arange(0, 61, 3)
        return shaken(Eagle3Head(SHAPE, *matrices, generator, num_features=3, draft_ids=ids))  # type: ignore[no-any-return]
    head = {"eagle": EagleHead, "mtp": MtpHead, "mtp, normed": partial(MtpHead, normed=True)}[kind]
    return shaken(head(SHAPE, *matrices, generator))  # type: ignore[no-any-return]


def engine_logits(head: HeadModel, target: Target, row: int, features: Tensor) -> list[Tensor]:
    """What the engine computes for the drafts that follow committed tokens 0..row+1, along the text."""
    table = np.arange(8, dtype=np.int32)
    kv = KVStorage(head.kv_layout(), 8, 4, torch.float32, CPU)
    out = []
    tokens, context, own = target.tokens[1 : row + 2], 1, features[: row + 1]
    for step in range(UNROLLS):
        batch = build_step_input([RowInput(tokens, context, table, first_key=1)], 4, CPU, position_offset=-1)
        output, logits = head.forward_logits(batch, own, kv, [len(tokens) - 1])
        out.append(logits[0])
        own, context = output.features[-1:], context + len(tokens)
        tokens = [target.tokens[row + 2 + step]]
    return out


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "mtp", "mtp, normed"])
def test_unrolled_training_computes_what_the_engine_drafts(kind: str, target: Target, tmp_path: Path) -> None:
    trained = make(kind, target)
    export_head(trained, tmp_path, TARGET_CONFIG, feature_layers=LAYERS, dtype=torch.float32)
    method = kind.split(",")[0]
    load = {"eagle3": load_eagle3, "eagle": load_eagle, "mtp": load_mtp}[method]
    with torch.inference_mode():
        head = load(target.context(method, str(tmp_path)))
        batch = batch_of(target)
        features = target.hidden
        if kind == "eagle3":
            assert head.feature_layers == LAYERS
            assert head.target_ids is not None and head.target_ids.tolist() == list(range(0, 61, 3))
            features = trained.first_features(batch)[0]
        rows = torch.tensor([0, 1, 7, 13])
        ours = trained.predictions(batch, rows, UNROLLS)
        for m, row in enumerate(rows.tolist()):
            for i, logits in enumerate(engine_logits(head, target, row, features)):
                torch.testing.assert_close(ours[i][0, m], logits, rtol=2e-4, atol=2e-4)


def test_medusa_heads_load_as_they_were_trained(target: Target, tmp_path: Path) -> None:
    trained = shaken(MedusaHeads(3, 2, target.output))
    export_head(trained, tmp_path, TARGET_CONFIG, dtype=torch.float32)
    with torch.inference_mode():
        link, ops = target_link(target, 64, torch.float32, CPU)  # type: ignore[arg-type]
        heads = load_medusa(tmp_path, link, ops)
        ours = torch.stack(trained.predictions(batch_of(target), torch.arange(TOKENS), 3))[:, 0]
        theirs = heads.logits(target.hidden, 3)
    torch.testing.assert_close(theirs.reshape(ours.shape), ours, rtol=1e-4, atol=1e-4)


def test_gradient_in_closed_form_is_the_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 9, generator=generator, requires_grad=True)
    probs = torch.softmax(2 * torch.randn(2, 5, 12, generator=generator), -1)[..., :9]
    weights = (torch.rand(2, 5, generator=generator) < 0.7).float()
    loss, seen, chances = Distillation()(logits, probs, weights, 0.7)
    loss.backward()
    plain = logits.detach().clone().requires_grad_()
    log_q = torch.log_softmax(plain, -1)
    entropy = -(probs * log_q).sum(-1)
    overlap = torch.minimum(probs, log_q.exp()).sum(-1)
    wanted = ((entropy - 0.7 * overlap) * weights).sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(logits.grad, plain.grad)
    torch.testing.assert_close(chances, overlap)
    torch.testing.assert_close(seen[1], (overlap * weights).sum() / weights.sum())


def test_rows_that_count() -> None:
    ids = torch.zeros(1, 12, dtype=torch.int64)
    segments = torch.tensor([[0] * 6 + [1] * 4 + [-1] * 2])
    counted = torch.ones(1, 12, dtype=torch.bool)
    counted[0, 3] = False
    nothing = torch.zeros(0)
    batch = HeadBatch(ids, torch.arange(12), block_mask(12, 2), segments, counted, nothing, nothing, nothing)
    rows = torch.arange(10)
    # the token the target speaks after is row + 1: not counted for row 2, another document for row 5, padding from 9 on
    assert row_weights(batch, rows, 0)[0].tolist() == [1, 1, 0, 1, 1, 0, 1, 1, 1, 0]
    assert row_weights(batch, rows[:9], 1)[0].tolist() == [1, 0, 1, 1, 0, 0, 1, 1, 0]
    for offset in range(3):
        found = chosen_rows(12, 4, 3, offset)
        assert len(found) == 2 and int(found.max()) + 4 < 12
    assert block_mask(4, 2).isinf().int().tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0]]


class _Parrot(nn.Module):
    """Says what it is told: 1 where it agrees with the target, per unroll."""

    draft_ids = None

    def __init__(self, right: list[list[bool]], batch: HeadBatch) -> None:
        super().__init__()
        self.right, self.batch = right, batch

    def predictions(self, batch: HeadBatch, rows: Tensor, unrolls: int) -> list[Tensor]:
        out = []
        for i in range(unrolls):
            logits = batch.probs[:, rows + 1 + i].log()
            for m, right in enumerate(self.right[i]):
                if not right:
                    logits[0, m] = -logits[0, m]
            out.append(logits)
        return out


def test_acceptance_along_the_targets_own_text(target: Target) -> None:
    batch = batch_of(target)
    places = TOKENS - 2
    right = [[True] * places for _ in range(2)]
    right[0][3] = right[1][3] = right[1][5] = right[1][7] = False
    seen = evaluate_head(_Parrot(right, batch), [batch], 2)
    assert seen["greedy"] == [round(1 - 1 / places, 4), round(1 - 3 / places, 4)]
    assert seen["greedy_length"] == round(1 + (2 * places - 4) / places, 4)
    everything = evaluate_head(_Parrot([[True] * places] * 2, batch), [batch], 2)
    assert everything["sampled"] == pytest.approx([1.0, 1.0], abs=1e-4)


def test_offsets_of_a_draft_vocabulary() -> None:
    assert offsets(torch.tensor([0, 3, 4])).tolist() == [0, 2, 2]
