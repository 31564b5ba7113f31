"""The books of drafters' state: marks of filled blocks are made of good answers alone, and a drafter that failed is
asked no more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.fakes.faulty_proposer import wrong_proposals

from draftwise.propose.base import Committed, DraftRow, Proposer
from draftwise.propose.hybrid import HybridProposer
from draftwise.propose.lookup.ngram import NgramProposer
from draftwise.propose.lookup.suffix import SuffixProposer
from draftwise.runner import guard as guards
from draftwise.runner.drafting import Drafting
from draftwise.runner.guard import whole_number
from draftwise.runner.placing import Wanted
from draftwise.runner.proposal_checks import are_sound, checked, is_foreign
from draftwise.runner.rows import BlockTables, Row
from draftwise.sampling.params import SamplingParams
from draftwise.sampling.state import SamplingState
from draftwise.types import EMPTY_PROPOSAL, IntArray, Proposal, Speculation, chain

BLOCK = 4
VOCAB = 50


class Scripted(Proposer):
    """Answers what it is told to answer, by hook; notes what it was asked."""

    name: ClassVar[str] = "scripted"
    has_storage: ClassVar[bool] = True
    observes: ClassVar[bool] = True

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []

    def _answer(self, hook: str, usual: Any) -> Any:
        self.asked.append(hook)
        answer = self.answers.get(hook, usual)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def propose(self, rows: Sequence[DraftRow]) -> Any:
        return self._answer("propose", [chain([7, 8, 9][: row.budget], self.name) for row in rows])

    def filled_after(self, row: DraftRow) -> Any:
        return self._answer("filled_after", row.num_tokens)

    def drafts_stored(self, row: DraftRow) -> Any:
        return self._answer("drafts_stored", 2)

    def stored_after(self, rows: Sequence[DraftRow]) -> Any:
        return self._answer("stored_after", None)

    def observe(self, *_: Any) -> None:
        self._answer("observe", None)

    def committed(self, parts: Sequence[Committed]) -> Any:
        return self._answer("committed", None)

    def trimmed(self, rid: int, num_tokens: int) -> None:
        self._answer("trimmed", None)

    def settle(self, rid: int, token_ids_np: IntArray, block_table_np: IntArray) -> Any:
        return self._answer("settle", 0)

    def leaving(self, rid: int, token_ids_np: IntArray) -> None:
        self._answer("leaving", None)

    def remove(self, rid: int) -> None:
        self._answer("remove", None)


class Books:
    """A drafter, and requests of 10 tokens in blocks 1, 2, 3, ... of which 9 are computed."""

    def __init__(self) -> None:
        self.proposer = Scripted()
        self.drafting = Drafting(
            {"scripted": self.proposer},
            num_blocks=20,
            block_size=BLOCK,
            vocab_size=VOCAB,
            device=torch.device("cpu"),
        )
        self._tables = BlockTables()

    def row(self, rid: int, blocks: Sequence[int] = (1, 2, 3, 4), known: int = 10, computed: int = 9) -> Row:
        tokens_np = np.arange(10, 40, dtype=np.int32)
        state = SamplingState(
            SamplingParams(temperature=0),
            seed=0,
            sample_index=0,
            token_ids_np=tokens_np[:known],
            num_prompt=5,
            vocab_size=VOCAB,
        )
        row = Row(
            rid=rid,
            tokens_np=tokens_np,
            num_tokens=known,
            num_prompt=5,
            max_total=30,
            num_computed=computed,
            state=state,
            speculation=Speculation("scripted", 3),
            stop_token_ids=frozenset(),
            prompt_logprobs=None,
            tables=self._tables,
            line=self._tables.open(),
        )
        row.add_blocks(blocks)
        self.drafting.fills.fresh_blocks(blocks)
        return row

    def entered(self, rid: int = 0) -> Row:
        row = self.row(rid)
        self.drafting.admitted(row)
        row.fill["scripted"].tokens = 0
        return row

    @property
    def marks(self) -> list[int]:
        return np.flatnonzero(self.drafting.fills.marks["scripted"]).tolist()

    def commit(self, row: Row) -> None:
        self.drafting.committed([(row, 0, range(9))])


@pytest.fixture
def books() -> Books:
    return Books()


def test_marks_follow_answers(books: Books) -> None:
    row = books.entered()
    books.proposer.answers["committed"] = [5]
    books.commit(row)
    assert row.fill["scripted"].tokens == 5 and books.marks == [1]
    books.drafting.propose(Wanted.of([(row, 3)]))
    assert row.proposal.tokens == (7, 8, 9)
    assert (row.fill["scripted"].tokens, row.fill["scripted"].drafts) == (10, 2) and books.marks == [1, 2]
    # tokens 10, 11 and 12 are committed; of the drafts 11 and 12 are stored, which completes block 3
    row.num_tokens, row.num_computed = 13, 12
    books.drafting.fills.accepted(row, 2, 10)
    assert row.fill["scripted"].tokens == 12 and books.marks == [1, 2, 3], "accepted drafts fill blocks, too"
    books.proposer.answers["settle"] = 12
    books.drafting.removed(row)
    assert books.marks == [1, 2, 3] and row.drafting_failed is False


@pytest.mark.parametrize("answer", [RuntimeError("no"), [11], [-1], [5, 5], [], 5, [None], ["5"], [4.0]])
def test_a_wrong_word_on_what_was_committed_marks_nothing(books: Books, answer: Any) -> None:
    row = books.entered()
    books.proposer.answers["committed"] = answer
    books.commit(row)
    assert row.drafting_failed and books.marks == [] and row.fill["scripted"].tokens == 0
    [failure] = books.drafting.take_failures()
    assert (failure.method, failure.hook, failure.rids) == ("scripted", "committed", (0,))
    books.proposer.asked.clear()
    books.commit(row)
    books.drafting.propose(Wanted.of([(row, 3)]))
    books.drafting.observe([row], [row.rid], None, None)  # type: ignore[arg-type]
    books.drafting.trimmed(row)
    books.drafting.removed(row)
    assert books.proposer.asked == ["remove"] and row.proposal is EMPTY_PROPOSAL
    assert books.drafting.take_failures() == ()


def test_what_is_stored_may_be_said_of_all_at_once(books: Books) -> None:
    rows = [books.entered(0), books.entered(1)]
    books.proposer.answers["stored_after"] = [10, 4], [1, 0]
    books.drafting.propose(Wanted.of([(row, 3) for row in rows]))
    fills = [row.fill["scripted"] for row in rows]
    assert [(fill.tokens, fill.drafts) for fill in fills] == [(10, 1), (4, 0)]
    assert books.proposer.asked == ["propose", "stored_after"]


@pytest.mark.parametrize(
    "answer", [RuntimeError("no"), ([10], [0]), ([10, 10], [0]), 3, ([10, 11], [0, 0]), ([10, 10], [0, -1])]
)
def test_a_wrong_word_on_what_all_have_stored_marks_nothing(books: Books, answer: Any) -> None:
    """A number that cannot be is the fault of the request that it was said of; all else is everybody's."""
    rows = [books.entered(0), books.entered(1)]
    books.proposer.answers["stored_after"] = answer
    books.drafting.propose(Wanted.of([(row, 3) for row in rows]))
    one = answer in (([10, 11], [0, 0]), ([10, 10], [0, -1]))
    assert [row.drafting_failed for row in rows] == [not one, True]
    assert rows[1].fill["scripted"].drafts == 0
    if not one:
        assert books.marks == []


@pytest.mark.parametrize("hook", ["filled_after", "drafts_stored"])
@pytest.mark.parametrize("answer", [RuntimeError("no"), 11, -1, None, 2.0])
def test_a_wrong_word_on_what_is_filled_marks_nothing(books: Books, hook: str, answer: Any) -> None:
    row = books.entered()
    books.proposer.answers[hook] = answer
    books.drafting.propose(Wanted.of([(row, 3)]))
    right = 10 if hook == "drafts_stored" else 0  # the other hook was answered well
    assert row.drafting_failed and row.fill["scripted"].tokens == right and row.fill["scripted"].drafts == 0
    assert row.proposal.tokens == (7, 8, 9), "what was drawn is verified, whatever came after"
    row.num_tokens, row.num_computed = 13, 12
    books.drafting.fills.accepted(row, 2, 10)
    assert row.fill["scripted"].tokens == right and 3 not in books.marks


@pytest.mark.parametrize("answer", [RuntimeError("no"), 10, -1, None])
def test_a_wrong_word_when_a_request_leaves_marks_nothing(books: Books, answer: Any) -> None:
    row = books.entered()
    books.proposer.answers["settle"] = answer
    books.drafting.removed(row)  # 9 tokens were computed, and could be filled
    assert books.marks == [] and row.drafting_failed
    assert books.proposer.asked == ["settle", "remove"]
    back = books.row(0)
    books.drafting.admitted(back)
    assert back.drafting_failed, "the request came back, and its drafter is in no known state"
    other = books.row(1)
    books.drafting.admitted(other)
    assert not other.drafting_failed


@pytest.mark.parametrize("hook", ["leaving", "remove", "trimmed"])
def test_who_comes_back_after_a_failure_is_not_drafted_for(books: Books, hook: str) -> None:
    books.proposer.answers[hook] = RuntimeError("no")
    row = books.entered()
    books.drafting.trimmed(row)
    books.drafting.removed(row)
    assert "remove" in books.proposer.asked, "whatever failed, what is kept for it is dropped"
    books.proposer.asked.clear()
    back = books.row(0)
    books.drafting.admitted(back)
    books.drafting.propose(Wanted.of([(back, 3)]))
    assert back.proposal is EMPTY_PROPOSAL and books.proposer.asked == []


def test_who_has_ended_is_forgotten(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_MOST_REMEMBERED", 3)
    books.proposer.answers["propose"] = RuntimeError("no")
    for rid in range(5):
        row = books.entered(rid)
        books.drafting.propose(Wanted.of([(row, 3)]))
        if rid % 2:
            row.num_tokens = row.max_total
        books.drafting.removed(row)
    assert list(books.drafting.guard._failed) == [0, 2, 4]
    row = books.entered(6)
    books.drafting.propose(Wanted.of([(row, 3)]))
    assert list(books.drafting.guard._failed) == [2, 4, 6]


def test_what_is_reported_is_bounded(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may be silent for long, such as while nobody steps; whoever reads is told of the first ones."""
    monkeypatch.setattr(guards, "_MOST_REPORTED", 3)
    books.proposer.answers["propose"] = RuntimeError("no")
    for rid in range(5):
        books.drafting.propose(Wanted.of([(books.entered(rid), 3)]))
    assert [failure.rids for failure in books.drafting.take_failures()] == [(0,), (1,), (2,)]
    books.drafting.propose(Wanted.of([(books.entered(5), 3)]))
    assert [failure.rids for failure in books.drafting.take_failures()] == [(5,)]


def test_a_prefix_hit_has_what_is_marked(books: Books) -> None:
    """Blocks 1 and 2 are filled, 3 is not: of a hit on all three the drafter has eight tokens."""
    row = books.entered()
    row.num_tokens, row.num_computed = 13, 12
    books.proposer.answers["settle"] = 11
    books.drafting.removed(row)
    assert books.marks == [1, 2]
    hit = books.row(1, blocks=(), known=14, computed=12)
    hit.add_blocks([1, 2, 3])
    books.drafting.admitted(hit)
    assert hit.fill["scripted"].tokens == 8
    books.drafting.fills.fresh_blocks([2])
    again = books.row(2, blocks=(), known=14, computed=12)
    again.add_blocks([1, 2, 3])
    books.drafting.admitted(again)
    assert books.marks == [1] and again.fill["scripted"].tokens == 4


def test_one_of_several_fails_alone(books: Books) -> None:
    rows = [books.entered(rid) for rid in range(3)]
    propose = books.proposer.propose

    def fails_for_one(asked: Sequence[DraftRow]) -> Any:
        if any(row.rid == 1 for row in asked):
            raise RuntimeError("not this one")
        return propose(asked)

    books.proposer.propose = fails_for_one  # type: ignore[method-assign]
    books.drafting.propose(Wanted.of([(row, 3) for row in rows]))
    assert [row.drafting_failed for row in rows] == [False, True, False]
    assert [len(row.proposal) for row in rows] == [3, 0, 3]
    assert [failure.rids for failure in books.drafting.take_failures()] == [(1,)]


def test_drafts_that_a_grammar_replaced_do_not_count_as_stored(books: Books) -> None:
    """The drafter stored 7 and 8; what is proposed is 7, then 6."""

    class OnlySevenSix:
        def prune(self, proposal: Proposal) -> Proposal:
            return proposal.prefix(1)

        def forced(self, limit: int) -> tuple[int, ...]:
            return (7, 6, 5)[:limit]

    row = books.entered()
    row.grammar = OnlySevenSix()  # type: ignore[assignment]
    books.drafting.propose(Wanted.of([(row, 3)]))
    assert row.proposal.tokens == (7, 6, 5) and row.fill["scripted"].drafts == 1


def test_what_is_asked_for_is_what_may_come(books: Books) -> None:
    """At most 63 nodes, and none that stands behind the last token: of 30 tokens 10 are known, so 19 deep."""
    asked: list[tuple[int, int, int]] = []

    class Nothing:
        def forced(self, limit: int) -> tuple[int, ...]:
            asked.append((0, 0, limit))
            return ()

    def propose(rows: Sequence[DraftRow]) -> list[Proposal]:
        asked.extend((row.budget, row.max_depth, row.filled) for row in rows)
        return [EMPTY_PROPOSAL] * len(rows)

    books.proposer.propose = propose  # type: ignore[method-assign]
    books.proposer.answers |= {"filled_after": 7, "drafts_stored": 0}
    row = books.entered()
    row.fill["scripted"].tokens = 7
    for budget, expected in ((100, 63), (63, 63), (5, 5)):
        books.drafting.propose(Wanted.of([(row, budget)]))
        assert asked.pop() == (expected, 19, 7)
    row.grammar = Nothing()  # type: ignore[assignment]
    for budget, limit in ((100, 19), (5, 5)):
        books.drafting.propose(Wanted.of([(row, budget)]))
        assert asked.pop(-2) == (0, 0, limit)
    row.num_tokens = 29  # the bonus token is the last that may come
    asked.clear()
    books.drafting.propose(Wanted.of([(row, 5)]))
    assert asked == []


@pytest.mark.parametrize("answer", [3, "a path", [("path", "x")]])
def test_what_a_request_is_there_for_fails_it(books: Books, answer: Any) -> None:
    """Its transfer is all that it is there for: an answer that is none, or a prompt that was read in part, fails it."""
    proposer = books.proposer
    proposer.prompt_only = True  # type: ignore[misc]
    drafting = Drafting(
        {"scripted": proposer},
        num_blocks=20,
        block_size=BLOCK,
        vocab_size=VOCAB,
        device=torch.device("cpu"),
    )
    row = books.entered()
    assert drafting.transfers
    for right in ({"path": "x"}, None):
        proposer.transfer = lambda rid, right=right: right  # type: ignore[method-assign,misc]
        assert drafting.transfer(row) == right
    proposer.transfer = lambda rid: answer  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="expected a mapping"):
        drafting.transfer(row)
    proposer.transfer = lambda rid: {"path": "x"}  # type: ignore[method-assign]
    proposer.answers["committed"] = RuntimeError("no")
    drafting.committed([(row, 0, range(9))])
    with pytest.raises(RuntimeError, match="scripted failed"):
        drafting.transfer(row)
    row.speculation = Speculation("none")
    assert drafting.transfer(row) is None


def test_time_that_cannot_be_counts_as_none(books: Books) -> None:
    for value in (float("nan"), -1.0, "soon", float("inf")):
        books.proposer.forward_time = value  # type: ignore[assignment]
        assert books.drafting.take_forward_time() == 0.0
        [failure] = books.drafting.take_failures()
        assert failure.hook == "forward_time" and failure.rids == ()
    books.proposer.forward_time = 1.5
    assert [books.drafting.take_forward_time() for _ in range(2)] == [1.5, 0.0]


def test_a_kind_of_failure_is_logged_once(books: Books, caplog: pytest.LogCaptureFixture) -> None:
    books.proposer.answers["propose"] = RuntimeError("no")
    with caplog.at_level(logging.DEBUG, logger="draftwise"):
        for rid in range(3):
            books.drafting.propose(Wanted.of([(books.entered(rid), 3)]))
        books.proposer.answers["propose"] = KeyError("else")
        books.drafting.propose(Wanted.of([(books.entered(3), 3)]))
    levels = [record.levelname for record in caplog.records if "failed in propose" in record.getMessage()]
    assert levels == ["WARNING", "DEBUG", "DEBUG", "WARNING"]


def draft_row(budget: int = 8, max_depth: int = 6) -> DraftRow:
    row = Books().row(0)
    return DraftRow(0, row.tokens_np[:10], 5, budget, max_depth, row.speculation, row.state, row.blocks_np, 0)


@pytest.mark.parametrize("name", sorted(set(wrong_proposals(VOCAB)) - {"None", "too few", "too many"}))
def test_what_is_no_proposal_is_refused(name: str) -> None:
    answer = wrong_proposals(VOCAB)[name]
    for budget in (1, 8):
        [wrong] = answer([chain([5] * min(budget, 2), "x")])
        with pytest.raises((TypeError, ValueError, AttributeError)):
            checked(wrong, draft_row(budget), VOCAB, torch.device("cpu"), foreign=True)


def q_of(rows: int) -> torch.Tensor:
    return torch.full((rows, VOCAB), 1.0 / VOCAB)


def test_limits_of_a_proposal_are_exact() -> None:
    """Budget 8, depth 6: as many are taken, one more is refused."""

    def sound(proposal: Proposal) -> bool:
        try:
            return are_sound([EMPTY_PROPOSAL, proposal], [draft_row(), draft_row()], VOCAB)
        except ValueError:
            return False

    def refused(proposal: Proposal) -> bool:
        try:
            checked(proposal, draft_row(), VOCAB, torch.device("cpu"), foreign=False)
            assert sound(proposal)
        except ValueError:
            assert not sound(proposal)
            return True
        try:
            checked(proposal, draft_row(), VOCAB, torch.device("cpu"), foreign=True)
        except ValueError:  # values of q are looked at where the drafter is somebody else's
            assert proposal.q is not None
            return True
        return False

    chains: list[Callable[[int], Proposal]] = [lambda n: chain([5] * n, "x")]
    chains.append(lambda n: Proposal((5,) * (n + 1), (-1, -1, *range(1, n)), "x"))  # another root before it
    for make in chains:
        assert [refused(make(n)) for n in (5, 6, 7)] == [False, False, True]
    assert [refused(Proposal((5,) * n, (-1,) * n, "x")) for n in (8, 9)] == [False, True]
    assert refused(Proposal((5, 5), (0, -1), "x")) and refused(Proposal((5,), (-1, 0), "x"))
    assert refused(Proposal((), (-1,), "x")) and refused(Proposal((5,), (-1,), "x", "fixed", q_of(2), (2,)))
    assert [refused(chain([token], "x")) for token in (-1, 0, VOCAB - 1, VOCAB)] == [True, False, False, True]
    q = torch.zeros(1, VOCAB)
    q[0, 3] = 1.0
    for scale, wrong in ((1.0, False), (1.0005, False), (1.002, True), (0.998, True)):
        assert refused(chain([3], "x", q * scale)) is wrong


def test_no_proposal_is_one() -> None:
    for values in (False, True):
        found = checked(EMPTY_PROPOSAL, draft_row(), VOCAB, torch.device("cpu"), foreign=values)
        assert found is EMPTY_PROPOSAL


def test_whose_q_is_read() -> None:
    assert is_foreign(Scripted()) and is_foreign(HybridProposer(NgramProposer(5, 2), Scripted()))
    assert not is_foreign(HybridProposer(NgramProposer(5, 2), SuffixProposer()))

    class Own(HybridProposer):
        pass

    assert is_foreign(Own(NgramProposer(5, 2), SuffixProposer()))
    wrong = chain([3], "x", torch.full((1, VOCAB), 1.0))
    assert checked(wrong, draft_row(), VOCAB, torch.device("cpu"), foreign=False) is wrong


def test_numbers_of_numpy_become_ints() -> None:
    tokens = np.array([5, 6], np.int64)
    found = checked(
        Proposal(tokens, [-1, 0], "x"),  # type: ignore[arg-type]
        draft_row(),
        VOCAB,
        torch.device("cpu"),
        foreign=True,
    )
    assert found == chain([5, 6], "x") and type(found.tokens[0]) is int and type(found.parents) is tuple


def test_whole_numbers() -> None:
    assert [whole_number(value, 3, "it") for value in (0, 3, np.int64(2))] == [0, 3, 2]
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="it is"):
            whole_number(wrong, 3, "it")
    for no_number in (None, 1.0, "1", [1]):
        with pytest.raises(TypeError):
            whole_number(no_number, 3, "it")
