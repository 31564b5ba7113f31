"""Measures the quality of quantised weights: perplexity on held-out text in each format."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwise import LLM

FORMATS = ("none", "int8", "int8_weight_only", "int4_g32", "int4", "int4_g128", "int4_weight_only")


@dataclass(frozen=True, slots=True)
class QualityRow:
    """One format. ``increase``: relative to the weights as they are; None where those were not measured before."""

    format: str
    perplexity: float
    increase: float | None
    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def quality(
    load: Callable[[str | None], LLM],
    prompts_of: Callable[[Any], Sequence[Sequence[int]]],
    formats: Sequence[str] = FORMATS,
    advance: Callable[[str], None] = lambda _: None,
) -> list[QualityRow]:
    """Perplexity of the same prompts under each format.

    Args:
        load: Makes an engine with these weights; None: as the checkpoint has them.
        prompts_of: Prompts from a tokenizer; asked once.
        formats: Names of ``quantization``, and "none"; that one first gives the increases.
        advance: Called after each format with its name.
    """
    prompts: Sequence[Sequence[int]] | None = None
    rows: list[QualityRow] = []
    plain: float | None = None
    for name in formats:
        with load(None if name == "none" else name) as llm:
            if prompts is None:
                prompts = prompts_of(llm.get_tokenizer())
            value, tokens = perplexity(llm, prompts)
        if name == "none":
            plain = value
        rows.append(QualityRow(name, value, None if plain is None else value / plain - 1, tokens))
        advance(name)
    return rows


def perplexity(llm: LLM, prompts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """exp of the mean negative log-probability of every token but the first of each prompt, and how many those are."""
    from draftwise import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, speculation={"method": "none"})
    total, count = 0.0, 0
    for out in llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False):
        assert out.prompt_logprobs is not None
        for token, position in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True):
            assert position is not None
            total -= position[token].logprob
            count += 1
    return math.exp(total / count), count
