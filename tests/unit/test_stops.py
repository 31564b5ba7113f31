"""Stop strings: the automaton against a look at every character, and what it costs, in nodes and steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.engine.stops import StopEnd, StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=6)


def naive_end(stops: list[str], text: str, start: int) -> tuple[int, str] | None:
    """(end, stop) of what is complete first behind ``text[start]``; of several the longest."""
    for end in range(start + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end, max(ended, key=len)
    return None


def naive_held(stops: list[str], text: str) -> int:
    """Characters at the end with which a stop string begins that is not whole there."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def looked_at(stops: list[str], pieces: list[str], ignored: list[bool]) -> None:
    automaton = StopStrings(stops)
    state, text = 0, ""
    for piece, ignore in zip(pieces, ignored, strict=False):
        before = len(text)
        text += piece
        state, found = automaton.read(state, piece, ignore)
        wanted = None if ignore else naive_end(stops, text, before)
        assert found == (None if wanted is None else StopEnd(wanted[0] - before, wanted[1]))
        if found is not None:
            return
        assert automaton.held(state) == naive_held(stops, text)


@pytest.mark.parametrize("examples", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_matches_and_what_is_held_against_a_look_at_every_character(examples: int) -> None:
    pieces = st.lists(st.text("abc", max_size=8), max_size=8)
    given(STOPS, pieces, st.lists(st.booleans(), min_size=8))(settings(max_examples=examples)(looked_at))()


@given(STOPS)
def test_nodes_are_the_different_beginnings(stops: list[str]) -> None:
    assert len(StopStrings(stops)) == len({stop[:n] for stop in stops for n in range(len(stop) + 1)})


def test_a_node_that_follows_another_is_not_its_child_for_that() -> None:
    """The third string's new node has the number behind that of the second's last, and the depth of its child."""
    automaton = StopStrings(["ab", "cd", "abx"])
    assert automaton.read(0, "cdx") == (4, StopEnd(2, "cd"))
    assert automaton.read(0, "cdx", ignore=True) == (0, None)


class Counted(list):  # type: ignore[type-arg]
    """Failures of an automaton; counts those that were followed."""

    num_read = 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.num_read += 1
        value: int = super().__getitem__(index)
        return value


def test_work_and_memory_are_linear_in_stops_and_text() -> None:
    for size in (1000, 2000, 4000):
        # The worst for a search that begins again: all but complete, over and over.
        automaton = StopStrings(["a" * size + "b", "a" * (size // 2) + "c"])
        assert len(automaton) == size + 3
        automaton._failures = followed = Counted(automaton._failures)  # type: ignore[assignment]
        text = ("a" * (size - 1) + "d") * 4
        assert automaton.read(0, text)[1] is None
        assert size <= followed.num_read <= len(text)


@pytest.mark.parametrize("half", [50_000, pytest.param(500_000, marks=pytest.mark.slow)])
def test_a_megabyte_of_stop_strings(half: int) -> None:
    """And, quick, a tenth of it: far deeper than anything could be that calls itself."""
    stop = "ab" * half
    automaton = StopStrings([stop, stop[:-1] + "c"])
    assert len(automaton) == 2 * half + 2
    state, found = automaton.read(0, stop[:-1])
    assert found is None and automaton.held(state) == len(stop) - 1
    assert automaton.read(state, "xb") == (0, None)
    assert automaton.read(state, "c") == (2 * half + 1, StopEnd(1, stop[:-1] + "c"))
