"""Stop strings as one automaton (Aho and Corasick, 1975): built once per request, shared by all its samples."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopEnd(NamedTuple):
    """A completed stop string: its number, and how many characters of the piece it ends behind."""

    end: int
    stop: str


class StopStrings:
    """Finds, character by character, the first place where one of the strings is complete; of several that end there,
    the longest.

    A state is a node of the trie of all strings: the longest end of the text with which one of them begins. It is an
    int that the caller keeps; the automaton does not change after construction. Building takes time and memory
    linear in the total length of the strings, a character of text constant time on average, whatever they are.

    Nodes of one string are numbered one after the other, so that most steps need no table: where v + 1 is a child of
    v, v is marked in ``_chained``; other children are in ``_branches``. Example: "he", "she", "hers" have nodes 1 h,
    2 he, 3 s, 4 sh, 5 she, 6 her, 7 hers; 6 is a branch of 2, 3 one of 0. After "ushe" the state is 5, and 2 is its
    failure: "he" ends there, too.
    """

    __slots__ = (
        "_branches",
        "_chained",
        "_chars",
        "_depths",
        "_failures",
        "_first",
        "_found",
        "_held",
        "_stops",
    )

    def __init__(self, stops: Sequence[str]) -> None:
        """``stops``: one or more, none of them empty."""
        assert stops and all(stops), "an empty stop string"
        self._stops = tuple(dict.fromkeys(stops))
        chars = ["\0"]  # of each node, the last character
        depths = array("i", [0])
        found = array("i", [-1])  # of each node, the longest stop string that ends there: its number
        self._branches: dict[tuple[int, str], int] = {}  # children other than the next node
        self._depths = depths
        self._chained = chained = bytearray(b"\0")  # of each node, whether the next one is its child
        inner = bytearray(b"\0")  # of each node, whether it has a child
        for number, stop in enumerate(self._stops):
            node = 0
            for char in stop:
                if chained[node] and chars[node + 1] == char:
                    node += 1
                    continue
                child = self._branches.get((node, char))
                if child is None:
                    child = len(chars)
                    if child == node + 1:
                        chained[node] = 1
                    else:
                        self._branches[node, char] = child
                    chars.append(char)
                    depths.append(depths[node] + 1)
                    found.append(-1)
                    inner.append(0)
                    chained.append(0)
                    inner[node] = 1
                node = child
            found[node] = number
        self._chars = "".join(chars)
        self._found = found
        self._failures = array("i", bytes(4 * len(chars)))
        self._held = array("i", bytes(4 * len(chars)))
        self._first = frozenset(stop[0] for stop in self._stops)
        self._link(inner)

    def _link(self, inner: bytearray) -> None:
        """Compute failure links level by level, and the tables that depend on them."""
        children: dict[int, list[int]] = {}
        for (node, _), child in self._branches.items():
            children.setdefault(node, []).append(child)
        depths, failures, found, held = self._depths, self._failures, self._found, self._held
        queue = deque([0])
        while queue:
            node = queue.popleft()
            below = children.get(node, [])
            for child in [node + 1, *below] if self._chained[node] else below:
                if node:
                    failures[child] = self._step(failures[node], self._chars[child])
                failure = failures[child]
                if found[child] < 0:
                    found[child] = found[failure]
                # What is held back of a text that ends here: as far as some stop string can still go on.
                held[child] = depths[child] if inner[child] else held[failure]
                queue.append(child)

    def __len__(self) -> int:
        """The number of nodes: at most one per character, and the root."""
        return len(self._depths)

    def _step(self, state: int, char: str) -> int:
        while True:
            if self._chained[state] and self._chars[state + 1] == char:
                return state + 1
            branch = self._branches.get((state, char))
            if branch is not None:
                return branch
            if not state:
                return 0
            state = self._failures[state]

    def read(self, state: int, piece: str, ignore: bool = False) -> tuple[int, StopEnd | None]:
        """Go on from ``state`` (0: before the text) through ``piece``: (state, what was completed first).

        ``ignore``: stop strings that are completed in this piece do not count. After a match the state is invalid.
        """
        if not state and self._first.isdisjoint(piece):  # as nearly always
            return 0, None
        found, step = self._found, self._step
        for i, char in enumerate(piece):
            state = step(state, char)
            number = found[state]
            if number >= 0 and not ignore:
                return state, StopEnd(i + 1, self._stops[number])
        return state, None

    def held(self, state: int) -> int:
        """Characters at the end of the text with which a stop string begins, that could still become whole."""
        return self._held[state]
