"""Slots of a resident step in the middle of a run, drawn at random: with drafts waiting and without, one that ends with
this step, one that nobody has."""

from __future__ import annotations

import numpy as np
import torch

from draftwise.graphs.backend import Rerun
from draftwise.graphs.buffers import PassBuffers, Shape, Tables
from draftwise.graphs.loop import LoopSeats
from draftwise.graphs.resident_memory import (
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
    ResidentMemory,
)

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
