"""Parts of steps that stay on the device, in plain torch: rules against those of `verify`, noise against the host's,
numbers by hand, and what a launch may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.seats import (
    DRAFTS,
    PAGE,
    SEATS,
    SPARE,
    VOCAB,
    loop_seats,
    pass_rows,
    random_memory,
    set_rules,
)
from torch.utils._python_dispatch import TorchDispatchMode

from draftwise.graphs.backend import Rerun
from draftwise.graphs.buffers import PassBuffers, PassSeats, Shape, Tables
from draftwise.graphs.chains import ChainLoop
from draftwise.graphs.loop import Drafter, LoopMemory
from draftwise.graphs.plans import distribution_rows
from draftwise.graphs.seats import rows
from draftwise.graphs.seats.features import DrafterSeats, SeatedLoop, SeatFeatures
from draftwise.graphs.seats.memory import (
    ACCEPTED,
    ANSWER,
    ANSWERED_FED,
    ANSWERED_KNOWN,
    ANSWERED_WAITING,
    LOOP,
    RAN,
    RULES,
    SAMPLE,
    SEED,
    SOURCE,
    TEMPERATURE,
    TOLD,
    TOP_K,
    VERIFIED,
    Limits,
    SeatMemory,
    pages_of_step,
)
from draftwise.graphs.seats.rows import LoopRows
from draftwise.graphs.seats.rules import Deciding, verify
from draftwise.graphs.seats.shaping import BIASED, PENALISED, TEMPERED, TRUNCATED, Shaping, numbers_of
from draftwise.graphs.seats.step import Entering, SeatedSteps
from draftwise.names import ACCEPT, SHARED
from draftwise.sampling.logits import LogitsRow, process
from draftwise.sampling.noise import (
    device_keys,
    row_key,
    signed_word,
    token_counters,
    uniform,
    uniforms_of_keys,
)
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, DrawKind, Proposal, StepInput, TargetOutput, TreeShape, chain
from draftwise.verify.base import VerifyRequest
from draftwise.verify.batch import verify_batch
from draftwise.verify.rates import SyntheticAcceptance

CPU = torch.device("cpu")
COUNTERS = token_counters(VOCAB, CPU)


def test_noise_without_the_host_is_the_hosts() -> None:
    rng = np.random.default_rng(0)
    seeds = [int(x) for x in rng.integers(0, 1 << 64, 20, dtype=np.uint64)]
    places, nodes, bases = (rng.integers(0, 5000, 20).tolist() for _ in range(3))
    columns = [torch.tensor(x) for x in ([signed_word(s) for s in seeds], [3] * 20, places, nodes, bases)]
    found = uniforms_of_keys(device_keys(ACCEPT, *columns)).tolist()
    assert found == [
        uniform(s, 3, ACCEPT, p, n, b) for s, p, n, b in zip(seeds, places, nodes, bases, strict=True)
    ]
    keys = device_keys(SHARED, *columns).tolist()
    assert keys == [signed_word(row_key(s, 3, SHARED, p, -1, 0)) for s, p in zip(seeds, places, strict=True)]


def test_pages_by_hand() -> None:
    # 10 tokens committed in 3 blocks of 4; a step under way commits up to 4, one more computes 1 and 3, 3 are drafted
    assert pages_of_step(3, 4) == 4 and pages_of_step(0, 16) == 2


RATES = (0.9, 0.5, 0.2)
NOT_DRAWN = ("greedy", "synthetic", "typical")


def oracle(
    memory: SeatMemory,
    seat: int,
    logits: torch.Tensor,
    rule: str,
    q: torch.Tensor | None,
    tree: TreeShape | None = None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The path and the tokens of a seat by the rules of `verify`."""
    known, root = memory.state[seat, :2].tolist()
    nodes = int(memory.now[seat, 1])
    tokens = memory.waiting_drafts[seat, :nodes].tolist()
    greedy = rule in NOT_DRAWN
    params = SamplingParams(temperature=0.0 if greedy else float(memory.number(TEMPERATURE)[seat]))
    ids_np = np.full(known, root, np.int32)
    state = SamplingState(
        params,
        seed=int(memory.state[seat, SEED]) & ((1 << 64) - 1),
        sample_index=int(memory.state[seat, SAMPLE]),
        token_ids_np=ids_np,
        num_prompt=1,
        vocab_size=VOCAB,
    )
    proposal = chain(tokens, "draft", None if q is None else q[seat, :nodes]) if nodes else EMPTY_PROPOSAL
    if tree is not None and nodes:
        draw: DrawKind = "fixed" if q is None else "without_replacement"
        from_rows = () if q is None else tuple(distribution_rows(tree)[:nodes])
        rows_of_q = None if q is None else q[seat]
        proposal = Proposal(tuple(tokens), tree.parents[:nodes], "draft", draw, rows_of_q, from_rows)
    part = logits.view(SEATS, -1, VOCAB)[seat].clone()
    request = VerifyRequest(state, proposal, 0, rule.removesuffix("_sampled"), ids_np)
    (answer,) = verify_batch(part, [request], synthetic=SyntheticAcceptance(RATES))
    assert not isinstance(answer, Exception)
    return answer.path, answer.token_ids


@pytest.mark.parametrize("names", [*((name,) for name in RULES), RULES], ids="-".join)
@pytest.mark.parametrize("with_q", [False, True])
@torch.inference_mode()
def test_a_rule_decides_as_that_of_its_name(names: tuple[str, ...], with_q: bool) -> None:
    """Alone and beside all others; with q, every other seat's drafts are point masses all the same."""
    lengths = set()
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn((SEATS * (DRAFTS + 1), VOCAB), generator=generator) * 2
        memory = random_memory(seed, CPU, loops=0)
        set_rules(memory, *names)
        if with_q:
            drawn = torch.randn((SEATS, DRAFTS, VOCAB), generator=generator).softmax(-1)
            memory.open_source(1, DRAFTS).copy_(drawn)
            memory.state[::2, SOURCE] = 1
        memory.waiting_drafts.copy_(logits.view(SEATS, DRAFTS + 1, VOCAB)[:, :DRAFTS].argmax(-1))
        target = pass_rows(DRAFTS + 1, CPU)
        rows.begin(memory, target.batch, SPARE)
        scores = logits.view(SEATS, DRAFTS + 1, VOCAB).clone()
        for seat in range(SEATS):
            if names[seat % len(names)] not in NOT_DRAWN:
                scores[seat] /= memory.number(TEMPERATURE)[seat].float()
        verify(memory, scores.view(-1, VOCAB), Deciding(SEATS, DRAFTS + 1, names, RATES), COUNTERS)
        for seat in range(SEATS):
            if memory.now[seat, 0]:
                accepted = int(memory.walk.accepted[seat])
                found = tuple(memory.walk.tokens[seat, : accepted + 1].tolist())
                q = memory.q[1] if with_q and seat % 2 == 0 else None
                assert found == oracle(memory, seat, logits, names[seat % len(names)], q)[1]
                lengths.add(accepted)
    assert len(lengths) > 2


TREE = TreeShape((-1, -1, -1, 0, 0, 1, 3), (0, 1, 2, 0, 1, 0, 0))


@pytest.mark.parametrize("drawn", ["", "q", "one token"])
@pytest.mark.parametrize("rule", RULES)
@torch.inference_mode()
def test_trees_are_walked_as_by_the_rule_of_that_name(rule: str, drawn: str) -> None:
    """Beside chains. ``drawn``: empty: point masses; "one token": q is on one token, so that siblings were drawn
    uniformly from the others."""
    count, paths = len(TREE.parents), set()
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn((SEATS * (count + 1), VOCAB), generator=generator) * 2
        memory = random_memory(seed, CPU, count, tree=TREE)
        memory.told[4:, LOOP] = 0
        set_rules(memory, rule)
        best = logits.view(SEATS, count + 1, VOCAB).argsort(-1, descending=True)
        for node, (parent, rank) in enumerate(zip(TREE.parents, TREE.ranks, strict=True)):
            memory.waiting_drafts[:, node] = best[:, parent + 1, (rank + seed) % 3]
        if drawn:
            opened = 1 + max(distribution_rows(TREE))
            q = torch.randn((SEATS, opened, VOCAB), generator=generator).softmax(-1)
            if drawn == "one token":
                q = torch.zeros_like(q)
                for node, row in reversed(list(enumerate(distribution_rows(TREE)))):
                    q[torch.arange(SEATS), row] = torch.nn.functional.one_hot(
                        memory.waiting_drafts[:, node], VOCAB
                    ).float()
            memory.open_source(1, opened).copy_(q)
            memory.state[:4, SOURCE] = 1
        rows.begin(memory, pass_rows(count + 1, CPU).batch, SPARE)
        scores = logits.view(SEATS, count + 1, VOCAB).clone()
        if rule not in NOT_DRAWN:
            scores /= memory.number(TEMPERATURE).float()[:, None, None]
        verify(
            memory, scores.view(-1, VOCAB), Deciding(SEATS, count + 1, (rule,), RATES, trees=True), COUNTERS
        )
        for seat in range(SEATS):
            if memory.now[seat, 0]:
                kept = int(memory.walk.accepted[seat])
                found = tuple(memory.walk.paths[seat, :kept].tolist())
                tokens = tuple(memory.walk.tokens[seat, : kept + 1].tolist())
                own = memory.q[1] if drawn and seat < 4 else None
                tree = TREE if seat < 4 else None
                assert (found, tokens) == oracle(memory, seat, logits, rule, own, tree)
                paths.add(found)
    later = any(path[:1] in ((1,), (2,)) for path in paths)
    assert len(paths) > 4 and later != rule.startswith("synthetic"), "which keeps first children"


SHAPES: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"temperature": 0.9, "repetition_penalty": 1.5, "logit_bias": {3: 2.0, 5: -4.0}},
    {"temperature": 1.0, "top_k": 3, "allowed_token_ids": [1, 2, 3, 4]},
]


@torch.inference_mode()
def test_logits_are_shaped_as_elsewhere() -> None:
    """Bit by bit what `sampling.logits.process` makes of them, beside requests that want something else, before and
    behind a step that commits."""
    memory = random_memory(3, CPU, loops=0)
    shaping = Shaping(memory)
    states, known = [], []
    for seat, shape in enumerate(SHAPES):
        ids_np = np.random.default_rng(seat).integers(0, 9, 12).astype(np.int32)
        state = SamplingState(
            SamplingParams(**shape),
            seed=1,
            sample_index=0,
            token_ids_np=ids_np,
            num_prompt=4,
            vocab_size=VOCAB,
        )
        memory.state[seat, TOP_K : TOP_K + 6] = torch.tensor(numbers_of(state))
        memory.number(TEMPERATURE)[seat] = state.temperature
        shaping.enter(seat, state)
        states.append(state)
        known.append(ids_np)
    memory.waiting_drafts.copy_(
        torch.tensor([[2, 2, 7], [1, 2, 3], [0, 0, 0], [5, 5, 5], [3, 8, 3], [4, 4, 1]])
    )
    wanted = frozenset((BIASED, PENALISED, TEMPERED, TRUNCATED))
    step = Deciding(SEATS, DRAFTS + 1, ("greedy",))
    for _ in range(2):
        logits = torch.randn((SEATS * (DRAFTS + 1), VOCAB), generator=torch.Generator().manual_seed(4)) * 3
        places = []
        for state, ids_np, drafts in zip(states, known, memory.waiting_drafts.tolist(), strict=True):
            places += [LogitsRow(state, tuple(drafts[:i]), ids_np) for i in range(DRAFTS + 1)]
        expected = process(logits.clone(), places)
        shaping.process(logits, step, wanted)
        assert torch.equal(logits, expected)
        # two drafts and another token stay, of all but one
        memory.now[:, 0] = torch.tensor([1, 1, 1, 1, 1, 0])
        memory.walk.packed[:SEATS, 0] = 2
        memory.walk.tokens[:SEATS, :3] = torch.tensor([6, 6, 1])
        shaping.commit(step, wanted)
        for seat in range(SEATS - 1):
            states[seat].commit((6, 6, 1))
            known[seat] = np.append(known[seat], np.array([6, 6, 1], np.int32))


@torch.inference_mode()
def test_what_a_seat_holds_moves_with_its_request() -> None:
    """State and blocks, what a head goes on from, what it has said, and its biases, where its drafter finds them."""
    memory = random_memory(3, CPU)
    steps = SeatedSteps(memory, Rerun(CPU))
    features, shaping = steps.features, steps.shaping
    features._read[1] = torch.rand((SEATS * (DRAFTS + 1), 5), generator=torch.Generator().manual_seed(1))
    features.enter(4, 1, torch.rand((2, 5), generator=torch.Generator().manual_seed(2)))
    state = SamplingState(
        SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, logit_bias={3: 9.0}),
        seed=1,
        sample_index=0,
        token_ids_np=np.arange(12, dtype=np.int32),
        num_prompt=4,
        vocab_size=VOCAB,
    )
    shaping.enter(4, state)

    def held(seat: int) -> list[list[float]]:
        tables = shaping._bias, shaping._counts, shaping._seen
        kept = [features.of(seat, 1, 2), memory.state[seat], memory.tables[seat]]
        kept += [table[seat] for table in tables if table is not None]
        return [x.flatten().tolist() for x in kept if x is not None]

    before = held(4)
    assert len(before) == 6 and all(any(part) for part in before)
    steps.move(4, 1)
    assert held(1) == before
    assert shaping._bias is not None and shaping._steered[1] == shaping._bias[1].data_ptr()


@pytest.mark.parametrize("part", [SeatMemory, SeatFeatures, Shaping])
def test_a_part_that_does_not_move_is_found(part: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "move", lambda *_: None)
    with pytest.raises(AssertionError):
        test_what_a_seat_holds_moves_with_its_request()


# ----------------------------------------------------------------------------------------- a whole step


class _Chain:
    """A model whose next token is the last one plus one, of 40; a drafter that is wrong behind multiples of 5."""

    def __init__(self, backend: Rerun) -> None:
        self.drafter = Drafter(self._advance, self._wrong, VOCAB, max_position=39)
        shape = Shape(2, 4, 64)
        self.target = PassBuffers(shape, Tables(2, 64, 4, SPARE, backend))
        self.logits = torch.zeros((8, VOCAB))
        hidden = torch.zeros((8, 1))
        graph, _ = backend.capture(self._pass)
        self.seats = PassSeats(self.target, graph, TargetOutput(hidden), self.logits, ())
        first = Shape(2, 2, 64)
        memory = LoopMemory([first], 3, self.drafter, CPU)
        loop_rows = PassBuffers(first, Tables(2, 64, 4, SPARE, backend))
        self.loop = ChainLoop("argmax", self.drafter, loop_rows, memory)
        self.loop.capture()
        self.fed: list[tuple[list[int], list[int], list[int]]] = []

    def _pass(self) -> None:
        self.logits.zero_().scatter_(1, ((self.target.batch.token_ids + 1) % VOCAB)[:, None], 1.0)

    def _advance(self, batch: StepInput, features: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        self.fed = [
            *getattr(self, "fed", []),
            (batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist()),
        ]
        return batch.token_ids[:, None].float(), None

    def _wrong(self, hidden: torch.Tensor) -> torch.Tensor:
        token = hidden[:, 0].long()
        following = torch.where(token % 5 == 0, 7, (token + 1) % VOCAB)
        return torch.zeros((len(token), VOCAB)).scatter_(1, following[:, None], 1.0)


def seated(model: _Chain, backend: Rerun) -> tuple[SeatedSteps, SeatedLoop]:
    width = model.target.tables.width
    steps = SeatedSteps(SeatMemory(Limits(2, 3, width, PAGE, VOCAB), CPU), backend, num_sources=1)
    return steps, SeatedLoop(1, 1, DrafterSeats(model.loop, 40))


def entering(known: int, root: int, drafts: tuple[int, ...], blocks: list[int]) -> Entering:
    state = SamplingState(
        SamplingParams(temperature=0.0),
        seed=1,
        sample_index=0,
        token_ids_np=np.zeros(known, np.int32),
        num_prompt=1,
        vocab_size=VOCAB,
    )
    return Entering(
        known=known,
        root=root,
        drafts=drafts,
        parents=range(-1, len(drafts) - 1),
        fed=known,
        stored=max(len(drafts) - 1, 0),
        first_key=0,
        rule="greedy",
        sampling=state,
        blocks_np=np.array(blocks, np.int32),
        scratch=range(60, 62),
        source=0,
        q=None,
    )


@torch.inference_mode()
def test_steps_by_hand() -> None:
    """10 known tokens, root 11 with drafts 12, 13, 14, all right: 15 follows. Behind 15 the drafter says 7."""
    backend = Rerun(CPU)
    model = _Chain(backend)
    steps, loop = seated(model, backend)
    pages = steps.memory.pages

    def launch() -> list[list[int]]:
        found: list[list[int]] = steps.launch(model.seats, [loop], ["greedy"]).wait().tolist()
        return found

    steps.capture(model.seats, [loop], ["greedy"])
    steps.enter([(0, entering(10, 11, (12, 13, 14), [3, 1, 2, 5, 6]))])
    told_np = steps.told()
    told_np[:] = 0
    told_np[0, :TOLD] = (30, 3, 3, 1, 0)
    told_np[0, TOLD + pages :] = 3  # the first page, as it is
    model.fed = []
    answer = launch()
    assert model.target.batch.token_ids.tolist()[:4] == [11, 12, 13, 14]
    assert model.target.batch.positions.tolist() == [9, 10, 11, 12, 0, 0, 0, 0]
    # block 2 of the request is 2, block 3 is 5; nobody has the second seat
    assert model.target.batch.slots.tolist() == [9, 10, 11, 20] + [SPARE] * 4
    row = answer[0]
    assert [row[i] for i in (RAN, VERIFIED, ACCEPTED, ANSWERED_KNOWN, ANSWERED_WAITING, ANSWERED_FED)] == [
        1, 3, 3, 14, 3, 14,
    ]  # fmt: skip
    assert row[ANSWER : ANSWER + 10] == [12, 13, 14, 15, 7, 8, 9, 0, 1, 2] and answer[1][RAN] == 0
    # the drafter had stored 12 and 13; it reads 14 and 15 at keys 12 and 13, then its drafts but the last
    assert (
        model.fed[0][0][:2] == [14, 15]
        and model.fed[0][1][:2] == [12, 13]
        and model.fed[0][2][:2] == [20, 21]
    )
    assert [fed[0][0] for fed in model.fed[1:]] == [7, 8]
    # a step in which the request takes no part changes nothing of it, and another one enters beside it
    steps.enter([(1, entering(5, 20, (), [7, 8]))])
    told_np = steps.told()
    told_np[:] = 0
    told_np[1, :TOLD] = (9, 0, 3, 1, 0)
    told_np[1, TOLD + pages :] = 7
    answer = launch()
    assert answer[0][RAN] == 0 and answer[1][ANSWER] == 21 and answer[1][ANSWERED_WAITING] == 2
    # 7 is wrong; a page is added; and the request ends with 16 tokens, so that one draft is left to make
    told_np = steps.told()
    told_np[:] = 0
    told_np[0, :TOLD] = (17, 3, 3, 1, 0)
    told_np[0, TOLD], told_np[0, TOLD + pages :] = 5, 3
    told_np[0, TOLD + pages] = 9
    row = launch()[0]
    assert [row[i] for i in (VERIFIED, ACCEPTED, ANSWERED_KNOWN, ANSWERED_WAITING)] == [3, 0, 15, 1]
    # behind the blocks of the plans stand scratch ones, over and over
    assert row[ANSWER] == 16 and model.target.tables.tables[0, :9].tolist() == [3, 1, 2, 5, 6, 9, 60, 61, 60]
    # the other one has moved
    steps.move(1, 0)
    told_np = steps.told()
    told_np[:] = 0
    told_np[0, :TOLD] = (9, 3, 3, 1, 0)
    told_np[0, TOLD + pages :] = 7
    assert launch()[0][ANSWER : ANSWER + 3] == [22, 23, 24]


class _NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        assert name not in {
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::equal",
            "aten::lift_fresh",
        }, name
        if name == "aten::copy_":
            assert args[2:] == (True,) or (kwargs or {}).get("non_blocking"), "a copy that waits"
            self.copies += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_launch_copies_twice_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Rerun(CPU)
    model = _Chain(backend)
    steps, loop = seated(model, backend)
    steps.capture(model.seats, [loop], ["greedy"])

    class Nothing:
        def replay(self) -> None:
            return

    steps._graphs = dict.fromkeys(steps._graphs, Nothing())
    target = model.seats._replace(graph=Nothing())
    monkeypatch.setattr(model.loop, "replay", lambda: None)
    steps.enter([(0, entering(10, 11, (), [3, 1, 2, 5]))])
    with _NoReads() as mode:
        steps.launch(target, [loop], ["greedy"])
    assert mode.copies == 2


@pytest.mark.parametrize("head", [False, True])
def test_drafters_read_tokens_of_requests_that_fail(head: bool) -> None:
    """Where no token could be drawn (-1) the host knows it a step late, and a drafter has no row of that number."""
    memory = random_memory(5, CPU)
    rows.begin(memory, pass_rows(DRAFTS + 1, CPU).batch, SPARE)
    memory.walk.packed.zero_()
    memory.walk.packed[:, 1 + DRAFTS :] = -1
    first = pass_rows(DRAFTS + 1, CPU)
    ends = torch.zeros(first.shape.size, dtype=torch.int64) if head else None
    loop = LoopRows(1, loop_seats(CPU), first.batch, "argmax", 24, SPARE, head, ends=ends, spare_block=20)
    rows.advance(memory, SEATS, loop)
    assert memory.answer[0, ANSWER] == -1 and memory.answer[0, ANSWERED_WAITING] > 0
    assert first.batch.token_ids.min() == 0


def test_the_budget_of_nobody_is_nothing() -> None:
    memory = random_memory(5, CPU, loops=0)
    target = pass_rows(DRAFTS + 1, CPU)
    memory.told[:, 0] = 0
    before = memory.state.clone(), memory.tables.clone()
    rows.begin(memory, target.batch, SPARE)
    rows.advance(memory, SEATS)
    assert set(target.batch.slots.tolist()) == {SPARE} and not memory.answer[:, RAN].any()
    assert torch.equal(memory.state, before[0]) and torch.equal(memory.tables, before[1])
