"""Passes captured between the calls of attention, replayed without a GPU: the same as without a capture."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.fake_graphs import FakeGraphs
from tests.fakes.tiny import save_llama
from tests.unit.test_graphs import BATCHES, BLOCK, CPU, random_tokens, storage, table

from draftwise.attention.base import AttentionBackend, attend
from draftwise.attention.torch_static import TorchStaticAttention
from draftwise.config import EngineConfig
from draftwise.config.graphs import GraphOptions
from draftwise.errors import ConfigError
from draftwise.graphs.backend import GraphBackend, Rerun
from draftwise.graphs.buffers import Shape
from draftwise.graphs.capture import Captures
from draftwise.graphs.decoder import GraphedDecoder
from draftwise.graphs.pieces import PieceMemory, PiecewisePass
from draftwise.graphs.setup import GraphSetup
from draftwise.graphs.sizes import piece_rows, worth_filling
from draftwise.kernels.torch_ops import TorchOps
from draftwise.kv.storage import KVStorage
from draftwise.models.base import DecoderModel
from draftwise.models.describe import CACHE_DTYPES
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.loader import load_model
from draftwise.types import StepInput

PROMPT = RowInput(random_tokens(17, 9), 0, table(0))
MIXED = [
    RowInput(random_tokens(9, 5), 4, table(0)),
    RowInput(random_tokens(1, 6), 11, table(8)),
    RowInput(random_tokens(6, 7), 7, table(16), (-1, -1, 0, 0, 2)),
]


def models(
    folder: Path, captures: Captures, backend: GraphBackend | None = None, **settings: Any
) -> tuple[DecoderModel, GraphedDecoder]:
    save_llama(folder, seed=3, **settings)
    ops = TorchOps(torch.float32, CPU, TorchStaticAttention())
    plain = load_model(folder, dtype=torch.float32, device=CPU, ops=ops)
    return plain, GraphedDecoder(plain, captures, BLOCK, backend or FakeGraphs())


def both(
    plain: DecoderModel,
    graphed: DecoderModel,
    kvs: tuple[KVStorage, KVStorage],
    batch: StepInput,
    rows: Sequence[int] | None,
    layers: Sequence[int] = (),
) -> None:
    """Run a batch with and without graphs: the same results, and the same K/V."""
    expected, wanted = plain.forward_logits(batch, kvs[0], rows, layers)
    output, logits = graphed.forward_logits(batch, kvs[1], rows, layers)
    torch.testing.assert_close(logits, wanted)
    torch.testing.assert_close(output.hidden, expected.hidden)
    assert set(output.captured) == set(layers)
    for layer in layers:
        torch.testing.assert_close(output.captured[layer], expected.captured[layer])
    spare = kvs[0].spare_slot
    for i in range(len(plain.kv_layout())):
        torch.testing.assert_close(kvs[1].layer(i)[0][:spare], kvs[0].layer(i)[0][:spare])


@pytest.mark.parametrize("kind", ["recorded", "run again"])
@torch.inference_mode()
def test_a_pass_in_pieces_is_the_pass(tmp_path: Path, kind: str) -> None:
    backend: GraphBackend = FakeGraphs() if kind == "recorded" else Rerun(CPU)
    plain, graphed = models(tmp_path, Captures((), pieces=(4, 8, 20)), backend)
    kvs = storage(plain), storage(plain)
    graphed.prepare(kvs[1], (0, 2))
    if isinstance(backend, FakeGraphs):
        assert backend.num_graphs == 3 * 3, (
            "of each size, one in front of every layer and one behind the last"
        )
    batches = {"prompt": [PROMPT], "mixed": MIXED, **BATCHES, "again": MIXED}
    for i, (name, inputs) in enumerate(batches.items()):
        batch = build_step_input(inputs, BLOCK, CPU)
        total = batch.token_ids.shape[0]
        assert total <= 20, name
        for rows in (None, [], [total - 1], list(range(0, total, 2))):
            both(plain, graphed, kvs, batch, rows, (2,) if i % 2 else (0, 2))
    assert graphed.num_piecewise == 4 * len(batches) and graphed.num_replays == 0


@pytest.mark.parametrize("cache", ["float32", "int8", "fp8"])
@torch.inference_mode()
def test_random_batches(tmp_path: Path, cache: str) -> None:
    """Chunks, decoding requests, trees and levels of trees in any mixture, whole passes and pieces in turn."""
    captures = Captures((Shape(2, 1, 40), Shape(3, 4, 40)), pieces=(2, 12, 30))
    plain, graphed = models(tmp_path, captures, hidden_size=64, intermediate_size=32)
    dtype = CACHE_DTYPES[cache]
    kvs = tuple(KVStorage(plain.kv_layout(), 32, BLOCK, dtype, CPU, spare=True) for _ in range(2))
    graphed.prepare(kvs[1], (1,))
    rng = np.random.default_rng(3)
    for _ in range(24):
        rows: list[RowInput] = []
        for i in range(int(rng.integers(1, 5))):
            context, blocks = int(rng.integers(0, 16)), table(8 * i)
            kind = rng.choice(["chunk", "decode", "tree", "level"])
            if kind == "tree":
                nodes = int(rng.integers(1, 7))
                parents = [int(rng.integers(-1, j)) for j in range(nodes)]
                rows.append(RowInput(random_tokens(nodes + 1, i), context, blocks, parents))
            elif kind == "level":
                masks = (0b1001, 0b10010, 0b100011)
                first = min(context, 2)
                level = RowInput(
                    random_tokens(3, i), context, blocks, ancestors=masks, tree_start=3, first_key=first
                )
                rows.append(level)
            else:
                count = 1 if kind == "decode" else int(rng.integers(1, 14))
                rows.append(RowInput(random_tokens(count, i), context, blocks))
        batch = build_step_input(rows, BLOCK, CPU)
        total = batch.token_ids.shape[0]
        picks = sorted(rng.choice(total, int(rng.integers(0, total + 1)), replace=False).tolist())
        if cache == "float32":
            both(plain, graphed, (kvs[0], kvs[1]), batch, picks, (1,))
        else:  # what is rounded may be rounded otherwise: only that nothing else is read
            expected = plain.forward_logits(batch, kvs[0], picks)[1]
            actual = graphed.forward_logits(batch, kvs[1], picks)[1]
            torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    assert graphed.num_piecewise >= 8 and graphed.num_replays >= 2


@torch.inference_mode()
def test_what_fills_up_reaches_no_real_row(tmp_path: Path) -> None:
    """Whatever stands in the spare slot and behind the real rows of attention's result, NaN included."""
    plain, graphed = models(tmp_path, Captures((), pieces=(32,)))
    kvs = storage(plain), storage(plain)
    graphed.prepare(kvs[1])
    (memory,) = {id(p._noted._memory): p._noted._memory for p in graphed._pieces}.values()
    for buffer in memory._buffers.values():
        buffer.fill_(float("nan"))
    for i in range(len(plain.kv_layout())):
        kvs[1].layer(i)[0][kvs[1].spare_slot :].fill_(float("nan"))
    batch = build_step_input(MIXED, BLOCK, CPU)
    both(plain, graphed, kvs, batch, None)
    assert graphed.num_piecewise == 1


@torch.inference_mode()
def test_which_pass_takes_a_batch(tmp_path: Path) -> None:
    plain, graphed = models(tmp_path, Captures((Shape(4, 2, 40),), pieces=(1, 4, 16)))
    kvs = storage(plain), storage(plain)
    graphed.prepare(kvs[1])

    def taken(count: int, rows: int, layers: Sequence[int] = ()) -> tuple[int, int]:
        before = graphed.num_replays, graphed.num_piecewise
        inputs = [RowInput(random_tokens(rows, i), 3, table(6 * i, 6)) for i in range(count)]
        both(plain, graphed, kvs, build_step_input(inputs, BLOCK, CPU), None, layers)
        return graphed.num_replays - before[0], graphed.num_piecewise - before[1]

    assert taken(3, 2) == (1, 0), "a whole pass"
    assert taken(1, 3) == (0, 1), "wider than the whole pass"
    assert taken(1, 16) == (0, 1)
    assert taken(1, 17) == (0, 0), "more rows than any"
    assert taken(1, 3, (1,)) == (0, 0), "layers that nobody spoke of before"
    other = storage(plain)
    batch = build_step_input([PROMPT], BLOCK, CPU)
    graphed.forward_logits(batch, other)
    assert graphed.num_piecewise == 2, "another storage"


@torch.inference_mode()
def test_the_host_buffers_are_not_written_while_they_are_read(tmp_path: Path) -> None:
    """Every fill but the first waits for the copy of the one before."""
    log: list[str] = []

    class Logged(FakeGraphs):
        def fence(self) -> Any:
            class Here:
                def synchronize(self) -> None:
                    log.append("wait")

            log.append("fence")
            return Here()

    plain, graphed = models(tmp_path, Captures((), pieces=(32,)), Logged())
    kv = storage(plain)
    graphed.prepare(kv)
    for _ in range(3):
        graphed.forward_logits(build_step_input(MIXED, BLOCK, CPU), kv)
    assert log == ["fence", "wait", "fence", "wait", "fence"]


@torch.inference_mode()
def test_what_a_pass_in_pieces_returned_stays(tmp_path: Path) -> None:
    plain, graphed = models(tmp_path, Captures((), pieces=(32,)))
    kv = storage(plain)
    graphed.prepare(kv, (1,))
    batch = build_step_input(MIXED, BLOCK, CPU)
    output, logits = graphed.forward_logits(batch, kv, [3], (1,))
    kept = [x.clone() for x in (output.hidden, output.captured[1], logits)]
    graphed.forward_logits(build_step_input([PROMPT], BLOCK, CPU), kv, None, (1,))
    for before, now in zip(kept, (output.hidden, output.captured[1], logits), strict=True):
        assert torch.equal(before, now)


def test_a_noted_call_keeps_how_it_was_called() -> None:
    """Window, soft cap and the layer's storage are the call's; rows and the place of the result are the replay's."""
    calls: list[dict[str, Any]] = []

    class Backend(AttentionBackend):
        def run(self, q: torch.Tensor, kv: Any, batch: Any, *, out: Any = None, **how: Any) -> torch.Tensor:
            calls.append({"q": q, "kv": kv, "batch": batch, "out": out, **how})
            return q.flatten(1) if out is None else out

    real = build_step_input(MIXED, BLOCK, CPU).attention
    pieces = PiecewisePass(32, PieceMemory(32, FakeGraphs()), BLOCK, 96)
    kv = (torch.zeros(1), torch.zeros(2))
    how: dict[str, Any] = {
        "num_kv_heads": 1,
        "scale": 0.5,
        "window": 4,
        "softcap": 5.0,
        "sinks": torch.ones(2),
    }
    q, out = torch.randn(32, 2, 8), torch.zeros(32, 16)
    noted = pieces.batch.attention
    assert attend(Backend(), q, kv, noted, out=out, **how) is out and not calls
    result = attend(Backend(), q, kv, noted, **how)
    for layer in (0, 1):
        pieces._attend(real, 16, layer)
        call = calls.pop()
        assert call.pop("q").equal(q[:16]) and call.pop("out").data_ptr() == result.data_ptr()
        assert call.pop("batch") is real and call.pop("kv") is kv and call == how | {"whole": False}
    assert attend(Backend(), q, kv, real, out=out, **how) is out and len(calls) == 1, "not apart: at once"


def test_rows_by_hand() -> None:
    assert piece_rows(max_num_batched_tokens=100) == (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 100)
    assert piece_rows(max_num_batched_tokens=1) == (1,) and piece_rows(max_num_batched_tokens=8) == (
        1,
        2,
        4,
        8,
    )
    usual = piece_rows(max_num_batched_tokens=8192)
    assert len(usual) == 29 and usual[-10:-6] == (240, 256, 288, 320) and usual[-1] == 512
    assert all(b <= 1.125 * a for a, b in pairwise(usual) if a >= 128), "an eighth fills up at most"
    assert piece_rows(max_num_batched_tokens=8192, largest=1024)[-2:] == (992, 1024)
    assert piece_rows(max_num_batched_tokens=100, sizes=(200, 8, 40, 8)) == (8, 40)
    assert piece_rows(max_num_batched_tokens=100, sizes=(8, 40), largest=10) == (8,)
    assert worth_filling(64, 8) and worth_filling(96, 64)
    assert not worth_filling(768, 192) and not worth_filling(72, 32)


def test_what_each_mode_captures(tmp_path: Path) -> None:
    def found(mode: Any, **options: Any) -> tuple[Captures, Captures]:
        setup = GraphSetup(FakeGraphs(), BLOCK, 4, 32, 64, mode=mode, **options)
        plain, _ = models(tmp_path, Captures(()))
        target, drafter = setup.target(plain, [1, 4]), setup.draft_model(plain, 3)
        assert isinstance(target, GraphedDecoder) and isinstance(drafter, GraphedDecoder)
        return target.captures, drafter.captures

    target, drafter = found("full")
    assert target.passes and not target.pieces and drafter.loops and not drafter.pieces
    target, drafter = found("piecewise")
    assert not target.passes and target.pieces == drafter.pieces == (1, 2, 4, 8, 16, 24, 32)
    assert not drafter.loops and drafter.count == 7
    target, drafter = found("full_and_piecewise", largest=8)
    assert [shape.size for shape in target.passes] == [1, 2, 4, 4, 8] or {
        shape.size for shape in target.passes
    } == {1, 2, 4, 8}
    assert target.pieces == drafter.pieces == (1, 2, 4, 8) and drafter.loops
    assert str(target) == f"{len(target.passes)} whole passes of 1..8 rows, 4 passes of 1..8 rows in pieces"
    assert "loops of 3 drafts for 1..4 requests" in str(drafter)
    setup = GraphSetup(FakeGraphs(), BLOCK, 4, 32, 64)
    plain, _ = models(tmp_path, Captures(()))
    setup.target(plain, [1, 4])
    assert setup.count == len(setup._passes([1, 4])) + 2 * 7, "passes in pieces count twice"
    setup.draft_model(plain, 3)
    setup.draft_model(plain, 2)
    assert setup.count == len(setup._passes([1, 4])) + 3 * 2 * 7 + 2 * 3 * 3, (
        "three kinds of loops, for 1, 2 and 4"
    )
    assert [part.split(":")[0] for part in str(setup).split("; ")] == [
        *("target", "draft model LlamaForCausalLM", "draft model LlamaForCausalLM #2"),
    ]


def test_memory_is_counted(tmp_path: Path) -> None:
    """Of 4-byte floats: five hidden states a row, queries and attention's results, four words for each row."""
    plain, graphed = models(tmp_path, Captures((), pieces=(8, 24)))
    assert graphed.static_bytes() == 24 * (5 * 32 * 4 + 2 * 32 * 4 + 4 * 8)
    memory = PieceMemory(24, FakeGraphs())
    with torch.inference_mode():
        PiecewisePass(24, memory, BLOCK, 96).capture(lambda batch: _forward(plain, batch), FakeGraphs())
    taken = memory.words.numel() * 8 + sum(b.numel() * 4 for b in memory._buffers.values())
    assert taken == PieceMemory.bytes(24, 32, 4)


def _forward(model: DecoderModel, batch: StepInput) -> None:
    model.forward(batch, storage(model))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_options(device: str) -> None:
    def options(**given: Any) -> GraphOptions:
        return EngineConfig(model="M", device=device, **given).graphs

    def inside(**given: Any) -> GraphOptions:
        return options(compilation_config=given)

    assert options() == GraphOptions("full_and_piecewise") == options(compilation_config=3)
    for mode in ("NONE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"):
        assert inside(cudagraph_mode=mode).mode == mode.lower()
    found = inside(cudagraph_capture_sizes=[8, 4, 4], max_cudagraph_capture_size=16)
    assert (found.sizes, found.largest) == ((4, 8), 16)
    found = options(cudagraph_capture_sizes=[8, 4], max_cudagraph_capture_size=8)
    assert (found.sizes, found.largest) == ((4, 8), 8)
    with pytest.raises(ConfigError, match=r"cudagraph_mode: expected one of .*full_and_piecewise"):
        inside(cudagraph_mode="HALF")
    with pytest.raises(ConfigError, match=r"compilation_config.cudagraph_capture_sizes\[0\]"):
        inside(cudagraph_capture_sizes=[0])
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes: 20 is over .*= 16"):
        options(cudagraph_capture_sizes=[20], max_cudagraph_capture_size=16)
    with pytest.raises(ConfigError, match=r"max_cudagraph_capture_size: is also given in compilation_config"):
        options(max_cudagraph_capture_size=16, compilation_config={"max_cudagraph_capture_size": 16})
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes: must not be empty"):
        options(cudagraph_capture_sizes=[])
