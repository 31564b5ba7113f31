"""The pool's three states: held, blank, retained."""

import pytest

from draftwise.kv.block_pool import BlockPool


def test_blocks_are_handed_out_once_and_come_back() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3 and pool.num_free == 1
    pool.check_integrity([blocks])
    for block in blocks:
        pool.release(block, retain=False)
    assert pool.num_free == 4 and not pool.retained()
    pool.check_integrity([])


def test_blank_blocks_go_before_retained_ones_and_those_in_order_of_release() -> None:
    pool = BlockPool(4)
    a, b, c, d = pool.allocate(4)
    pool.release(c, retain=True)
    pool.release(a, retain=True)
    pool.release(b, retain=False)
    assert pool.retained() == (c, a)
    assert pool.allocate(3) == [b, c, a]
    pool.check_integrity([[a, b, c, d]])


def test_acquiring_a_retained_block_takes_it_off_the_free_list() -> None:
    pool = BlockPool(2)
    (a,) = pool.allocate(1)
    pool.release(a, retain=True)
    pool.acquire(a)
    pool.acquire(a)
    assert pool.ref_counts[a] == 2 and pool.num_free == 1
    pool.release(a, retain=True)
    assert pool.num_free == 1, "still held once"
    pool.check_integrity([[a]])


def test_a_blank_block_cannot_be_acquired() -> None:
    pool = BlockPool(1)
    with pytest.raises(KeyError):
        pool.acquire(0)


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="1 free"):
        pool.allocate(2)
    (block,) = pool.allocate(1)
    pool.release(block, retain=False)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(block, retain=False)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_drop_retained_makes_them_blank() -> None:
    pool = BlockPool(2)
    for block in pool.allocate(2):
        pool.release(block, retain=True)
    pool.drop_retained()
    assert not pool.retained() and pool.num_free == 2
    pool.check_integrity([])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[0, 0]], "twice in one table"),
        ([[0], [0]], "has 1 references but stands in 2"),
        ([], "has 1 references but stands in 0"),
        ([[0, 9]], "does not exist"),
    ],
)
def test_integrity_names_what_is_wrong_with_tables(tables: list[list[int]], message: str) -> None:
    pool = BlockPool(3)
    assert pool.allocate(1) == [0]
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(tables)


def test_integrity_names_what_is_wrong_with_free_lists() -> None:
    pool = BlockPool(3)
    pool._blank.append(0)
    with pytest.raises(AssertionError, match="twice in the free list"):
        pool.check_integrity([])
    pool = BlockPool(3)
    pool._retained[1] = None
    with pytest.raises(AssertionError, match="both blank and retained"):
        pool.check_integrity([])
    pool = BlockPool(3)
    pool._blank.remove(2)
    with pytest.raises(AssertionError, match="block 2 is neither free nor held"):
        pool.check_integrity([])
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool._blank.append(block)
    with pytest.raises(AssertionError, match="free but held"):
        pool.check_integrity([[block]])
