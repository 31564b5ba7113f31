"""Models with recurrent state: the text is that of plain decoding and of Transformers, with any drafter, alone and
among others, through chunks, preemption, cancellation and steps planned ahead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwise import LLM, AsyncLLM, SamplingParams
from draftwise.errors import ConfigError, ModelLoadError, RequestError
from draftwise.kv.states import Begun, StateStore
from draftwise.models.loader import load_model
from draftwise.propose.base import DraftRow, Proposer
from draftwise.types import Proposal
from tests.e2e.conftest import random_prompts, token_ids
from tests.fakes.architectures import save, small

CPU = torch.device("cpu")
KINDS = (
    "jamba",
    "falcon_h1",
    "lfm2",
    "mamba",
)  # beside attention, in one layer with it, convolutions, nothing else


@dataclass(frozen=True)
class Folders:
    """``near``: the same with other weights, so that it is right now and then."""

    target: str
    near: str
    model: Any


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    root = tmp_path_factory.mktemp("recurrent")
    made = {}
    for kind in (*KINDS, "llama"):
        target, near = small(kind), small(kind)
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in near.model.parameters():  # type: ignore[union-attr]
                weight += 0.1 * weight.std() * torch.randn_like(weight) if weight.numel() > 1 else 0
        for name, one in (("target", target), ("near", near)):
            save(one, root / kind / name)
        made[kind] = Folders(str(root / kind / "target"), str(root / kind / "near"), target.model)
    return made


OPTIONS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "block_size": 4, "num_kv_blocks": 200,
    "speculation_control": "static", "max_num_seqs": 6,
}  # fmt: skip


def engine(folders: Folders, **more: Any) -> LLM:
    drafters = [
        {"method": "draft_model", "model": folders.near, "num_speculative_tokens": 4},
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    ]
    return LLM(folders.target, **(OPTIONS | {"speculative_config": drafters} | more))


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, folders: dict[str, Folders]) -> Iterator[tuple[Folders, LLM]]:
    found = folders[request.param]
    llm = engine(found)
    yield found, llm
    llm.check_integrity()
    assert llm.stats().num_used_blocks == 0 and not llm.stats().drafter_failures
    llm.close()


PROMPTS = random_prompts(9, seed=3, high=30)


def params(method: str = "none", **more: Any) -> SamplingParams:
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True} | more
    return SamplingParams(**given, speculation={"method": method})


@pytest.fixture(scope="module")
def plain(world: tuple[Folders, LLM]) -> list[tuple[int, ...]]:
    """Transformers' own."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        out = world[0].model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=14, min_new_tokens=14,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found.append(tuple(out[0, ids.shape[1] :].tolist()))
    return found


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_the_text_is_that_of_transformers(
    world: tuple[Folders, LLM], plain: list[tuple[int, ...]], method: str
) -> None:
    _, llm = world
    outputs = llm.generate(PROMPTS, params(method))
    assert token_ids(outputs) == plain
    if method == "draft_model":
        drafted = sum(o.metrics.speculation.num_draft_tokens for o in outputs)
        accepted = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
        assert 0 < accepted < drafted, "some drafts have to be taken back, and not all"
    assert token_ids(llm.generate(PROMPTS[:1], params(method))) == plain[:1]  # alone


@pytest.mark.parametrize("kind", ["falcon_h1", pytest.param("jamba", marks=pytest.mark.slow)])
def test_tight_engines(folders: dict[str, Folders], kind: str) -> None:
    """Chunks, preemption, steps planned ahead, cancellation: requests that go leave nothing to those that come."""
    found = folders[kind]
    with engine(found) as llm:
        wanted = token_ids(llm.generate(PROMPTS[:6], params()))
        many = [params(max_tokens=5, n=2, temperature=0.8, seed=i) for i in range(4)]
        samples = [s.token_ids for o in llm.generate(PROMPTS[:4], many) for s in o.outputs]
    tight = {"num_kv_blocks": 22, "max_num_batched_tokens": 11, "max_num_seqs": 5}
    for ahead, methods in ((False, ("none", "draft_model")), (True, ("draft_model", "ngram"))):
        with engine(found, **tight, async_scheduling=ahead) as llm:
            for method in methods:
                before = llm.stats().num_preemptions
                assert token_ids(llm.generate(PROMPTS[:6], params(method))) == wanted
                assert llm.stats().num_preemptions > before
            drafted = [params("draft_model", max_tokens=5, n=2, temperature=0.8, seed=i) for i in range(4)]
            assert [s.token_ids for o in llm.generate(PROMPTS[:4], drafted) for s in o.outputs] == samples
            llm.check_integrity()
            assert llm.stats().num_used_blocks == 0 and not llm.stats().drafter_failures


def test_cancelled_requests_leave_their_slots(folders: dict[str, Folders]) -> None:
    found = folders["lfm2"]
    with engine(found) as llm:
        wanted = token_ids(llm.generate(PROMPTS[:6], params()))

    async def run() -> list[list[int]]:
        drafter = {"method": "draft_model", "model": found.near, "num_speculative_tokens": 4}
        async with AsyncLLM(
            found.target, **OPTIONS | {"speculative_config": drafter, "max_num_seqs": 2}
        ) as llm:

            async def one(i: int) -> list[int]:
                ids: list[int] = []
                async for output in llm.generate(PROMPTS[i], params("draft_model"), request_id=f"{i}"):
                    ids = list(output.outputs[0].token_ids)
                    if i % 2 and len(ids) > 2:
                        llm.abort(f"{i}")
                return ids

            texts = await asyncio.gather(*map(one, range(6)))
            llm.check_integrity()
            return list(texts)

    for i, text in enumerate(asyncio.run(run())):
        assert tuple(text) == wanted[i][: len(text)] and (i % 2 or len(text) == 14)


@pytest.mark.parametrize("kind", ["falcon_h1", pytest.param("mamba", marks=pytest.mark.slow)])
def test_a_drafter_that_is_the_target_is_always_right(folders: dict[str, Folders], kind: str) -> None:
    """Its states have to be those behind the tokens it goes on from: one wrong one and drafts are rejected."""
    drafter = {"method": "draft_model", "model": folders[kind].target, "num_speculative_tokens": 3}
    with LLM(folders[kind].target, **OPTIONS, speculative_config=drafter) as llm:
        for output in llm.generate(PROMPTS[:4], params("draft_model", max_tokens=13)):
            report = output.metrics.speculation
            assert report.num_accepted_tokens == report.num_draft_tokens > 0


def test_a_recurrent_drafter_of_a_target_with_prefix_cache(folders: dict[str, Folders]) -> None:
    """What the target finds cached, the drafter has no state of: it reads the prompt again."""
    drafter = {"method": "draft_model", "model": folders["mamba"].target, "num_speculative_tokens": 3}
    with LLM(folders["llama"].target, **OPTIONS, speculative_config=drafter) as llm:
        wanted = token_ids(llm.generate(PROMPTS, params()))
        for _ in range(2):
            assert token_ids(llm.generate(PROMPTS, params("draft_model"))) == wanted
        assert llm.stats().prefix_cache_hits > 0 and not llm.stats().drafter_failures
        with pytest.raises(RequestError, match=r"recurrent state for 3 drafts of a request, not for 5"):
            more = {"method": "draft_model", "num_speculative_tokens": 5}
            llm.generate(PROMPTS[:1], SamplingParams(speculation=more))
        with pytest.raises(RequestError, match="drafts chains only"):
            tree = {"method": "draft_model", "speculative_token_tree": [[0], [1]]}
            llm.generate(PROMPTS[:1], SamplingParams(speculation=tree))
        five = {"method": "ngram", "num_speculative_tokens": 5}
        llm.generate(PROMPTS[:1], SamplingParams(speculation=five))  # the target has no states


def test_prefixes_are_not_shared_and_words_are_said(
    folders: dict[str, Folders], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="draftwise")
    with engine(folders["mamba"]) as llm:
        first = token_ids(llm.generate(PROMPTS[:2], params()))
        assert token_ids(llm.generate(PROMPTS[:2], params())) == first
        assert llm.stats().prefix_cache_hits == 0
        assert any("recurrent state" in reason for reason in llm.guarantees.reasons)
        assert not llm.guarantees.same_bits and llm.guarantees.lossless
        with pytest.raises(RequestError, match="speculative_token_tree: the model carries recurrent state"):
            llm.generate(PROMPTS[:1], SamplingParams(speculation={"speculative_token_tree": [[0], [1]]}))
        with pytest.raises(RequestError, match="speculative_dynamic_tree: the model carries recurrent state"):
            llm.generate(PROMPTS[:1], SamplingParams(speculation={"speculative_dynamic_tree": {"top_k": 2}}))
        with pytest.raises(RequestError, match="state for 4 drafts of a request, not for 9"):
            nine = {"method": "ngram", "num_speculative_tokens": 9}
            llm.generate(PROMPTS[:1], SamplingParams(speculation=nine))
    assert [r for r in caplog.messages if "carries recurrent state" in r and "share no prefixes" in r]


_TREES: dict[str, Any] = {
    "speculative_token_tree": [[0], [1]],
    "speculative_dynamic_tree": {"top_k": 2},
}


@pytest.mark.parametrize(
    ("target", "field"),
    [
        ("llama", "speculative_dynamic_tree"),
        # those of requests are refused in `test_prefixes_are_not_shared_and_words_are_said`
        pytest.param("mamba", "speculative_token_tree", marks=pytest.mark.slow),
        pytest.param("mamba", "speculative_dynamic_tree", marks=pytest.mark.slow),
        pytest.param("llama", "speculative_token_tree", marks=pytest.mark.slow),
    ],
)
def test_trees_are_refused_in_the_configuration(folders: dict[str, Folders], target: str, field: str) -> None:
    drafter = {"method": "draft_model", "model": folders["mamba"].target, field: _TREES[field]}
    with pytest.raises(ConfigError, match=f"{field}: the model carries recurrent state"):
        LLM(folders[target].target, **OPTIONS, speculative_config=drafter)


def test_memory_of_states_is_planned(folders: dict[str, Folders]) -> None:
    """So many run as half of the memory has states for; with a number of blocks, as many as are wanted."""
    base = {k: v for k, v in OPTIONS.items() if k not in ("num_kv_blocks", "max_num_seqs")}
    with LLM(folders["mamba"].target, **base, kv_cache_memory=8 << 20) as llm:
        core = llm._engine.core  # type: ignore[union-attr]
        model = llm._engine.model  # type: ignore[union-attr]
        one = model.state_spec().num_bytes * 9  # type: ignore[union-attr]
        most = core.scheduler.config.max_num_seqs
        assert most == (4 << 20) // one < 64
        assert len(token_ids(llm.generate(PROMPTS, params("ngram")))) == 9
    with LLM(folders["mamba"].target, **base, max_num_seqs=200, num_kv_blocks=9) as llm:
        assert llm._engine.kv_cache_bytes >= 200 * one  # type: ignore[union-attr]


def test_a_model_that_cuts_long_passes_itself(tmp_path: Path) -> None:
    """xLSTM cuts them, with a cache that it makes for them; here they are cut by request."""
    save(small("xlstm", max_inference_chunksize=16), tmp_path / "model")
    prompt = random_prompts(1, seed=5, low=40, high=41)
    found = []
    for rows in (64, 16):
        with LLM(str(tmp_path / "model"), **OPTIONS, max_num_batched_tokens=rows) as llm:
            found.append(token_ids(llm.generate(prompt, params())))
    assert found[0] == found[1]


class Branches(Proposer):
    """Of another package, and drafts trees without being asked for them."""

    name = "branches"

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [Proposal((5, 6), (-1, -1), self.name) for _ in rows]


def test_a_drafter_that_drafts_trees_unasked_is_no_harm(folders: dict[str, Folders]) -> None:
    config = {"method": f"{__name__}.Branches", "num_speculative_tokens": 3}
    with LLM(folders["lfm2"].target, **OPTIONS, speculative_config=config) as llm:
        wanted = token_ids(llm.generate(PROMPTS[:3], params()))
        found = llm.generate(PROMPTS[:3], params(f"{__name__}.Branches"))
        assert token_ids(found) == wanted
        assert sum(llm.stats().drafter_failures.values()) > 0


def newest(self: StateStore, slot: int, context: int, final: int, end: int) -> Begun:
    """A wrong store: whoever goes on does so from the newest state there is."""
    held = self._kept[slot]
    if context and held:
        held[context] = held.pop(max(held))
    return REAL(self, slot, context, final, end)


REAL = StateStore.begin


@pytest.mark.parametrize("kind", ["falcon_h1", pytest.param("jamba", marks=pytest.mark.slow)])
def test_a_state_that_is_not_restored_is_found(
    folders: dict[str, Folders], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: by the check at load, and by the text of these tests."""
    found = folders[kind]
    with engine(found) as llm:
        wanted = token_ids(llm.generate(PROMPTS, params("draft_model")))
        monkeypatch.setattr(StateStore, "begin", newest)
        assert token_ids(llm.generate(PROMPTS, params())) == wanted  # nothing is taken back
        assert token_ids(llm.generate(PROMPTS, params("draft_model"))) != wanted
    with pytest.raises(ModelLoadError, match="behind rejected drafts, its logits are not those"):
        load_model(found.target, dtype=torch.float32, device=CPU)
