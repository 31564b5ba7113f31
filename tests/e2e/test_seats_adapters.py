"""Adapters in captured passes and in seats on the device: the text of an engine that captures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from draftwise import LLM, LoRARequest
from tests.e2e.conftest import token_ids
from tests.e2e.seated_engines import Engines, count_ordinary, graphs, params_of, seats, some
from tests.fakes.lora import ATTENTION, save_adapter

assert graphs is not None  # the fixture


class Adapted(Engines):
    """With two adapters, of other ranks and layers, and room for both."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        folder = Path(self.target)
        self.adapters = [
            LoRARequest("one", 1, save_adapter(root / "one", folder, 1, rank=4)),
            LoRARequest("other", 2, save_adapter(root / "other", folder, 2, rank=9, modules=ATTENTION)),
        ]
        one, other = self.adapters
        self.requests = [one, None, other, one, None, other, None, one]
        self.eager = self.make(enforce_eager=True)

    @cached_property
    def ahead(self) -> LLM:
        return self.make(async_scheduling=True)

    def options(self, **more: Any) -> dict[str, Any]:
        return super().options(enable_lora=True, max_loras=2, **more)


@pytest.fixture(scope="module")
def adapted(graphs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    made = Adapted(tmp_path_factory.mktemp("adapted"))
    yield made
    for llm in (made.waiting, made.ahead, made.eager):
        llm.close()


@pytest.mark.parametrize(
    ("rule", "method"),
    some(
        [
            ("coupled", "none"),
            ("greedy", "early_exit"),
            ("coupled", "eagle3"),
            ("block", "hybrid"),  # of a draft model and ngram
        ],
        [
            ("rejection", "draft_model"),
            *(("greedy", method) for method in ("none", "draft_model", "eagle3", "ngram", "medusa")),
        ],
    ),
)
def test_text_is_that_of_passes_call_by_call(adapted: Adapted, rule: str, method: str) -> None:
    params = params_of(rule, method, max_tokens=20)
    wanted = adapted.eager.generate(adapted.prompts, params, lora_request=adapted.requests)
    bare = adapted.eager.generate(adapted.prompts, params)
    changed = [one != other for one, other in zip(token_ids(wanted), token_ids(bare), strict=True)]
    assert changed == [request is not None for request in adapted.requests], "adapters change texts"
    waiting: Any = adapted.waiting._engine.core.executor  # type: ignore[union-attr]
    replays = waiting._model.num_replays
    found = adapted.waiting.generate(adapted.prompts, params, lora_request=adapted.requests)
    assert token_ids(found) == token_ids(wanted)
    assert waiting._model.num_replays > replays + 10
    before = seats(adapted.ahead).num_entered
    found = adapted.ahead.generate(adapted.prompts, params, lora_request=adapted.requests)
    assert token_ids(found) == token_ids(wanted)
    assert seats(adapted.ahead).num_entered >= before + len(params)
    for llm in (adapted.waiting, adapted.ahead):
        assert not llm.stats().drafter_failures
        llm.check_integrity()


def test_places_are_given_to_others(adapted: Adapted, tmp_path: Path) -> None:
    """An adapter that made room is gone from the device, and its place another one's; nobody else notices."""
    params = params_of("greedy", "none", max_tokens=16)[:3]
    prompts = adapted.prompts[:3]
    third = LoRARequest("third", 3, save_adapter(tmp_path / "third", Path(adapted.target), 3, rank=16))
    one, other = adapted.adapters
    for who in ([one, None, other], [third, None, third], [other, other, None], [None, third, one]):
        if third in who and one in who:  # three are too many
            who = [third, None, None]
        wanted = adapted.eager.generate(prompts, params, lora_request=who)
        assert token_ids(adapted.ahead.generate(prompts, params, lora_request=who)) == token_ids(wanted)
    adapted.ahead.check_integrity()


def test_decoding_is_captured_and_prompts_are_not(adapted: Adapted) -> None:
    params = params_of("greedy", "none", max_tokens=20)[:3]
    with adapted.make(async_scheduling=True, max_num_seqs=3) as llm:
        ordinary = count_ordinary(llm)
        llm.generate(adapted.prompts[:3], params, lora_request=adapted.requests[:3])
        assert seats(llm).num_steps > 16 and not any(ordinary)
