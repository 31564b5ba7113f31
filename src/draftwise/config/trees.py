"""Draft trees as users write them: static ones, a list of paths of child ranks, and dynamic ones, their limits."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftwise.errors import ConfigError, shown, suggest
from draftwise.names import MAX_FED_NODES, MAX_TREE_NODES

_LONGEST_TEXT = 20_000
"""Characters of a tree as text: 63 paths of 63 ranks have fewer, and Python's parser may be asked for no more."""


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """Limits of a tree that follows the drafter's confidence (EAGLE-2, arXiv:2406.16858): ``depth`` levels; on each the
    ``top_k`` likeliest nodes are expanded by ``top_k`` children. How many nodes are then verified is
    ``num_speculative_tokens``. The defaults go with 15 nodes; the paper has 10 and 7 for 60."""

    top_k: int = 4
    depth: int = 6


def parse_dynamic_tree(value: object) -> DynamicTree | None:
    """Parse ``speculative_dynamic_tree``: true, false (None), or ``{"top_k": ..., "depth": ...}``; also as JSON text.

    Args:
        value: what the user gave; None is false.

    Raises:
        ConfigError: something else, an unknown field, a value out of range, or more nodes to expand
            than the drafter can feed: ``top_k * (depth - 1)`` (the last level is not expanded) is over 64.
    """
    name = "speculative_dynamic_tree"
    wanted = 'expected true, false or {"top_k": ..., "depth": ...}'
    given = value
    if isinstance(given, str):
        try:
            given = json.loads(given.strip().lower())
        except json.JSONDecodeError:
            raise ConfigError(f"{name}: {wanted}, got {shown(value)}") from None
    if given is None or given is False:
        return None
    if given is True:
        return DynamicTree()
    if isinstance(given, DynamicTree):
        given = {"top_k": given.top_k, "depth": given.depth}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}: {wanted}, got {shown(value)}")
    fields = ("top_k", "depth")
    numbers: dict[str, int] = {}
    for key, number in given.items():
        if key not in fields:
            raise ConfigError(f"{name}: unknown field {key!r}{suggest(str(key), fields)}; {wanted}")
        numbers[key] = _count(f"{name}.{key}", number)
    tree = DynamicTree(**numbers)
    fed = tree.top_k * (tree.depth - 1)
    if fed > MAX_FED_NODES:
        raise ConfigError(
            f"{name}: top_k {tree.top_k} and depth {tree.depth} expand up to {fed} nodes, top_k * (depth - 1); "
            f"at most {MAX_FED_NODES} can be"
        )
    return tree


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TREE_NODES:
        raise ConfigError(f"{name}: expected an integer in 1..{MAX_TREE_NODES}, got {shown(value)}")
    return value


def parse_tree(spec: str | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parse ``speculative_token_tree`` (or ``medusa_choices``, which has the same form) into (parents, ranks).

    A path names a node by the ranks one takes from the root: ``[0, 2]`` is the third choice below the first.
    Nodes keep the order of the list, in which a node comes after its parent and siblings come by rank: a
    step that has room for fewer nodes verifies the first ones. Ranks may be skipped (the best choice and the
    third). ``parents[i]`` is the parent's index (-1: the root), ``ranks[i]`` the last number of path i.

    Example: ``[[0], [1], [0, 0], [1, 0], [0, 0, 0]]`` is parents (-1, -1, 0, 1, 2), ranks (0, 1, 0, 0, 0)::

        root -+- 0 --- 00 --- 000
              +- 1 --- 10

    Raises:
        ConfigError: no list of paths, an empty tree or path, a negative rank, a path that
            stands twice or before its parent or a smaller sibling, more than 63 nodes.
    """
    paths = _paths(spec)
    if not paths:
        raise ConfigError("speculative_token_tree: a tree needs at least one path, such as [[0]]")
    index: dict[tuple[int, ...], int] = {}
    last_child: dict[tuple[int, ...], int] = {}  # path of a parent -> rank of its latest child
    parents: list[int] = []
    for i, path in enumerate(paths):
        shown = list(path)
        if path in index:
            raise ConfigError(f"speculative_token_tree: path {shown} stands twice")
        parent = path[:-1]
        if parent and parent not in index:
            raise ConfigError(
                f"speculative_token_tree: path {shown} comes before its parent {list(parent)}, or without it"
            )
        if path[-1] < last_child.get(parent, -1):
            raise ConfigError(
                f"speculative_token_tree: path {shown} comes after its sibling {[*parent, last_child[parent]]}; "
                "siblings are listed by rank"
            )
        parents.append(index[parent] if parent else -1)
        last_child[parent] = path[-1]
        index[path] = i
    return tuple(parents), tuple(path[-1] for path in paths)


def _paths(spec: object) -> list[tuple[int, ...]]:
    """A list of non-empty tuples of ranks >= 0, whatever was given."""
    wanted = "expected a list of paths of child ranks, such as [[0], [1], [0, 0]]"
    if isinstance(spec, str):
        try:
            spec = ast.literal_eval(spec if len(spec) <= _LONGEST_TEXT else "")
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ConfigError(f"speculative_token_tree: {wanted}, got {shown(spec)}") from None
    if not isinstance(spec, Sequence) or isinstance(spec, str | bytes):
        raise ConfigError(f"speculative_token_tree: {wanted}, got {shown(spec)}")
    if len(spec) > MAX_TREE_NODES:
        raise ConfigError(
            f"speculative_token_tree: {len(spec)} nodes; at most {MAX_TREE_NODES} are verified in a step"
        )
    paths: list[tuple[int, ...]] = []
    for path in spec:
        if not isinstance(path, Sequence) or isinstance(path, str | bytes) or not path:
            raise ConfigError(f"speculative_token_tree: {wanted}, got the path {shown(path)}")
        if len(path) > MAX_TREE_NODES:
            raise ConfigError(
                f"speculative_token_tree: a path of {len(path)} ranks, where a tree has at most {MAX_TREE_NODES} nodes"
            )
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in path):
            raise ConfigError(
                f"speculative_token_tree: ranks are integers from 0 on, got the path {shown(list(path))}"
            )
        paths.append(tuple(path))
    return paths
