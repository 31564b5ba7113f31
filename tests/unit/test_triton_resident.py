"""Between the passes of a resident step: the kernels, in Triton's interpreter where there is no GPU, against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from tests.fakes.resident import DRAFTS, SLOTS, SPARE, VOCAB, loop_seats, pass_rows, random_memory

from draftwise.graphs import resident_rows as rows
from draftwise.graphs.resident_rules import verify
from draftwise.kernels.resident import ACCEPTED, ANSWER, ResidentMemory, ResidentRule
from draftwise.kernels.triton import resident as kernels
from draftwise.kernels.triton.availability import interpreted
from draftwise.kernels.triton.resident import ResidentVerification
from draftwise.sampling.noise import token_counters

DEVICE = torch.device("cpu" if interpreted() else "cuda")
RULES = [
    ResidentRule("greedy"),
    ResidentRule("coupled"),
    ResidentRule("rejection"),
    ResidentRule("block"),
    ResidentRule("synthetic", (0.9, 0.5, 0.2)),
    ResidentRule("synthetic", (0.9, 0.5, 0.2), sampled=True),
]


def tensors(memory: ResidentMemory) -> list[list[int]]:
    return [x.flatten().tolist() for x in (memory.state, memory.now)]


@pytest.mark.parametrize("drafts", [0, DRAFTS])
@torch.inference_mode()
def test_rows_of_the_targets_pass(drafts: int) -> None:
    made = []
    for fused in (False, True):
        memory = random_memory(1, DEVICE, drafts)
        target = pass_rows(drafts + 1, DEVICE)
        tables = [target.tables.tables, target.tables.tables.clone()]
        if fused:
            verification = ResidentVerification(memory, RULES[0], None)
            kernels.begin(memory, target.batch, tables, SPARE, verification)
            assert verification.batch.table[:, 0].tolist() == [s * (drafts + 1) for s in range(SLOTS)]
        else:
            rows.begin(memory, target.batch, tables, SPARE)
        static = target.batch.attention.static
        assert static is not None and tables[1].tolist() == tables[0].tolist()
        batch = target.batch
        made.append(
            [x.tolist() for x in (batch.token_ids, batch.positions, batch.slots, static.context, tables[0])]
            + tensors(memory)
        )
    assert made[0] == made[1]
    assert SPARE in made[0][2]


@pytest.mark.parametrize("kind", ["argmax", "draft", "shared"])
@pytest.mark.parametrize("drafter", ["none", "model", "head"])
@torch.inference_mode()
def test_what_was_committed_and_the_drafters_rows(drafter: str, kind: str) -> None:
    drafts = 0 if drafter == "none" else DRAFTS
    made = []
    for step, begin, finish in (
        (rows.advance, rows.begin, rows.finish),
        (kernels.advance, rows.begin, kernels.finish),
    ):
        memory = random_memory(2, DEVICE, drafts)
        target = pass_rows(drafts + 1, DEVICE)
        begin(memory, target.batch, [target.tables.tables], SPARE)
        packed = memory.walk.packed
        kept = torch.tensor([0, 2, 0, 1, 3, 1], device=DEVICE)
        packed[:, 0] = torch.minimum(kept, memory.now[:, 1])
        packed[:, 1 + drafts :] = torch.arange(drafts + 1, device=DEVICE) + 20
        ends = torch.zeros(SLOTS * (drafts + 1), dtype=torch.int64, device=DEVICE)
        if drafter == "none":
            step(memory)
            made.append([*tensors(memory), memory.answer.tolist()])
            continue
        first = pass_rows(2 if drafter == "model" else drafts + 1, DEVICE)
        seats = loop_seats(DEVICE)
        step(
            memory,
            seats=seats,
            batch=first.batch,
            kind=kind,
            max_len=24,
            spare_slot=SPARE,
            head=drafter == "head",
            ends=ends if drafter == "head" else None,
            spare_block=77,
        )
        finish(memory, seats, None)
        static, batch = first.batch.attention.static, first.batch
        assert static is not None
        found = (
            batch.token_ids,
            batch.positions,
            batch.slots,
            static.context,
            ends,
            memory.answer,
            *seats[:4],
        )
        made.append([x.tolist() for x in found] + tensors(memory))
    assert made[0] == made[1]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}{'-sampled' * rule.sampled}")
@pytest.mark.parametrize("with_q", [False, True])
@torch.inference_mode()
def test_verification(rule: ResidentRule, with_q: bool) -> None:
    accepted = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn((SLOTS * (DRAFTS + 1), VOCAB), generator=generator).to(DEVICE) * 2
        q = (
            torch.randn((SLOTS, DRAFTS, VOCAB), generator=generator).to(DEVICE).softmax(-1)
            if with_q
            else None
        )
        made = []
        for fused in (False, True):
            memory = random_memory(seed, DEVICE)
            # the likeliest tokens: others are next to never accepted
            memory.waiting_drafts.copy_(logits.view(SLOTS, DRAFTS + 1, VOCAB)[:, :DRAFTS].argmax(-1))
            target = pass_rows(DRAFTS + 1, DEVICE)
            if fused:
                verification = ResidentVerification(memory, rule, q)
                kernels.begin(memory, target.batch, [target.tables.tables], SPARE, verification)
                kernels.verify(memory, logits, verification)
            else:
                rows.begin(memory, target.batch, [target.tables.tables], SPARE)
                verify(memory, logits, rule, q, token_counters(VOCAB, DEVICE))
            rows.advance(memory)
            answer = memory.answer.tolist()
            made.append([row[: ANSWER + row[ACCEPTED] + 1] for row in answer])
        assert made[0] == made[1]
        accepted += [row[ACCEPTED] for row in made[0]]
    assert 0 in accepted and max(accepted) > 0
