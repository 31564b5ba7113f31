"""What suffix proposers are asked in tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftwise.propose.base import DraftRow
from draftwise.propose.lookup.suffix import SuffixProposer
from draftwise.types import IntArray, Speculation

TEXT = list(range(10, 60))


def array(tokens: Any) -> IntArray:
    return np.array(tokens, np.int32)


def row(
    tokens: Any,
    rid: int = 0,
    *,
    num_prompt: int = 1,
    budget: int = 15,
    max_depth: int = 63,
    tree: tuple[int, ...] | None = None,
    ranks: tuple[int, ...] | None = None,
) -> DraftRow:
    return DraftRow(
        rid=rid,
        token_ids_np=array(tokens),
        num_prompt=num_prompt,
        budget=budget,
        max_depth=max_depth,
        speculation=Speculation("suffix", budget, "greedy", tree, ranks),
        sampling=None,  # type: ignore[arg-type]  # a suffix draft looks at nothing but tokens
        block_table_np=array([]),
        filled=0,
    )


def run(proposer: SuffixProposer, rid: int, prompt: list[int], output: list[int], *, chunk: int = 3) -> None:
    """A whole request: its output comes in chunks, the last one after the last draft."""
    for n in range(chunk, len(output), chunk):
        proposer.propose([row(prompt + output[:n], rid, num_prompt=len(prompt))])
    proposer.leaving(rid, array(prompt + output))
    proposer.remove(rid)
