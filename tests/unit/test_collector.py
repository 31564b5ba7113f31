"""The garbage collector rests while models load, and nothing else about it changes."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from draftwise.collector import collector_paused


class Node:
    """Something that only the collector can free."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def collections() -> list[int]:
    return [generation["collections"] for generation in gc.get_stats()]


def test_no_collection_inside_and_none_of_what_was_made_there_soon_after() -> None:
    gc.collect()
    before = collections()
    with collector_paused():
        kept = [Node() for _ in range(50_000)]
        assert collections() == before and not gc.isenabled()
    assert gc.isenabled() and gc.get_count()[0] < 100, "they count as old"
    walked: list[int] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            walked.append(info["generation"])

    gc.callbacks.append(watch)
    try:
        more = [Node() for _ in range(20_000)]
    finally:
        gc.callbacks.remove(watch)
    assert 2 not in walked and len(kept) + len(more) == 70_000


def test_what_was_made_inside_can_be_freed() -> None:
    with collector_paused():
        node = Node()
        gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collector_paused():
        pass
    assert gc.get_freeze_count() > frozen // 2 and gc.isenabled()  # other threads may have freed some


def test_it_runs_again_when_loading_fails() -> None:
    @collector_paused()
    def load() -> None:
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            load()
    assert gc.isenabled()
