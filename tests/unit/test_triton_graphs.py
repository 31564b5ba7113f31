"""Triton's kernels over static batches: what a captured pass launches gives what the pass gives. In the interpreter
nothing is captured; the function is run again on what the buffers hold then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.fakes.tiny import VOCAB, save_llama

from draftwise.graphs.backend import CudaGraphs, Rerun
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder, on_device
from draftwise.graphs.plans import TreePlan
from draftwise.kernels.triton.attention import TritonAttention
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.linear import LinearTiling
from draftwise.kernels.triton.ops import TritonOps
from draftwise.kernels.triton.tiling import Tiling
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.types import TreeDraws

DEVICE = torch.device("cpu" if interpreted() else "cuda")
TREE = (-1, -1, 0)


def graphed_model(folder: Path, captures: Captures) -> tuple[DecoderModel, GraphedDecoder]:
    attention = TritonAttention(Tiling(block_n=16, partition=32))
    ops = TritonOps(torch.float32, DEVICE, attention, LinearTiling(16, 32, 32))
    saved = save_llama(folder, seed=3, num_hidden_layers=1)
    model = load_model(saved, dtype=torch.float32, device=DEVICE, ops=ops)
    assert ops.capturable
    backend = Rerun(DEVICE) if interpreted() else CudaGraphs(DEVICE)
    return model, GraphedDecoder(model, captures, 4, backend)


def storage(model: DecoderModel) -> KVStorage:
    kv = KVStorage(model.kv_layout(), 36, 4, torch.float32, DEVICE, spare=True)
    for i in range(len(model.kv_layout())):
        kv.layer(i)[0].normal_(generator=torch.Generator(DEVICE).manual_seed(i))
    return kv


def random_tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(3, VOCAB, count).astype(np.int32)


TABLES = [np.arange(12 * i, 12 * i + 12, dtype=np.int32) for i in range(3)]


@torch.inference_mode()
def test_a_replay_has_the_bits_of_the_pass(tmp_path: Path) -> None:
    """Rows of a chunk, a tree and a decoding request, filled up to 3 x 4; twice, with other contents."""
    model, graphed = graphed_model(tmp_path, Captures((Shape(3, 4, 48),)))
    kv, other = storage(model), storage(model)
    graphed.prepare(kv)
    for contexts in ((5, 33, 40), (30, 9, 1)):
        batch = build_step_input(
            [
                RowInput(random_tokens(3), contexts[0], TABLES[0]),
                RowInput(random_tokens(4), contexts[1], TABLES[1], TREE),
                RowInput(random_tokens(1), contexts[2], TABLES[2]),
            ],
            4,
            graphed.inputs_on,
        )
        output, logits = graphed.forward_logits(batch, kv)
        expected, wanted = model.forward_logits(on_device(batch, DEVICE), other)
        assert torch.equal(output.hidden, expected.hidden) and torch.equal(logits, wanted)
    assert graphed.num_replays == 2


@torch.inference_mode()
def test_a_pass_in_pieces_has_the_bits_of_the_pass(tmp_path: Path) -> None:
    """A chunk wider than the others' rows, a tree and a decoding request are 9 rows of 12; then a chunk alone."""
    model, graphed = graphed_model(tmp_path, Captures((), pieces=(12,)))
    kv, other = storage(model), storage(model)
    graphed.prepare(kv, (1,))
    batches = [
        [
            RowInput(random_tokens(4), 30, TABLES[0]),
            RowInput(random_tokens(4), 5, TABLES[1], TREE),
            RowInput(random_tokens(1), 40, TABLES[2]),
        ],
        [RowInput(random_tokens(11), 3, TABLES[1])],
    ]
    for rows in batches:
        batch = build_step_input(rows, 4, graphed.inputs_on)
        last = (batch.attention.query_start_np[1:] - 1).tolist()
        output, logits = graphed.forward_logits(batch, kv, last, (1,))
        batch = build_step_input(rows, 4, DEVICE)
        expected, wanted = model.forward_logits(batch, other, last, (1,))
        assert torch.equal(output.hidden, expected.hidden) and torch.equal(logits, wanted)
        assert torch.equal(output.captured[1], expected.captured[1])
    assert graphed.num_piecewise == 2


@pytest.mark.slow
@torch.inference_mode()
def test_loops_draft_what_passes_draft(tmp_path: Path) -> None:
    tree = TreePlan(None, 2, 2, nodes=6)
    captures = Captures((), (Shape(2, 2, 48),), 2, tree)
    model, graphed = graphed_model(tmp_path, captures)
    kv, other = storage(model), storage(model)
    graphed.prepare(kv)
    first = [RowInput(random_tokens(2), 6, TABLES[0]), RowInput(random_tokens(1), 20, TABLES[1])]
    batch = build_step_input(first, 4, graphed.inputs_on)
    drafted = graphed.draft_chains(batch, kv, None, 2)
    trees = graphed.draft_trees(batch, kv, None, [TreeDraws(top_k=2, depth=2, nodes=6)] * 2)
    assert drafted is not None and trees is not None
    _, logits = model.forward_logits(build_step_input(first, 4, DEVICE), other, [1, 2])
    assert drafted[0][:, 0].tolist() == logits.argmax(-1).tolist()
    again = [
        RowInput([int(token)], row.context_len + len(row.tokens), row.block_table_np)
        for token, row in zip(logits.argmax(-1).tolist(), first, strict=True)
    ]
    _, second = model.forward_logits(build_step_input(again, 4, DEVICE), other)
    assert drafted[0][:, 1].tolist() == second.argmax(-1).tolist()
    best, below = logits.topk(2).indices.tolist(), second.topk(2).indices.tolist()
    for found, top, children in zip(trees, best, below, strict=True):
        assert [t for t, p in zip(found.tokens, found.parents, strict=True) if p < 0] == top
        root = found.tokens.index(top[0])
        assert [t for t, p in zip(found.tokens, found.parents, strict=True) if p == root] == children
