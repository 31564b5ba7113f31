"""Parts of steps that stay on the device, in plain torch: rules against those of `verify`, noise against the host's,
numbers by hand, and what a launch may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.resident import DRAFTS, SLOTS, SPARE, VOCAB, pass_rows, random_memory
from torch.utils._python_dispatch import TorchDispatchMode

from draftwise.graphs import resident_rows as rows
from draftwise.graphs.backend import Rerun
from draftwise.graphs.buffers import PassBuffers, Shape, Tables
from draftwise.graphs.loop import ChainLoop, Drafter, LoopMemory
from draftwise.graphs.resident import DrafterSeats, PassSeats, ResidentStep, SlotState
from draftwise.graphs.resident_rules import verify
from draftwise.kernels.resident import (
    ACCEPTED,
    ANSWER,
    ANSWERED_FED,
    ANSWERED_KNOWN,
    ANSWERED_WAITING,
    RAN,
    TOLD,
    VERIFIED,
    ResidentMemory,
    ResidentRule,
    pages_of_step,
)
from draftwise.names import ACCEPT, SHARED
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
from draftwise.types import EMPTY_PROPOSAL, StepInput, TargetOutput, chain
from draftwise.verify.base import VerifyRequest
from draftwise.verify.batch import verify_batch
from draftwise.verify.rates import SyntheticAcceptance

CPU = torch.device("cpu")


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


RULES = [
    ResidentRule("greedy"),
    ResidentRule("coupled"),
    ResidentRule("rejection"),
    ResidentRule("block"),
    ResidentRule("synthetic", (0.9, 0.5, 0.2)),
    ResidentRule("synthetic", (0.9, 0.5, 0.2), sampled=True),
]


def oracle(
    memory: ResidentMemory, slot: int, logits: torch.Tensor, rule: ResidentRule, q: torch.Tensor | None
) -> tuple[int, ...]:
    """The tokens of a slot by the rules of `verify`."""
    known, root, _, _, _, seed, sample = memory.state[slot, :7].tolist()
    nodes = int(memory.now[slot, 1])
    tokens = memory.waiting_drafts[slot, :nodes].tolist()
    greedy = rule.name == "greedy" or (rule.name == "synthetic" and not rule.sampled)
    params = SamplingParams(temperature=0.0 if greedy else float(memory.temperatures[slot]))
    ids_np = np.full(known, root, np.int32)
    state = SamplingState(
        params,
        seed=seed & ((1 << 64) - 1),
        sample_index=sample,
        token_ids_np=ids_np,
        num_prompt=1,
        vocab_size=VOCAB,
    )
    proposal = chain(tokens, "draft", None if q is None else q[slot, :nodes]) if nodes else EMPTY_PROPOSAL
    part = logits.view(SLOTS, DRAFTS + 1, VOCAB)[slot].clone()
    acceptance = SyntheticAcceptance(rule.rates) if rule.rates else None
    request = VerifyRequest(state, proposal, 0, rule.name, ids_np)
    (answer,) = verify_batch(part, [request], synthetic=acceptance)
    assert not isinstance(answer, Exception)
    return answer.token_ids


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}{'-sampled' * rule.sampled}")
@pytest.mark.parametrize("with_q", [False, True])
@torch.inference_mode()
def test_a_rule_decides_as_that_of_its_name(rule: ResidentRule, with_q: bool) -> None:
    lengths = set()
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn((SLOTS * (DRAFTS + 1), VOCAB), generator=generator) * 2
        q = torch.randn((SLOTS, DRAFTS, VOCAB), generator=generator).softmax(-1) if with_q else None
        memory = random_memory(seed, CPU)
        memory.waiting_drafts.copy_(logits.view(SLOTS, DRAFTS + 1, VOCAB)[:, :DRAFTS].argmax(-1))
        target = pass_rows(DRAFTS + 1, CPU)
        rows.begin(memory, target.batch, [target.tables.tables], SPARE)
        verify(memory, logits, rule, q, token_counters(VOCAB, CPU))
        for slot in range(SLOTS):
            if memory.now[slot, 0]:
                accepted = int(memory.walk.accepted[slot])
                found = tuple(memory.walk.tokens[slot, : accepted + 1].tolist())
                assert found == oracle(memory, slot, logits, rule, q)
                lengths.add(accepted)
    assert len(lengths) > 2


# ----------------------------------------------------------------------------------------- a whole step


class _Chain:
    """A model whose next token is the last one plus one, of 40; a drafter that is wrong behind multiples of 5."""

    def __init__(self, backend: Rerun) -> None:
        self.drafter = Drafter(self._advance, self._wrong, VOCAB, max_position=39)
        shape = Shape(2, 4, 64)
        self.target = PassBuffers(shape, Tables(2, 64, 4, backend), 4, SPARE, backend)
        self.logits = torch.zeros((8, VOCAB))
        hidden = torch.zeros((8, 1))
        graph, _ = backend.capture(self._pass)
        self.seats = PassSeats(self.target, graph, TargetOutput(hidden), self.logits, SPARE)
        first = Shape(2, 2, 64)
        memory = LoopMemory([first], 3, self.drafter, CPU)
        loop_rows = PassBuffers(first, Tables(2, 64, 4, backend), 4, SPARE, backend)
        self.loop = ChainLoop(first, 3, "argmax", self.drafter, loop_rows, memory, SPARE, backend)
        self.loop.capture(backend)
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


def member(known: int, root: int, drafts: tuple[int, ...], blocks: list[int]) -> SlotState:
    return SlotState(
        known=known,
        root=root,
        drafts=drafts,
        fed=known,
        stored=max(len(drafts) - 1, 0),
        seed=1,
        sample_index=0,
        temperature=1.0,
        first_key=0,
        blocks_np=np.array(blocks, np.int32),
        q=None,
    )


@torch.inference_mode()
def test_steps_by_hand() -> None:
    """10 known tokens, root 11 with drafts 12, 13, 14, all right: 15 follows. Behind 15 the drafter says 7."""
    backend = Rerun(CPU)
    model = _Chain(backend)
    step = ResidentStep(
        model.seats, DrafterSeats(model.loop, 40, SPARE), ResidentRule("greedy"), VOCAB, 4, backend
    )
    step.board([member(10, 11, (12, 13, 14), [3, 1, 2, 5, 6])])
    told_np = step.told()
    told_np[:] = 0
    told_np[0, :TOLD] = (30, 3, 3)
    told_np[0, TOLD + step.memory.pages :] = 3  # the first page, as it is
    model.fed = []
    answer_np = step.launch().wait()
    assert model.target.batch.token_ids.tolist()[:4] == [11, 12, 13, 14]
    assert model.target.batch.positions.tolist() == [9, 10, 11, 12, 0, 0, 0, 0]
    # block 2 of the request is 2, block 3 is 5; nobody has the second slot
    assert model.target.batch.slots.tolist() == [9, 10, 11, 20] + [SPARE] * 4
    row = answer_np[0].tolist()
    assert [row[i] for i in (RAN, VERIFIED, ACCEPTED, ANSWERED_KNOWN, ANSWERED_WAITING, ANSWERED_FED)] == [
        1, 3, 3, 14, 3, 14,
    ]  # fmt: skip
    assert row[ANSWER:] == [12, 13, 14, 15, 7, 8, 9] and answer_np[1, RAN] == 0
    # the drafter had stored 12 and 13; it reads 14 and 15 at keys 12 and 13, then its drafts but the last
    assert (
        model.fed[0][0][:2] == [14, 15]
        and model.fed[0][1][:2] == [12, 13]
        and model.fed[0][2][:2] == [20, 21]
    )
    assert [fed[0][0] for fed in model.fed[1:]] == [7, 8]
    # 7 is wrong; a page is added; and the request ends with 16 tokens, so that one draft is left to make
    told_np = step.told()
    told_np[:] = 0
    told_np[0, :TOLD] = (17, 3, 3)
    told_np[0, TOLD], told_np[0, TOLD + step.memory.pages :] = 5, 3
    told_np[0, TOLD + step.memory.pages] = 9
    row = step.launch().wait()[0].tolist()
    assert [row[i] for i in (VERIFIED, ACCEPTED, ANSWERED_KNOWN, ANSWERED_WAITING)] == [3, 0, 15, 1]
    assert row[ANSWER] == 16 and model.target.tables.tables[0, :6].tolist() == [3, 1, 2, 5, 6, 9]


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
    step = ResidentStep(
        model.seats, DrafterSeats(model.loop, 40, SPARE), ResidentRule("greedy"), VOCAB, 4, backend
    )
    step.board([member(10, 11, (), [3, 1, 2, 5])])
    step.told()[:] = 0

    class Nothing:
        def replay(self) -> None:
            return

    step._graphs = (Nothing(), Nothing(), Nothing())
    step._target = step._target._replace(graph=Nothing())
    monkeypatch.setattr(model.loop, "replay", lambda: None)
    with _NoReads() as mode:
        step.launch()
    assert mode.copies == 2


def test_the_budget_of_nobody_is_nothing() -> None:
    memory = random_memory(5, CPU)
    target = pass_rows(DRAFTS + 1, CPU)
    memory.told[:, 0] = 0
    rows.begin(memory, target.batch, [target.tables.tables], SPARE)
    before = memory.state[:, :7].clone()
    rows.advance(memory)
    assert set(target.batch.slots.tolist()) == {SPARE} and not memory.answer[:, RAN].any()
    assert torch.equal(memory.state[:, :2], before[:, :2])
