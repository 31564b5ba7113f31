"""Seats of a step in the middle of a run, drawn at random: with drafts waiting and without, one that ends with
this step, one that takes no part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from draftwise.graphs.backend import Rerun
from draftwise.graphs.buffers import PassBuffers, Shape, Tables
from draftwise.graphs.loop import LoopSeats
from draftwise.graphs.plans import TreePlan, lay_out
from draftwise.graphs.seats import rows
from draftwise.graphs.seats.lookup import LookUp, find, join_found
from draftwise.graphs.seats.memory import (
    BUDGET,
    FED,
    FIRST_KEY,
    KNOWN,
    LIMIT,
    LOOP,
    NODES,
    ROOT,
    RULE,
    RULES,
    SAMPLE,
    SEED,
    SOURCE,
    STATE,
    STORED,
    TEMPERATURE,
    TOLD,
    WAITING,
    Limits,
    SeatMemory,
    form_of,
)
from draftwise.graphs.seats.rows import SHAPES, LoopRows
from draftwise.kernels.walk import Walk
from draftwise.types import TreeShape

SEATS, DRAFTS, VOCAB, PAGE, SPARE = 6, 3, 40, 4, 999
KEYS = 40


def random_memory(
    seed: int,
    device: torch.device,
    drafts: int = DRAFTS,
    loops: int = 1,
    tree: TreeShape | Literal["own"] | None = None,
) -> SeatMemory:
    """``loops``: so many, from 1 on, that seats draft with; 0: nobody drafts. ``tree``: of the first one; "own": each
    seat has its own."""
    rng = np.random.default_rng(seed)
    memory = SeatMemory(Limits(SEATS, drafts, (KEYS + 128) // PAGE, PAGE, VOCAB, max(loops, 1)), device)
    if tree is not None:
        memory.set_form(1, None if tree == "own" else tree)
    state_np = memory.state.cpu().numpy().copy()
    told_np = np.zeros((SEATS, TOLD + 2 * memory.pages), np.int64)
    for s in range(SEATS):
        known, waiting = int(rng.integers(4, 20)), int(rng.integers(0, drafts + 1))
        state_np[s, [KNOWN, ROOT, WAITING]] = known, rng.integers(VOCAB), waiting
        state_np[s, FED], state_np[s, STORED] = known, max(waiting - 1, 0)
        state_np[s, SEED] = rng.integers(-(1 << 62), 1 << 62)
        state_np[s, SAMPLE] = s % 2
        state_np[s, TEMPERATURE] = np.float64(rng.choice([0.5, 1.0, 1.3])).view(np.int64)
        state_np[s, FIRST_KEY] = s % 3
        state_np[s, STATE:] = rng.integers(0, VOCAB, drafts)
        told_np[s, [LIMIT, NODES, BUDGET]] = known + 9, max(drafts - s % 2, 0), drafts
        told_np[s, LOOP] = 1 + s % loops if loops else 0
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
    if tree == "own":
        for s in range(SEATS):
            parents = [(draft + s) % (draft + 1) - 1 for draft in range(drafts)]  # of seat 0 a chain
            memory.own_forms[s, :3].copy_(form_of(parents, drafts)[:3])
    memory.tables.copy_(torch.arange(memory.tables.numel()).view_as(memory.tables) % 60)
    return memory


def set_rules(memory: SeatMemory, *names: str) -> None:
    """Seat i has the i-th of these, over and over."""
    for s in range(SEATS):
        memory.state[s, RULE] = RULES.index(names[s % len(names)])


def pass_rows(rows: int, device: torch.device) -> PassBuffers:
    backend = Rerun(device)
    tables = Tables(SEATS, KEYS, PAGE, SPARE, backend)
    tables.tables.copy_(torch.arange(tables.tables.numel()).view_as(tables.tables) % 60)
    return PassBuffers(Shape(SEATS, rows, KEYS), tables)


def loop_seats(
    device: torch.device, drafts: int = DRAFTS, tree: TreeShape | Literal["own"] | None = None
) -> LoopSeats:
    """``tree``: of the loop, cut to its drafts; "own": dynamic ones, of two levels; None: chains."""
    reach, depths, nodes = [*range(drafts + 1)], [*range(drafts)], [*range(drafts)]
    form = None
    if tree == "own":
        reach, depths, nodes = [0, 2, 6], [0, 1], [-1, -1]
        words = torch.arange(SEATS * 3 * (drafts + 1), device=device)
        form = words.view(SEATS, 3, drafts + 1) + 1000
    elif tree is not None:
        plan = TreePlan(TreeShape(tree.parents[:drafts], tree.ranks[:drafts]))
        assert plan.shape is not None
        layout = lay_out(plan.shape, "draft", device)
        reach, depths, nodes = plan.reach, layout.depths.tolist(), layout.nodes.tolist()

    def longs(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return LoopSeats(
        last=longs(SEATS),
        start=longs(SEATS),
        length=longs(SEATS),
        scale=torch.ones(SEATS, dtype=torch.float64, device=device),
        noise=longs(SEATS, len(nodes)),
        depths=torch.tensor(depths, device=device),
        nodes=torch.tensor(nodes, device=device),
        features=None,
        tokens=torch.arange(SEATS * drafts, device=device).view(SEATS, drafts),
        q=None,
        reach=torch.tensor(reach, device=device),
        steered=longs(SEATS),
        form=form,
    )


# ------------------------------------------------------------------- on a pretended device, what kernels would do


def _memory(given: dict[str, Any]) -> SeatMemory:
    memory = SeatMemory.__new__(SeatMemory)
    memory.state, memory.told, memory.now = given["state"], given["told"], given["now"]
    memory.seats, memory.drafts = memory.state.shape[0], given["drafts"]
    memory.numbers, memory.shared_forms = torch.arange(memory.seats), given.get("shared_forms", 0)
    memory.pages, memory.block_size, memory.q = (memory.told.shape[1] - TOLD) // 2, given.get("PAGE", 1), {}
    return memory


def _batch(given: dict[str, Any], width: int) -> Any:
    static = SimpleNamespace(
        context=given["context"],
        tables=given["table"],
        first_key=given.get("first_key"),
        is_tree=given.get("is_tree"),
        ancestors=given.get("ancestors"),
        rows=width,
    )
    return SimpleNamespace(
        token_ids=given["tokens"],
        positions=given["positions"],
        slots=given["slots"],
        attention=SimpleNamespace(static=static),
    )


@torch.inference_mode()
def _begin(given: dict[str, Any]) -> None:
    memory, drafts, width = _memory(given), given["drafts"], given["rows"]
    memory.tables, memory.forms = given["table"], given["forms"]
    rows.begin(memory, _batch(given, width), given["spare_slot"])
    count = given["context"].shape[0]
    seat, fields, state = torch.arange(count), given["fields"][:count], memory.state[:count]
    known = (seat * width, memory.now[:count, 1], *(state[:, i] for i in (SEED, SAMPLE, KNOWN)))
    fields[:, :5] = torch.stack(known, dim=1)
    fields[:, 6 : 6 + drafts] = state[:, STATE:]
    forms = memory.forms_of(count)
    fields[:, 6 + drafts : 6 + 2 * drafts] = forms[:, 2, 1:]
    base, seats, step = given["sources"][state[:, SOURCE]].T[..., None]
    fields[:, 5] = torch.where(base[:, 0] != 0, forms[:, 3, 0], 0)
    at = base + seat[:, None] * seats + forms[:, 4, 1:] * step
    fields[:, 6 + 2 * drafts :] = torch.where(base != 0, at, 0)


@torch.inference_mode()
def _advance(given: dict[str, Any]) -> None:
    memory, number = _memory(given), given["number"]
    memory.answer, memory.walk = given["answer"], Walk(given["walk"], given["drafts"])
    if not given["DRAFTER"]:
        rows.advance(memory, given["programs"])
        return
    names = ("last", "start", "length")
    head, noise = given["DRAFTER"] == 2, given["noise"]
    drawn = given["depths"], given["nodes"]
    seats = LoopSeats(
        *(given[name] for name in names), noise, noise, *drawn, None, noise, None, given["reach"], noise
    )
    loop = LoopRows(
        number,
        seats,
        _batch(given, given["ROWS"]),
        ("argmax", "draft", "shared")[given["KIND"]],  # type: ignore[arg-type]
        given["max_len"],
        given["spare_slot"],
        head,
        SHAPES[given["TREE"]],
        given["ends"] if head else None,
        given["spare_block"],
        given["source"],
    )
    rows.advance(memory, given["context"].shape[0], loop)


@torch.inference_mode()
def _keep(given: dict[str, Any]) -> None:
    memory, drafted = _memory(given), given["drafted"]
    memory.answer, memory.own_forms = given["answer"], given["own_forms"]
    form = given["form"] if given["DYNAMIC"] else None
    seats = LoopSeats(*[drafted] * 7, None, drafted, None, drafted, drafted, form)
    loop = LoopRows(given["number"], seats, None, "argmax", 0, 0)  # type: ignore[arg-type]
    rows.finish(memory, drafted.shape[0], loop)


@torch.inference_mode()
def _keep_at_rates(given: dict[str, Any]) -> None:
    """Two drafts stay."""
    members, nodes = given["members"].long(), given["num_nodes"]
    table, walk = given["table"][members], given["walk"]
    kept = table[:, 1].clamp(max=2)
    own = walk[members]
    own[:, 0] = kept
    own[:, 1 + nodes : 1 + 2 * nodes] = table[:, 6 : 6 + nodes]
    own[:, 1 + nodes :].scatter_(1, kept[:, None], 1)
    walk[members] = own


@torch.inference_mode()
def _look_up(given: dict[str, Any]) -> None:
    memory = _memory(given)
    memory.answer, memory.walk = given["answer"], Walk(given["walk"], given["drafts"])
    memory.text, memory.past = given["text"], given["past"]
    limit = (given["slope"], given["height"], given["least"] if given["CUT"] else None, given["PAST"])
    look = LookUp(given["steps"], given["longest"], given["shortest"], *limit, given["JOINS"])
    memory.paths = given["paths"]
    find(memory, given["programs"], given["number"], look)


@torch.inference_mode()
def _join_found(given: dict[str, Any]) -> None:
    memory = _memory({"now": given["state"], **given})
    memory.answer, memory.own_forms, memory.paths = given["answer"], given["own_forms"], given["paths"]
    memory.draft_places = torch.arange(memory.drafts)
    join_found(memory, given["programs"])


EFFECTS = {
    "begin_rows": _begin,
    "advance_rows": _advance,
    "keep_drafts": _keep,
    "keep_at_rates": _keep_at_rates,
    "keep_typical": _keep_at_rates,
    "look_up": _look_up,
    "join_found": _join_found,
}
"""Of the kernels between the passes of seats, on their arguments by name, where kernels are not run."""
