"""The way of a GPU without one: engines and the benchmark on a pretended device (`tests.fakes.fake_cuda`), with CUDA's
graphs, pinned memory and Triton's launches. Kernels are checked as they are launched, and not run; verification accepts
what a rule made up here says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.fakes import seats
from tests.fakes.every_method import CASES, SHAPES, VOCAB, case_id, make_families, make_target
from tests.fakes.fake_cuda import fake_cuda
from tests.fakes.fake_cuda_device import FakeCuda
from tests.fakes.fake_cuda_triton import Launches, fake_launches

from draftwise import LLM, SamplingParams
from draftwise.bench.gpu import command
from draftwise.graphs.decoder import GraphedDecoder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as made:
        yield made


@pytest.fixture
def launches(device: FakeCuda) -> Iterator[Launches]:
    with fake_launches(device, "skip") as made:
        made.effects |= dict.fromkeys(("walk_trees", "judge_chains", "judge_blocks", "reject_trees"), accept)
        made.effects["best_of_all"] = draw
        made.effects |= seats.EFFECTS
        yield made


def accept(given: dict[str, Any]) -> None:
    """Stands for a rule: takes two of three drafts whose parents are taken."""
    table, walk, nodes = given["table"], given["walk"], given["num_nodes"]
    for r in given["members"].tolist():
        _, count, _, _, known, _, *rest = table[r].tolist()
        tokens, parents = rest[:nodes], rest[nodes : 2 * nodes]
        path: list[int] = []
        for i in range(count):
            if parents[i] == (path[-1] if path else -1) and (known + i) % 3:
                path.append(i)
        taken = [tokens[i] for i in path]
        walk[r, 0] = len(path)
        walk[r, 1 : 1 + len(path)] = torch.tensor(path)
        walk[r, 1 + nodes : 2 + nodes + len(path)] = torch.tensor([*taken, known % VOCAB])


def draw(given: dict[str, Any]) -> None:
    """The first tokens are the best."""
    given["out_tokens"].copy_(torch.arange(given["K"]).expand_as(given["out_tokens"]))


# ------------------------------------------------------------------------------------- the benchmark

LAUNCHED = {
    "bandwidth": set(),
    "kernels": {"rms_norm", "silu_mul", "linear", "partial_attention", "combine_partitions", "tree_rows"},
    "steps": {
        "gather_rows",
        "rms_norm",
        "rope_write",
        "silu_mul",
        "linear",
        "partial_attention",
        "split_attention",
    },
    "drafting": {"next_rows", "part_of_best", "best_of_all", "draw_sampled"},
    "engines": {"next_rows", "wanted_parts", "walk_trees", "best_of_all"},
    "memory": {"wanted_parts"},
    "attention": {"split_attention"},
    "mixed": {"split_attention"},
    "adapters": {"low_rank_down", "low_rank_up"},
    "transformers": set(),
    "truth": {"split_attention", "tree_rows"},
    "profile": {"split_attention", "next_rows"},
}


# the profile takes six minutes in the interpreter, a third of all tests there; its parts are those of the others
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.slow if part == "profile" else []) for part in LAUNCHED]
)
def test_a_part_of_the_benchmark_comes_to_its_end(launches: Launches, device: FakeCuda, part: str) -> None:
    report = command.run_part(part, "cuda", True)
    assert report.error is None and report.lines and report.skipped is None
    assert launches.kernels() >= LAUNCHED[part]
    if part in ("steps", "drafting", "engines"):
        assert device.replays
    if part == "memory":
        assert all(line.met for line in report.lines if line.met is not None)
    if part == "attention":
        found = [str(line.value) for line in report.lines if "flex" in line.name]
        assert len(found) == 2 and all(value.startswith("refused: ") for value in found)


def test_every_part_is_rehearsed() -> None:
    assert LAUNCHED.keys() | {"drafting_in_torch"} >= command.PARTS.keys()


def test_what_would_break_a_part_is_found(
    launches: Launches, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwise.kernels.triton import rows

    right = rows.rms_norm

    def looks(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert x.abs().max() < 1e9
        return right(x, *args, **kwargs)

    monkeypatch.setattr(rows, "rms_norm", looks)
    report = command.run_part("steps", "cuda", True)
    assert report.error is not None and "not permitted when stream is capturing" in report.error


# ------------------------------------------------------------------------------------------- engines


class Checkpoints:
    def __init__(self, root: Path) -> None:
        self.target, self.families = make_target(root), make_families(root)
        rng = np.random.default_rng(7)
        self.prompts = [
            {"prompt_token_ids": rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist()} for _ in range(5)
        ]

    def engine(self, case: tuple[str, str, str], **options: Any) -> LLM:
        family, method, shape = case
        config: dict[str, Any] = next(s for s in self.families[family] if s["method"] == method)
        if shape != "chain":
            config = {k: v for k, v in config.items() if k != "num_speculative_tokens"} | SHAPES[shape]
        base: dict[str, Any] = {
            "dtype": "float32",
            "device": "cuda",
            "skip_tokenizer_init": True,
            "num_kv_blocks": 64,
            "max_num_seqs": 3,
            "max_model_len": 64,
            "max_num_batched_tokens": 64,
            "speculation_control": "static",
            "speculative_config": config,
        }
        return LLM(self.target, **(base | options))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("rehearsal"))


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, seed=5),
    SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, seed=6, speculation={"rule": "rejection"}),
    SamplingParams(temperature=0.9, max_tokens=8, ignore_eos=True, seed=6, top_p=0.9, logprobs=1),
]


def run(llm: LLM, prompts: list[dict[str, Any]]) -> None:
    """All of `PARAMS` in one batch; a lossless rule gives every request its tokens."""
    mixed = [PARAMS[i % len(PARAMS)] for i in range(len(prompts))]
    for outputs in (llm.generate(prompts, mixed), llm.generate(prompts[:2], PARAMS[0])):
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """What was warned of: an engine goes on without a drafter that fails."""
    return lambda: "\n".join(r.getMessage() for r in caplog.records if r.levelname in ("WARNING", "ERROR"))


@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}], ids=["ahead", "waiting"])
@pytest.mark.parametrize("case", CASES, ids=map(case_id, CASES))
def test_an_engine_runs(
    launches: Launches,
    device: FakeCuda,
    checkpoints: Checkpoints,
    said: Callable[[], str],
    case: Any,
    options: dict[str, Any],
) -> None:
    with checkpoints.engine(case, **options) as llm:
        run(llm, checkpoints.prompts)
        engine: Any = llm._engine
        seats = None if options else engine.core.executor.inner.seats
        assert isinstance(engine.model, GraphedDecoder)
        assert engine.model.num_replays or (seats is not None and seats.num_steps)
    assert not said()


def test_a_drafter_that_fails_is_told(
    launches: Launches,
    device: FakeCuda,
    checkpoints: Checkpoints,
    said: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "draftwise.propose.heads.proposer.HeadProposer.propose", lambda *args: torch.ones(1).cuda() + 1 / 0
    )
    with checkpoints.engine(("methods", "eagle3", "chain"), async_scheduling=False) as llm:
        llm.generate(checkpoints.prompts[:1], PARAMS[0])
    assert "failed" in said()


OPTIONS: dict[str, dict[str, Any]] = {
    "waiting": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "bfloat16, fixed sums": {"dtype": "bfloat16", "batch_invariant": True},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8", "dtype": "bfloat16"},
    "int8_weight_only": {"quantization": "int8_weight_only", "dtype": "bfloat16"},
    "fp8, fixed sums": {"quantization": "fp8", "dtype": "bfloat16", "batch_invariant": True},
    "fp8": {"quantization": "fp8", "dtype": "bfloat16"},
    "int4": {"quantization": "int4", "dtype": "bfloat16"},
    "memory as planned": {"num_kv_blocks": None, "gpu_memory_utilization": 0.9},
    "sizes": {"cudagraph_capture_sizes": [4, 8]},
    "pieces": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "no pieces": {"compilation_config": {"cudagraph_mode": "FULL"}},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_an_engine_runs_with_options(
    launches: Launches, device: FakeCuda, checkpoints: Checkpoints, said: Callable[[], str], options: str
) -> None:
    case = ("methods", "eagle3", "chain")
    with checkpoints.engine(case, **OPTIONS[options]) as llm:
        run(llm, checkpoints.prompts)
        model = llm._engine.model  # type: ignore[union-attr]
        if isinstance(model, GraphedDecoder):
            assert bool(model.num_piecewise) == (options != "no pieces")
            assert options != "pieces" or not model.num_replays
        if options == "memory as planned":
            free, total = torch.cuda.mem_get_info()
            assert total - free <= 0.9 * total
    assert not said()


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
def test_long_prompts_go_through_flash_attention(
    launches: Launches,
    device: FakeCuda,
    checkpoints: Checkpoints,
    said: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """Between the pieces of captured passes, and in passes that are not captured; it is no wait for the device."""
    options = {"dtype": "bfloat16", "num_kv_blocks": None, "gpu_memory_utilization": 0.9}
    options |= {"compilation_config": {"cudagraph_mode": mode}}
    waits, flashes = [], []
    for least in (100, 12):
        monkeypatch.setattr("draftwise.kernels.triton.ops.PROMPT_ROWS", least)
        with checkpoints.engine(("methods", "eagle3", "chain"), **options) as llm:
            run(llm, checkpoints.prompts)
            before = device.waits, device.flashes
            llm.generate([{"prompt_token_ids": [5] * 30}], PARAMS[0])
            waits.append(device.waits - before[0])
            flashes.append(device.flashes - before[1])
            layers = llm._engine.model.config.num_layers  # type: ignore[union-attr]
    assert flashes == [0, layers + 1], "of the target, and of the head's one"
    assert waits[0] == waits[1] and not said()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_step_waits_for_its_verification_and_for_its_drafts(
    launches: Launches, device: FakeCuda, checkpoints: Checkpoints, temperature: float
) -> None:
    found: list[tuple[int, int]] = []
    with checkpoints.engine(("methods", "eagle3", "chain"), async_scheduling=False) as llm:
        model = llm._engine.model  # type: ignore[union-attr]
        assert isinstance(model, GraphedDecoder)
        for tokens in (12, 12, 36):
            before = model.num_replays
            params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=3)
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                llm.generate(checkpoints.prompts[:3], params)
            torch.cuda.set_sync_debug_mode("default")
            found.append((model.num_replays - before, len(caught)))
    (steps, waits), (more_steps, more_waits) = found[1:]
    assert more_steps > steps + 4 and more_waits - waits <= 2 * (more_steps - steps)


def test_later_requests_need_no_code_that_was_not_compiled(
    launches: Launches, device: FakeCuda, checkpoints: Checkpoints
) -> None:
    """Triton compiles for alignments and small numbers apart, which takes seconds; see `kernels.triton.device`."""
    rng = np.random.default_rng(1)
    with checkpoints.engine(("methods", "eagle3", "chain")) as llm:
        run(llm, checkpoints.prompts)
        before = set(launches.seen)
        for count in range(1, 5):
            prompts = [rng.integers(0, VOCAB, int(rng.integers(2, 40))).tolist() for _ in range(count)]
            llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS[: len(prompts)])
    assert set(launches.seen) == before


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true device")
