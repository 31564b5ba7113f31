"""Draft heads recorded: one native call does what a head's calls do one by one, and a whole chain what passes do."""

from __future__ import annotations

import logging
from typing import Literal

import numpy as np
import pytest
import torch
from tests.native import native_or_skip
from torch import Tensor

from draftwise.kernels.base import HeadShape
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.recording import Recording
from draftwise.kernels.cpu.tape import RecordingError
from draftwise.kv.storage import KVLayerSpec, KVStorage
from draftwise.models.heads.base import HeadModel, HeadOutput
from draftwise.models.heads.recorded import RecordedHead, recorded_head
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.names import DRAFT, SHARED
from draftwise.sampling.noise import NoiseKey, gumbel, uniform
from draftwise.types import ChainDraws, ChainKey, StepInput, TargetOutput, TreeDraws

CPU = torch.device("cpu")
VOCAB, DRAFT_VOCAB, SIZE = 50, 23, 32
Kind = Literal["eagle", "eagle3", "mtp"]
KINDS: tuple[Kind, ...] = ("eagle", "eagle3", "mtp")


class SmallHead(HeadModel):
    """One layer in the manner of each published kind: how token and feature are joined, and what is fed back."""

    def __init__(self, kind: Kind, ops: NativeOps) -> None:
        self.kind = kind
        self.ops = ops
        self.dtype, self.device = ops.dtype, ops.device
        self.feature_size = SIZE
        self.max_model_len = 200
        self.draft_vocab_size = DRAFT_VOCAB if kind == "eagle3" else VOCAB
        if kind == "eagle3":
            self.target_ids = torch.arange(DRAFT_VOCAB) * 2 + 1
        generator = torch.Generator().manual_seed(len(kind))

        def weight(*shape: int) -> Tensor:
            values: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            return values.to(ops.dtype)

        self.shape = HeadShape(4, 2, 8)
        self.embedding = weight(VOCAB, SIZE) * 5
        self.fc = ops.pack_linear(weight(SIZE, 2 * SIZE))
        self.qkv = ops.pack_linear(weight(64, 2 * SIZE if kind == "eagle3" else SIZE))
        self.o = ops.pack_linear(weight(SIZE, SIZE))
        self.gate_up = ops.pack_gate_up(weight(96, SIZE))
        self.down = ops.pack_linear(weight(SIZE, 48))
        self.norms = [ops.pack_norm(1 + 0.1 * weight(SIZE).float(), 1e-5) for _ in range(5)]
        self.head = ops.pack_head(weight(self.draft_vocab_size, SIZE) * 3)
        self.rope = ops.pack_rope(1.0 / 10.0 ** torch.arange(0, 1, 0.25), 1.0, 200)

    def finish(self) -> None:
        raise AssertionError

    def kv_layout(self) -> tuple[KVLayerSpec, ...]:
        return (KVLayerSpec.dense(2, 8),)

    def weight_bytes(self) -> int:
        return 1

    def combine(self, output: TargetOutput, rows: Tensor) -> Tensor:
        return output.hidden.index_select(0, rows)

    def forward(self, batch: StepInput, features: Tensor, kv: KVStorage, depth: int = 0) -> HeadOutput:
        ops, norms = self.ops, self.norms
        embedded = ops.embedding(batch.token_ids, self.embedding)
        if self.kind == "eagle3":
            normed = ops.rms_norm(features, norms[0])
            hidden = ops.concat(ops.rms_norm(embedded, norms[1]), normed)
            residual = ops.copy(features)
        else:
            if self.kind == "mtp":
                embedded = ops.clear_first(ops.rms_norm(embedded, norms[1]), batch.positions)
                features = ops.rms_norm(features, norms[0])
            residual = ops.linear(ops.concat(embedded, features), self.fc)
            hidden = residual if self.kind == "eagle" else ops.rms_norm(residual, norms[2])
        qkv = ops.linear(hidden, self.qkv)
        rope = ops.rope_rows(self.rope, batch.positions)
        q = ops.qkv_rope_write(qkv, self.shape, rope, kv.layer(0), batch.slots)
        attended = ops.attention(q, kv.layer(0), batch.attention, self.shape, 0.35)
        inner = ops.add_rms_norm(ops.linear(attended, self.o), residual, norms[3])
        inner = ops.silu_mul(ops.linear(inner, self.gate_up))
        product = ops.linear(inner, self.down)
        if self.kind == "eagle":
            hidden = ops.add(product, residual)
            return HeadOutput(hidden, hidden)
        return HeadOutput(ops.add_rms_norm(product, residual, norms[4]), residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ops.logits(hidden, self.head)


def make(kind: Kind, dtype: torch.dtype = torch.float32, threads: int = 2) -> RecordedHead:
    ops = NativeOps(native_or_skip(), ThreadPool(native_or_skip(), threads), dtype)
    head = recorded_head(SmallHead(kind, ops), ops)
    assert isinstance(head, RecordedHead) and head.same_bits
    return head


def storage(head: HeadModel) -> KVStorage:
    kv = KVStorage(head.kv_layout(), 64, 4, head.dtype, CPU)
    kv.layer(0)[0][3 * 4] = float("nan")  # slot of the first request's key 0: nobody may look
    return kv


TABLES = np.arange(3, 63, dtype=np.int32).reshape(3, 20)
ROWS = [([5, 9, 11, 4], 1), ([7], 6), ([8, 30, 2], 13)]  # tokens, first key
LAST = [3, 4, 7]


def features(head: HeadModel, rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)).to(head.dtype)


def first_batch() -> StepInput:
    rows = [RowInput(tokens, key, TABLES[r], first_key=1) for r, (tokens, key) in enumerate(ROWS)]
    return build_step_input(rows, 4, CPU, position_offset=-1)


def fill(head: HeadModel, kv: KVStorage) -> None:
    """The committed tokens before `ROWS`, all but token 0."""
    for r, (_, key) in enumerate(ROWS):
        if key > 1:
            known = [(3 * i + r) % VOCAB for i in range(1, key)]
            batch = build_step_input([RowInput(known, 1, TABLES[r], first_key=1)], 4, CPU, -1)
            head.forward(batch, features(head, key - 1, r), kv)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_replay_equals_the_calls(kind: Kind, dtype: torch.dtype) -> None:
    """To rounding: the fused SiLU has another exponential, and rounds once less in bfloat16."""
    tolerance = 2e-5 if dtype is torch.float32 else 0.06
    head = make(kind, dtype)
    kv, other = storage(head), storage(head)
    fill(head, kv)
    fill(head.inner, other)
    given = features(head, 8, 9)
    kept = given.clone()
    got, logits = head.forward_logits(first_batch(), given, kv, LAST)
    assert torch.equal(given, kept), "a pass does not change what it is given"
    want, expected = head.inner.forward_logits(first_batch(), given, other, LAST)
    torch.testing.assert_close(got.hidden, want.hidden, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.features, want.features, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance * 4)
    assert torch.equal(head.logits(got.hidden)[LAST], logits)
    assert torch.equal(head.forward(first_batch(), given, kv).features, got.features)
    assert torch.equal(head.forward_logits(first_batch(), given, kv)[1][LAST], logits)
    assert head.forward_logits(first_batch(), given, kv, [])[1].shape == (0, head.draft_vocab_size)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [0]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_chains_equal_pass_by_pass(kind: Kind, rows: list[int]) -> None:
    """Greedy, sampled and coupled: tokens, distributions, K/V; features and draft vocabulary fed back."""
    steps, temperature = 6, np.array([0.7, 1.0, 2.5], np.float32)[: len(rows)]
    head = make(kind, torch.bfloat16)
    vocab = head.draft_vocab_size
    keys = tuple(ChainKey(7 + i, 0, 30 + i, 0, float(1 / t)) for i, t in enumerate(temperature))
    parts = [ROWS[r] for r in rows]
    batch = build_step_input(
        [RowInput(ROWS[r][0], ROWS[r][1], TABLES[r], first_key=1) for r in rows], 4, CPU, -1
    )
    last = (np.cumsum([len(tokens) for tokens, _ in parts]) - 1).tolist()
    given = features(head, last[-1] + 1, 9)

    def noise_keys(stream: int, step: int) -> list[NoiseKey]:
        return [NoiseKey(key.seed, 0, stream, key.base + step, step, key.base) for key in keys]

    for draws in (None, ChainDraws("draft", keys), ChainDraws("shared", keys)):
        one, other = storage(head), storage(head)
        for kv in (one, other):
            fill(head, kv)
        every = len(last) == last[-1] + 1
        chains = head.draft_chains(batch, given, one, None if every else last, steps, draws)
        assert chains is not None
        tokens, q = chains
        output, logits = head.forward_logits(batch, given, other, last)
        fed = output.features[last]
        for step in range(steps):
            scaled = logits / torch.from_numpy(temperature)[:, None]
            if draws is not None and draws.stream == "shared":
                # a drafter with a vocabulary of its own reads the noise of the target's tokens
                ids = (scaled + gumbel(noise_keys(SHARED, step), VOCAB, token_ids=head.target_ids)).argmax(-1)
            elif draws is None:
                ids = logits.argmax(-1)
            else:
                assert q is not None and q.shape == (len(rows), steps, vocab)
                torch.testing.assert_close(q[:, step], scaled.softmax(-1), rtol=1e-5, atol=1e-7)
                sums = q[:, step].double().cumsum(-1)
                uniforms = [uniform(*key) for key in noise_keys(DRAFT, step)]
                targets = torch.tensor(uniforms, dtype=torch.float64) * sums[:, -1]
                ids = torch.searchsorted(sums, targets[:, None], right=True)[:, 0].clamp(max=vocab - 1)
            if head.target_ids is not None:
                ids = head.target_ids[ids]
            assert tokens[:, step].tolist() == ids.tolist(), step
            if step + 1 == steps:
                break
            nexts = [
                RowInput([int(ids[i])], ROWS[r][1] + len(ROWS[r][0]) + step, TABLES[r], first_key=1)
                for i, r in enumerate(rows)
            ]
            output, logits = head.forward_logits(build_step_input(nexts, 4, CPU, -1), fed, other)
            fed = output.features
        assert torch.equal(one.layer(0)[0].nan_to_num(), other.layer(0)[0].nan_to_num())


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_tree_of_one_path_is_the_chain(kind: Kind) -> None:
    head, steps = make(kind, torch.bfloat16), 5
    found: list[list[list[int]]] = []
    for tree in (False, True):
        kv = storage(head)
        fill(head, kv)
        given = features(head, 8)
        if tree:
            draws = [TreeDraws(top_k=1, depth=steps, nodes=steps) for _ in ROWS]
            trees = head.draft_trees(first_batch(), given, kv, LAST, draws)
            assert trees is not None and all(list(x.parents) == list(range(-1, steps - 1)) for x in trees)
            found.append([list(x.tokens) for x in trees])
        else:
            chains = head.draft_chains(first_batch(), given, kv, LAST, steps)
            assert chains is not None
            found.append(chains[0].tolist())
    assert found[0] == found[1]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_same_bits_in_any_batch_and_for_any_threads(kind: Kind) -> None:
    want = None
    for threads in (1, 2, 4):
        head = make(kind, torch.bfloat16, threads)
        kv = storage(head)
        fill(head, kv)
        given = features(head, 8, 9)
        _, logits = head.forward_logits(first_batch(), given, kv)
        if want is None:
            want = logits
        assert torch.equal(logits, want)
        tokens, key = ROWS[0]
        for i in range(len(tokens)):  # one by one, keys of later tokens already there
            alone = build_step_input(
                [RowInput(tokens[i : i + 1], key + i, TABLES[0], first_key=1)], 4, CPU, -1
            )
            assert torch.equal(head.forward_logits(alone, given[i : i + 1], kv)[1], want[i : i + 1])


@torch.inference_mode()
def test_adding_rows_that_no_product_made() -> None:
    """And in place, so that what was copied before stays."""
    ops = NativeOps(native_or_skip(), ThreadPool(native_or_skip(), 1), torch.bfloat16)
    recording = Recording(torch.bfloat16, 24)
    assert recording.features is not None
    table = torch.randn(9, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    embedded = ops.embedding(recording.token_ids, table)
    before = ops.copy(embedded)
    total = ops.add(recording.features, embedded)
    norm = ops.pack_norm(torch.ones(24), 1e-5)
    head = ops.pack_head(torch.eye(24).bfloat16())
    logits = ops.logits(recording.pick(ops.rms_norm(total, norm)), head)
    program = recording.finish(ops.library, ops.pool, total, {0: before}, logits)
    batch = build_step_input([RowInput([3, 8], 0, TABLES[0])], 4, CPU)
    given = torch.randn(2, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    output = program.run(batch, 2, given)
    assert torch.equal(output.captured[0], table[[3, 8]])
    assert torch.equal(output.hidden, table[[3, 8]] + given)
    assert output.logits is not None
    assert torch.equal(output.logits, ops.rms_norm(output.hidden, norm).float())


def test_an_input_of_a_pass_is_not_changed() -> None:
    ops = NativeOps(native_or_skip(), ThreadPool(native_or_skip(), 1), torch.float32)
    recording = Recording(torch.float32, 8)
    assert recording.features is not None
    with pytest.raises(RecordingError, match="copy"):
        ops.clear_first(recording.features, recording.positions)
    with pytest.raises(RecordingError, match="copy"):
        ops.add(ops.copy(recording.features), recording.features)


class Peeking(SmallHead):
    """Does something with a tensor that is no operation."""

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) * 2


@torch.inference_mode()
def test_a_head_that_cannot_be_recorded_runs_call_by_call(caplog: pytest.LogCaptureFixture) -> None:
    ops = NativeOps(native_or_skip(), ThreadPool(native_or_skip(), 1), torch.float32)
    inner = Peeking("eagle", ops)
    with caplog.at_level(logging.WARNING, "draftwise"):
        head = recorded_head(inner, ops)
    assert isinstance(head, RecordedHead) and not head.same_bits
    assert "cannot be recorded" in caplog.text
    kv = storage(head)
    assert head.draft_chains(first_batch(), features(head, 8), kv, LAST, 3) is None
    usual = SmallHead("eagle", ops)
    want = usual.forward_logits(first_batch(), features(head, 8), kv, LAST)[1]
    assert torch.equal(head.forward_logits(first_batch(), features(head, 8), kv, LAST)[1], want * 2)
