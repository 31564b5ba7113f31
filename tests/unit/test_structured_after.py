"""Grammars behind a mark: the free text before, where it ends, and every way back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from tests.fakes.word_grammar import WordMatcher

from draftwise.errors import RequestError
from draftwise.sampling.structured import StructuredOutputs
from draftwise.structured.after import AfterGrammar, AfterMatcher, FreeGrammar, Marks, TokenBytes
from draftwise.structured.cursor import Cursor, Vocabulary

TOKENS = [
    b"",
    b"<",
    b"/t",
    b">",
    b"t>",
    b"a",
    b"b",
    b"</t>",
    b">a",
    b"x</t>y",
    b"</",
    b"<t>",
    b"<t",
    b"/",
    b"t",
    b"<t>a",
]
END, A, B = 0, 5, 6
WORDS = [(A, B), (B,), (1, A)]  # "ab", "b", "<a"


def marks(opened_by: str | None = None, after: Sequence[str] = ("</t>",)) -> Marks:
    return Marks(after, opened_by, TokenBytes(TOKENS))


def matcher(opened_by: str | None = None, after: Sequence[str] = ("</t>",)) -> AfterMatcher:
    return AfterMatcher(lambda: WordMatcher(WORDS, len(TOKENS)), marks(opened_by, after))


def allowed(one: AfterMatcher) -> set[int]:
    bits = np.unpackbits(one.mask().view(np.uint8), bitorder="little")[: len(TOKENS)]
    return {t for t in range(1, len(TOKENS)) if bits[t]}


def after(one: AfterMatcher, *tokens: int) -> AfterMatcher:
    for token in tokens:
        assert token in allowed(one) and one.advance(token), (token, allowed(one))
    return one


def index(text: bytes) -> int:
    return TOKENS.index(text)


def test_free_until_the_mark_is_complete() -> None:
    one = matcher()
    everything = set(range(1, len(TOKENS)))
    assert allowed(one) == everything - {index(b"x</t>y")}, "a token may not go on behind the mark"
    assert not one.is_accepting(), "no end before the answer"
    after(one, A, A, B, index(b"</"), index(b"t"))
    assert index(b">a") not in allowed(one) and index(b">") in allowed(one)
    after(one, index(b">"))
    assert allowed(one) == {A, B, 1}
    assert after(one, A, B).is_finished()


@pytest.mark.parametrize(
    "way", [["</t>"], ["<", "/t", ">"], ["</", "t>"], ["<", "/", "t", ">"], ["<", "</", "t>"]]
)
def test_a_mark_of_any_tokens(way: list[str]) -> None:
    one = after(matcher(), *(index(text.encode()) for text in way))
    assert allowed(one) == {A, B, 1} and not one.is_accepting()
    assert one.forced(4) == []


def test_the_text_behind_is_forced_as_ever() -> None:
    one = after(matcher(), index(b"</t>"), A)
    assert list(one.forced(4)) == [B]
    assert list(matcher().forced(4)) == []


def test_the_grammar_holds_at_once_where_nothing_opens() -> None:
    one = matcher("<t>")
    # What begins the opener, and what the grammar begins with; "<" does both.
    opening = {index(text) for text in (b"<", b"<t", b"<t>", b"<t>a")}
    assert allowed(one) == {A, B, *opening}
    assert after(one, A, B).is_finished()
    both = after(matcher("<t>"), index(b"<"))
    assert allowed(both) == {A, index(b"t>"), index(b"t")}
    assert after(both, A).is_accepting()
    opened = after(matcher("<t>"), index(b"<"), index(b"t>"), B, B, index(b"</t>"), B)
    assert opened.is_finished()
    assert after(matcher("<t>"), index(b"<t>a"), index(b"</t>"), A).forced(3) == [B]


def test_several_marks() -> None:
    one = after(matcher(after=("ab", "</t>")), A, A)
    assert index(b"b") in allowed(one) and allowed(after(one, B)) == {A, B, 1}


@pytest.mark.parametrize("opened_by", [None, "<t>"])
def test_every_way_back_leads_to_the_same_place(opened_by: str | None) -> None:
    """Random walks with roll-backs against matchers that went straight there."""
    rng = random.Random(3)
    for _ in range(150):
        one, path = matcher(opened_by), list[int]()
        for _ in range(25):
            choices = sorted(allowed(one))
            if path and (not choices or rng.random() < 0.35):
                count = rng.randrange(1, len(path) + 1)
                one.rollback(count)
                del path[-count:]
            elif choices:
                path.append(rng.choice(choices))
                assert one.advance(path[-1])
            straight = after(matcher(opened_by), *path)
            assert allowed(one) == allowed(straight), path
            assert one.is_accepting() == straight.is_accepting() and one.forced(3) == straight.forced(3)


def test_what_is_not_allowed_is_not_taken_in() -> None:
    for opened_by in (None, "<t>"):
        rng = random.Random(5)
        for _ in range(200):
            one = matcher(opened_by)
            for _ in range(8):
                choices = allowed(one)
                for token in range(1, len(TOKENS)):
                    if token not in choices:
                        assert not one.advance(token)
                if not choices:
                    break
                assert one.advance(rng.choice(sorted(choices)))


def test_a_cursor_goes_through_a_draft_that_ends_the_free_text() -> None:
    cursor = Cursor(matcher(), Vocabulary(len(TOKENS), (END,)))
    close = index(b"</t>")
    assert cursor.allows((A, close), A) and not cursor.allows((A, close), index(b"x</t>y"))
    assert not cursor.allows((A, close), close) and cursor.allows((A,), close)
    assert not cursor.allows((A,), END) and cursor.allows((A, close, B), END)
    cursor.commit((A, close, A))
    assert cursor.forced(5) == (B, END)


def test_long_texts_keep_few_places() -> None:
    one = matcher()
    for _ in range(5000):
        assert one.advance(A)
    assert len(one._places) <= 256
    one.rollback(100)
    assert after(one, index(b"</t>"), B).is_finished()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"after": []}, "after is"),
        ({"after": ""}, "after is"),
        ({"after": ["a"] * 9}, "1 to 8 texts"),
        ({"after": "a" * 65}, "1 to 64 characters"),
        ({"after": "\ud800"}, "after is"),
        ({"after": 5}, "after is"),
        ({"opened_by": "<t>"}, "opened_by needs after"),
        ({"after": "a", "opened_by": ""}, "opened_by is"),
    ],
)
def test_bad_marks_are_named(more: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        StructuredOutputs.from_value({"regex": "a", **more})


def test_the_grammar_alone() -> None:
    spec = StructuredOutputs(regex="a", after="</t>", opened_by="<t>")  # type: ignore[arg-type]
    assert spec.after == ("</t>",) and spec.inner == StructuredOutputs(regex="a")
    inner = spec.inner
    assert inner.inner is inner and inner != spec


def limited(within: int, opened_by: str | None = None, after: Sequence[str] = ("</t>",)) -> AfterMatcher:
    return AfterMatcher(lambda: WordMatcher(WORDS, len(TOKENS)), marks(opened_by, after), within)


def test_a_spent_budget_leaves_only_the_mark() -> None:
    one = after(limited(2), A, B)
    assert allowed(one) == {index(b"</t>")}, "in one token, as there is such a token"
    assert not one.advance(A)
    after(one, index(b"</t>"), B)
    assert one.is_finished()
    one.rollback(2)
    assert allowed(one) == {index(b"</t>")}
    one.rollback(1)
    assert A in allowed(one), "the budget counts what was taken back no more"


def test_a_mark_that_has_begun_is_completed() -> None:
    one = after(limited(2), A, index(b"<"))
    assert allowed(one) == {index(b"/"), index(b"/t")}
    after(one, index(b"/"))
    assert allowed(one) == {index(b"t>")}
    assert allowed(after(one, index(b"t>"))) == {A, B, 1}


def test_a_budget_counts_from_the_opening_mark() -> None:
    assert allowed(after(limited(0, "<t>"), index(b"<t>"))) == {index(b"</t>")}
    assert after(limited(0, "<t>"), A, B).is_finished(), "what does not begin with the mark has no budget"
    one = after(limited(1, "<t>"), index(b"<t>a"))
    assert allowed(one) == {index(b"</t>")}
    assert allowed(limited(0)) == {index(b"</t>")}


def test_a_budget_needs_a_mark_that_can_be_written() -> None:
    with pytest.raises(RequestError, match="cannot write the text of after"):
        AfterGrammar(FreeGrammar(len(TOKENS)), marks(None, ("zz",)), 5)
    one = AfterGrammar(FreeGrammar(len(TOKENS)), marks(None, ("zz", "<t>")), 1).matcher()
    assert isinstance(one, AfterMatcher)
    assert allowed(after(one, A)) == {index(b"<t>")}
    after(one, index(b"<t>"), *range(1, 9))
    assert one.is_accepting() and not one.is_finished()


def test_fields_of_a_budget() -> None:
    free = StructuredOutputs(after=("</t>",), within=5)
    assert free.is_free and free.size == 0
    assert not StructuredOutputs(regex="a", after=("</t>",), within=5).is_free
    for given, words in (
        ({"within": 5}, "within needs after"),
        ({"within": -1, "after": "</t>"}, "0 or more"),
        ({"within": True, "after": "</t>"}, "0 or more"),
        ({"after": "</t>"}, "needs exactly one of"),
    ):
        with pytest.raises(RequestError, match=words):
            StructuredOutputs.from_value(given)
