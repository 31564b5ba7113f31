"""What a step costs the host, counted in calls: of Python functions, and of what they call in C.

Counts say nothing of how long a call takes, but they do not depend on the machine, and nobody adds a call unnoticed.
Steps of 8 and of 24 requests that decode are compared, so that what a step costs by itself drops out; a step of one
request shows that. Steps have one round: how many there would be depends on the machine's speed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.block import BlockShape, random_weights, save_block
from tests.native import native_or_skip

from draftwise import LLM, SamplingParams
from draftwise.bench.workloads import code_prompts
from draftwise.models.recorded import RecordedDecoder

STEPS = 12
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("method", "most", "alone"),
    [
        ("none", 3, 209),
        ("ngram", 9, 306),
        ("suffix", 8, 311),
        pytest.param("hybrid", 11, 356, marks=pytest.mark.slow),  # as suffix and draft_model
        ("mtp", 10, 356),
        ("eagle3", 9.5, 395),
        ("dflash", 4.2, 413),
        ("medusa", 7, 416),
        ("draft_model", 9, 289),
        ("early_exit", 4.2, 279),
        pytest.param("mtp:tree", 9.7, 381, marks=pytest.mark.slow),  # as eagle3
        ("eagle3:tree", 9.5, 422),
        ("draft_model:tree", 8.8, 308),
    ],
)
def test_calls_of_a_step(method: str, most: float, alone: int, tmp_path: Path) -> None:
    """``most``: per request, what it was when the limit was set, and a tenth; ``alone``: of a step with one request,
    what it was and three in a hundred."""
    native_or_skip()
    folder = None
    if method == "dflash":  # none ships: random weights draft as many tokens
        shape = BlockShape(
            "deepspec", hidden=256, vocab=4096, target_layers=(2, 8), num_target_layers=12, mask=4014,
            from_root=True, markov="vanilla", rank=8,
        )  # fmt: skip
        folder = save_block(tmp_path / "drafter", shape, random_weights(shape))
    found = (calls_of(method, 24, folder) - calls_of(method, 8, folder)) / 16
    assert found <= most, f"{found:.1f} calls per request"
    one = calls_of(method, 1, folder)
    assert one <= alone, f"{one:.0f} calls of a step with one request"


def calls_of(method: str, requests: int, folder: str | None = None) -> float:
    """Calls of a step, on average. ``METHOD:tree`` drafts static trees. ``folder``: of a drafter that does not ship."""
    name, _, tree = method.partition(":")
    spec: dict[str, Any] = {"method": name} | ({} if folder is None else {"model": folder})
    if tree:
        spec["speculative_token_tree"] = TREE
    elif name != "none":
        spec["num_speculative_tokens"] = 3
    llm = LLM(
        speculative_config=spec,
        speculation_control="static",
        max_num_seqs=requests,
        max_model_len=256,
        num_kv_blocks=requests * 16,
        rounds_per_step=1,
    )
    assert llm._engine is not None
    core, processor = llm._engine.core, llm._engine.processor
    for prompt in code_prompts(llm.get_tokenizer(), requests, 32):
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        for request in processor.group({"prompt_token_ids": list(prompt)}, params).requests:
            core.add(request)
    while core.scheduler.num_running < requests:
        core.step()
    for _ in range(4):
        core.step()
    count = 0

    def tick(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for _ in range(STEPS):
        sys.setprofile(tick)
        try:
            updates = core.step()
        finally:
            sys.setprofile(None)
        assert len(updates) == requests and all(update.num_new for update in updates)
    assert not core.totals.drafter_failures, "who does not draft costs less"
    llm.close()
    return count / STEPS


def test_all_drafts_of_a_step_are_one_call_of_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token there would be the same drafts, at a multiple of the time."""
    native_or_skip()
    answered: list[bool] = []

    def count(name: str) -> None:
        drafts = getattr(RecordedDecoder, name)

        def counted(self: RecordedDecoder, *args: Any) -> Any:
            found = drafts(self, *args)
            answered.append(found is not None)
            return found

        monkeypatch.setattr(RecordedDecoder, name, counted)

    count("draft_books")
    count("round_passes")  # a part of the call that computes the whole step
    with LLM(
        speculative_config={"method": "draft_model", "num_speculative_tokens": 3},
        speculation_control="static",
    ) as llm:
        llm.generate(
            "def main(", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), use_tqdm=False
        )
    assert len(answered) >= 3 and all(answered)
