"""Chained digests and the map between them and blocks."""

import numpy as np
import pytest

from draftwise.kv.prefix_cache import PrefixCache, block_digests, root_digest

TOKENS = np.arange(10, 26, dtype=np.int32)


def fill(cache: PrefixCache, tokens: np.ndarray, blocks: list[int], salt: str | None = None) -> list[bytes]:
    digests = block_digests(root_digest(salt), tokens, cache.block_size, 0, len(blocks))
    for digest, block in zip(digests, blocks, strict=True):
        cache.register(digest, block)
    return digests


def test_digests_chain_and_can_be_continued() -> None:
    root = root_digest(None)
    whole = block_digests(root, TOKENS, 4, 0, 4)
    first = block_digests(root, TOKENS, 4, 0, 1)
    rest = block_digests(first[0], TOKENS, 4, 1, 4)
    assert first + rest == whole
    assert len(set(whole)) == 4


def test_a_digest_depends_on_everything_before_it_and_not_on_the_storage() -> None:
    root = root_digest(None)
    other = TOKENS.copy()
    other[0] += 1
    assert block_digests(root, TOKENS, 4, 0, 4)[3] != block_digests(root, other, 4, 0, 4)[3]
    strided = np.repeat(TOKENS, 2)[::2]
    assert not strided.flags.c_contiguous
    want = block_digests(root, TOKENS, 4, 0, 4)
    assert block_digests(root, strided, 4, 0, 4) == want
    assert block_digests(root, TOKENS.astype(np.int64), 4, 0, 4) == want


def test_salts_differ_from_each_other_and_from_none() -> None:
    assert len({root_digest(salt) for salt in (None, "", "a", "b", "=a")}) == 5


def test_match_leaves_a_token_to_compute() -> None:
    cache = PrefixCache(4)
    digests = fill(cache, TOKENS, [3, 1, 2, 0])
    assert cache.match(TOKENS[:8], None)[:2] == ([3], digests[0])
    assert cache.match(TOKENS[:9], None)[:2] == ([3, 1], digests[1])
    assert cache.match(TOKENS[:4], None)[:2] == ([], root_digest(None))
    assert cache.match(TOKENS[:9], "salt")[0] == []


def test_match_across_chunks() -> None:
    tokens = np.arange(1001, dtype=np.int32)
    cache = PrefixCache(4)
    digests = fill(cache, tokens, list(range(250)))
    assert cache.match(tokens, None)[:2] == (list(range(250)), digests[-1])
    cache.forget(100)
    assert cache.match(tokens, None)[:2] == (list(range(100)), digests[99])


def test_the_first_block_registered_stays() -> None:
    cache = PrefixCache(4)
    digests = fill(cache, TOKENS, [0])
    cache.register(digests[0], 5)
    assert 5 not in cache and 0 in cache and len(cache) == 1
    cache.forget(5)
    assert cache.match(TOKENS, None)[0] == [0], "forgetting the copy leaves the original"


def test_one_block_one_digest() -> None:
    cache = PrefixCache(4)
    fill(cache, TOKENS, [0])
    with pytest.raises(AssertionError, match="block 0"):
        cache.register(b"x" * 16, 0)


def test_integrity_names_what_is_wrong() -> None:
    cache = PrefixCache(4)
    fill(cache, TOKENS, [0, 1])
    cache.check_integrity({1}, [1, 0, 0])
    with pytest.raises(AssertionError, match="block 1 is hashed but blank"):
        cache.check_integrity(set(), [1, 0, 0])
    with pytest.raises(AssertionError, match=r"blocks \[2\] are retained without a hash"):
        cache.check_integrity({1, 2}, [1, 0, 0])
    cache._digests[0] = cache._digests[1]
    with pytest.raises(AssertionError, match="does not hold"):
        cache.check_integrity({0, 1}, [0, 0, 0])
    del cache._digests[0]
    with pytest.raises(AssertionError, match="differ in size"):
        cache.check_integrity({0, 1}, [0, 0, 0])
