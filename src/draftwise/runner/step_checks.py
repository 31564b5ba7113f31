"""Are the kernels between passes right here? Draws, verification and rows of steps, against plain torch.

`models.checking` looks at those of passes. These decide whole numbers, so that nothing may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftwise.graphs.backend import Rerun
from draftwise.graphs.buffers import PassBuffers, Shape, Tables, static_of
from draftwise.graphs.chains import next_rows_in_torch
from draftwise.graphs.seats import kernels, rows
from draftwise.graphs.seats.kernels import SeatVerification
from draftwise.graphs.seats.lookup import LookUp, look_up
from draftwise.graphs.seats.memory import (
    BUDGET,
    FED,
    KNOWN,
    LIMIT,
    LOOK,
    NODES,
    ROOT,
    STATE,
    TOLD,
    WAITING,
    Limits,
    SeatMemory,
)
from draftwise.kernels.ranks import Ranks
from draftwise.kernels.replaced import STEPS
from draftwise.kernels.select import on_triton
from draftwise.kernels.triton.inputs import DraftSlots, best_tokens, next_rows, sample_tokens
from draftwise.kernels.triton.rows import compact_paths
from draftwise.kernels.walk import Walk
from draftwise.models.checking import KernelCheck, compare
from draftwise.models.self_test import TESTED, settle
from draftwise.sampling.noise import gumbel_of_keys, token_counters
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import Proposal
from draftwise.verify.base import VerifyRequest
from draftwise.verify.registry import get_rule
from draftwise.verify.triton import TritonRules

_ROWS: Final = 7
_CHAIN: Final = (-1, 0, 1, 2)
_TREE: Final = (-1, -1, -1, 0, 0, 1, 3, 3)
_PROMPT: Final = np.array([1, 2, 0], np.int32)
_Pair = tuple[Tensor, Tensor]


def settle_steps(device: torch.device, vocab_size: int, block_size: int, ranks: Ranks | None = None) -> None:
    """Where Triton's kernels stand between passes: leave all of it to torch if one of them is not right, and say so.

    Raises:
        ModelLoadError: a kernel has left the device unusable.
    """
    if device.type in TESTED and on_triton(device):
        settle(check_steps(device, vocab_size, block_size), device, ranks)


@torch.inference_mode()
def check_steps(device: torch.device, vocab_size: int, block_size: int) -> list[KernelCheck]:
    """Compare draws, verification and rows of steps with torch, over a vocabulary and blocks of these sizes."""
    cases = {
        "best tokens": partial(_best, device, vocab_size, noisy=False),
        "best tokens, with noise": partial(_best, device, vocab_size, noisy=True),
        "draws": partial(_draws, device, vocab_size),
        "rows of the next draft": partial(_next, device, block_size),
        "seats": partial(_seats, device, vocab_size, block_size),
        "accepted paths, moved": partial(_moved, device),
    }
    for rule in ("greedy", "coupled", "rejection", "block"):
        cases[f"verification, {rule}"] = partial(_verified, device, vocab_size, rule)
    return [compare(STEPS, name, 0.0, case) for name, case in cases.items()]


def _logits(device: torch.device, count: int, vocab_size: int) -> Tensor:
    made = torch.empty((count, vocab_size), device=device)
    return made.normal_(0.0, 2.0, generator=torch.Generator(device).manual_seed(0))


def _best(device: torch.device, vocab_size: int, *, noisy: bool) -> _Pair:
    """The four best of each row; with noise the best."""
    logits = _logits(device, _ROWS, vocab_size)
    if not noisy:
        count = min(4, vocab_size)
        return best_tokens(logits, count).tokens, logits.topk(count, dim=-1).indices
    keys = torch.arange(_ROWS, device=device) * 0x1E3779B97F4A7C15
    scales = torch.linspace(0.5, 2.0, _ROWS, device=device)
    noise = gumbel_of_keys(keys, token_counters(vocab_size, device))
    found = best_tokens(logits, scales=scales, keys=keys).tokens[:, 0]
    return found, (logits * scales[:, None] + noise).argmax(-1)


def _draws(device: torch.device, vocab_size: int) -> _Pair:
    """Uniforms in the middle of what belongs to a token: which one it is does not hang on the last bits of a sum."""
    logits = _logits(device, _ROWS, vocab_size)
    wanted = logits.argmax(-1)
    p = logits.softmax(-1)
    sums = p.cumsum(-1, dtype=torch.float64)
    upper = sums.gather(1, wanted[:, None]).squeeze(1)
    uniforms = (upper - p.gather(1, wanted[:, None]).squeeze(1).double() / 2) / sums[:, -1]
    q = torch.empty_like(logits)
    found = sample_tokens(logits, q, uniforms, scales=torch.ones(_ROWS, device=device))
    apart = ((q - p).abs().amax(-1) > 1e-4).long()  # 1: of another distribution
    return torch.stack((found, apart)), torch.stack((wanted, torch.zeros_like(wanted)))


def _next(device: torch.device, block_size: int) -> _Pair:
    """Some past their drafts, one past the model's length."""
    pages = 4
    tables = torch.arange(_ROWS * pages, dtype=torch.int32, device=device).view(_ROWS, pages).flip(0)
    start = torch.arange(_ROWS, device=device) * block_size // 2
    length = torch.arange(_ROWS, device=device) % 4
    where = DraftSlots(tables.contiguous(), block_size, 9999, 3 * block_size - 1, -1)
    found, wanted = next_rows(start, length, 1, where), next_rows_in_torch(start, length, 1, where)
    return torch.stack([x.long() for x in found]), torch.stack([x.long() for x in wanted])


def _moved(device: torch.device) -> _Pair:
    """Entries of two accepted paths in two layers."""
    pool = torch.arange(2 * 40 * 3, dtype=torch.float32, device=device).view(2, 40, 3)
    slots = torch.arange(39, -1, -1, device=device)
    # lengths, paths of up to four nodes, tokens; behind the lengths nothing is meant
    packed = torch.tensor(
        [[2, 1, 3, 0, 0, *[0] * 5], [3, 0, 2, 3, 0, *[0] * 5]], dtype=torch.int32, device=device
    )
    wanted = pool.clone()
    for root, path in ((0, (1, 3)), (9, (0, 2, 3))):
        for place, node in enumerate(path):
            wanted[:, slots[root + 1 + place]] = pool[:, slots[root + 1 + node]]
    compact_paths(pool, slots, torch.tensor([0, 9], device=device), Walk(packed, 4))
    return pool, wanted


def _seats(device: torch.device, vocab_size: int, block_size: int) -> _Pair:
    """The rows of the target's pass, what is committed, what is looked up behind it, and what the host is told."""
    found = [
        torch.cat([x.flatten().long() for x in _seated(device, vocab_size, block_size, fused)])
        for fused in (True, False)
    ]
    return found[0], found[1]


def _seated(device: torch.device, vocab_size: int, block_size: int, fused: bool) -> Iterator[Tensor]:
    seats, drafts, width = 4, 3, 12
    memory = SeatMemory(Limits(seats, drafts, width, block_size, vocab_size, texts=True, past=40), device)
    column = torch.arange(seats, device=device)
    memory.state[:, KNOWN] = memory.state[:, FED] = 4 * block_size + column
    memory.state[:, ROOT] = column
    memory.state[:, WAITING] = column % (drafts + 1)
    memory.state[:, STATE:] = torch.arange(seats * drafts, device=device).view(seats, drafts) % vocab_size
    memory.told[:, LIMIT] = torch.where(column == 2, 0, 5 * block_size + drafts)  # seat 2 takes no part
    memory.told[:, NODES] = memory.told[:, BUDGET] = drafts
    memory.told[1::2, LOOK] = 1
    memory.text.copy_(torch.arange(memory.text.shape[1], device=device) % 3)
    memory.past.copy_(torch.arange(40, device=device) % 5 - 1)
    memory.told[:, TOLD : TOLD + memory.pages] = 5
    memory.told[:, TOLD + memory.pages :] = 60 + column[:, None]
    memory.tables.copy_(torch.arange(seats * width, device=device).view(seats, width))
    backend = Rerun(device)
    tables = Tables(seats, width * block_size, block_size, 999, backend)
    batch = PassBuffers(Shape(seats, drafts + 1, width * block_size), tables).batch
    if fused:
        kernels.begin(memory, batch, 999, SeatVerification(memory, (), 0))
    else:
        rows.begin(memory, batch, 999)
    memory.walk.packed[:seats, 0] = memory.now[:, 1].clamp(max=2)
    memory.walk.packed[:, 1 + drafts :] = 1
    (kernels if fused else rows).advance(memory, seats)
    (kernels.look_up if fused else look_up)(memory, seats, 1, LookUp(drafts, 9, 1, 1.0, 0.0, 0.1, past=True))
    static = static_of(batch)
    yield from (batch.token_ids, batch.positions, batch.slots, static.context, static.ancestors)
    yield from (memory.state, memory.now, memory.tables, memory.answer, memory.text[:, :-1])


def _verified(device: torch.device, vocab_size: int, rule: str) -> _Pair:
    """Chains and trees of point masses, chains of drafts that were drawn: paths and tokens, by kernels and by torch."""
    requests = []
    first = 0
    logits = _logits(device, 6 * (1 + len(_TREE)), vocab_size)
    best = logits.argmax(-1).tolist()
    for seed, parents in enumerate((_CHAIN, _TREE) * 3):
        # first children are the target's own choice, so that paths are longer than none
        tokens = [
            best[first + 1 + parent] if parents.index(parent) == i else i % vocab_size
            for i, parent in enumerate(parents)
        ]
        proposal = Proposal(tuple(tokens), parents, "test")
        if parents == _CHAIN and seed:
            q = (logits[first : first + len(parents)] * 0.9).softmax(-1)
            proposal = Proposal(tuple(tokens), parents, "test", "independent", q, tuple(range(len(parents))))
        state = SamplingState(
            SamplingParams(),
            seed=seed,
            sample_index=seed % 2,
            token_ids_np=_PROMPT,
            num_prompt=3,
            vocab_size=vocab_size,
        )
        requests.append(VerifyRequest(state, proposal, first, rule, _PROMPT))
        first += len(proposal) + 1
    found = TritonRules().verify(logits, requests, [rule] * len(requests))
    wanted = get_rule(rule).verify(logits, requests)
    told = [
        torch.tensor([x for result in results for x in (len(result.path), *result.path, *result.token_ids)])
        for results in (found, wanted)
    ]
    return told[0], told[1]
