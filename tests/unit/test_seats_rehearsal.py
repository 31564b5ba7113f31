"""Steps that stay on the device, on a pretended one (`tests.fakes.fake_cuda`): CUDA's graphs, pinned memory, copies
that arrive when they are waited for, and Triton's launches, which are checked, and done by torch instead."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.fakes.every_method import SHAPES, VOCAB, make_families, make_target
from tests.fakes.fake_cuda import fake_cuda
from tests.fakes.fake_cuda_triton import fake_launches
from tests.fakes.lora import save_adapter
from tests.fakes.seats import EFFECTS

from draftwise import LLM, LoRARequest, SamplingParams
from draftwise.runner.seat_results import Flight
from draftwise.runner.seats import Seats
from draftwise.types import RowPlan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a true device")


def accept(given: dict[str, Any]) -> None:
    """Stands for a rule: takes up to two drafts, and a token follows that tells how many are known."""
    table, walk, nodes = given["table"], given["walk"], given["num_nodes"]
    for r in given["members"].tolist():
        count, known = min(int(table[r, 1]), 2), int(table[r, 4])
        walk[r, 0] = count
        walk[r, 1 : 1 + count] = torch.arange(count)
        walk[r, 1 + nodes : 1 + nodes + count] = table[r, 6 : 6 + count].int()
        walk[r, 1 + nodes + count] = (known + count) % VOCAB


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 9, "min_p": 0.01, "logprobs": 3},
    {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}},
    {"temperature": 0.9, "allowed_token_ids": list(range(VOCAB))},
]
"""Each with short texts twice, so that all is captured, and then with long ones: no more is waited for."""


CASES = [
    *(
        (method, "chain", "")
        for method in ("none", "draft_model", "eagle3", "ngram", "suffix", "medusa", "early_exit", "hybrid")
    ),
    ("eagle3", "chain", "typical"),
    ("none", "adapters", ""),
    ("eagle3", "adapters", "coupled"),
    ("dflash", "chain", ""),
    ("dflash", "static", "coupled"),
    ("dflash", "masks", ""),
    ("mtp", "masks", ""),
    ("draft_model", "masks", ""),
    pytest.param("eagle3", "masks", "", marks=pytest.mark.slow),
    *((method, "static", "coupled") for method in ("draft_model", "eagle3", "mtp", "medusa")),
    *((method, "static", "rejection") for method in ("draft_model", "eagle3", "medusa")),
    *(("eagle3", "dynamic", rule) for rule in ("coupled", "rejection")),
    *((method, "dynamic", "coupled") for method in ("draft_model", "medusa", "hybrid")),
]


@pytest.mark.parametrize(("method", "shape", "rule"), CASES)
def test_a_step_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, shape: str, rule: str
) -> None:
    """``rule``: empty: the default. ``shape`` "masks": other forms of the method, such as drafts in one pass;
    "adapters": one request has one."""
    form = "other forms" if shape == "masks" else "methods"
    target, families = make_target(tmp_path), make_families(tmp_path)
    options: dict[str, Any] = {
        "dtype": "float32",
        "device": "cuda",
        "skip_tokenizer_init": True,
        "num_kv_blocks": 64,
        "max_num_seqs": 2,
        "max_model_len": 96,
        "max_num_batched_tokens": 32,
        "speculation_control": "static",
        "async_scheduling": True,
        "compilation_config": {"cudagraph_mode": "FULL"},
        "speculative_config": [s for s in families[form] if s["method"] == method] or None,
    }
    if shape in SHAPES and shape != "chain":
        (own,) = options["speculative_config"]
        own.pop("num_speculative_tokens", None)  # Medusa has as many as heads
        own.update(SHAPES[shape])
    asked: list[LoRARequest | None] | None = None
    if shape == "adapters":
        options["enable_lora"] = True
        asked = [None, LoRARequest("one", 1, save_adapter(tmp_path / "one", Path(target), 1))]
    prompts = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [3, 4, 5]}]
    found = []
    with fake_cuda() as device, fake_launches(device, "skip") as launches:
        deciding = ("walk_trees", "judge_chains", "reject_trees")
        launches.effects |= EFFECTS | dict.fromkeys(deciding, accept)
        launches.effects["best_of_all"] = lambda given: given["out_tokens"].zero_()
        with LLM(target, **options) as llm:
            executor: Any = llm._engine.core.executor  # type: ignore[union-attr]
            seats: Seats = executor.inner.seats
            under_way: list[int] = []  # steps on the device when another was launched
            launch = seats.launch

            def watched(taking: Sequence[RowPlan]) -> Flight | None:
                under_way.append(len(seats._flights))
                return launch(taking)

            monkeypatch.setattr(seats, "launch", watched)
            # what steers draws without replacement is looked at by the host
            kinds = KINDS[:-1] if (shape, rule) == ("static", "rejection") else KINDS
            for kind, tokens in product(kinds, (8, 8, 56)):
                params = SamplingParams(
                    max_tokens=tokens,
                    ignore_eos=True,
                    seed=None if kind["temperature"] else 1,
                    speculation={"method": method} | ({"rule": rule} if rule else {}),
                    **kind,
                )
                llm.generate(prompts[:1], params)  # one may be left alone when the other has ended
                before, waited = seats.num_steps, device.waits
                torch.cuda.set_sync_debug_mode("warn")
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    done = llm.generate(prompts, params, lora_request=asked)
                torch.cuda.set_sync_debug_mode("default")
                # the token behind n known ones is n, whatever was drafted in between
                assert (
                    all(o.outputs[0].token_ids[-1] == (2 + tokens) % VOCAB for o in done) or method != "none"
                )
                assert all(len(o.outputs[0].token_ids) == tokens for o in done)
                found.append((seats.num_steps - before, len(caught), device.waits - waited))
        assert under_way.count(1) > 3 * under_way.count(0), "the step before it had not been read"
        assert {"begin_rows", "advance_rows"} <= launches.kernels()
        assert ("low_rank_up" in launches.kernels()) == (shape == "adapters")
        trees = shape in ("static", "dynamic")
        assert ("compact_paths" in launches.kernels()) == trees
        assert ("reject_trees" in launches.kernels()) == trees
    for few, many in zip(found[1::3], found[2::3], strict=True):
        assert many[0] >= few[0] + 12, "steps on the device"
        assert many[1] == few[1], "no operation waits"
        assert many[2] - few[2] <= many[0] - few[0], "an event is waited for once a step"


def test_a_device_that_captures_none_has_ordinary_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from draftwise.graphs.seats import step

    def refused(*args: object, **named: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(step.SeatedSteps, "capture", refused)
    with fake_cuda() as device, fake_launches(device, "skip") as launches:
        launches.effects["walk_trees"] = accept
        options: dict[str, Any] = {"num_kv_blocks": 16, "max_num_seqs": 1, "max_model_len": 32}
        with LLM(
            make_target(tmp_path),
            device="cuda",
            dtype="float32",
            skip_tokenizer_init=True,
            async_scheduling=True,
            compilation_config={"cudagraph_mode": "FULL"},
            **options,
        ) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            assert len(llm.generate([{"prompt_token_ids": [1, 2]}], params)[0].outputs[0].token_ids) == 4
    assert "not permitted" in caplog.text
