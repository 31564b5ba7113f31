"""At the edges: the model's last position, a drafter with a shorter context, tokens past the end."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from draftwise.kernels.cpu.book_drafts import BookDrafts
from draftwise.models.base import DecoderModel
from draftwise.runner.rows import RowBook
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.tiny import TinyModels

ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def watch_positions(model: DecoderModel) -> list[int]:
    """Record the highest position of every pass."""
    highest: list[int] = []

    def watched(forward: Any) -> Any:
        def call(batch: Any, *args: Any, **kwargs: Any) -> Any:
            highest.append(int(batch.positions.max()))
            return forward(batch, *args, **kwargs)

        return call

    chains = model.draft_chains

    def watched_chains(batch: Any, kv: Any, rows: Any, steps: int, draws: Any = None) -> Any:
        drafted = chains(batch, kv, rows, steps, draws)
        if drafted is not None:  # the last token of each chain is not fed
            highest.append(int(batch.positions.max()) + steps - 1)
        return drafted

    books = model.draft_books

    def watched_books(asked: BookDrafts, kv: Any) -> Any:
        drafted, record = books(asked, kv), asked.record
        places = (ctypes.c_uint64 * record.requests).from_address(record.books)
        for book in [RowBook.from_address(place) for place in places] if drafted is not None else ():
            if book.num_waiting:
                highest.append(book.num_tokens - 1 + book.num_waiting - 1)
        return drafted

    model.forward_logits = watched(model.forward_logits)  # type: ignore[method-assign]
    model.logits_alone = watched(model.logits_alone)  # type: ignore[method-assign]
    model.draft_books = watched_books  # type: ignore[method-assign]
    model.draft_chains = watched_chains  # type: ignore[method-assign]
    return highest


@pytest.mark.parametrize("method", ["none", "draft_model", "ngram", "synthetic"])
def test_no_position_past_the_models_length(
    make_llm: Callable[..., LLM], tiny: TinyModels, method: str
) -> None:
    prompts = random_prompts(3, seed=1, low=150, high=185)
    prompts.append({"prompt_token_ids": [5] * 191})  # room for one token
    wanted = token_ids(make_llm().generate(prompts, ENDLESS))
    llm = make_llm(
        speculative_config=[
            {"method": "draft_model", "model": tiny.near, "num_speculative_tokens": 7},
            {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1},
            {"method": "synthetic", "num_speculative_tokens": 7},
        ]
    )
    assert llm._engine is not None
    target = watch_positions(llm._engine.model)
    proposers = llm._engine.core.executor._drafting._proposers  # type: ignore[attr-defined]
    drafter = watch_positions(proposers["draft_model"]._model)
    outputs = llm.generate(prompts, ENDLESS.replace(speculation={"method": method}))
    assert token_ids(outputs) == wanted
    for output in outputs:
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == llm.max_model_len == 192
        assert output.outputs[0].finish_reason == "length"
    assert max(target) <= 191
    if method == "draft_model":
        assert max(drafter) <= 191


def test_a_drafter_with_a_shorter_context_stops_there(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    prompt = random_prompts(1, seed=2, low=20, high=21)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    wanted = token_ids(make_llm().generate(prompt, params))
    llm = make_llm(
        speculative_config={"model": tiny.target, "num_speculative_tokens": 4, "max_model_len": 60}
    )
    assert llm._engine is not None
    drafter = watch_positions(
        llm._engine.core.executor._drafting._proposers["draft_model"]._model  # type: ignore[attr-defined]
    )
    output = llm.generate(prompt, params)[0]
    assert token_ids([output]) == wanted
    speculation = output.metrics.speculation
    assert max(drafter) < 60
    # 40 tokens at nearly five a step, the other 60 one by one
    assert 8 <= speculation.num_drafts <= 12
    assert speculation.steps_by_method["none"] >= 58


def test_stop_token_inside_accepted_drafts_cuts_there(make_llm: Callable[..., LLM], tiny: TinyModels) -> None:
    prompts = random_prompts(6, seed=3)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    free = token_ids(make_llm().generate(prompts, params))
    llm = make_llm(speculative_config={"model": tiny.target, "num_speculative_tokens": 6})
    for i, prompt in enumerate(prompts):
        stop = free[i][17]
        first = free[i].index(stop)
        output = llm.generate(prompt, params.replace(stop_token_ids=[stop], logprobs=0))[0].outputs[0]
        assert output.token_ids == free[i][: first + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.logprobs is not None and len(output.logprobs) == first + 1
    llm.check_integrity()
    # Only what was delivered is cached: a later request that shares the prefix is right.
    assert token_ids(llm.generate(prompts, params)) == free


def test_num_speculative_tokens_follows_the_batch_size(
    make_llm: Callable[..., LLM], tiny: TinyModels
) -> None:
    llm = make_llm(
        speculative_config={
            "model": tiny.target,
            "num_speculative_tokens": 4,
            "num_speculative_tokens_per_batch_size": [(1, 1, 3), (2, 4, 1), (5, 64, 0)],
        }
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    alone = llm.generate(random_prompts(1, seed=4), params)[0].metrics.speculation
    assert alone.num_draft_tokens / alone.num_drafts > 2.5
    three = llm.generate(random_prompts(3, seed=4), params)[0].metrics.speculation
    assert 0 < three.num_draft_tokens <= 1.5 * three.num_drafts  # the last steps may be another's alone
    many = llm.generate(random_prompts(6, seed=4), params)
    assert sum(o.metrics.speculation.num_drafts for o in many) == 0


def test_synthetic_acceptance_is_what_was_asked_for(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(
        speculative_config={
            "method": "synthetic",
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": 2.6,
        }
    )
    outputs = llm.generate(
        random_prompts(20, seed=5), SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    )
    drafts = sum(o.metrics.speculation.num_drafts for o in outputs)
    accepted = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
    # About 600 drafts accept 1 or 2 tokens (0.6): standard deviation of the mean 0.02, allowed are six of them.
    assert abs(1 + accepted / drafts - 2.6) < 0.12


def test_rope_scaling_by_the_engine_option(
    make_llm: Callable[..., LLM], tiny: TinyModels, tmp_path: Path
) -> None:
    """A checkpoint with dynamic rope scaling serves more positions than it was trained for, when asked to."""
    folder = tmp_path / "dynamic"
    shutil.copytree(tiny.target, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(config))
    llm = make_llm(model=str(folder), max_model_len=300)
    output = llm.generate(random_prompts(1, seed=6, low=200, high=201), ENDLESS)[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 300
