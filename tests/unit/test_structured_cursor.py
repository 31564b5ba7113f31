"""The walk along a draft tree, over grammars whose answers can be read off a list of words."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.word_grammar import Word, WordMatcher, cursor_over, following

from draftwise.errors import RequestError
from draftwise.propose.grammar import fit
from draftwise.sampling.masks import unpack
from draftwise.structured.cursor import Cursor, Vocabulary, paths_of
from draftwise.types import Proposal, chain

VOCAB = 6
EOS = (0, 5)
WORDS: tuple[Word, ...] = ((1, 2, 3, 4), (1, 2, 3, 1), (1, 2), (4,), (4, 4, 4))

words = st.lists(
    st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple), min_size=1, max_size=8, unique=True
)
trees = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 30)), max_size=12).map(
    lambda nodes: Proposal(
        tuple(token for token, _ in nodes),
        tuple(min(parent, i - 1) for i, (_, parent) in enumerate(nodes)),
        "t",
    )
)


def allowed(language: tuple[Word, ...] | list[Word], path: Word, ignore_eos: bool = False) -> set[int] | None:
    """Tokens allowed after ``path``, from the list of words; None: behind an end or a forbidden token."""
    for i, token in enumerate(path):
        if token not in following(language, path[:i]):
            return None
    after = following(language, path)
    ends = set(EOS) if path in set(language) and not (ignore_eos and after) else set()
    return after | ends


def tokens_of(mask: torch.Tensor) -> set[int]:
    assert mask.dtype == torch.bool and mask.shape == (VOCAB,)
    return set(mask.nonzero().flatten().tolist())


@settings(max_examples=150)
@given(words, st.lists(trees, min_size=1, max_size=4), st.booleans(), st.randoms(use_true_random=False))
def test_masks_prune_and_commit_agree_with_the_words(language, proposals, ignore_eos, rng) -> None:  # type: ignore[no-untyped-def]
    cursor = cursor_over(language, VOCAB, EOS, ignore_eos=ignore_eos)
    done: Word = ()
    for proposal in proposals:
        masks = unpack(cursor.masks(proposal), VOCAB)
        paths = paths_of(proposal)
        assert masks.shape == (1 + len(proposal), VOCAB)
        for path, mask in zip(paths, masks, strict=True):
            wanted = allowed(language, (*done, *path), ignore_eos)
            assert tokens_of(mask) == (set(range(VOCAB)) if wanted is None else wanted)
            assert tokens_of(cursor.mask(path)) == tokens_of(mask)
        pruned = cursor.prune(proposal)
        kept = set(paths_of(pruned)[1:])
        for path in paths[1:]:
            before = allowed(language, (*done, *path[:-1]), ignore_eos)
            assert (path in kept) == (before is not None and path[-1] in before)
        # Commit a way through the language: along the tree where it goes, then somewhere else.
        ahead = max(kept, key=len, default=())
        step: list[int] = []
        for token in (*ahead, None, None):
            choices = sorted(allowed(language, (*done, *step), ignore_eos) or ())
            step.append(token if token in choices else rng.choice(choices))
            if step[-1] in EOS:
                break
        cursor.commit(step)
        if step[-1] in EOS:
            assert cursor.ended
            assert tokens_of(cursor.mask()) == set(range(VOCAB)) and cursor.forced(3) == ()
            return
        done = (*done, *step)
        # A request that comes back after a preemption stands where this one stands.
        again = cursor_over(language, VOCAB, EOS, ignore_eos=ignore_eos, output_ids=done)
        assert tokens_of(again.mask()) == tokens_of(cursor.mask())
        assert again.forced(9) == cursor.forced(9)


def test_masks_of_a_tree() -> None:
    cursor = cursor_over(WORDS, VOCAB, EOS)
    proposal = Proposal((1, 4, 2, 4, 3, 0), (-1, -1, 0, 1, 2, 1), "t")
    assert [tokens_of(mask) for mask in unpack(cursor.masks(proposal), VOCAB)] == [
        {1, 4},
        {2},
        {4, 0, 5},
        {3, 0, 5},
        {4},
        {4, 1},
        set(range(VOCAB)),  # behind an end
    ]


def test_ignore_eos_ends_where_nothing_else_is_left() -> None:
    cursor = cursor_over(WORDS, VOCAB, EOS, ignore_eos=True)
    assert tokens_of(cursor.mask((4,))) == {4}
    assert tokens_of(cursor.mask((1, 2))) == {3}
    assert tokens_of(cursor.mask((1, 2, 3, 1))) == set(EOS)


def test_masks_are_made_once_per_step() -> None:
    matcher = WordMatcher(WORDS, VOCAB)
    cursor = Cursor(matcher, Vocabulary(VOCAB, EOS))
    for path in ((), (1,), (1, 2)):  # a drafter draws
        cursor.mask(path)
    assert matcher.masks == 3
    proposal = chain((1, 2, 3), "d")
    assert cursor.prune(proposal) is proposal
    cursor.masks(proposal)
    assert matcher.masks == 4
    cursor.commit((1, 2, 3, 4))
    assert tokens_of(cursor.mask()) == set(EOS)
    assert matcher.masks == 5


def test_forced() -> None:
    cursor = cursor_over([(1, 2, 3, 4), (1, 2, 3, 1, 2)], VOCAB, EOS)
    assert cursor.forced(8) == (1, 2, 3)
    assert cursor.forced(2) == (1, 2)
    assert cursor.forced(0) == ()
    cursor.commit((1, 2, 3, 1))
    assert cursor.forced(8) == (2, EOS[0])
    assert cursor.forced(1) == (2,)
    cursor.commit((2,))
    assert cursor.forced(8) == (EOS[0],)
    assert cursor_over([(1,), (1, 2)], VOCAB).forced(8) == (1,), "may end, may go on: no choice is forced"


def test_what_does_not_follow_is_an_error() -> None:
    cursor = cursor_over(WORDS, VOCAB, EOS)
    with pytest.raises(RequestError, match="token 3 does not follow the grammar"):
        cursor.commit((1, 3))
    with pytest.raises(RequestError, match="token 2"):
        cursor_over(WORDS, VOCAB, EOS, output_ids=(2,))


def test_fit() -> None:
    cursor = cursor_over([(1, 2, 3, 4), (1, 2, 3, 1, 2)], VOCAB, EOS)
    forced = cursor.forced(4)
    assert forced == (1, 2, 3)
    assert fit(Proposal(), cursor, forced) == chain((1, 2, 3), "grammar")
    assert fit(chain((3, 3, 3, 3), "ngram"), cursor, forced) == chain((1, 2, 3), "grammar")
    assert fit(chain((1, 2), "ngram"), cursor, forced) == chain((1, 2, 3), "grammar")
    assert fit(chain((1, 2, 3, 1), "ngram"), cursor, forced) == chain((1, 2, 3, 1), "ngram")
    assert fit(chain((1, 2, 3, 2), "ngram"), cursor, forced) == chain((1, 2, 3), "ngram")
    tree = Proposal((4, 1, 2, 3, 1, 4, 3), (-1, -1, 1, 2, 3, 3, 3), "t")
    assert fit(tree, cursor, forced) == Proposal((1, 2, 3, 1, 4), (-1, 0, 1, 2, 2), "t")
    # Drawn nodes stay, whatever they are: dropping them would bias the output.
    drawn = chain((3,), "draft_model", torch.full((1, VOCAB), 1 / VOCAB))
    assert fit(drawn, cursor, forced) is drawn


def test_vocabularies_of_any_size() -> None:
    """A mask covers whole words of 32 bits; the model's vocabulary may end anywhere."""
    for vocab in (31, 32, 33, 64, 100):
        language = [(vocab - 1, 31 % vocab, 1), (7,)]
        cursor = cursor_over(language, vocab, (vocab - 2,))
        assert set(cursor.mask().nonzero().flatten().tolist()) == {vocab - 1, 7}
        assert cursor.allows((), vocab - 1) and not cursor.allows((), vocab - 2)
        assert cursor.allows((7,), vocab - 2)
