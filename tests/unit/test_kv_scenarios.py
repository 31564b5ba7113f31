"""Slots under speculation, block size 4 and a pool of 10: the situations that went wrong elsewhere."""

import numpy as np
import pytest

from draftwise.kv.manager import KVManager

TOKENS = np.arange(1, 41, dtype=np.int32)


def make() -> KVManager:
    return KVManager(10, 4)


def counts(kv: KVManager, rid: int = 1) -> tuple[int, int]:
    """(mutable, immutable): blocks that may still be written, and full ones."""
    full = kv.num_committed(rid) // 4
    return len(kv.block_ids(rid)) - full, full


def step(kv: KVManager, n: int, reserve: int | None = None, tokens: np.ndarray = TOKENS) -> None:
    assert kv.reserve(1, n if reserve is None else reserve) is not None
    kv.commit(1, n, tokens)
    kv.check_integrity()


def test_one_token() -> None:
    kv = make()
    kv.open(1, TOKENS[:1])
    step(kv, 1)
    assert counts(kv) == (1, 0)


def test_eight_tokens_in_chunks_of_two() -> None:
    kv = make()
    kv.open(1, TOKENS[:8])
    seen = []
    for _ in range(4):
        step(kv, 2)
        seen.append(counts(kv))
    assert seen == [(1, 0), (0, 1), (1, 1), (0, 2)]


def test_prefill_then_decode() -> None:
    kv = make()
    kv.open(1, TOKENS[:4])
    step(kv, 4)
    for _ in range(5):
        step(kv, 1)
    assert kv.num_committed(1) == 9 and counts(kv) == (1, 2)


def test_reserve_six_apply_two() -> None:
    kv = make()
    kv.open(1, TOKENS[:4])
    step(kv, 4)
    step(kv, 2, reserve=6)
    assert kv.num_committed(1) == 6 and counts(kv)[1] == 1
    assert len(kv.block_ids(1)) * 4 - kv.num_committed(1) >= 4
    assert kv.num_reserved(1) == 4


def test_applying_more_than_reserved_is_an_error_and_changes_nothing() -> None:
    kv = make()
    kv.open(1, TOKENS[:2])
    step(kv, 2, reserve=4)
    before = (kv.num_committed(1), kv.num_reserved(1), kv.block_ids(1), kv.num_free)
    with pytest.raises(ValueError, match="reserved"):
        kv.commit(1, 5, TOKENS)
    assert (kv.num_committed(1), kv.num_reserved(1), kv.block_ids(1), kv.num_free) == before
    kv.check_integrity()


def test_a_salt_separates_caches() -> None:
    kv = make()
    kv.open(1, TOKENS[:8], salt="tenant")
    step(kv, 8)
    blocks = kv.block_ids(1)
    kv.release(1)
    assert kv.open(2, TOKENS[:9], salt="tenant") == (8, blocks)
    assert kv.open(3, TOKENS[:9], salt="other") == (0, ())
    assert kv.open(4, TOKENS[:9]) == (0, ())


def test_a_cache_hit_then_decode() -> None:
    kv = make()
    kv.open(1, TOKENS[:8])
    step(kv, 8)
    kv.release(1)
    assert kv.open(1, TOKENS[:9])[0] == 8
    step(kv, 2)
    assert kv.num_committed(1) == 10


def test_reserve_ten_apply_four_then_five() -> None:
    kv = make()
    kv.open(1, TOKENS[:8])
    step(kv, 4, reserve=10)
    assert counts(kv) == (2, 1)
    kv.commit(1, 5, TOKENS)
    assert counts(kv) == (1, 2)


def test_three_new_and_two_lookahead_tokens_are_two_blocks() -> None:
    kv = make()
    kv.open(1, TOKENS[:3])
    assert len(kv.reserve(1, 3 + 2) or ()) == 2


def test_draft_lengths_that_vary_never_ask_for_a_negative_number_of_blocks() -> None:
    kv = make()
    kv.open(1, TOKENS[:1])
    blocks = []
    for drafts, accepted in ((12, 0), (1, 1), (12, 12), (0, 0), (3, 1), (9, 9)):
        step(kv, 1 + accepted, reserve=1 + drafts)
        blocks.append(len(kv.block_ids(1)))
    assert kv.num_committed(1) == 29
    assert blocks == [4, 4, 4, 5, 6, 8], "grows to what was asked for, never shrinks by itself"


def test_preempted_and_resumed_there_are_no_duplicates() -> None:
    kv = make()
    kv.open(1, TOKENS[:6])
    step(kv, 6)
    step(kv, 3, reserve=5)
    kv.release(1)
    assert kv.num_used == 0
    computed, blocks = kv.open(1, TOKENS[:10])
    assert computed == 8 and len(blocks) == 2 and kv.block_ids(1) == blocks
    step(kv, 2, reserve=6)
    assert kv.num_committed(1) == 10 and kv.stats().cached_blocks == 2


def test_a_full_pool_serves_again_after_release() -> None:
    kv = make()
    kv.open(1, TOKENS)
    step(kv, 40)
    kv.open(2, TOKENS[10:])
    assert kv.reserve(2, 1) is None and not kv.num_free
    kv.release(1)
    assert len(kv.reserve(2, 40) or ()) == 10
    assert kv.match_prefix(TOKENS) == 0, "evicted"
    kv.check_integrity()
