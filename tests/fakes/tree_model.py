"""A drafter whose logits are a function of the last token and the depth, and which checks what it is fed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from draftwise.config.trees import DynamicTree, parse_tree
from draftwise.names import MAX_FED_NODES
from draftwise.propose.base import DraftRow
from draftwise.propose.trees.expansion import TreeModel
from draftwise.propose.trees.growth import TreeLevel, TreeTask
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import Speculation


class ScriptedTreeModel(TreeModel):
    """``table`` [V, V]: logits behind each token. Remembers every level, and that paths agree with ancestors."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.levels: list[list[TreeLevel]] = []
        self._fed: dict[int, list[tuple[int, int]]] = {}  # member -> (token, parent number) of each fed node

    def expand(self, levels: Sequence[TreeLevel]) -> torch.Tensor:
        self.levels.append(list(levels))
        last: list[int] = []
        for level in levels:
            fed = self._fed.setdefault(level.member, [])
            assert level.start == len(fed), "levels follow each other"
            assert len(level.tokens) == len(level.parents) == len(level.ancestors) > 0
            for i, (token, parent, bits) in enumerate(
                zip(level.tokens, level.parents, level.ancestors, strict=True)
            ):
                assert -1 <= parent < level.start, "parents were fed in an earlier pass"
                fed.append((token, parent))
                above, number = set(), level.start + i
                while number >= 0:
                    above.add(number)
                    number = fed[number][1]
                assert above == {j for j in range(MAX_FED_NODES) if bits >> j & 1}
                assert len(above) == len(self.levels), "depth and pass agree"
                last.append(token)
        assert all(len(fed) <= MAX_FED_NODES for fed in self._fed.values())
        return self.table[last].clone()

    @property
    def num_fed(self) -> int:
        return sum(len(fed) for fed in self._fed.values())

    def root_logits(self, tasks: Sequence[TreeTask]) -> torch.Tensor:
        return self.table[[t.forced[-1] if t.forced else int(t.row.token_ids_np[-1]) for t in tasks]].clone()


def draft_row(
    vocab: int,
    *,
    rid: int = 0,
    tokens: Sequence[int] = (0,),
    rule: str = "greedy",
    seed: int = 0,
    tree: Any = None,
    dynamic: DynamicTree | None = None,
    params: SamplingParams | None = None,
    state: SamplingState | None = None,
    budget: int = 63,
    max_depth: int = 63,
    grammar: Any = None,
    forced: tuple[int, ...] = (),
) -> DraftRow:
    """A row of one request; ``tree``: paths of child ranks."""
    ids_np = np.asarray(tokens, np.int32)
    params = params or SamplingParams(temperature=0.0 if rule == "greedy" else 1.0)
    parents, ranks = (None, None) if tree is None else parse_tree(tree)
    return DraftRow(
        rid=rid,
        token_ids_np=ids_np,
        num_prompt=1,
        budget=budget,
        max_depth=max_depth,
        speculation=Speculation("test", budget, rule, parents, ranks, dynamic),
        sampling=state
        or SamplingState(
            params, seed=seed, sample_index=0, token_ids_np=ids_np, num_prompt=1, vocab_size=vocab
        ),
        block_table_np=np.arange(4, dtype=np.int32),
        filled=0,
        grammar=grammar,
        forced=forced,
    )
