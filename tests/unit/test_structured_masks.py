"""Packed masks against the plain way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draftwise.sampling import masks
from draftwise.sampling.masks import exclude, pack, unpack


@pytest.mark.parametrize("vocab", [1, 7, 8, 31, 32, 33, 61, 4096, 4099])
@pytest.mark.parametrize("rows", [1, 5])
def test_exclude_equals_masked_fill(vocab: int, rows: int) -> None:
    generator = np.random.default_rng(vocab)
    allowed = generator.random((rows, vocab)) < 0.4
    words = pack(allowed)
    assert words.dtype == np.int32 and words.shape == (rows, -(-vocab // 32))
    assert bool((unpack(words, vocab).numpy() == allowed).all())
    logits = torch.from_numpy(generator.standard_normal((rows, vocab)).astype(np.float32))
    logits[0, 0] = -math.inf
    wanted = logits.masked_fill(torch.from_numpy(~allowed), -math.inf)
    exclude(logits, words)
    assert bool((logits == wanted).all())


def test_words_may_cover_more_than_the_logits() -> None:
    allowed = np.ones((2, 100), np.bool_)
    allowed[1, 3] = False
    logits = torch.zeros(2, 40)
    exclude(logits, pack(allowed))
    assert logits.isinf().nonzero().tolist() == [[1, 3]]


def test_slices_and_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are done in pieces; rows of a larger tensor are written to where they are."""
    monkeypatch.setattr(masks, "_SLICE", 100)
    allowed = np.random.default_rng(0).random((7, 40)) < 0.5
    whole = torch.zeros(12, 40)
    exclude(whole[3:10], pack(allowed))
    assert bool((whole[3:10].isinf().numpy() == ~allowed).all())
    assert not bool(whole[:3].isinf().any() or whole[10:].isinf().any())
