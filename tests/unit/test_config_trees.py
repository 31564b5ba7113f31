"""speculative_token_tree: paths to parents and ranks; speculative_dynamic_tree: limits."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwise.config.trees import DynamicTree, parse_dynamic_tree, parse_tree
from draftwise.errors import ConfigError


@pytest.mark.parametrize(
    ("spec", "parents", "ranks"),
    [
        ([[0]], (-1,), (0,)),
        ([[0], [1], [0, 0]], (-1, -1, 0), (0, 1, 0)),
        ([[0], [0, 0], [0, 0, 0]], (-1, 0, 1), (0, 0, 0)),
        (((0,), (0, 1), (2,), (2, 0)), (-1, 0, -1, 2), (0, 1, 2, 0)),
        ("[[0], [1], [0, 0]]", (-1, -1, 0), (0, 1, 0)),
        ("[(0,), (1,), (0, 0)]", (-1, -1, 0), (0, 1, 0)),
    ],
)
def test_parse(spec: Any, parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    assert parse_tree(spec) == (parents, ranks)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "at least one path"),
        ("[]", "at least one path"),
        ([[]], "path \\[\\]"),
        ([[0], [0]], "path \\[0\\] stands twice"),
        ([[0, 0], [0]], "\\[0, 0\\] comes before its parent \\[0\\]"),
        ([[0], [1, 0]], "before its parent \\[1\\]"),
        ([[1], [0]], "\\[0\\] comes after its sibling \\[1\\]"),
        ([[-1]], "from 0 on"),
        ([[0.5]], "from 0 on"),
        ([[True]], "from 0 on"),
        ([0], "the path 0"),
        (["0"], "the path '0'"),
        ("nonsense(", "expected a list of paths"),
        ("5", "expected a list of paths"),
        (5, "expected a list of paths"),
        ([[i] for i in range(64)], "64 nodes; at most 63"),
    ],
)
def test_what_is_no_tree(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_tree(spec)


def test_the_widest_tree() -> None:
    assert parse_tree([[i] for i in range(63)])[0] == (-1,) * 63


@given(st.lists(st.integers(-1, 61), max_size=62))
def test_any_tree_survives_the_way_through_its_paths(choices: list[int]) -> None:
    parents = [-1] + [min(c, i) for i, c in enumerate(choices)]
    ranks: list[int] = []
    paths: list[list[int]] = []
    for parent in parents:
        rank = sum(p == parent for p in parents[: len(ranks)])
        ranks.append(rank)
        paths.append([*(paths[parent] if parent >= 0 else []), rank])
    assert parse_tree(paths) == (tuple(parents), tuple(ranks))
    assert parse_tree(str(paths)) == (tuple(parents), tuple(ranks))


@pytest.mark.parametrize(
    ("value", "tree"),
    [
        (None, None),
        (False, None),
        ("false", None),
        (True, DynamicTree()),
        ("true", DynamicTree()),
        ({}, DynamicTree()),
        ({"top_k": 4}, DynamicTree(top_k=4)),
        ({"depth": 3, "top_k": 32}, DynamicTree(32, 3)),
        ('{"top_k": 63, "depth": 1}', DynamicTree(63, 1)),
        (DynamicTree(2, 9), DynamicTree(2, 9)),
    ],
)
def test_parse_dynamic(value: Any, tree: DynamicTree | None) -> None:
    assert parse_dynamic_tree(value) == tree


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "expected true, false or"),
        ("yes", "expected true, false or"),
        ([10, 7], "expected true, false or"),
        ({"topk": 3}, "unknown field 'topk'.*top_k"),
        ({"top_k": 0}, "top_k: expected an integer in 1..63, got 0"),
        ({"top_k": True}, "top_k: expected an integer"),
        ({"depth": 64}, "depth: expected an integer in 1..63, got 64"),
        ({"depth": 2.0}, "depth: expected an integer"),
        ({"top_k": 13, "depth": 6}, "65 nodes, top_k \\* \\(depth - 1\\); at most 64"),
    ],
)
def test_wrong_dynamic(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_dynamic_tree(value)
