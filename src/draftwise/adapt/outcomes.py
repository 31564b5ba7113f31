"""What became of each request's proposal in a step, read from columns where the step has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, cast

from draftwise.types import RowResult, tree_depth

Outcome = tuple[int, int, int, int, int, int]
"""Request, drafts verified, those accepted, depth of what was verified, drafts that wait now, tokens of the step.
Drafts verified are a chain if they are as many as they are deep. A request without tokens has failed, and its drafts
say nothing."""


class _Columns(Protocol):
    def outcomes(self) -> Iterable[Outcome]: ...


def outcomes(rows: Sequence[RowResult]) -> Iterable[Outcome]:
    """The outcomes of a step's results, in their order. Records of requests are made for trees alone, by whoever looks
    at ``rows``: to make one takes longer than to learn from it."""
    if hasattr(rows, "outcomes"):
        return cast(_Columns, rows).outcomes()
    return [
        (
            row.rid,
            row.num_drafted,
            row.num_accepted,
            tree_depth(row.draft_parents) if row.num_drafted else 0,
            row.num_proposed,
            len(row.token_ids),
        )
        for row in rows
    ]
