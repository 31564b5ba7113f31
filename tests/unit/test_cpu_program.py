"""Recorded passes: one native call does what the model's calls do one by one."""

from __future__ import annotations

import gc
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.tiny import VOCAB, save_llama
from tests.native import native_or_skip
from torch import Tensor

from draftwise.kernels.base import HeadShape
from draftwise.kernels.cpu.ops import NativeOps
from draftwise.kernels.cpu.pool import ThreadPool
from draftwise.kernels.cpu.recording import Recording
from draftwise.kernels.cpu.tape import RecordingError
from draftwise.kv.storage import KVStorage
from draftwise.models.inputs import RowInput, build_step_input
from draftwise.models.llama import LlamaModel
from draftwise.models.loader import load_model
from draftwise.models.recorded import RecordedDecoder, recorded
from draftwise.models.registry import register_model
from draftwise.names import DRAFT, SHARED
from draftwise.sampling.logits import LogitsRow, shape
from draftwise.sampling.noise import NoiseKey, gumbel, uniform
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import ChainDraws, ChainKey, StepInput, TargetOutput

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("model"), seed=3)


def native_ops(dtype: torch.dtype = torch.float32, threads: int = 2) -> NativeOps:
    return NativeOps(native_or_skip(), ThreadPool(native_or_skip(), threads), dtype)


def load(folder: str, dtype: torch.dtype = torch.float32, threads: int = 2) -> RecordedDecoder:
    model = load_model(folder, dtype=dtype, device=CPU, ops=native_ops(dtype, threads))
    assert isinstance(model, RecordedDecoder)
    return model


def storage(model: RecordedDecoder) -> KVStorage:
    return KVStorage(model.kv_layout(), 64, 4, model.dtype, CPU)


def batch(rows: int, start: int = 0) -> StepInput:
    tokens = [(7 * i + 3) % VOCAB for i in range(rows)]
    table = torch.arange(1, 63, dtype=torch.int32).numpy()
    return build_step_input([RowInput(tokens, start, table)], 4, CPU)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("capture", [(), (0, 1, 2), (2,)], ids=str)
@torch.inference_mode()
def test_replay_equals_the_calls(folder: str, dtype: torch.dtype, capture: tuple[int, ...]) -> None:
    """To rounding: the fused SiLU has another exponential, and rounds once less in bfloat16."""
    tolerance = 2e-5 if dtype is torch.float32 else 0.05
    model = load(folder, dtype)
    kv, other = storage(model), storage(model)
    for start, rows in ((0, 70), (70, 1), (71, 5)):  # more rows than the first arena holds, then few
        got = model.forward(batch(rows, start), kv, capture)
        want = model.inner.forward(batch(rows, start), other, capture)
        assert got.captured.keys() == want.captured.keys() == set(capture)
        torch.testing.assert_close(got.hidden, want.hidden, rtol=tolerance, atol=tolerance)
        for layer in capture:
            torch.testing.assert_close(
                got.captured[layer], want.captured[layer], rtol=tolerance, atol=tolerance
            )


@torch.inference_mode()
def test_logits_of_chosen_rows(folder: str) -> None:
    model = load(folder)
    kv = storage(model)
    hidden = model.forward(batch(9), kv).hidden
    logits = model.logits(hidden)
    for rows in (None, [0], [8], [2, 5, 7], list(range(9))):
        output, chosen = model.forward_logits(batch(9), kv, rows)
        assert torch.equal(output.hidden, hidden)
        assert torch.equal(chosen, logits if rows is None else logits[rows]), rows
        plain = super(RecordedDecoder, model).forward_logits(batch(9), kv, rows)[1]
        assert torch.equal(plain, chosen), rows
    assert model.forward_logits(batch(9), kv, [])[1].shape == (0, VOCAB)


@torch.inference_mode()
def test_results_outlive_the_next_pass(folder: str) -> None:
    model = load(folder)
    kv = storage(model)
    first, logits = model.forward_logits(batch(3), kv, capture=(0, 1))
    kept = [first.hidden.clone(), logits.clone(), first.captured[1].clone()]
    model.forward_logits(batch(3, 3), kv, capture=(0, 1))
    for value, copy in zip([first.hidden, logits, first.captured[1]], kept, strict=True):
        assert torch.equal(value, copy)


@torch.inference_mode()
def test_one_recording_per_storage(folder: str) -> None:
    model = load(folder)
    for _ in range(5):  # storages that are gone may come back with the same id
        kv = storage(model)
        one = model.forward(batch(5), kv).hidden
        assert kv.layer(1)[0].any(), "the pass writes to the storage it was given"
        assert torch.equal(model.forward(batch(5), kv).hidden, one)
        del kv
        gc.collect()


@pytest.mark.usefixtures("level")
@torch.inference_mode()
def test_same_bits_for_any_number_of_threads(folder: str) -> None:
    results = []
    for threads in (1, 2, 3):
        model = load(folder, torch.bfloat16, threads)
        results.append(model.forward_logits(batch(40), storage(model))[1])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.usefixtures("level")
@torch.inference_mode()
def test_a_team_of_threads_computes_the_same_bits(folder: str) -> None:
    """Few rows of a small model are shared by threads that come and go: whoever helps, nothing changes."""
    alone, team = load(folder, torch.bfloat16, 1), load(folder, torch.bfloat16, 4)
    kv, other = storage(alone), storage(team)
    want = [alone.forward_logits(batch(rows, 40), kv)[1] for rows in range(1, 17)]
    for step in range(400):
        rows = 1 + step % 16
        assert torch.equal(team.forward_logits(batch(rows, 40), other)[1], want[rows - 1]), (step, rows)


def test_models_side_by_side(folder: str) -> None:
    """Several engines of a process, each with its threads: what all of them know about busy cores changes no bit."""
    model = load(folder, torch.bfloat16, 1)
    with torch.inference_mode():
        kv = storage(model)
        want = [model.forward_logits(batch(rows, 40), kv)[1] for rows in range(1, 9)]

    def run(threads: int) -> int:
        mine = load(folder, torch.bfloat16, threads)
        with torch.inference_mode():
            kv = storage(mine)
            return sum(
                torch.equal(mine.forward_logits(batch(1 + step % 8, 40), kv)[1], want[step % 8])
                for step in range(80)
            )

    with ThreadPoolExecutor(3) as engines:
        assert list(engines.map(run, (2, 3, 2))) == [80, 80, 80]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.inference_mode()
def test_draft_chains_in_one_call(folder: str, dtype: torch.dtype) -> None:
    """The same tokens and K/V as pass by pass; three requests that catch up on different numbers of tokens."""
    model = load(folder, dtype)
    tables = torch.arange(3, 63, dtype=torch.int32).view(3, 20).numpy()
    tokens = [[5, 9, 11, 4], [7], [8, 30, 2]]
    contexts = [0, 6, 13]
    one, other = storage(model), storage(model)
    for r in range(3):  # committed tokens, some of which the chains must see
        if contexts[r]:
            known = [(3 * i + r) % VOCAB for i in range(contexts[r])]
            for kv in (one, other):
                model.forward(build_step_input([RowInput(known, 0, tables[r])], 4, CPU), kv)

    def first() -> StepInput:
        return build_step_input([RowInput(tokens[r], contexts[r], tables[r]) for r in range(3)], 4, CPU)

    steps = 7  # over block borders
    chains = model.draft_chains(first(), one, [3, 4, 7], steps)
    assert chains is not None
    got, q = chains
    assert got.shape == (3, steps) and q is None
    logits = model.forward_logits(first(), other, [3, 4, 7])[1]
    for step in range(steps):
        best = logits.argmax(-1).tolist()
        assert got[:, step].tolist() == best, step
        rows = [RowInput([best[r]], contexts[r] + len(tokens[r]) + step, tables[r]) for r in range(3)]
        if step + 1 < steps:
            logits = model.forward_logits(build_step_input(rows, 4, CPU), other)[1]
    for layer in range(2):
        assert torch.equal(one.layer(layer)[0], other.layer(layer)[0])
    alone = model.draft_chains(build_step_input([RowInput([7], 6, tables[1])], 4, CPU), one, None, 1)
    assert alone is not None and alone[0].tolist() == [[got[1, 0]]]


SHAPES: list[dict[str, Any]] = [{}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.3}, {"top_k": 3}]


@torch.inference_mode()
@pytest.mark.parametrize("given", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_chains_draw_from_what_they_report(folder: str, rows: int, given: dict[str, Any]) -> None:
    """q is the softmax at the request's temperature of what min_p, top_k and top_p leave, a token the inverse CDF of
    its uniform; with shared noise the argmax of both together, keys those of `draft_tokens`. K/V as pass by pass."""
    model = load(folder)
    tables = torch.arange(3, 63, dtype=torch.int32).view(3, 20).numpy()
    steps, temperature = 5, np.array([0.7, 1.0, 2.5], np.float32)[:rows]
    keys: list[ChainKey] = []
    shaped: list[LogitsRow] = []
    for i, (seed, t) in enumerate(zip((2**64 - 1, 5, 11), temperature.tolist(), strict=False)):
        state = SamplingState(
            SamplingParams(temperature=t, **given),
            seed=seed,
            sample_index=seed % 7,
            token_ids_np=np.zeros(1, np.int32),
            num_prompt=1,
            vocab_size=VOCAB,
        )
        low, p, scale, log_min_p, k, index = state.draw_fields
        keys.append(ChainKey(low, index, 40 + i, 2 * i, scale, log_min_p, k, p))
        shaped.append(LogitsRow(state, (), np.zeros(1, np.int32)))

    def first() -> StepInput:
        return build_step_input([RowInput([5 + r], 0, tables[r]) for r in range(rows)], 4, CPU)

    def noise_keys(stream: int, step: int) -> list[NoiseKey]:
        nodes = [key.node + step for key in keys]
        return [
            NoiseKey(key.seed, key.sample_index, stream, key.base + node, node, key.base)
            for key, node in zip(keys, nodes, strict=True)
        ]

    for draws in (ChainDraws("draft", tuple(keys)), ChainDraws("shared", tuple(keys))):
        one, other = storage(model), storage(model)
        chains = model.draft_chains(first(), one, None, steps, draws)
        assert chains is not None
        tokens, q = chains
        logits = model.forward_logits(first(), other)[1]
        for step in range(steps):
            scaled = shape(logits.clone(), shaped)
            assert bool((scaled == -torch.inf).any()) is bool(given)
            if draws.stream == "shared":
                assert q is None
                wanted = (scaled + gumbel(noise_keys(SHARED, step), VOCAB)).argmax(-1).tolist()
            else:
                assert q is not None
                torch.testing.assert_close(q[:, step], scaled.softmax(-1), rtol=1e-5, atol=1e-7)
                assert torch.equal(q[:, step] == 0.0, scaled == -torch.inf)
                sums = q[:, step].double().cumsum(-1)
                uniforms = torch.tensor(
                    [uniform(*key) for key in noise_keys(DRAFT, step)], dtype=torch.float64
                )
                targets = uniforms * sums[:, -1]
                wanted = (
                    torch.searchsorted(sums, targets[:, None], right=True)
                    .squeeze(1)
                    .clamp(max=VOCAB - 1)
                    .tolist()
                )
            assert tokens[:, step].tolist() == wanted, step
            fed = [RowInput([wanted[r]], 1 + step, tables[r]) for r in range(rows)]
            if step + 1 < steps:
                logits = model.forward_logits(build_step_input(fed, 4, CPU), other)[1]
        assert torch.equal(one.layer(0)[0], other.layer(0)[0])


def test_products_are_fused(folder: str) -> None:
    """Per layer: norm, q/k/v, rotation, attention, output + residual, norm, gate/up with SiLU, down + residual."""
    model = load(folder)
    program = model._program(storage(model), ())
    assert program is not None
    embedding_rope_last_norm, pick_head, narrow_qkv_residual = 3, 2, 2
    assert program.num_operations == 8 * 2 + embedding_rope_last_norm + pick_head + narrow_qkv_residual


def test_a_product_that_is_read_again_is_refused() -> None:
    ops = native_ops()
    recording = Recording(torch.float32)
    norm = ops.pack_norm(torch.ones(8), 1e-5)
    residual = ops.embedding(recording.token_ids, torch.ones(4, 8))
    hidden = ops.rms_norm(residual, norm)
    product = ops.linear(hidden, ops.pack_linear(torch.ones(8, 8)))
    ops.add_rms_norm(product, residual, norm)
    with pytest.raises(RecordingError, match="fused"):
        ops.copy(product)


def test_heads_larger_than_the_kernel_s_buffer_are_refused() -> None:
    recording = Recording(torch.float32)
    qkv = native_ops().embedding(recording.token_ids, torch.ones(4, 3 * 2048))
    cache = (torch.zeros(16, 2, 2048),)
    with pytest.raises(ValueError, match="up to 1024"):
        recording.qkv_rope_write(
            qkv, HeadShape(1, 1, 2048), recording.positions, cache, recording.slots, None, None, 1e-5
        )


class Peeking(LlamaModel):
    """Does something with a tensor that is no operation."""

    def forward(self, batch: StepInput, kv: KVStorage, capture: Any = ()) -> TargetOutput:
        if int(batch.token_ids.max()) >= 0:
            return super().forward(batch, kv, capture)
        raise AssertionError


@torch.inference_mode()
def test_a_model_that_cannot_be_recorded_runs_call_by_call(
    tmp_path: Path, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    import json
    import shutil

    register_model("PeekingForCausalLM", Peeking)
    copy = tmp_path / "peeking"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["architectures"] = ["PeekingForCausalLM"]
    (copy / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING, "draftwise"):
        model = load(str(copy))
    assert not model.same_bits
    assert "cannot be recorded" in caplog.text
    usual = load(folder)
    expected: Tensor = usual.forward_logits(batch(6), storage(usual))[1]
    got = model.forward_logits(batch(6), storage(model))[1]
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert usual.same_bits


def test_other_ops_are_not_wrapped(folder: str) -> None:
    from draftwise.kernels.torch_ops import TorchOps

    ops = TorchOps(torch.float32, CPU)
    model = load_model(folder, dtype=torch.float32, device=CPU, ops=ops)
    assert recorded(model, ops) is model
    assert not model.same_bits
