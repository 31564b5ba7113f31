"""Captured passes and loops, replayed without a GPU: the same as without a capture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.fakes.fake_graphs import FakeGraphs
from tests.fakes.tiny import VOCAB, save_llama

from draftwise.attention.reference import ReferenceAttention
from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.graphs.backend import Rerun
from draftwise.graphs.buffers import Need, PassBuffers, Shape, Tables
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.plans import TreePlan
from draftwise.graphs.setup import GraphSetup
from draftwise.graphs.sizes import key_limits, pass_shapes, request_counts
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.names import DRAFT, SHARED
from draftwise.sampling.draw import pick
from draftwise.sampling.noise import NoiseKey, gumbel, uniform
from draftwise.types import ChainDraws, ChainKey, StepInput, TreeShape

CPU = torch.device("cpu")
BLOCK = 4
TREE = (-1, -1, 0, 0, 2)


def table(first: int, count: int = 8) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, count).astype(np.int32)


BATCHES = {
    "one row": [RowInput(random_tokens(1), 9, table(0))],
    "full": [RowInput(random_tokens(6), 9, table(0)), RowInput(random_tokens(6, 1), 3, table(8))],
    "ragged": [
        RowInput(random_tokens(2), 5, table(0)),
        RowInput(random_tokens(6, 1), 0, table(8)),
        RowInput(random_tokens(1, 2), 11, table(16)),
    ],
    "trees": [
        RowInput(random_tokens(6), 7, table(0), TREE),
        RowInput(random_tokens(2, 1), 4, table(8)),
        RowInput(random_tokens(4, 2), 10, table(16), TREE[:3]),
    ],
    "a level": [
        RowInput(random_tokens(2), 7, table(0), ancestors=(0b1001, 0b10010), tree_start=3, first_key=2),
        RowInput(random_tokens(1, 2), 11, table(16)),
    ],
}


@pytest.mark.parametrize(("name", "whole"), [*((name, False) for name in BATCHES), ("full", True)])
@pytest.mark.parametrize("window", [None, 4])
def test_static_attention_is_the_reference_whatever_fills_up(
    name: str, whole: bool, window: int | None
) -> None:
    """``whole``: of requests that have all their rows, which see one another."""
    backend = FakeGraphs()
    generator = torch.Generator().manual_seed(0)
    kv = KVStorage((KVLayerSpec.dense(2, 8),), 24, BLOCK, torch.float32, CPU, spare=True)
    kv.layer(0)[0].copy_(torch.randn(kv.layer(0)[0].shape, generator=generator))
    batch = build_step_input(BATCHES[name], BLOCK, CPU)
    rows = batch.token_ids.shape[0]
    q = torch.randn((rows, 4, 8), generator=generator)
    run = {"num_kv_heads": 2, "scale": 0.3, "window": window, "softcap": 5.0, "whole": whole}
    expected = ReferenceAttention().run(q, kv.layer(0), batch.attention, **run)  # type: ignore[arg-type]
    assert kv.spare_slot is not None
    shape = Shape(4, 6 if whole else 7, 40)
    buffers = PassBuffers(shape, Tables(4, 40, BLOCK, kv.spare_slot, backend))
    assert buffers.fits(Need.of(batch))
    place = buffers.fill(batch)
    padded = torch.full((shape.size, 4, 8), float("nan"))
    padded[place] = q
    actual = TorchStaticAttention().run(padded, kv.layer(0), buffers.batch.attention, **run)  # type: ignore[arg-type]
    torch.testing.assert_close(actual[place], expected)
    spare = np.setdiff1d(np.arange(shape.size), place)
    assert (buffers.batch.slots[spare] == kv.spare_slot).all()


def test_buffers_by_hand() -> None:
    backend = FakeGraphs()
    buffers = PassBuffers(Shape(2, 3, 20), Tables(2, 20, BLOCK, 99, backend))
    batch = build_step_input(
        [RowInput([7, 8], 5, table(0)), RowInput([9], 2, table(8))], BLOCK, CPU, position_offset=-1
    )
    assert buffers.fill(batch, np.array([1, 2])).tolist() == [0, 1, 3]
    assert buffers.batch.token_ids.tolist() == [7, 8, 0, 9, 0, 0]
    assert buffers.batch.positions.tolist() == [4, 5, 0, 1, 0, 0]
    assert buffers.batch.slots.tolist() == [5, 6, 99, 34, 99, 99]
    assert buffers.picks[:2].tolist() == [1, 3]
    static = buffers.batch.attention.static
    assert (
        static is not None
        and static.context.tolist() == [5, 2]
        and static.tables[1, :3].tolist() == [8, 9, 10]
    )
    too_long = build_step_input([RowInput([1], 20, table(0))], BLOCK, CPU)
    assert not buffers.fits(Need.of(too_long))
    assert not buffers.fits(Need.of(build_step_input([RowInput([1, 2, 3, 4], 0, table(0))], BLOCK, CPU)))


def models(folder: Path, captures: Captures) -> tuple[DecoderModel, GraphedDecoder, FakeGraphs]:
    save_llama(folder, seed=3)
    ops = TorchOps(torch.float32, CPU, TorchStaticAttention())
    plain = load_model(folder, dtype=torch.float32, device=CPU, ops=ops)
    backend = FakeGraphs()
    return plain, GraphedDecoder(plain, captures, BLOCK, backend), backend


def storage(model: DecoderModel) -> KVStorage:
    return KVStorage(model.kv_layout(), 24, BLOCK, torch.float32, CPU, spare=True)


@torch.inference_mode()
def test_a_replayed_pass_is_the_pass(tmp_path: Path) -> None:
    plain, graphed, backend = models(tmp_path, Captures((Shape(1, 1, 40), Shape(4, 6, 40))))
    kv, other = storage(plain), storage(plain)
    graphed.prepare(kv, (0, 2))
    assert backend.num_graphs == 2
    prompts = [RowInput(random_tokens(12, i), 0, table(8 * i)) for i in range(3)]
    for name in ("prompts", *BATCHES, "trees", "one row"):
        batch = build_step_input(prompts if name == "prompts" else BATCHES[name], BLOCK, CPU)
        total = batch.token_ids.shape[0]
        for rows in (None, [total - 1], list(range(0, total, 2))):
            expected, wanted = plain.forward_logits(batch, other, rows, (2,))
            output, logits = graphed.forward_logits(batch, kv, rows, (2,))
            torch.testing.assert_close(logits, wanted)
            torch.testing.assert_close(output.hidden, expected.hidden)
            torch.testing.assert_close(output.captured[2], expected.captured[2])
        for i in range(len(plain.kv_layout())):
            assert kv.spare_slot is not None
            torch.testing.assert_close(kv.layer(i)[0][: kv.spare_slot], other.layer(i)[0][: kv.spare_slot])
    assert graphed.num_replays == 3 * (len(BATCHES) + 2), "the prompts, and nothing else, ran as they are"


@torch.inference_mode()
def test_what_a_replay_returned_stays(tmp_path: Path) -> None:
    _, graphed, _ = models(tmp_path, Captures((Shape(2, 6, 40),)))
    kv = storage(graphed)
    graphed.prepare(kv)
    first = graphed.forward_logits(build_step_input(BATCHES["full"], BLOCK, CPU), kv)[0].hidden
    before = first.clone()
    graphed.forward_logits(build_step_input(BATCHES["one row"], BLOCK, CPU), kv)
    assert torch.equal(first, before)


def loop_by_hand(
    model: DecoderModel,
    kv: KVStorage,
    batch: StepInput,
    inputs: list[RowInput],
    steps: int,
    draws: ChainDraws | None,
) -> tuple[list[list[int]], torch.Tensor | None]:
    """Token by token, drawn as `draft_tokens` draws."""
    last = (batch.attention.query_start_np[1:] - 1).tolist()
    _, logits = model.forward_logits(batch, kv, last)
    tokens: list[list[int]] = [[] for _ in inputs]
    qs = []
    for step in range(steps):
        if draws is None:
            drawn = logits.argmax(-1).tolist()
        else:
            scaled = logits * torch.tensor([key.scale for key in draws.keys])[:, None]
            shared = draws.stream == "shared"
            keys = [
                NoiseKey(k.seed, k.sample_index, SHARED if shared else DRAFT, k.base + step, step, k.base)
                for k in draws.keys
            ]
            if shared:
                drawn = (scaled + gumbel(keys, VOCAB)).argmax(-1).tolist()
            else:
                qs.append(scaled.softmax(-1))
                drawn = pick(qs[-1], [uniform(*key) for key in keys])
        for own, token in zip(tokens, drawn, strict=True):
            own.append(token)
        if step + 1 < steps:
            rows = [
                RowInput(own[-1:], row.context_len + len(row.tokens) + step, row.block_table_np)
                for own, row in zip(tokens, inputs, strict=True)
            ]
            _, logits = model.forward_logits(build_step_input(rows, BLOCK, CPU), kv)
    return tokens, torch.stack(qs, 1) if qs else None


@pytest.mark.parametrize("stream", [None, "draft", "shared"])
@torch.inference_mode()
def test_a_captured_loop_is_the_loop(tmp_path: Path, stream: Literal["draft", "shared"] | None) -> None:
    plain, graphed, _ = models(tmp_path, Captures((), (Shape(1, 2, 40), Shape(4, 2, 40)), 4))
    kv, other = storage(plain), storage(plain)
    graphed.prepare(kv)
    for count, steps in ((1, 4), (3, 1), (3, 3), (4, 4)):
        prompts = [RowInput(random_tokens(9 + i, i), 0, table(6 * i, 6)) for i in range(count)]
        for each in (kv, other):
            plain.forward_logits(build_step_input(prompts, BLOCK, CPU), each)
        inputs = [RowInput(random_tokens(1 + i % 2, 5 + i), 9 + i, table(6 * i, 6)) for i in range(count)]
        batch = build_step_input(inputs, BLOCK, CPU)
        draws = None
        if stream is not None:
            keys = [ChainKey(2**63 + i, i, 11 + i, 0, 0.7 + 0.2 * i) for i in range(count)]
            draws = ChainDraws(stream, tuple(keys))
        wanted, wanted_q = loop_by_hand(plain, other, batch, inputs, steps, draws)
        found = graphed.draft_chains(batch, kv, None, steps, draws)
        assert found is not None
        assert found[0].tolist() == wanted
        assert (found[1] is None) == (wanted_q is None)
        if wanted_q is not None:
            torch.testing.assert_close(found[1], wanted_q)
        assert kv.spare_slot is not None
        for i in range(len(plain.kv_layout())):
            torch.testing.assert_close(kv.layer(i)[0][: kv.spare_slot], other.layer(i)[0][: kv.spare_slot])
    one = build_step_input(BATCHES["one row"], BLOCK, CPU)
    assert graphed.draft_chains(one, kv, None, 5) is None
    assert graphed.draft_chains(one, other, None, 4) is None


def test_sizes_by_hand() -> None:
    assert request_counts(1) == (1,) and request_counts(6) == (1, 2, 4, 6)
    assert request_counts(8) == (1, 2, 4, 8) and request_counts(12) == (1, 2, 4, 8, 12)
    assert request_counts(40) == (1, 2, 4, 8, 16, 24, 32, 40)
    assert request_counts(256) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert key_limits(4096) == (4160,) and key_limits(131072) == (8192, 131136)
    options: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 100}
    shapes = pass_shapes(widths=[1, 5], sizes=[5, 10], **options)
    assert [(s.requests, s.rows) for s in shapes] == [(1, 5), (2, 5), (5, 1), (10, 1)]
    assert all(s.requests * s.rows <= 2048 for s in pass_shapes(widths=[1, 64], **options))


def test_a_loops_first_pass_has_room_for_what_its_drafter_has_not_seen() -> None:
    """The root and one draft of a chain; all that may be accepted of others, and masks behind it."""
    setup = GraphSetup(Rerun(torch.device("cpu")), 4, 2, 64, 64)
    joined = replace(setup, unseen=6)
    tree = TreePlan(TreeShape((-1, -1, 0), (0, 1, 0)))

    def rows(captures: Captures) -> set[int]:
        return {shape.rows for shape in captures.loops}

    assert rows(setup._loops(1, 3)) == {2} and rows(joined._loops(1, 3)) == {7}
    assert rows(setup._loops(3, 3, tree)) == {3}, "two levels"
    assert rows(setup._loops(3, 3, masked=True)) == {6} and rows(joined._loops(3, 3, masked=True)) == {9}
    assert rows(setup._loops(0, 3)) == rows(joined._loops(0, 3)) == {1}, "the root alone"
