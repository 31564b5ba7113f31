"""Look-ups of steps that stay on the device: the drafts of the host's own, of texts that grow step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.fakes.seats import DRAFTS, PAGE, SEATS, VOCAB, random_memory
from tests.unit.test_ngram import row

from draftwise.graphs.backend import Rerun
from draftwise.graphs.seats.lookup import LookUp, look_up
from draftwise.graphs.seats.memory import (
    ANSWER,
    ANSWERED_WAITING,
    BUDGET,
    KNOWN,
    LIMIT,
    LOOK,
    RAN,
    SOURCE,
    STORED,
    WAITING,
    Limits,
    SeatMemory,
    form_of,
)
from draftwise.graphs.seats.texts import Texts, output_of
from draftwise.propose.hybrid import join
from draftwise.propose.lookup.ngram import NgramProposer
from draftwise.types import Proposal, chain

CPU = torch.device("cpu")


def with_texts(texts: list[list[int]], budget: int = DRAFTS, room: int = 100) -> SeatMemory:
    """Seats that draft with look-up 1, whose steps accepted nothing but the last token."""
    limits = Limits(len(texts), DRAFTS, 16, PAGE, VOCAB, texts=True)
    memory = SeatMemory(limits, CPU)
    memory.now[:, 0] = 1
    for s, text in enumerate(texts):
        memory.text[s, : len(text) - 1] = torch.tensor(text[:-1])
        memory.walk.tokens[s, 0] = text[-1]
        memory.state[s, KNOWN] = len(text)
        memory.told[s, LOOK], memory.told[s, BUDGET], memory.told[s, LIMIT] = 1, budget, len(text) + room
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
    look_up(memory, 6, 1, LookUp(DRAFTS, 2, 1))
    assert [drafts_of(memory, s) for s in range(6)] == [[4, 1, 2], [8, 1, 2], [7, 1, 7], [5, 6, 5], [], []]


def test_limits() -> None:
    """No draft behind the last token but one, none over the budget, and those of others stay as they are."""
    text = [1, 2, 3, 4, 1, 2, 3]
    assert drafts_of(_looked(with_texts([text], room=3)), 0) == [4, 1]
    assert drafts_of(_looked(with_texts([text], room=1)), 0) == []
    assert drafts_of(_looked(with_texts([text], budget=1)), 0) == [4]
    assert drafts_of(_looked(with_texts([text]), steps=2), 0) == [4, 1]
    for number, live in ((0, 1), (2, 1), (1, 0)):
        memory = with_texts([text])
        memory.told[0, LOOK], memory.now[0, 0] = number, live
        memory.state[0, WAITING] = 2
        before = memory.state.clone(), memory.answer.clone(), memory.text[:, :-1].clone()
        _looked(memory)
        assert torch.equal(memory.state, before[0]) and torch.equal(memory.answer, before[1])
        assert torch.equal(memory.text[:, :-1], before[2])


def test_what_is_found_goes_before_what_a_drafter_has_drafted() -> None:
    """Which stays where nothing is found, or where what is found may not be drafted."""
    texts = [[1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 1, 2]]
    memory = with_texts(texts)
    memory.told[2, LIMIT] = 7
    memory.state[:, WAITING] = memory.answer[:, ANSWERED_WAITING] = 2
    memory.state[:, STORED] = memory.state[:, SOURCE] = memory.answer[:, RAN] = 1
    memory.waiting_drafts[:] = memory.answer[:, ANSWER + DRAFTS + 1 :][:, :DRAFTS] = torch.tensor([8, 9, 7])
    _looked(memory)
    assert [drafts_of(memory, s) for s in range(3)] == [[3, 4, 1], [8, 9], [8, 9]]
    assert memory.state[:, STORED].tolist() == memory.state[:, SOURCE].tolist() == [0, 1, 1]
    assert memory.answer[:, RAN].tolist() == [2, 1, 1]


def _looked(memory: SeatMemory, steps: int = DRAFTS) -> SeatMemory:
    look_up(memory, memory.seats, 1, LookUp(steps, 2, 2))
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
        look_up(memory, SEATS, 1, LookUp(DRAFTS, longest, shortest))
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
            memory.state[s, WAITING] = memory.answer[s, ANSWERED_WAITING] = 0  # as `rows.advance` does
            memory.told[s, LIMIT] = 100
    assert found > 100


SUFFIX = LookUp(DRAFTS, 8, 1, 1.0, 0.0, 0.5, past=True)


def suffix_drafts(text: list[int], past: list[int] = [], look: LookUp = SUFFIX) -> list[int]:  # noqa: B006
    memory = with_texts([text])
    memory.past = torch.tensor([*past, -1], dtype=torch.int32)
    look_up(memory, 1, 1, look)
    return drafts_of(memory, 0)


def test_drafts_are_as_long_as_the_match_and_the_evidence() -> None:
    assert suffix_drafts([1, 2, 3, 4, 5, 2]) == [3], "a match of one token"
    assert suffix_drafts([1, 2, 3, 4, 5, 1, 2]) == [3, 4]
    assert suffix_drafts([1, 2, 3, 4, 5, 1, 2], look=SUFFIX._replace(factor=0.5)) == [3]
    assert suffix_drafts([1, 2, 3, 4, 5, 2], look=SUFFIX._replace(offset=1.0)) == [3, 4]
    # 1 2 stood there three times, before 5, 3 and 3; the last time before 5
    counted = [1, 2, 3, 4, 1, 2, 3, 6, 1, 2, 5, 1, 2]
    assert suffix_drafts(counted) == []
    assert suffix_drafts(counted, look=SUFFIX._replace(least=0.3)) == [5, 1]
    # 7 7: nothing is known behind the last place, although the text might go on with itself
    assert suffix_drafts([7, 7]) == [7]


def test_others_outputs_are_looked_up_too() -> None:
    assert suffix_drafts([1, 2, 3], [9, 2, 3, 4, 5, 6]) == [4, 5]
    assert suffix_drafts([2, 3, 8, 1, 2, 3], [9, 2, 3, 4, 5]) == [8, 1], "of equal matches the own one"
    assert suffix_drafts([2, 3, 8, 1, 2, 3], [1, 2, 3, 4]) == [4], "a longer one; its output ends"
    assert suffix_drafts([1, 2, 3], [2, 3, -1, 4, 5]) == [], "nothing is found over the end of an output"
    assert suffix_drafts([1, 2, 3], [2, 3, 4], SUFFIX._replace(past=False)) == []
    # 4 followed once, 5 twice, and 6 the last time
    assert suffix_drafts([1, 2], [1, 2, 4, -1, 1, 2, 5, -1, 1, 2, 5, -1, 1, 2, 6]) == []


def test_outputs_make_room_for_newer_ones() -> None:
    backend = Rerun(CPU)
    memory = SeatMemory(Limits(2, DRAFTS, 4, PAGE, VOCAB, texts=True, past=10), CPU)
    texts = Texts(memory, backend, 2)

    def ids(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array(values, np.int32)

    texts.take_in(0, [(1, ids(1, 2, 3))], [ids(5, 6, 7), ids(8, 9)])
    assert memory.text[1, :4].tolist() == [1, 2, 3, 0] and not memory.text[0].any()
    assert memory.past.tolist() == [5, 6, 7, -1, 8, 9, -1, -1, -1, -1]
    texts.take_in(1, [], [ids(1, 2, 3, 4)])
    assert memory.past.tolist() == [1, 2, 3, 4, -1, 9, -1, -1, -1, -1]
    texts.take_in(0, [], [ids(*range(20))])
    assert memory.past.tolist() == [*range(10)], "more than there is room for"
    texts.forget()
    assert memory.past.tolist() == [-1] * 10
    assert output_of(np.arange(6), 4).tolist() == [4, 5]


def random_trees(memory: SeatMemory, rng: np.random.Generator) -> list[Proposal]:
    """Trees that wait in all seats, of three tokens; none in the first."""
    trees = []
    for s in range(memory.seats):
        size = int(rng.integers(1, DRAFTS + 1)) if s else 0
        tokens: list[int] = []
        parents: list[int] = []
        while len(tokens) < size:
            node = int(rng.integers(0, 3)), int(rng.integers(-1, len(tokens)))
            if node not in list(zip(tokens, parents, strict=True)):
                tokens.append(node[0])
                parents.append(node[1])
        form = form_of(parents, DRAFTS)[:3].to(memory.device)
        memory.own_forms[s, :3] = form
        memory.state[s, WAITING] = memory.answer[s, ANSWERED_WAITING] = size
        first = ANSWER + DRAFTS + 1
        for place in (memory.waiting_drafts[s], memory.answer[s, first:]):
            place[:size] = torch.tensor(tokens, dtype=torch.int64)
        memory.answer[s, first + 2 * DRAFTS :][:DRAFTS] = form[2, 1:]
        trees.append(Proposal(tuple(tokens), tuple(parents), "model"))
    return trees


def test_what_is_found_becomes_a_branch() -> None:
    """As a hybrid joins both on the host, with room for all and without."""
    rng = np.random.default_rng(3)
    shared = added = 0
    for _ in range(60):
        texts = [rng.integers(0, 3, 12).tolist() for _ in range(SEATS)]
        budget = int(rng.integers(1, DRAFTS + 1))
        alone, memory = with_texts(texts, budget), with_texts(texts, budget)
        look = LookUp(DRAFTS, 4, 1)
        look_up(alone, SEATS, 1, look)
        trees = random_trees(memory, rng)
        for s, tree in enumerate(trees):
            memory.state[s, WAITING] = min(len(tree), budget)
        look_up(memory, SEATS, 1, look._replace(joins=True))
        for s, tree in enumerate(trees):
            path = drafts_of(alone, s)
            found = chain(path, "look-up")
            nodes = (
                min(len(tree), max(budget - min(len(path), budget // 2), 1))
                if path
                else min(len(tree), budget)
            )
            wanted = join(tree.prefix(nodes), found, budget)
            count = int(memory.state[s, WAITING])
            assert tuple(drafts_of(memory, s)) == wanted.tokens
            own = memory.own_forms[s, :3, : count + 1]
            assert torch.equal(own, form_of(wanted.parents, DRAFTS)[:3, : count + 1])
            parents = memory.answer[s, ANSWER + 3 * DRAFTS + 1 :][:count].tolist()
            assert parents == list(wanted.parents)
            assert (memory.answer[s, RAN] == 2) == (count > nodes)
            added += count - nodes
            shared += any(
                node == (path[0], -1) for node in zip(tree.tokens, tree.parents, strict=True) if path
            )
    assert shared > 20 and added > 50


def test_a_kernel_finds_the_same() -> None:
    """In Triton's interpreter, or on a device; texts of several tiles."""
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
            for seed in range(6):
                memory = random_memory(seed, device, loops=0)
                rng = np.random.default_rng(seed)

                def tokens(*shape: int, least: int = 0, rng: np.random.Generator = rng) -> torch.Tensor:
                    return torch.from_numpy(rng.integers(least, 3, shape).astype(np.int32)).to(device)

                memory.text, memory.past = tokens(SEATS, 60), tokens(20, least=-1)
                memory.told[:, LOOK] = memory.state[:, SOURCE] = 1
                memory.told[4, LOOK] = 2
                memory.now[:, 0] = torch.tensor([1, 1, 1, 0, 1, 1])
                memory.walk.packed[:SEATS, 0] = tokens(SEATS)
                memory.walk.tokens[:SEATS] = tokens(SEATS, DRAFTS + 1)
                joins = seed in (1, 2, 5)
                if joins:
                    random_trees(memory, rng)
                look = LookUp(DRAFTS, 4, 1 + seed % 2)
                if seed > 1:
                    look = LookUp(DRAFTS, 7, 1, 0.75, 0.5, (0.0, 0.4)[seed % 2], past=seed > 3)
                find(memory, SEATS, 1, look._replace(joins=joins))
                drafts = [
                    memory.waiting_drafts[s, :n].tolist() for s, n in enumerate(memory.state[:, WAITING])
                ]
                found.append((drafts, memory.state.tolist(), memory.answer.tolist()))
                found.append((memory.text[:, :-1].tolist(), memory.own_forms.tolist()))
            made.append(found)
    assert made[0] == made[1]
    lengths = {len(own) for drafts, *_ in made[0][::2] for own in drafts}
    assert lengths == set(range(DRAFTS + 1))
