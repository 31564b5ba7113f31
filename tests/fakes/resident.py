"""Slots of a resident step in the middle of a run, drawn at random: with drafts waiting and without, one that ends with
this step, one that nobody has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from draftwise.graphs import resident_rows as rows
from draftwise.graphs.backend import Rerun
from draftwise.graphs.buffers import PassBuffers, Shape, Tables
from draftwise.kernels.resident import (
    ANSWER,
    BUDGET,
    FED,
    KNOWN,
    LIMIT,
    NODES,
    ROOT,
    SAMPLE,
    SEED,
    STATE,
    STORED,
    TEMPERATURE,
    TOLD,
    WAITING,
    LoopSeats,
    ResidentMemory,
)
from draftwise.kernels.walk import Walk

SLOTS, DRAFTS, VOCAB, PAGE, SPARE = 6, 3, 40, 4, 999
KEYS = 40


def random_memory(seed: int, device: torch.device, drafts: int = DRAFTS) -> ResidentMemory:
    rng = np.random.default_rng(seed)
    memory = ResidentMemory(SLOTS, drafts, PAGE, device)
    state_np = np.zeros((SLOTS, STATE + drafts), np.int64)
    told_np = np.zeros((SLOTS, TOLD + 2 * memory.pages), np.int64)
    for s in range(SLOTS):
        known, waiting = int(rng.integers(4, 20)), int(rng.integers(0, drafts + 1))
        state_np[s, [KNOWN, ROOT, WAITING]] = known, rng.integers(VOCAB), waiting
        state_np[s, FED], state_np[s, STORED] = known, max(waiting - 1, 0)
        state_np[s, SEED] = rng.integers(-(1 << 62), 1 << 62)
        state_np[s, SAMPLE] = s % 2
        state_np[s, TEMPERATURE] = np.float64(rng.choice([0.5, 1.0, 1.3])).view(np.int64)
        state_np[s, STATE:] = rng.integers(0, VOCAB, drafts)
        told_np[s, [LIMIT, NODES, BUDGET]] = known + 9, max(drafts - s % 2, 0), drafts
        if s == 1:
            told_np[s, LIMIT] = known + 2
        if s == 2:
            state_np[s, FED], state_np[s, WAITING], state_np[s, STORED] = known - 1, 0, 0
        if s == 3:
            told_np[s, LIMIT] = 0
        told_np[s, TOLD] = 5 + s % 2
        told_np[s, TOLD + memory.pages : TOLD + memory.pages + 1] = 50 + s
        told_np[s, TOLD + 1 : TOLD + memory.pages] = told_np[s, TOLD]
        told_np[s, TOLD + memory.pages + 1 :] = 50 + s
    memory.state.copy_(torch.from_numpy(state_np))
    memory.told.copy_(torch.from_numpy(told_np))
    return memory


def pass_rows(rows: int, device: torch.device) -> PassBuffers:
    backend = Rerun(device)
    tables = Tables(SLOTS, KEYS, PAGE, backend)
    tables.tables.copy_(torch.arange(tables.tables.numel()).view_as(tables.tables) % 60)
    return PassBuffers(Shape(SLOTS, rows, KEYS), tables, PAGE, SPARE, backend)


def loop_seats(device: torch.device, drafts: int = DRAFTS) -> LoopSeats:
    def longs(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return LoopSeats(
        last=longs(SLOTS),
        start=longs(SLOTS),
        length=longs(SLOTS),
        noise=longs(SLOTS, drafts),
        features=None,
        tokens=torch.arange(SLOTS * drafts, device=device).view(SLOTS, drafts),
        q=None,
    )


# ------------------------------------------------------------------- on a pretended device, what kernels would do


def _memory(given: dict[str, Any]) -> ResidentMemory:
    memory = ResidentMemory.__new__(ResidentMemory)
    memory.state, memory.told, memory.now = given["state"], given["told"], given["now"]
    memory.slots, memory.drafts = memory.state.shape[0], given["drafts"]
    memory.pages, memory.block_size, memory.q = (memory.told.shape[1] - TOLD) // 2, given["PAGE"], None
    return memory


def _batch(given: dict[str, Any]) -> Any:
    static = SimpleNamespace(
        context=given["context"], tables=given["table"], first_key=given.get("first_key")
    )
    return SimpleNamespace(
        token_ids=given["tokens"],
        positions=given["positions"],
        slots=given["slots"],
        attention=SimpleNamespace(static=static),
    )


@torch.inference_mode()
def _begin(given: dict[str, Any]) -> None:
    memory, drafts = _memory(given), given["drafts"]
    tables = [given["table"], given["other_table"]][: given["TABLES"]]
    rows.begin(memory, _batch(given), tables, given["spare_slot"])
    slot, fields = torch.arange(memory.slots), given["fields"]
    known = (slot * (drafts + 1), memory.now[:, 1], *(memory.state[:, i] for i in (SEED, SAMPLE, KNOWN)))
    fields[:, :5] = torch.stack(known, dim=1)
    fields[:, 6 : 6 + drafts] = memory.waiting_drafts
    fields[:, 6 + drafts : 6 + 2 * drafts] = torch.arange(drafts) - 1


@torch.inference_mode()
def _advance(given: dict[str, Any]) -> None:
    memory = _memory(given)
    memory.answer, memory.walk = given["answer"], Walk(given["walk"], given["drafts"])
    if not given["DRAFTER"]:
        rows.advance(memory)
        return
    names = ("last", "start", "length", "noise")
    head = given["DRAFTER"] == 2
    rows.advance(
        memory,
        seats=LoopSeats(*(given[name] for name in names), None, given["noise"], None),
        batch=_batch(given),
        kind=("argmax", "draft", "shared")[given["KIND"]],
        max_len=given["max_len"],
        spare_slot=given["spare_slot"],
        head=head,
        ends=given["ends"] if head else None,
        spare_block=given["spare_block"],
    )


@torch.inference_mode()
def _keep(given: dict[str, Any]) -> None:
    drafts = given["drafts"]
    given["state"][:, STATE:] = given["drafted"][:, :drafts]
    given["answer"][:, ANSWER + drafts + 1 :] = given["drafted"][:, :drafts]


@torch.inference_mode()
def _keep_at_rates(given: dict[str, Any]) -> None:
    """Two drafts stay."""
    table, walk, nodes = given["table"], given["walk"], given["num_nodes"]
    kept = table[:, 1].clamp(max=2)
    walk[:, 0] = kept
    walk[:, 1 + nodes : 1 + 2 * nodes] = table[:, 6 : 6 + nodes]
    walk[:, 1 + nodes :].scatter_(1, kept[:, None], 1)


EFFECTS = {
    "begin_rows": _begin,
    "advance_rows": _advance,
    "keep_drafts": _keep,
    "keep_at_rates": _keep_at_rates,
}
"""Of the kernels of resident steps, on their arguments by name, where kernels are not run."""
