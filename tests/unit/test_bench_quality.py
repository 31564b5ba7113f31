"""Perplexity by format: right on the embedded model, and near for every format."""

from __future__ import annotations

import math

from tests.native import native_or_skip

from draftwise import LLM, SamplingParams
from draftwise.bench.quality import perplexity, quality

PROMPTS = [[5 + (7 * i + j) % 200 for j in range(24)] for i in range(3)]


def test_perplexity_is_that_of_the_logprobs() -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(speculation_control="static") as llm:
        value, count = perplexity(llm, PROMPTS[:1])
        out = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)[0]
    assert out.prompt_logprobs is not None
    logprobs = [
        position[token].logprob
        for token, position in zip(PROMPTS[0], out.prompt_logprobs, strict=True)
        if position
    ]
    assert count == len(logprobs) == 23
    assert math.isclose(value, math.prod(math.exp(-p) for p in logprobs) ** (1 / 23), rel_tol=1e-9)


def test_formats_stay_near_the_weights() -> None:
    native_or_skip()
    seen: list[str] = []
    rows = quality(
        lambda name: LLM(quantization=name, speculation_control="static"),
        lambda _: PROMPTS,
        ["none", "int8", "int4_g32"],
        seen.append,
    )
    assert seen == [row.format for row in rows] == ["none", "int8", "int4_g32"]
    assert rows[0].increase == 0
    assert rows[1].increase is not None and abs(rows[1].increase) < 0.02
    assert rows[2].increase is not None and abs(rows[2].increase) < 0.3
