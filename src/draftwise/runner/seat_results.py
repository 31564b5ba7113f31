"""Requests in seats as the host knows them, and what it writes down of a step that was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from draftwise.graphs.seats import memory as at
from draftwise.graphs.seats.step import Landing
from draftwise.runner.drafting import Drafting
from draftwise.runner.rows import Row
from draftwise.runner.seating import Seating, Way
from draftwise.types import Proposal, RowResult, TokenLogprobs

_NOT_FINITE = "RequestError: the model's logits are not finite"


@dataclass(slots=True)
class Member:
    """A request in its seat. ``drafts`` wait on the device, as far as the host knows, drawn from ``source`` unless they
    were ``looked_up``."""

    row: Row
    seat: int
    way: Way
    drafts: tuple[int, ...]
    parents: tuple[int, ...]  # of these
    source: int
    fed: int
    before: Proposal | None  # what waited when it came, until it has taken part in a step: q may be large
    scratch: range  # of blocks behind its own
    accepted: int = 0  # in the newest step that was read
    looked_up: bool = False
    failed: bool = False


@dataclass(slots=True)
class Flight:
    """A step on its way, or the rows that were read. ``members``: with their seats when it was launched."""

    landing: Landing
    members: list[tuple[Member, int]]
    rows: list[RowResult] = field(default_factory=list)
    landed: bool = False


def record(
    member: Member,
    words: Sequence[int],
    drafts: int,
    report_np: npt.NDArray[np.float32] | None,
    seating: Seating,
    drafting: Drafting,
) -> RowResult:
    """Write down what a step made of a request.

    Args:
        member: it.
        words: [6 + 4 K + 1] of its seat, see `graphs.seats.memory`.
        drafts: K.
        report_np: [K + 1, 2 + 2 T], see `Shaping.report`; None: it wants no log-probabilities.
        seating: its drafter is told.
        drafting: keeps the books of what drafters have stored.
    """
    row = member.row
    verified, accepted = words[at.VERIFIED], words[at.ACCEPTED]
    tokens = tuple(words[at.ANSWER : at.ANSWER + accepted + 1])
    if tokens[-1] < 0:
        member.failed = True
        return RowResult(row.rid, error=_NOT_FINITE)
    waiting = words[at.ANSWERED_WAITING]
    first = at.ANSWER + drafts + 1
    drafted, parents = member.drafts[:verified], member.parents[:verified]
    method = member.way.method
    name = seating.name_of(method, member.looked_up)
    member.looked_up = words[at.RAN] == 2
    member.drafts = tuple(words[first : first + waiting])
    fixed = seating.parents_of(method)
    member.parents = (
        fixed[:waiting]
        if fixed is not None
        else tuple(words[first + 2 * drafts : first + 2 * drafts + waiting])
    )
    row.num_computed += 1 + accepted
    row.append(tokens)
    row.state.commit(tokens)
    assert row.num_tokens == words[at.ANSWERED_KNOWN], "host and device count alike"
    member.accepted, member.fed = accepted, words[at.ANSWERED_FED]
    seated = seating.drafters.get(method)
    if seated is not None and not row.drafting_failed:  # a request that fails here leaves with the next plan
        # a drafter has stored nothing of what was looked up
        filled = seated.went_on(row, member.fed, 0 if member.looked_up else waiting)
        if filled is not None:
            drafting.fills.has(method, row, *filled)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    if report_np is not None:
        logprobs = _logprobs(report_np, tokens, row.state.params.logprobs or 0)
    if not verified:
        return RowResult(row.rid, tokens, num_proposed=waiting, logprobs=logprobs)
    return RowResult(
        rid=row.rid,
        token_ids=tokens,
        num_drafted=verified,
        num_accepted=accepted,
        accepted_nodes=tuple(words[first + drafts : first + drafts + accepted]),
        draft_tokens=drafted,
        draft_parents=parents,
        method=name,
        num_proposed=waiting,
        logprobs=logprobs,
    )


def _logprobs(
    report_np: npt.NDArray[np.float32], tokens: Sequence[int], count: int
) -> tuple[TokenLogprobs, ...]:
    """``report_np`` [K + 1, 2 + 2 T], see `Shaping.report`; ``count``: alternatives of each token."""
    alternatives = (report_np.shape[1] - 2) // 2
    found = []
    for token, row in zip(tokens, report_np.tolist(), strict=False):
        ids = tuple(int(i) for i in row[2 : 2 + count])
        values = tuple(row[2 + alternatives : 2 + alternatives + min(count, alternatives)])
        found.append(TokenLogprobs(token, row[0], int(row[1]), ids[: len(values)], values))
    return tuple(found)
