"""Continuous batching without phases: every step, each request gets some of its tokens computed."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from draftwise.adapt.controller import Controller, ControlStats, StepShape
from draftwise.errors import RequestError
from draftwise.kv.manager import KVManager
from draftwise.sched.ahead import outlook
from draftwise.sched.request import Request, RequestStatus, RequestUpdate, SpeculationCounts, StepTrace
from draftwise.types import NewRequest, RowPlan, RowResult, StepPlan, StepResult, tree_depth

MAX_TRACE_STEPS = 4096
"""Steps a request remembers when its trace is kept; what comes later is not traced, so that a trace is bounded."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``max_num_batched_tokens``: rows of one step, drafts included. ``chunked_prefill`` off: a prompt is
    computed in one step or not at all."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True


class Scheduler:
    """Decides what each step computes and takes in what came of it. The only writer of a `Request`."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        controller: Controller,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.kv = kv
        self._controller = controller
        self._clock = clock
        self._requests: dict[int, Request] = {}
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._running: list[Request] = []  # sorted by Request.order
        self._removed: list[int] = []  # the executor still has them
        self._planned: dict[int, RowPlan] = {}  # rows of the newest plan
        self._flying: dict[int, RowPlan] = {}  # of the one before it, while that was not taken in
        self._trimmed: dict[int, int] = {}
        self._batch_size = 0
        self._shape = StepShape()  # of the newest plan
        self._flying_shape = self._shape  # of the one before it
        self._refused = -1  # the waiting request that found no room, and the free blocks it found
        self._refused_free = 0
        self._finished: list[RequestUpdate] = []  # cancelled between steps
        self._step = 0
        self.num_preemptions = 0

    # ------------------------------------------------------------------------------------------ requests

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests) or bool(self._finished)

    def check(self, num_prompt: int, max_total: int) -> None:
        """Raise RequestError if a request of this size could never be served, even alone."""
        capacity = self.kv.num_blocks * self.kv.block_size
        # The last token is never computed, it needs no slot.
        if max_total - 1 > capacity:
            raise RequestError(
                f"the request needs up to {max_total - 1} cache slots ({num_prompt} prompt tokens + "
                f"{max_total - num_prompt} output tokens) but the whole KV cache has {capacity}; lower max_tokens "
                "or raise kv_cache_memory / num_kv_blocks"
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
        heapq.heappush(self._waiting, (request.order, request))

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
        """Plan a step: running requests first, in order of priority and arrival, then waiting ones.

        One plan may be made ahead: before the step of the newest one was taken in. Who cannot be planned without
        knowing what that step does waits for the next plan, which may then be empty.
        """
        self._step += 1
        assert not self._flying, "two steps have not been taken in"
        self._flying, self._planned = self._planned, {}
        self._trimmed = {}
        # What will run once everybody who can is admitted: the first of many must not draft as if it were alone.
        self._batch_size = min(len(self._requests), self.config.max_num_seqs)
        self._flying_shape = self._shape
        self._shape = StepShape(note=self._controller.begin(self._batch_size))
        left = self.config.max_num_batched_tokens
        preempted = self.num_preemptions
        for request in list(self._running):
            if left == 0:
                break
            if request.status is RequestStatus.RUNNING:  # not preempted by one before it
                left -= self._plan_running(request, left)
        new: list[NewRequest] = []
        if preempted == self.num_preemptions:  # no room was found for those that run: admit nobody
            while left > 0 and len(self._running) < self.config.max_num_seqs:
                admitted = self._admit(left)
                if admitted is None:
                    break
                new.append(admitted)
                left -= self._planned[admitted.rid].num_new
        plan = StepPlan(
            step=self._step,
            rows=tuple(self._planned.values()),
            new=tuple(new),
            removed=tuple(self._removed),
            trimmed=tuple(self._trimmed.items()),
        )
        self._removed = []
        assert plan.rows or self._flying or not self._requests, "work is waiting but nothing could be planned"
        return plan

    def _plan_running(self, request: Request, left: int) -> int:
        """Plan one running request with at most ``left`` rows; preempts others, or it, when the cache is full."""
        missing, proposed, before = request.num_tokens - request.num_computed, request.num_proposed, 0
        flying = self._flying.get(request.rid)
        if flying is not None:
            expected = outlook(request, flying)
            if expected is None:
                return 0
            missing, proposed, before = expected
        num_new = min(missing, left)
        if num_new < missing and not self.config.chunked_prefill:
            return 0
        num_draft = budget = 0
        if num_new == missing:
            if proposed:
                num_draft = self._controller.nodes_to_verify(request.rid, proposed)
                num_draft = min(num_draft, left - num_new)
            budget = self._controller.draft_budget(request.rid, request.speculation, self._batch_size)
        while True:
            blocks = self.kv.reserve(request.rid, before + num_new + num_draft + budget)
            if blocks is not None:
                break
            if flying is not None:
                return 0
            # Cheapest first: what others reserved ahead, then drafting, then somebody's place.
            if self._trim_others(request):
                continue
            if budget or num_draft:
                budget = num_draft = 0
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        follow = request.rid not in self._controller.resting
        self._planned[request.rid] = RowPlan(request.rid, num_new, num_draft, budget, blocks, follow)
        shape = self._shape
        if num_new == missing == 1:
            shape.requests += 1
            shape.rows += 1 + num_draft
            shape.context += request.num_computed
            shape.sampled = shape.sampled or request.speculation.rule != "greedy"
        else:
            shape.prompt_rows += num_new + num_draft
        return num_new + num_draft

    def _trim_others(self, request: Request) -> bool:
        """Take back lookahead blocks of requests that have no row in this step yet."""
        gained = False
        for other in self._running:
            if other is request or any(other.rid in t for t in (self._planned, self._flying, self._trimmed)):
                continue
            before = len(self.kv.block_ids(other.rid))
            kept = self.kv.trim(other.rid)
            if kept < before:
                self._trimmed[other.rid] = kept
                gained = True
        return gained

    def _preempt(self, victim: Request) -> None:
        """Give up the request's cache; it is computed again from its tokens (and what the prefix cache kept)."""
        assert victim.rid not in self._planned, "victims are later in the order than what is planned"
        self.num_preemptions += 1
        victim.num_preemptions += 1
        self._running.remove(victim)
        self.kv.release(victim.rid)
        self._trimmed.pop(victim.rid, None)
        self._removed.append(victim.rid)
        victim.status = RequestStatus.WAITING
        victim.num_computed = victim.num_proposed = 0
        if victim.prompt_logprobs is not None and len(victim.prompt_logprobs) < victim.num_prompt:
            victim.prompt_logprobs = [None]
        heapq.heappush(self._waiting, (victim.order, victim))

    def _admit(self, left: int) -> NewRequest | None:
        """Admit the first waiting request if its tokens fit the budget and the cache."""
        while self._waiting and self._waiting[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._waiting)  # cancelled while waiting
        if not self._waiting:
            return None
        request = self._waiting[0][1]
        if self._running and self._refused == request.rid and self.kv.num_free <= self._refused_free:
            return None  # nothing was freed since: do not match its prefix again every step
        wants_prompt_logprobs = (
            request.prompt_logprobs is not None and len(request.prompt_logprobs) < request.num_prompt
        )
        known = request.known_np
        cached, blocks = self.kv.open(
            request.rid, known, use_cache=not wants_prompt_logprobs and not request.speculation.whole_prompt
        )
        num_new = min(request.num_tokens - cached, left)
        completes = num_new == request.num_tokens - cached
        budget = 0
        self._controller.admit(request.rid, request.speculation, request.num_tokens - cached)
        if completes:
            budget = self._controller.draft_budget(request.rid, request.speculation, self._batch_size)
        # All known tokens must fit now, even if their computation takes several steps: admitting on the first
        # chunk alone makes requests preempt each other half-way.
        fits = completes or self.config.chunked_prefill
        if fits and self._running:
            needed = -(-request.num_tokens // self.kv.block_size) - len(blocks)
            fits = needed <= self.kv.num_free
        fresh = self.kv.reserve(request.rid, num_new + budget) if fits else None
        if fits and fresh is None and budget:
            budget = 0
            fresh = self.kv.reserve(request.rid, num_new)
        if fresh is None:
            self.kv.release(request.rid)
            self._refused, self._refused_free = request.rid, self.kv.num_free
            return None
        self._refused = -1
        heapq.heappop(self._waiting)
        request.status = RequestStatus.RUNNING
        request.num_computed = cached
        request.num_cached = (
            max(request.num_cached, cached) if request.num_preemptions == 0 else request.num_cached
        )
        if request.scheduled_time is None:
            request.scheduled_time = self._clock()
        # Keep the running list in order: later ones are preempted first.
        index = len(self._running)
        while index and self._running[index - 1].order > request.order:
            index -= 1
        self._running.insert(index, request)
        follow = request.rid not in self._controller.resting
        self._planned[request.rid] = RowPlan(request.rid, num_new, 0, budget, fresh, follow)
        self._shape.prompt_rows += num_new
        return NewRequest(
            rid=request.rid,
            token_ids_np=known.copy(),
            num_prompt=request.num_prompt,
            max_total=request.max_total,
            sampling=request.params,
            seed=request.seed,
            sample_index=request.sample_index,
            speculation=request.speculation,
            num_computed=cached,
            block_ids=blocks,
            stop_token_ids=request.stop_token_ids,
            bad_words_ids=request.bad_words_ids,
            prompt_logprobs=request.params.prompt_logprobs if wants_prompt_logprobs else None,
        )

    # -------------------------------------------------------------------------------------------- commit

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        """Take in a step: commit K/V, append tokens, apply stop conditions. Rows of requests that were
        cancelled meanwhile are ignored."""
        updates, self._finished = self._finished, []
        now = self._clock()
        # Steps are taken in in their order: the one before the newest plan first.
        planned = self._flying if result.step < self._step else self._planned
        for row in result.rows:
            request = self._requests.get(row.rid)
            plan = planned.get(row.rid)
            if request is None or plan is None or request.status is not RequestStatus.RUNNING:
                continue
            if row.error is not None:
                request.error = row.error
                self._finish(request, "error")
                updates.append(RequestUpdate(request, 0, True))
                continue
            updates.append(self._commit_row(request, plan, row, now))
        planned.clear()
        return updates

    def learn(self, result: StepResult, seconds: float | None) -> None:
        """Tell the controller what the committed step took, see `Controller.observe`."""
        shape = self._flying_shape if result.step < self._step else self._shape
        self._controller.observe(result, shape, seconds)

    def control_stats(self) -> ControlStats:
        """What the controller has decided."""
        return self._controller.stats()

    def _commit_row(self, request: Request, plan: RowPlan, row: RowResult, now: float) -> RequestUpdate:
        if row.prompt_logprobs is not None:
            assert request.prompt_logprobs is not None
            request.prompt_logprobs.extend(row.prompt_logprobs)
        request.num_proposed = row.num_proposed
        if not row.token_ids:  # a chunk that did not reach the last known token
            self.kv.commit(request.rid, plan.num_new, request.known_np)
            request.num_computed += plan.num_new
            return RequestUpdate(request, 0, False)

        if row.kv_transfer_params is not None:
            request.kv_transfer_params = row.kv_transfer_params
        taken, reason = request.append(row.token_ids)
        if request.logprobs is not None:
            assert row.logprobs is not None
            request.logprobs.extend(row.logprobs[:taken])
        # K/V exists for the new tokens and the accepted drafts; of a cut step only what was delivered counts.
        accepted = min(row.num_accepted, taken)
        computed = plan.num_new + accepted
        self.kv.commit(request.rid, computed, request.known_np)
        request.num_computed += computed
        request.counts.add(row.method, row.num_drafted, accepted, tree_depth(row.draft_parents))
        if request.trace is not None and len(request.trace) < MAX_TRACE_STEPS:
            request.trace.append(
                StepTrace(
                    row.method, row.draft_tokens, row.draft_parents, row.accepted_nodes, row.token_ids[:taken]
                )
            )
        if request.first_token_time is None:
            request.first_token_time = now
        request.last_token_time = now
        if reason is not None:
            self._finish(request, reason)
        return RequestUpdate(request, taken, reason is not None)

    def _finish(self, request: Request, reason: str) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self.kv.release(request.rid)
            self._removed.append(request.rid)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finished_time = self._clock()
        self._controller.forget(request.rid)
        del self._requests[request.rid]

    def unfinished_counts(self) -> list[SpeculationCounts]:
        """Counters of the requests whose end no update has reported yet, so that totals need not wait for it."""
        counts = [request.counts for request in self._requests.values()]
        return counts + [update.request.counts for update in self._finished]

    # ----------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise AssertionError, naming what is wrong, if the books do not agree."""
        self.kv.check_integrity()
        assert self._running == sorted(self._running, key=lambda r: r.order), "running list out of order"
        for request in self._running:
            assert request.status is RequestStatus.RUNNING, f"request {request.rid} runs as {request.status}"
            assert self._requests.get(request.rid) is request, f"request {request.rid} runs but is unknown"
            committed = self.kv.num_committed(request.rid)
            assert committed == request.num_computed, (
                f"request {request.rid}: cache has {committed} tokens, scheduler {request.num_computed}"
            )
            assert request.num_computed < request.num_tokens, f"request {request.rid} has nothing to compute"
        waiting = {r.rid for _, r in self._waiting if r.status is RequestStatus.WAITING}
        expected = set(self._requests) - {r.rid for r in self._running}
        assert waiting == expected, f"waiting {sorted(waiting)} but expected {sorted(expected)}"
        if not self._running:
            assert self.kv.num_used == 0, f"{self.kv.num_used} blocks are held by nobody"
