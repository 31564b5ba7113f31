"""Text by the target itself: acceptance is about what the target says, not about what it was taught."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TEMPERATURES = (0.0, 0.8, 0.8, 1.0)
"""Temperatures of continuations in turn: greedy text is drafted most easily, but users ask for more than that."""


def continue_prompts(
    target: str | Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
    batch: int = 96,
) -> list[list[int]]:
    """Return each prompt followed by `num_tokens` tokens of the target, end-of-text tokens included.

    Args:
        target: folder of the target.
        prompts: token ids.
        batch: prompts that are in the engine at once.
    """
    from draftwise import LLM, SamplingParams

    out: list[list[int]] = []
    with LLM(str(target), max_num_seqs=batch, speculative_config={"method": "ngram"}) as llm:
        for start in range(0, len(prompts), batch):
            chunk = prompts[start : start + batch]
            params = [
                SamplingParams(
                    temperature=temperatures[(start + i) % len(temperatures)],
                    max_tokens=num_tokens,
                    ignore_eos=True,
                    seed=seed * 1_000_003 + start + i,
                    speculation={"method": "none"},
                )
                for i in range(len(chunk))
            ]
            answers = llm.generate([{"prompt_token_ids": list(p)} for p in chunk], params, use_tqdm=False)
            out += [[*prompt, *a.outputs[0].token_ids] for prompt, a in zip(chunk, answers, strict=True)]
    return out
