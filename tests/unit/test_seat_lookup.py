"""Look-ups of steps that stay on the device: the drafts of the host's own, of texts that grow step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.fakes.seats import DRAFTS, PAGE, SEATS, VOCAB, random_memory
from tests.unit.test_ngram import row

from draftwise.graphs.seats.lookup import LookUp, look_up
from draftwise.graphs.seats.memory import (
    ANSWER,
    ANSWERED_WAITING,
    BUDGET,
    KNOWN,
    LIMIT,
    LOOP,
    WAITING,
    Limits,
    SeatMemory,
)
from draftwise.propose.lookup.ngram import NgramProposer

CPU = torch.device("cpu")


def with_texts(texts: list[list[int]], budget: int = DRAFTS, room: int = 100) -> SeatMemory:
    """Seats that draft with look-up -1, whose steps accepted nothing but the last token."""
    limits = Limits(len(texts), DRAFTS, 16, PAGE, VOCAB, texts=True)
    memory = SeatMemory(limits, CPU)
    memory.now[:, 0] = 1
    for s, text in enumerate(texts):
        memory.text[s, : len(text) - 1] = torch.tensor(text[:-1])
        memory.walk.tokens[s, 0] = text[-1]
        memory.state[s, KNOWN] = len(text)
        memory.told[s, LOOP], memory.told[s, BUDGET], memory.told[s, LIMIT] = -1, budget, len(text) + room
    return memory


def drafts_of(memory: SeatMemory, seat: int) -> list[int]:
    count = int(memory.state[seat, WAITING])
    found: list[int] = memory.waiting_drafts[seat, :count].tolist()
    answer = memory.answer[seat].tolist()
    assert answer[ANSWERED_WAITING] == count
    assert answer[ANSWER + DRAFTS + 1 :][:count] == found, "the host is told"
    return found


def test_by_hand() -> None:
    """The longest end, the last of its places, a text that goes on with itself, and none."""
    memory = with_texts(
        [
            [1, 2, 3, 4, 1, 2, 3],
            [9, 2, 8, 1, 2, 7, 9, 2],
            [5, 1, 6, 1, 7, 1],
            [5, 6, 5, 6],
            [1, 2, 3, 4],
            [3],
        ]
    )
    look_up(memory, 6, -1, LookUp(DRAFTS, 2, 1))
    assert [drafts_of(memory, s) for s in range(6)] == [[4, 1, 2], [8, 1, 2], [7, 1, 7], [5, 6, 5], [], []]


def test_limits() -> None:
    """No draft behind the last token but one, none over the budget, and those of others stay as they are."""
    text = [1, 2, 3, 4, 1, 2, 3]
    assert drafts_of(_looked(with_texts([text], room=3)), 0) == [4, 1]
    assert drafts_of(_looked(with_texts([text], room=1)), 0) == []
    assert drafts_of(_looked(with_texts([text], budget=1)), 0) == [4]
    assert drafts_of(_looked(with_texts([text]), steps=2), 0) == [4, 1]
    for number, live in ((0, 1), (-2, 1), (-1, 0)):
        memory = with_texts([text])
        memory.told[0, LOOP], memory.now[0, 0] = number, live
        memory.state[0, WAITING] = 2
        before = memory.state.clone(), memory.answer.clone(), memory.text[:, :-1].clone()
        _looked(memory)
        assert torch.equal(memory.state, before[0]) and torch.equal(memory.answer, before[1])
        assert torch.equal(memory.text[:, :-1], before[2])


def _looked(memory: SeatMemory, steps: int = DRAFTS) -> SeatMemory:
    look_up(memory, memory.seats, -1, LookUp(steps, 2, 2))
    return memory


@pytest.mark.parametrize(("longest", "shortest"), [(5, 2), (3, 1), (1, 1)])
def test_drafts_are_those_of_the_host(longest: int, shortest: int) -> None:
    """Texts of few tokens, which repeat themselves, with one to four tokens committed in a step."""
    rng = np.random.default_rng(longest)
    texts = [rng.integers(0, 3, int(rng.integers(2, 8))).tolist() for _ in range(SEATS)]
    memory = with_texts(texts)
    hosts = NgramProposer(longest, shortest)
    found = 0
    for _ in range(10):
        look_up(memory, SEATS, -1, LookUp(DRAFTS, longest, shortest))
        for s, text in enumerate(texts):
            (wanted,) = hosts.propose([row(text, budget=DRAFTS, rid=s)])
            assert drafts_of(memory, s) == list(wanted.tokens)
            found += len(wanted.tokens)
            accepted = int(rng.integers(0, DRAFTS + 1))
            came = rng.integers(0, 3, accepted + 1).tolist()
            text += came
            memory.walk.packed[s, 0] = accepted
            memory.walk.tokens[s, : accepted + 1] = torch.tensor(came, dtype=torch.int32)
            memory.state[s, KNOWN] = len(text)
            memory.told[s, LIMIT] = 100
    assert found > 100


def test_a_kernel_finds_the_same() -> None:
    """In Triton's interpreter, or on a device; places beside each other, and further apart than a tile."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from draftwise.graphs.seats import kernels
    from draftwise.kernels.triton.availability import interpreted

    device = torch.device("cpu" if interpreted() else "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("Triton's kernels need a CUDA device, or TRITON_INTERPRET=1")
    made = []
    for find in (look_up, kernels.look_up):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_TILE", 8)
            found = []
            for seed in range(4):
                memory = random_memory(seed, device, loops=0)
                rng = np.random.default_rng(seed)
                memory.text = torch.from_numpy(rng.integers(0, 3, (SEATS, 60)).astype(np.int32)).to(device)
                memory.told[:, LOOP] = -1
                memory.told[4, LOOP] = -2
                memory.now[:, 0] = torch.tensor([1, 1, 1, 0, 1, 1])
                accepted = torch.from_numpy(rng.integers(0, DRAFTS + 1, SEATS)).to(device)
                memory.walk.packed[:SEATS, 0] = accepted
                memory.walk.tokens[:SEATS] = torch.from_numpy(rng.integers(0, 3, (SEATS, DRAFTS + 1))).to(
                    device
                )
                find(memory, SEATS, -1, LookUp(DRAFTS, 4, 1 + seed % 2))
                found.append([x.tolist() for x in (memory.state, memory.answer, memory.text[:, :-1])])
            made.append(found)
    assert made[0] == made[1]
    assert any(row[WAITING] == DRAFTS for state, *_ in made[0] for row in state)
