"""Continuous batching without phases: every step, each request gets some of its tokens computed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwise.adapt.controller import Controller, ControlStats, StepShape
from draftwise.errors import ContextLengthError, RequestError
from draftwise.kv.manager import KVManager
from draftwise.sched.adapters import AdapterPlaces
from draftwise.sched.admission import Refusal, admission, entering
from draftwise.sched.ahead import outlook
from draftwise.sched.columns import EMPTY_PLAN, PlanColumns
from draftwise.sched.committing import commit_row
from draftwise.sched.drafts import DraftRoom
from draftwise.sched.integrity import check_books
from draftwise.sched.order import Ordered, Waiting
from draftwise.sched.request import Request, RequestStatus, RequestUpdate, SpeculationCounts, together
from draftwise.sched.rounds import RoundRoom, step_seconds
from draftwise.sched.shares import Shares, kept_for_drafts, measure
from draftwise.sched.steps import PlannedStep
from draftwise.sched.taking import Books, Members, Planned, native_books
from draftwise.types import NewRequest, RowPlan, RowResult, StepPlan, StepResult, new_record


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``max_num_batched_tokens``: rows of one step, drafts included; at least ``max_num_seqs``. ``chunked_prefill``
    off: a prompt is computed in one step or not at all; what a preempted request computes again may take several.
    ``max_adapters``: that the executor holds at a time."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    max_adapters: int = 1


class Scheduler:
    """Decides what each step computes, and takes in the results. The only writer of a `Request`."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        controller: Controller,
        clock: Callable[[], float],
        most_rounds: int = 1,
    ) -> None:
        """``most_rounds``: of a step, see `Executor.most_rounds`."""
        self.config = config
        self.kv = kv
        self.adapters = AdapterPlaces(config.max_adapters)
        self._controller = controller
        self._draft_room = DraftRoom(kv, config.max_num_batched_tokens)
        self._rounds = RoundRoom(kv, most_rounds)
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._waiting = Waiting()
        self._running = Ordered()
        self._removed: list[int] = []  # the executor still has them
        self._newest = PlannedStep(StepShape())
        self._before = PlannedStep(StepShape())  # the one before it
        self._books: Books | None = native_books()
        self._members: tuple[int, Members] | None = None  # who runs, and `Ordered.version` of that
        self._trimmed: dict[int, int] = {}
        self._batch_size = 0
        self._refusal: Refusal | None = None  # the newest one
        self._finished: list[RequestUpdate] = []  # cancelled between steps
        self._step = 0
        self.num_preemptions = 0

    # ------------------------------------------------------------------------------------------ requests

    def adapters_in_use(self) -> set[int]:
        """Numbers of the adapters of all requests that are here."""
        return set().union(*self.adapters_by_state())

    def adapters_by_state(self) -> tuple[set[int], set[int]]:
        """Numbers of the adapters of requests that run, and of those that wait."""
        return self.adapters.running, self._waiting.by_adapter.keys() - {0}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or bool(self._finished)

    def check(self, num_prompt: int, max_total: int) -> None:
        """Raise RequestError if a request of this size could never be served, even alone."""
        capacity = self.kv.num_blocks * self.kv.block_size
        # The last token is never computed, it needs no slot.
        if max_total - 1 > capacity:
            raise ContextLengthError(
                f"This model's maximum context length is {capacity + 1} tokens here: the request needs up to "
                f"{max_total - 1} cache slots ({num_prompt} prompt tokens + {max_total - num_prompt} output tokens) "
                f"but the whole KV cache has {capacity}; lower max_tokens or raise kv_cache_memory / num_kv_blocks"
            )
        if not self.config.chunked_prefill and num_prompt > self.config.max_num_batched_tokens:
            raise RequestError(
                f"the prompt has {num_prompt} tokens but a step computes at most max_num_batched_tokens="
                f"{self.config.max_num_batched_tokens} and chunked prefill is off"
            )

    def add(self, request: Request) -> None:
        self.check(request.num_prompt, request.max_total)
        assert request.rid not in self._requests
        self._requests[request.rid] = request
        self._waiting.add(request)

    def cancel(self, rid: int, reason: str = "abort") -> bool:
        """Stop a request wherever it is; False if it is not here (any more)."""
        request = self._requests.get(rid)
        if request is None:
            return False
        self._finish(request, reason)
        self._finished.append(RequestUpdate(request, 0, True))
        return True

    # ------------------------------------------------------------------------------------------ schedule

    def schedule(self) -> StepPlan:
        """Plan a step: a row for every running request, then prompts, new requests, and drafts from the rest.

        One plan may be made ahead: before the step of the newest one was taken in. Who cannot be planned without
        knowing what that step does waits for the next plan, which may then be empty.
        """
        self._step += 1
        assert not self._before.plan.rids, "two steps have not been taken in"
        places = self.config.max_num_seqs - len(self._running)
        self._trimmed = self._rounds.give_back(self._running, self._waiting, places)
        # What will run once all that fit are admitted: the first of many must not draft as if it were alone, nor one
        # for whose adapter the others wait as if they ran.
        waiting = bool(self._waiting)
        entering = self.adapters.num_entering(self._waiting) if waiting else 0
        self._batch_size = min(len(self._running) + entering, self.config.max_num_seqs)
        shape = StepShape(note=self._controller.begin(self._batch_size))
        self._before, self._newest = self._newest, PlannedStep(shape)
        preempted = self.num_preemptions
        members = self._running_members()
        shares = None if members is None else self._roots_together(members)
        if shares is None:
            members, shares = None, self._share_roots()
        self._draft_room.wish(shares, self._controller, self._batch_size, self._books, members)
        left = self.config.max_num_batched_tokens - len(shares.rids)
        kept = kept_for_drafts(sum(shares.num_draft), left)
        for i in shares.reading:
            shares.num_new[i] += min(shares.missing[i] - 1, left - kept)
            left -= shares.num_new[i] - 1
        new: list[NewRequest] = []
        if waiting and preempted == self.num_preemptions:  # else running requests found no room: admit none
            while self._waiting and len(self._running) < self.config.max_num_seqs:
                admitted = self._admit(left, kept, shares)
                if admitted is None:
                    break
                new.append(admitted)
                left -= shares.num_new[-1]
        self._draft_room.divide(shares, left, self._controller, self._batch_size)
        self._controller.grant(shares.rids, shares.budgets)
        rounds, cuts = 1, None
        # Where all places are taken, nobody enters before a request ends, and that ends the rounds, too.
        hurried = waiting and places > 0
        if members is not None and self._books is not None and not hurried and not shares.reading:
            plain = self._newest.plain = not (any(shares.budgets) or any(shares.num_draft))
            rounds, cuts = self._rounds.of(
                shares, plain, self._controller, self._books, members, self._running
            )
        self._plan(shares, members)
        plan = StepPlan(
            step=self._step,
            rows=self._newest.plan,
            new=tuple(new),
            removed=tuple(self._removed),
            trimmed=tuple(self._trimmed.items()),
            rounds=rounds,
            round_seconds=step_seconds(members),
            cuts=cuts,
        )
        self._removed = []
        busy = self._newest.plan.rids or self._before.plan.rids
        assert busy or not self._requests, "work is waiting but nothing could be planned"
        return plan

    def _running_members(self) -> Members | None:
        """Who runs, where native code reads their books; None: there is none, or a step is on its way."""
        if self._books is None or self._before.plan.rids:
            return None
        known = self._members
        if known is None or known[0] != self._running.version:
            if not len(self._running):
                return None
            known = self._members = self._running.version, Members(self._running.copy(), self.kv)
        return known[1]

    def _roots_together(self, members: Members) -> Shares | None:
        """`_share_roots` where there are blocks for all. None: there are not, and nothing has changed."""
        assert self._books is not None, "there are no members without"
        size = self.kv.block_size
        missing, proposed, decoding, context, lacking = self._books.roots(members, size)
        if lacking > self.kv.num_free:
            return None
        count = len(missing)
        shares = Shares(
            members.requests.copy(),
            members.rids.copy(),
            missing,
            [0] * count,
            [1] * count,
            proposed,
            [0] * count,
            num_running=count,
        )
        if decoding < count:
            shares.reading = [i for i, tokens in enumerate(missing) if tokens > 1]
        for i in self._books.room(members, size, missing) if lacking else ():
            blocks = self.kv.reserve(members.rids[i], missing[i])
            assert blocks is not None, "as many blocks as were counted"
            shares.got(i, blocks)
        self._newest.shape.context = context
        return shares

    def _share_roots(self) -> Shares:
        """A row for every running request, and blocks for its known tokens: there are at least as many rows as
        requests that may run. Preempts the last ones when the cache is full."""
        shares = Shares()
        reserve, flying, shape = self.kv.reserve, self._before.plan.by_rid, self._newest.shape
        for request in self._running.copy():
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by one before it
            before = 0
            row = flying.get(request.rid)
            if row is None:
                missing, proposed = request.num_tokens - request.num_computed, request.num_proposed
            else:
                expected = outlook(request, row)
                if expected is None:
                    continue
                missing, proposed, before = expected
            blocks = reserve(request.rid, before + missing)
            if blocks is None:
                if row is not None:
                    continue
                blocks = self._make_room(request, missing)
                if blocks is None:
                    continue
            shares.add(request, missing, blocks, before=before, num_draft=proposed if missing == 1 else 0)
            if missing == 1:
                shape.context += request.num_computed
        return shares

    def _make_room(self, request: Request, missing: int) -> tuple[int, ...] | None:
        """Blocks for the ``missing`` known tokens of a running request. Cheapest first: what others reserved ahead,
        then somebody's place. None: it lost its own."""
        for other in reversed(self._running):
            # Blocks of a step on its way are written to.
            if other is request or other.rid in self._before.plan.by_rid or other.rid in self._trimmed:
                continue
            known = other.num_tokens - other.num_computed
            if not self.kv.surplus(other.rid, known):
                continue
            self._trimmed[other.rid] = self.kv.trim(other.rid, known)
            blocks = self.kv.reserve(request.rid, missing)
            if blocks is not None:
                return blocks
        while True:
            victim = self._running.last
            self._preempt(victim)
            if victim is request:
                return None
            blocks = self.kv.reserve(request.rid, missing)
            if blocks is not None:
                return blocks

    def _plan(self, shares: Shares, members: Members | None) -> None:
        """Write the shares down: the rows of the plan, and what they add up to. ``members``: see `DraftRoom.wish`."""
        controller = self._controller
        num_new, num_draft = array("i", shares.num_new), array("i", shares.num_draft)
        budgets = array("i", shares.budgets)
        resting: frozenset[int] = frozenset()
        if controller.resting:
            told = controller.resting
            resting = frozenset([i for i, rid in enumerate(shares.rids) if rid in told])
        self._newest.plan = PlanColumns(shares.rids, num_new, num_draft, budgets, shares.blocks, resting)
        measure(shares, self._newest.shape, None if members is None else members.sampled)
        if self._books is not None:
            whole = members is not None and len(shares.rids) == len(members.rids)
            own = members if members is not None and whole else Members(shares.requests, self.kv)
            self._newest.side_by_side = Planned(own, num_new)

    def _preempt(self, victim: Request) -> None:
        """Give up the request's cache; it is computed again from its tokens (and what the prefix cache kept)."""
        self.num_preemptions += 1
        victim.num_preemptions += 1
        self._running.remove(victim)
        self.adapters.leave(victim)
        self._newest.side_by_side = self._before.side_by_side = None
        self.kv.release(victim.rid)
        self._trimmed.pop(victim.rid, None)
        self._removed.append(victim.rid)
        victim.status = RequestStatus.WAITING
        victim.num_computed = victim.num_proposed = 0
        if victim.wants_prompt_logprobs:
            victim.prompt_logprobs = [None]
        self._waiting.add(victim)

    def _admit(self, left: int, kept: int, shares: Shares) -> NewRequest | None:
        """Admit the first waiting request, of those whose adapters find places, if there is room for it, and give it a
        share. ``left``: rows that nobody has yet, of which a prompt that can be cut leaves ``kept`` to drafts."""
        request = self.adapters.first(self._waiting)
        if request is None:
            return None
        # What a preempted request computes again may be longer than a step, whatever its prompt was.
        whole = not self.config.chunked_prefill and request.num_output == 0
        rows = left if whole else left - kept
        if rows <= 0 or (self._refusal is not None and self._refusal.stands(request, rows, self.kv)):
            return None
        answer = admission(request, rows, self.kv, whole=whole)
        if isinstance(answer, Refusal):
            self._refusal = answer
            return None
        self._refusal = None
        rid = request.rid
        cached, blocks = self.kv.open(
            rid, request.known_np, salt=request.salt, use_cache=request.takes_prefix, prefix=answer.prefix
        )
        missing = request.num_tokens - cached
        fresh = self.kv.reserve(rid, missing)
        assert fresh is not None, "what was granted is there"
        self._controller.admit(rid, request.speculation, missing, request.max_total - request.num_tokens)
        self._waiting.remove(request)
        self.adapters.enter(request)
        request.status = RequestStatus.RUNNING
        request.num_computed = cached
        if request.num_preemptions == 0:
            request.num_cached = cached
        if request.scheduled_time is None:
            request.scheduled_time = self._clock()
        self._running.add(request)
        shares.add(request, missing, fresh, num_new=answer.num_new, fresh=True)
        return entering(request, cached, blocks)

    # -------------------------------------------------------------------------------------------- commit

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        """Take in a step: commit K/V, append tokens, apply stop conditions. Rows of requests that were
        cancelled meanwhile are ignored."""
        updates, self._finished = self._finished, []
        now = self._clock()
        # Steps are taken in in their order: the one before the newest plan first.
        step = self._before if result.step < self._step else self._newest
        planned, side_by_side = step.plan, step.side_by_side
        step.plan, step.side_by_side = EMPTY_PLAN, None
        if not result.earlier:
            return updates + self._commit_round(result.rows, planned, side_by_side, now)
        own: list[RequestUpdate] = []
        for rows in (*result.earlier, result.rows):
            own += self._commit_round(rows, planned, side_by_side, now)
            if any(update.finished for update in own):
                side_by_side = None  # later rounds of those that ended are passed over
        return updates + together(own)

    def _commit_round(
        self, rows: Sequence[RowResult], planned: PlanColumns, side_by_side: Planned | None, now: float
    ) -> list[RequestUpdate]:
        """The results of one round of the step ``planned``, taken in."""
        answers: Sequence[int] | None = None
        if self._books is not None and side_by_side is not None:
            answers = self._books.take_in(side_by_side, rows, now, self.kv)
        if answers is None or side_by_side is None:
            plans, requests = planned.by_rid, self._requests
            updates: list[RequestUpdate] = []
            for row in rows:
                plan, request = plans.get(row.rid), requests.get(row.rid)
                if request is not None and plan is not None and request.status is RequestStatus.RUNNING:
                    updates.append(self._commit_row(request, plan, row, now))
            return updates
        took = zip(side_by_side.members.requests, answers, strict=True)
        if min(answers) >= 0:
            return [new_record(RequestUpdate, (request, taken, False)) for request, taken in took]
        return [
            new_record(RequestUpdate, (request, taken, False))
            if taken >= 0
            else self._commit_row(request, planned[i], rows[i], now)
            for i, (request, taken) in enumerate(took)
        ]

    def break_off(self, plan: StepPlan) -> None:
        """The newest step ended with an exception, somewhere: what the executor has of those that run is in no known
        state. It drops them, and they are computed again from their tokens."""
        self._newest.plan, self._newest.side_by_side = EMPTY_PLAN, None
        # Of those that left with this plan, too: the executor may not have come so far.
        self._removed = [*plan.removed, *self._removed]
        for request in self._running.copy():
            self._preempt(request)

    def learn(self, result: StepResult, seconds: float | None) -> None:
        """Tell the controller what the committed step took, see `Controller.observe`."""
        planned = self._before if result.step < self._step else self._newest
        shape = planned.shape
        if seconds is not None and not shape.prompt_rows:
            self._rounds.took(seconds / result.num_rounds, planned.plain)
        self._controller.observe(result, shape, seconds)

    def control_stats(self) -> ControlStats:
        """The controller's decisions."""
        return self._controller.stats()

    def _commit_row(self, request: Request, plan: RowPlan, row: RowResult, now: float) -> RequestUpdate:
        taken, reason = commit_row(request, plan, row, self.kv, now)
        if reason is not None:
            self._finish(request, reason)
        return new_record(RequestUpdate, (request, taken, reason is not None))

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self.adapters.leave(request)
            self._newest.side_by_side = self._before.side_by_side = None
            self.kv.release(request.rid)
            self._removed.append(request.rid)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_time = self._clock()
        self._controller.forget(request.rid)
        del self._requests[request.rid]

    def unfinished_counts(self) -> list[SpeculationCounts]:
        """Counters of the requests whose end no update has reported yet, so that totals need not wait for it."""
        counts = [request.counts for request in self._requests.values()]
        return counts + [update.request.counts for update in self._finished]

    def check_integrity(self) -> None:
        """Raise AssertionError, naming what is wrong, if the books do not agree."""
        check_books(self.kv, self._requests, self._running, self._waiting)
        self.adapters.check(self._running)
