"""A drafter of random trees that knows some of the answer, so that some paths are accepted and some are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch

from draftwise.propose.base import DraftRow, Proposer, ProposerContext
from draftwise.sampling.draw import draft_children, draft_tokens, draws_from_q
from draftwise.sampling.logits import LogitsRow
from draftwise.types import EMPTY_PROPOSAL, DrawKind, Proposal

Oracle = Callable[[tuple[int, ...], int], Sequence[int]]
"""``oracle(tokens, n)``: up to n tokens that are likely to follow ``tokens``; may be empty."""


def no_oracle(tokens: tuple[int, ...], n: int) -> Sequence[int]:
    return ()


def oracle_from_outputs(outputs: Mapping[tuple[int, ...], Sequence[int]]) -> Oracle:
    """An oracle that has seen the answers: prompt -> output."""
    whole = [(*prompt, *output) for prompt, output in outputs.items()]

    def oracle(tokens: tuple[int, ...], n: int) -> Sequence[int]:
        for sequence in whole:
            if sequence[: len(tokens)] == tokens:
                return sequence[len(tokens) : len(tokens) + n]
        return ()

    return oracle


class TreeProposer(Proposer):
    """Random trees, a function of (seed, request, length). Register a subclass made by `tree_proposer`.

    ``draw`` "fixed": children are distinct tokens chosen outright, point masses. "independent" and
    "without_replacement": children are drawn from a scripted q, through the code that real drafters use, for
    requests whose rule looks at q; for the others (greedy, coupled) they are the best by the same
    scores. The shape is decided before anything is drawn.
    """

    name: ClassVar[str] = "scripted_tree"
    drafts_trees: ClassVar[bool] = True
    vocab_size: int
    oracle: Oracle
    draw: DrawKind
    seed: int
    sharpness: float
    last_shapes: list[tuple[int, ...]]

    def __init__(
        self,
        vocab_size: int,
        oracle: Oracle = no_oracle,
        draw: DrawKind = "fixed",
        *,
        seed: int = 0,
        sharpness: float = 4.0,
    ) -> None:
        """``sharpness``: how much the oracle's token is preferred: added to its logit when children are
        drawn (the others are standard normal); fixed children have it with probability s / (1 + s)."""
        self.vocab_size = vocab_size
        self.oracle = oracle
        self.draw = draw
        self.seed = seed
        self.sharpness = sharpness
        self.last_shapes = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.last_shapes = []
        return [self._propose(row) for row in rows]

    def _propose(self, row: DraftRow) -> Proposal:
        rng = random.Random(f"{self.seed} {row.rid} {row.num_tokens}")
        parents = random_shape(rng, row.budget, row.max_depth)
        if self.draw == "without_replacement" or self.draw == "fixed":
            parents = limit_children(parents, self.vocab_size)
        self.last_shapes.append(parents)
        if not parents:
            return EMPTY_PROPOSAL
        known = tuple(row.token_ids_np.tolist())
        hints = tuple(self.oracle(known, max(depths(parents))))
        if self.draw == "fixed":
            return Proposal(self._fixed(rng, parents, hints), parents, self.name)
        return self._drawn(row, parents, hints)

    # ---------------------------------------------------------------------------------------------- fixed

    def _fixed(self, rng: random.Random, parents: Sequence[int], hints: Sequence[int]) -> tuple[int, ...]:
        tokens: list[int] = []
        paths: list[tuple[int, ...]] = []
        for i, parent in enumerate(parents):
            above = paths[parent] if parent >= 0 else ()
            taken = {tokens[j] for j in range(i) if parents[j] == parent}
            hint = hint_after(above, hints)
            if hint is None or hint in taken or rng.random() > self.sharpness / (1 + self.sharpness):
                hint = rng.choice([t for t in range(self.vocab_size) if t not in taken])
            tokens.append(hint)
            paths.append((*above, hint))
        return tuple(tokens)

    # ---------------------------------------------------------------------------------------------- drawn

    def _drawn(self, row: DraftRow, parents: Sequence[int], hints: Sequence[int]) -> Proposal:
        """Nodes in the order of ``parents``, without those below a child that could not be drawn."""
        sampled = draws_from_q(row.sampling, row.speculation.rule)
        tokens: list[int] = []
        new_parents: list[int] = []
        q_rows: list[int] = []
        paths: list[tuple[int, ...]] = []
        q: list[torch.Tensor] = []
        row_of: dict[int, int] = {}  # parent in the proposal -> its row of q
        queue: dict[int, list[int]] = {}  # parent in the proposal -> drawn children not yet placed
        index: dict[int, int] = {-1: -1}  # node of the shape -> node of the proposal
        for i, shape_parent in enumerate(parents):
            parent = index.get(shape_parent)
            if parent is None:
                continue
            path = paths[parent] if parent >= 0 else ()
            if self.draw == "without_replacement" or not sampled:
                if parent not in queue:
                    count = sum(p == shape_parent for p in parents)
                    queue[parent], part = self._children(row, path, hints, parent, count)
                    if part is not None:
                        row_of[parent] = len(q)
                        q.append(part)
                if not queue[parent]:
                    continue  # fewer tokens have probability than children were wanted
                token = queue[parent].pop(0)
            else:
                token, part = self._independent(row, path, hints, len(tokens))
                if parent not in row_of:
                    row_of[parent] = len(q)
                    q.append(part)
            index[i] = len(tokens)
            tokens.append(token)
            new_parents.append(parent)
            q_rows.append(row_of.get(parent, -1))
            paths.append((*path, token))
        if not sampled:
            return Proposal(tuple(tokens), tuple(new_parents), self.name)
        return Proposal(
            tuple(tokens), tuple(new_parents), self.name, self.draw, torch.stack(q), tuple(q_rows)
        )

    def _children(
        self, row: DraftRow, path: tuple[int, ...], hints: Sequence[int], parent: int, count: int
    ) -> tuple[list[int], torch.Tensor | None]:
        children = draft_children(
            self.logits(row, path, hints)[None],
            [LogitsRow(row.sampling, path, row.token_ids_np)],
            rules=[row.speculation.rule],
            positions=[row.num_tokens + len(path)],
            parents=[parent],
            bases=[row.num_tokens],
            counts=[count],
        )
        return children.tokens[0], None if children.q is None else children.q[0]

    def _independent(
        self, row: DraftRow, path: tuple[int, ...], hints: Sequence[int], node: int
    ) -> tuple[int, torch.Tensor]:
        tokens, q = draft_tokens(
            self.logits(row, path, hints)[None],
            [LogitsRow(row.sampling, path, row.token_ids_np)],
            rules=[row.speculation.rule],
            positions=[row.num_tokens + len(path)],
            nodes=[node],
            bases=[row.num_tokens],
        )
        assert q is not None
        return tokens[0], q[0]

    def logits(self, row: DraftRow, path: tuple[int, ...], hints: Sequence[int]) -> torch.Tensor:
        """The scripted draft model: float32 [V], a function of what precedes the position."""
        last = path[-1] if path else int(row.token_ids_np[-1])
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + last * 1009 + len(path))
        logits = torch.randn(self.vocab_size, generator=generator)
        hint = hint_after(path, hints)
        if hint is not None:
            logits[hint] += self.sharpness
        return logits


def tree_proposer(
    oracle: Oracle = no_oracle,
    draw: Literal["fixed", "independent", "without_replacement"] = "fixed",
    *,
    seed: int = 0,
    sharpness: float = 4.0,
) -> type[TreeProposer]:
    """A class to register: ``register_proposer("tree", tree_proposer(...))``."""

    class Scripted(TreeProposer):
        @classmethod
        def create(cls, context: ProposerContext) -> Self:
            return cls(context.vocab_size, oracle, draw, seed=seed, sharpness=sharpness)

    return Scripted


def hint_after(path: tuple[int, ...], hints: Sequence[int]) -> int | None:
    """The oracle's token behind ``path``, as long as the path has followed the oracle."""
    follows = len(path) < len(hints) and tuple(hints[: len(path)]) == path
    return hints[len(path)] if follows else None


def random_shape(rng: random.Random, budget: int, max_depth: int) -> tuple[int, ...]:
    """Parents of 0..budget nodes, at most ``max_depth`` deep; deep and bushy ones alike, and some chains."""
    size = rng.choice([budget, budget, budget, rng.randint(0, budget)])
    depth_bias = rng.random()  # near 1: chains
    parents: list[int] = []
    depth: list[int] = []
    for i in range(size):
        open_nodes = [-1, *(j for j in range(i) if depth[j] < max_depth)]
        parent = open_nodes[-1] if rng.random() < depth_bias else rng.choice(open_nodes)
        parents.append(parent)
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return tuple(parents)


def limit_children(parents: Sequence[int], most: int) -> tuple[int, ...]:
    """The longest prefix in which no node has more than ``most`` children."""
    for i, parent in enumerate(parents):
        if sum(p == parent for p in parents[:i]) >= most:
            return tuple(parents[:i])
    return tuple(parents)


def depths(parents: Sequence[int]) -> list[int]:
    out: list[int] = []
    for parent in parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out
