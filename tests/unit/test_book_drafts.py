"""What native code reads of requests in books before a drafter's passes, and what it refuses.

Without room for its rows a call says how many there are and touches nothing else. What is drafted, and written down, is
compared with the same request by request in tests/e2e/test_ordinary_steps.py.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from tests.native import native_or_skip

from draftwise import LLM, SamplingParams
from draftwise.kernels.cpu.book_drafts import (
    NO_ROOM,
    NOT_SO,
    BookDrafts,
    BookFeatures,
    BookRecord,
    BookTree,
    Scratch,
)
from draftwise.kernels.cpu.chains import ChainOutput
from draftwise.kernels.cpu.pass_records import PassInput
from draftwise.kernels.cpu.trees import TreeOutput
from draftwise.propose.models.proposer import ModelProposer
from draftwise.runner.rows import DrafterFill, RowBook

SIZE = 4


class Books:
    """Requests with ``known`` tokens, of which the drafter has ``filled``."""

    def __init__(self, known: list[int], filled: list[int], blocks: int = 8, max_total: int = 100) -> None:
        self.tokens = np.arange(64, dtype=np.int32)
        self.blocks = np.arange(blocks, dtype=np.int32)
        self.fills = [DrafterFill(tokens=count) for count in filled]
        self.books = [
            RowBook(
                num_tokens=count,
                max_total=max_total,
                capacity=64,
                tokens_at=self.tokens.__array_interface__["data"][0],
                num_blocks=blocks,
                blocks_at=self.blocks.__array_interface__["data"][0],
                fill_at=ctypes.addressof(fill),
                kind=1,
            )
            for count, fill in zip(known, self.fills, strict=True)
        ]
        self.places = array("Q", [ctypes.addressof(book) for book in self.books])

    def drafts(self, **options: Any) -> BookDrafts:
        given: dict[str, Any] = {
            "block_size": SIZE,
            "max_len": 50,
            "vocab_size": 9,
            "scratch": Scratch(8, 16, 2),
        }
        return BookDrafts("draft_model", **given | options)


def answer(asked: BookDrafts, tree: bool = False) -> tuple[int, int, int]:
    """What a call without room says: its answer, rows of the first pass, and rows of logits."""
    output: type[ctypes.Structure] = TreeOutput if tree else ChainOutput
    call = native_or_skip().function(
        "dw_book_trees" if tree else "dw_book_chains",
        ctypes.c_int64,
        [ctypes.c_void_p] * 2 + [ctypes.POINTER(kind) for kind in (PassInput, output, BookRecord)],
    )
    asked.record.room = asked.record.head_room = 0
    out = output()
    out.feature_in = -1  # type: ignore[attr-defined]
    found = call(None, None, PassInput(), out, asked.record)
    return found, asked.record.rows, asked.record.head_rows


def test_rows_are_what_the_drafter_has_not_read() -> None:
    books = Books([10, 12, 30], [8, 12, 5])
    asked = books.drafts()
    asked.ask(books.places, array("i", [3, 3, 3]), "argmax")
    # the last known token is read in any case: 2, 1 and 25 rows
    assert answer(asked) == (NO_ROOM, 28, 3)


def test_who_may_have_no_draft_has_no_rows() -> None:
    books = Books([10, 31, 50, 20, 10], [9, 9, 49, 19, 9])
    books.books[3].max_total = 21  # the bonus token is its last one
    books.books[4].drafting_failed = True
    asked = books.drafts()
    asked.ask(books.places, array("i", [2] * 5), "argmax")
    assert answer(asked) == (NO_ROOM, 1 + 22, 2), "the third one has no slot for a token behind its 50"


def test_requests_of_two_kinds_and_too_many_rows() -> None:
    books = Books([10, 12], [9, 11])
    books.books[1].kind = 2
    asked = books.drafts()
    asked.ask(books.places, array("i", [2, 2]), "argmax")
    assert answer(asked)[0] == NOT_SO
    books.books[1].kind = 1
    asked = books.drafts(most_rows=1)
    asked.ask(books.places, array("i", [2, 2]), "argmax")
    assert answer(asked)[0] == NOT_SO


@pytest.mark.parametrize("counts", [[2, 1], [1, 2], [3, 0]])
def test_features_have_to_be_those_of_the_rows(counts: list[int]) -> None:
    books = Books([10, 12], [8, 11])
    asked = books.drafts()
    zeros, none = array("i", [1, 1]), array("i", [-1, -1])
    features = BookFeatures(
        torch.zeros(3, 2), array("i", counts), array("i", [7, 10]), array("i", [0, 0]), none, zeros
    )
    asked.ask(books.places, array("i", [2, 2]), "argmax", features)
    expected = (NO_ROOM, 3) if counts == [2, 1] else (NOT_SO, 0)
    found, rows, _ = answer(asked)
    assert (found, rows) == expected
    short = features._replace(values=torch.zeros(4, 2))
    asked.ask(books.places, array("i", [2, 2]), "argmax", short)
    assert answer(asked)[0] == NOT_SO, "a feature too many"
    with pytest.raises(ValueError, match="int32"):
        asked.ask(books.places, array("i", [2, 2]), "argmax", features._replace(seen=array("i", [7])))


def test_a_tree_is_cut_to_what_each_request_may_have() -> None:
    """Parents (-1, 0, 1, -1, 3): five nodes, of which two levels are left to one request and three nodes to another."""
    tree = BookTree((-1, 0, 1, -1, 3))
    books = Books([10, 10, 10], [9, 9, 9])
    books.books[1].max_total = 13
    asked = books.drafts()
    asked.ask(books.places, array("i", [5, 5, 3]), "argmax", tree=tree)
    assert answer(asked, tree=True) == (NO_ROOM, 5 + 4 + 3, 5 + 4 + 3)
    asked.ask(books.places, array("i", [5, 5, 5]), "argmax", tree=BookTree((0, 0)))
    with pytest.raises(ValueError, match="do not fit together"):
        answer(asked, tree=True)  # a node that is its own parent


def test_dynamic_trees_take_turns_where_scratch_blocks_are_few() -> None:
    books = Books([10, 12, 14], [9, 11, 13])
    asked = books.drafts()
    asked.ask(books.places, array("i", [5, 5, 5]), "argmax", tree=BookTree(top_k=4, depth=3))
    assert answer(asked, tree=True) == (NO_ROOM, 8, 8)  # of two requests at a time
    asked.ask(books.places, array("i", [5, 5, 5]), "argmax", tree=BookTree(top_k=40, depth=3))
    with pytest.raises(ValueError, match="do not fit together"):
        answer(asked, tree=True)  # more nodes than a mask has bits


def test_books_that_make_no_sense_are_refused() -> None:
    books = Books([10], [9])
    books.books[0].capacity = 9
    asked = books.drafts()
    asked.ask(books.places, array("i", [2]), "argmax")
    with pytest.raises(ValueError, match="do not fit together"):
        answer(asked)
    with pytest.raises(ValueError, match="a place and a budget"):
        asked.ask(books.places, array("i", [2, 2]), "argmax")
    with pytest.raises(ValueError, match="a place and a budget"):
        asked.ask(books.places, array("q", [2]), "argmax")


def test_requests_near_their_ends_draft_in_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    native_or_skip()
    apart: list[int] = []
    propose = ModelProposer.propose

    def counted(self: ModelProposer, rows: Any) -> Any:
        apart.append(len(rows))
        return propose(self, rows)

    params = [SamplingParams(temperature=0.0, max_tokens=9 + i, ignore_eos=True) for i in range(5)]
    with LLM(
        speculative_config={"method": "draft_model", "num_speculative_tokens": 4},
        speculation_control="static",
    ) as llm:
        engine = llm._engine
        assert engine is not None
        executor: Any = engine.core.executor
        proposer = executor._drafting._proposers["draft_model"]
        monkeypatch.setattr(ModelProposer, "propose", counted)
        monkeypatch.setattr("draftwise.propose.models.proposer.says_itself", lambda *_: False)
        assert isinstance(proposer, ModelProposer)
        outputs = llm.generate(["def main("] * 5, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 10, 11, 12, 13]
    assert not apart
