"""Draft heads on targets that have no file of their own: put together from our operations, they lend their embedding,
output layer and hidden states as families do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftwise import LLM, SamplingParams
from tests.fakes.architectures import save, small
from tests.fakes.heads import HeadShape, random_weights, save_head
from tests.native import native_or_skip

SHAPES = {
    "eagle": HeadShape("eagle", 64, 64, 256),
    "eagle3": HeadShape("eagle3", 64, 64, 256, feature_layers=(0, 1, 2), draft_vocab=47, own_embedding=True),
}
PROMPTS = [
    {"prompt_token_ids": [(3 + 7 * i + j * (i + 2)) % 250 + 3 for j in range(9 + 14 * i)]} for i in range(3)
]


def texts(llm: LLM, **speculation: Any) -> tuple[list[tuple[int, ...]], int]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, speculation=speculation)
    found = llm.generate(PROMPTS, params, use_tqdm=False)  # type: ignore[arg-type]
    drafted = sum(output.metrics.speculation.num_draft_tokens for output in found)
    return [tuple(output.outputs[0].token_ids) for output in found], drafted


@pytest.mark.parametrize("kind", ["granite", "gpt_neox"])
@pytest.mark.parametrize("method", list(SHAPES))
def test_the_same_text_as_without(kind: str, method: str, tmp_path: Path) -> None:
    native_or_skip()
    save(small(kind), tmp_path / "target")
    head = save_head(tmp_path / "head", SHAPES[method], random_weights(SHAPES[method], seed=5))
    entry = {"method": method, "model": str(head), "num_speculative_tokens": 4}
    with LLM(
        str(tmp_path / "target"), device="cpu", dtype="float32", skip_tokenizer_init=True, num_kv_blocks=40,
        max_num_batched_tokens=24, speculative_config=entry, speculation_control="static",
    ) as llm:  # fmt: skip
        assert llm.guarantees.same_bits
        plain, none = texts(llm, method="none")
        for tree in (None, [[0], [1], [0, 0], [1, 0]]):
            options = {} if tree is None else {"speculative_token_tree": tree}
            drafted, count = texts(llm, method=method, **options)
            assert drafted == plain and none == 0 and count > 30
        llm.check_integrity()
