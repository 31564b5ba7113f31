"""Converters of the fields of `SpeculativeConfig`: from user input to stored values."""

from __future__ import annotations

import ast
from typing import Any

from draftwise.config import coerce as to
from draftwise.config.heads import sorted_choices
from draftwise.config.trees import DynamicTree, parse_dynamic_tree, parse_tree
from draftwise.errors import ConfigError
from draftwise.names import MAX_TREE_NODES
from draftwise.quantization.scheme import checked_name


def weight_format(name: str, value: Any) -> str:
    """A weight format, in its canonical spelling."""
    return checked_name(to.string(name, value), name)


def ranges(name: str, value: Any) -> tuple[tuple[int, int, int], ...]:
    """[(first batch size, last batch size, K)], ranges in rising order without overlap; K may be 0."""
    what = "a list of [from, to, K]"
    rows: tuple[tuple[int, ...], ...] = to.sequence_of(to.sequence_of(to.integer(0), what), what)(name, value)
    last = 0
    for row in rows:
        if len(row) != 3 or not last < row[0] <= row[1] or row[2] > MAX_TREE_NODES:
            raise ConfigError(
                f"{name}: expected [from, to, K] with rising, separate batch sizes >= 1 and K in "
                f"0..{MAX_TREE_NODES}, got {list(row)!r}"
            )
        last = row[1]
    if not rows:
        raise ConfigError(f"{name}: expected at least one [from, to, K], got an empty list")
    return tuple((first, final, k) for first, final, k in rows)


def tree_paths(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Paths of child ranks, or the text of their list."""
    try:
        parse_tree(value)
    except ConfigError as error:
        raise ConfigError(f"speculative_config.{error}") from None
    paths = ast.literal_eval(value) if isinstance(value, str) else value
    return tuple(tuple(path) for path in paths)


def dynamic_tree(name: str, value: Any) -> DynamicTree | None:
    """True, or the limits of the tree."""
    try:
        return parse_dynamic_tree(value)
    except ConfigError as error:
        raise ConfigError(f"speculative_config.{error}") from None


def choices(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Paths of child ranks in any order, or the text of their list."""
    paths = sorted_choices(to.from_json(name, value, "a list of paths of ranks"), name)
    try:
        return tree_paths(name, paths)
    except ConfigError as error:
        raise ConfigError(str(error).replace("speculative_token_tree", "medusa_choices")) from None
