"""The heads that ship for the embedded target: they load by name, fit, and are accepted as they were when measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from draftwise import LLM, SamplingParams
from draftwise.train.demo_data import heldout_prompts

ASSETS = Path(__file__).parents[2] / "src/draftwise/assets/demo"
NUM_DRAFTS = {"eagle3": 4, "mtp": 4, "medusa": 3}
LEAST = {"eagle3": 2.4, "mtp": 2.4, "medusa": 1.2}
"""Tokens per step, well under what was measured (docs/demo-models.md)."""


def run(method: str | None) -> tuple[list[list[int]], float]:
    """Greedy continuations of four held-out prompts, and the tokens per step of fixed chains."""
    spec: dict[str, Any] = {"method": "ngram"}
    if method is not None:
        spec = {"method": method, "num_speculative_tokens": NUM_DRAFTS[method]}
    tokenizer = Tokenizer.from_file(str(ASSETS / "target" / "tokenizer.json"))
    prompts = [{"prompt_token_ids": p.token_ids} for p in heldout_prompts(tokenizer, 4, 64)]
    params = SamplingParams(
        temperature=0, max_tokens=64, ignore_eos=True, speculation=None if method else {"method": "none"}
    )
    with LLM(speculative_config=spec, speculation_control="static") as llm:
        outputs = llm.generate(prompts, params)
    drafts = sum(o.metrics.speculation.num_drafts for o in outputs)
    accepted = sum(o.metrics.speculation.num_accepted_tokens for o in outputs)
    return [list(o.outputs[0].token_ids) for o in outputs], 1 + accepted / max(1, drafts)


@pytest.mark.parametrize("method", list(NUM_DRAFTS))
def test_shipped_heads_draft_what_the_target_says(method: str) -> None:
    plain, _ = run(None)
    drafted, length = run(method)
    assert drafted == plain
    assert length > LEAST[method]


@pytest.mark.parametrize("method", list(NUM_DRAFTS))
def test_shipped_heads_say_where_they_come_from(method: str) -> None:
    record = json.loads((ASSETS / method / "provenance.json").read_text())
    assert record["made_by"].startswith("draftwise train demo-heads")
    assert record["tokens"] > 0 and record["recipe"]["plans"][method]["unrolls"] >= 3
    assert record["history"] and record["measured"]["own"]["greedy_length"] > 1


def test_model_files_stay_small() -> None:
    assert sum(file.stat().st_size for file in ASSETS.rglob("*") if file.is_file()) < 40_000_000
