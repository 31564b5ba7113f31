"""Between the passes of a step of seats: the kernels, in Triton's interpreter where there is no GPU, against torch."""

from __future__ import annotations

from itertools import product
from typing import Literal

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.fakes.seats import (
    DRAFTS,
    SEATS,
    SPARE,
    VOCAB,
    loop_seats,
    pass_rows,
    random_memory,
    set_rules,
)

from draftwise.graphs.buffers import static_of
from draftwise.graphs.loop import LoopKind
from draftwise.graphs.seats import kernels, rows
from draftwise.graphs.seats.kernels import SeatVerification
from draftwise.graphs.seats.memory import ACCEPTED, ANSWER, LOOP, RULES, SOURCE, STORED, WAITING, SeatMemory
from draftwise.graphs.seats.rows import SHAPES, LoopRows
from draftwise.graphs.seats.rules import Deciding, verify
from draftwise.kernels.triton.availability import interpreted
from draftwise.sampling.noise import token_counters
from draftwise.types import TreeShape

DEVICE = torch.device("cpu" if interpreted() else "cuda")
RATES = (0.9, 0.5, 0.2)


def tensors(memory: SeatMemory) -> list[list[int]]:
    return [x.flatten().tolist() for x in (memory.state, memory.now, memory.tables)]


TREE = TreeShape((-1, -1, 0), (0, 1, 0))


@pytest.mark.parametrize("tree", [None, TREE, "own"], ids=["chain", "tree", "own tree"])
@pytest.mark.parametrize("width", [1, 3, DRAFTS + 1])
@torch.inference_mode()
def test_rows_of_the_targets_pass(width: int, tree: TreeShape | Literal["own"] | None) -> None:
    """Also of passes with fewer rows than a request might have drafts, and than there are seats."""
    made = []
    for fused in (False, True):
        memory = random_memory(1, DEVICE, tree=tree)
        target = pass_rows(width, DEVICE)
        batch = target.batch
        if fused:
            verification = SeatVerification(memory, (), 1)
            kernels.begin(memory, batch, SPARE, verification)
            assert verification.batch.table[:SEATS, 0].tolist() == [s * width for s in range(SEATS)]
        else:
            rows.begin(memory, batch, SPARE)
        static = static_of(batch)
        made.append(
            [x.tolist() for x in (batch.token_ids, batch.positions, batch.slots, static.context)]
            + [static.is_tree.tolist(), static.ancestors.tolist()]
            + tensors(memory)
        )
    assert made[0] == made[1]
    assert SPARE in made[0][2] and (5 in made[0][5]) == (tree is not None and width > 1)


@pytest.mark.parametrize("kind", ["argmax", "draft", "shared"])
@pytest.mark.parametrize(
    "drafter", ["none", "model", "head", "without storage", "tree", "own tree", "masks", "masks of a head"]
)
@torch.inference_mode()
def test_what_was_committed_and_the_drafters_rows(drafter: str, kind: LoopKind) -> None:
    """Two loops, of which the second drafts less; each concerns its own seats alone. ``tree``, ``own tree``: a model's,
    which has stored nothing of its drafts, as over ``masks``."""
    made = []
    for form in (rows, kernels):
        tree: TreeShape | Literal["own"] | None
        tree = TREE if drafter == "tree" else "own" if drafter == "own tree" else None
        memory = random_memory(2, DEVICE, loops=0 if drafter == "none" else 2, tree=tree)
        masked = "masks" in drafter
        if tree is not None or masked:
            memory.state[:, STORED] = 0
        target = pass_rows(DRAFTS + 1, DEVICE)
        rows.begin(memory, target.batch, SPARE)
        packed = memory.walk.packed
        kept = torch.tensor([0, 2, 0, 1, 3, 1], device=DEVICE)
        packed[:SEATS, 0] = torch.minimum(kept, memory.now[:, 1])
        packed[:, 1 : 1 + DRAFTS] = torch.arange(DRAFTS, device=DEVICE)
        packed[:, 1 + DRAFTS :] = torch.arange(DRAFTS + 1, device=DEVICE) + 20
        packed[0, 1 + DRAFTS] = -1  # no token could be drawn
        if drafter == "none":
            form.advance(memory, SEATS)
            made.append([*tensors(memory), memory.answer.tolist()])
            continue
        found = []
        for number in (1, 2):
            steps = DRAFTS + 1 - number
            widths = {"model": 2, "head": steps + 1, "without storage": 1, "tree": 4, "own tree": 4}
            first = pass_rows(2 * DRAFTS if masked else widths[drafter], DEVICE)
            ends = torch.zeros(first.shape.size, dtype=torch.int64, device=DEVICE)
            seats, batch = loop_seats(DEVICE, steps, tree), first.batch
            head = "head" in drafter
            shape = SHAPES[3 if masked else 0 if tree is None else 1 + (tree == "own")]
            loop = LoopRows(
                number, seats, batch, kind, 24, SPARE, head, shape, ends if head else None, 20, number
            )
            form.advance(memory, SEATS, loop)
            form.finish(memory, SEATS, loop)
            assert batch.token_ids.min() == 0
            static = static_of(batch)
            read = (batch.token_ids, batch.positions, batch.slots, static.context, static.first_key, ends)
            found += [x.tolist() for x in (*read, *seats[:3], seats.noise)]
        made.append([*found, memory.answer.tolist(), memory.own_forms.tolist(), *tensors(memory)])
    assert made[0] == made[1]


CASES = [*((rule,) for rule in RULES), RULES, ("greedy", "block")]


@pytest.mark.parametrize(
    ("names", "drafts"),
    [*product(CASES, ("point masses", "q", "trees", "own trees", "trees with q"))],
)
@torch.inference_mode()
def test_verification(names: tuple[str, ...], drafts: str) -> None:
    """Every seat by its own rule; with q, of every other seat's drafts."""
    accepted = []
    with_q, trees = "q" in drafts, "trees" in drafts
    pools = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn((SEATS * (DRAFTS + 1), VOCAB), generator=generator).to(DEVICE) * 2
        q = torch.randn((SEATS, DRAFTS, VOCAB), generator=generator).to(DEVICE).softmax(-1)
        made = []
        for fused in (False, True):
            memory = random_memory(seed, DEVICE, loops=0, tree="own" if "own" in drafts else TREE)
            set_rules(memory, *names)
            # the likeliest tokens: others are next to never accepted
            memory.waiting_drafts.copy_(logits.view(SEATS, DRAFTS + 1, VOCAB)[:, :DRAFTS].argmax(-1))
            if trees:
                memory.told[:, LOOP] = 1
                memory.state[::2, WAITING] = DRAFTS
                # what the root wants is the second one
                memory.waiting_drafts[:, 1] = memory.waiting_drafts[:, 0]
                memory.waiting_drafts[:, 0] = 0
                grown = logits.view(SEATS, DRAFTS + 1, VOCAB)
                memory.waiting_drafts[:, 2] = grown[:, 1].argmax(-1)
            verification = SeatVerification(memory, RATES, 1)
            if with_q:
                memory.open_source(1, DRAFTS).copy_(q)
                verification.open_source(1, memory.q[1])
                memory.state[::2, SOURCE] = 1
            target = pass_rows(DRAFTS + 1, DEVICE)
            step = Deciding(SEATS, DRAFTS + 1, names, RATES, trees)
            if fused:
                kernels.begin(memory, target.batch, SPARE, verification)
                kernels.verify(memory, logits.clone(), step, verification)
            else:
                rows.begin(memory, target.batch, SPARE)
                verify(memory, logits, step, token_counters(VOCAB, DEVICE))
            slots = target.batch.slots
            pool = torch.arange(2000, device=DEVICE).view(2, 1000, 1).clone()
            (kernels if fused else rows).compact(memory, SEATS, DRAFTS + 1, slots, [pool])
            pools.append(pool[:, :SPARE].tolist())
            memory.told[:, LOOP] = 0
            rows.advance(memory, SEATS)
            answer = memory.answer.tolist()
            path = ANSWER + 2 * DRAFTS + 1
            made.append(
                [row[: ANSWER + row[ACCEPTED] + 1] + row[path : path + row[ACCEPTED]] for row in answer]
            )
        assert made[0] == made[1] and pools[-1] == pools[-2]
        accepted += [row[ACCEPTED] for row in made[0]]
    still = torch.arange(2000).view(2, 1000, 1)[:, :SPARE].tolist()
    assert any(pool != still for pool in pools) == trees or "own" in drafts
    assert 0 in accepted and max(accepted) > 0
