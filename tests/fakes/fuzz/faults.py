"""Faults to plant: each is one line of the engine gone or wrong, and the fuzzer has to find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from draftwise.engine.group import RequestGroup
from draftwise.graphs.seats import rows as rows_file
from draftwise.graphs.seats.memory import SeatMemory
from draftwise.graphs.seats.shaping import Shaping
from draftwise.kv.manager import KVManager
from draftwise.kv.prefix_cache import PrefixCache
from draftwise.kv.storage import KVStorage
from draftwise.runner import verifying as verifying_file
from draftwise.runner.fills import Fills
from draftwise.runner.rows import Row
from draftwise.runner.seat_entry import Scratch
from draftwise.runner.seats import Seats
from draftwise.sampling.state import SamplingState
from draftwise.sched import request as request_file
from draftwise.sched import scheduler as scheduler_file
from draftwise.sched.adapters import AdapterPlaces
from draftwise.sched.ahead import Outlook, outlook
from draftwise.sched.request import Request
from draftwise.sched.scheduler import Scheduler
from draftwise.structured.cursor import Cursor

Patch = pytest.MonkeyPatch


def _nothing(*_: object, **__: object) -> None:
    return None


def no_compaction(patch: Patch) -> None:
    """Accepted paths of trees stay where they were computed, in kernels and in torch."""
    verify = verifying_file.verify_batch
    patch.setattr(KVStorage, "move", _nothing)
    patch.setattr(
        verifying_file, "verify_batch", lambda *a, **options: verify(*a, **{**options, "stored": None})
    )


def marks_not_cleared(patch: Patch) -> None:
    """A block that is handed out anew still counts as filled for the drafters that filled it before."""
    patch.setattr(Fills, "fresh_blocks", _nothing)


def trims_lost(patch: Patch) -> None:
    """The executor keeps the blocks that the scheduler took back."""
    patch.setattr(Row, "trim", _nothing)


def evicted_blocks_found(patch: Patch) -> None:
    """A block that is handed out anew is still found by the prefix that it held."""
    patch.setattr(PrefixCache, "forget", _nothing)


def blocks_kept(patch: Patch) -> None:
    """Some requests leave and keep their blocks."""
    release = KVManager.release

    def keeps(self: KVManager, rid: int) -> None:
        if rid % 7 != 3:
            release(self, rid)

    patch.setattr(KVManager, "release", keeps)


def stops_seen_late(patch: Patch) -> None:
    """Stop tokens and limits are looked at after a whole step's tokens."""
    append = Request.append

    def late(self: Request, token_ids: tuple[int, ...]) -> tuple[int, str | None]:
        taken, reason = append(self, token_ids)
        if reason == "stop" and taken < len(token_ids) and self.num_tokens < self.max_total:
            append(self, token_ids[taken : taken + 1])
            taken += 1
        return taken, reason

    patch.setattr(Request, "append", late)


def penalties_forget(patch: Patch) -> None:
    """Penalties know the prompt and the first token alone."""
    commit = SamplingState.commit

    def once(self: SamplingState, token_ids: Any) -> None:
        commit(self, token_ids[:1])

    patch.setattr(SamplingState, "commit", once)


def room_ahead_too_small(patch: Patch) -> None:
    """A plan made ahead reserves nothing for the drafts of the step that runs."""

    def narrow(request: Request, flying: Any) -> Outlook | None:
        found = outlook(request, flying)
        return None if found is None else found._replace(before=flying.num_new)

    patch.setattr(scheduler_file, "outlook", narrow)


def grammar_stays_behind(patch: Patch) -> None:
    """A grammar is not told of the last token of a step that accepted drafts."""
    commit = Cursor.commit

    def behind(self: Cursor, token_ids: Any) -> None:
        commit(self, token_ids if len(token_ids) == 1 else token_ids[:-1])

    patch.setattr(Cursor, "commit", behind)


def preempted_prompt_logprobs_doubled(patch: Patch) -> None:
    """A request that is computed again reports the log-probabilities of its prompt on top of those that it had."""
    preempt = Scheduler._preempt

    def doubles(self: Scheduler, victim: Request) -> None:
        had = list(victim.prompt_logprobs or ())
        preempt(self, victim)
        if had:
            victim.prompt_logprobs = had

    patch.setattr(Scheduler, "_preempt", doubles)


def counts_whole_steps(patch: Patch) -> None:
    """Of a step that was cut, all drafts that were accepted count."""
    commit = Scheduler._commit_row

    def counts(self: Scheduler, request: Request, plan: Any, row: Any, now: float) -> Any:
        before = request.num_tokens
        update = commit(self, request, plan, row, now)
        if row.num_accepted > request.num_tokens - before > 0:
            request.counts.num_accepted_tokens += 1
        return update

    patch.setattr(Scheduler, "_commit_row", counts)


def prefixes_of_every_adapter(patch: Patch) -> None:
    """A request finds blocks that were filled under another adapter."""
    patch.setattr(request_file, "adapter_salt", lambda adapter: None)


def places_kept(patch: Patch) -> None:
    """A request that ends, or is preempted, keeps the place of its adapter."""
    patch.setattr(AdapterPlaces, "leave", _nothing)


def pieces_lost(patch: Patch) -> None:
    """A stream's reader who comes late gets the newest token alone."""
    piece = RequestGroup._completion

    def newest(self: RequestGroup, index: int, sample: Any, delta: bool) -> Any:
        found = piece(self, index, sample, delta)
        return replace(found, token_ids=found.token_ids[-1:]) if delta else found

    patch.setattr(RequestGroup, "_completion", newest)


SOON: tuple[Callable[[Patch], None], ...] = (
    no_compaction,
    trims_lost,
    evicted_blocks_found,
    blocks_kept,
    stops_seen_late,
    penalties_forget,
    counts_whole_steps,
    prefixes_of_every_adapter,
    places_kept,
    pieces_lost,
)
"""Found within the cases of every run."""
LATER: tuple[Callable[[Patch], None], ...] = (
    grammar_stays_behind,
    marks_not_cleared,
    room_ahead_too_small,
    preempted_prompt_logprobs_doubled,
)
"""Found within the first few hundred cases."""


# ------------------------------------------------------------------- steps whose requests have seats on the device


def paths_stay_in_seats(patch: Patch) -> None:
    """Accepted paths of trees stay where a step on the device computed them."""
    patch.setattr(rows_file, "compact", _nothing)


def new_blocks_untold(patch: Patch) -> None:
    """The device is not told of blocks that a plan gives to a request in its seat."""
    leave = Seats.leave

    def without(self: Seats, plan: Any) -> None:
        leave(self, plan)
        self._fresh = {}

    patch.setattr(Seats, "leave", without)


def scratch_is_block_0(patch: Patch) -> None:
    """Drafts behind a request's own blocks are written to the first block of the cache, which is another's."""
    take = Scratch.take

    def first(self: Scratch, method: str) -> range:
        return take(self, method) if method in self._free else range(1)

    patch.setattr(Scratch, "take", first)


def moves_leave_state(patch: Patch) -> None:
    """A request that moves to another seat finds there what the one before left."""
    patch.setattr(SeatMemory, "move", _nothing)


def seats_count_nothing(patch: Patch) -> None:
    """Penalties do not know what a request said in its seat."""
    patch.setattr(Shaping, "commit", _nothing)


def bias_of_another(patch: Patch) -> None:
    """A request without a bias has that of its seat's last one, while somebody else in the step has one."""
    enter = Shaping.enter

    def keeps(self: Shaping, seat: int, state: SamplingState) -> None:
        bias = self._bias
        self._bias = bias if state.has_static else None
        enter(self, seat, state)
        self._bias = self._bias if bias is None else bias

    patch.setattr(Shaping, "enter", keeps)


def trees_leave_as_chains(patch: Patch) -> None:
    """What waits on the device when a request leaves its seat is verified as drafts of a chain."""
    give_back = Seats._give_back

    def chained(self: Seats, going: Any) -> None:
        give_back(self, going)
        for member in going:
            row = member.row
            if row.proposal.tokens:
                row.proposal = replace(row.proposal, parents=tuple(range(-1, len(row.proposal) - 1)))

    patch.setattr(Seats, "_give_back", chained)


SEATED: Mapping[Callable[[Patch], None], int] = {
    paths_stay_in_seats: 0,
    new_blocks_untold: 1,
    scratch_is_block_0: 59,
    moves_leave_state: 35,
    seats_count_nothing: 5,
    bias_of_another: 21,
    trees_leave_as_chains: 21,
}
"""With the seed of a case that shows it."""
