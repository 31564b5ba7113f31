"""Scheduler and KV manager under random arrivals, draft trees, acceptances, cancellations and preemptions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.fakes.fake_executor import VOCAB, FakeExecutor, LateExecutor, expected_output

from draftwise.adapt.controller import StaticController
from draftwise.engine.core import EngineCore
from draftwise.errors import RequestError
from draftwise.kv.manager import KVManager
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.types import Speculation

MAX_LEN = 40


class Engine(RuleBasedStateMachine):
    @initialize(
        extra_blocks=st.one_of(st.integers(0, 6), st.integers(20, 80)),
        block_size=st.sampled_from([1, 3, 4]),
        budget=st.integers(4, 30),
        seqs=st.integers(1, 6),
        seed=st.integers(0, 1000),
        caching=st.booleans(),
        mode=st.sampled_from(["in step", "ahead", "late"]),
        chunks=st.booleans(),
        rounds=st.sampled_from([1, 8]),
        places=st.integers(1, 2),
    )
    def start(
        self,
        extra_blocks: int,
        block_size: int,
        budget: int,
        seqs: int,
        seed: int,
        caching: bool,
        mode: str,
        chunks: bool,
        rounds: int,
        places: int,
    ) -> None:
        """``mode``: steps are taken in at once, or one later; and then the device may be late, too. ``rounds``: blocks
        are found for so many, of which the executor computes one. ``places``: for adapters."""
        # One request fits alone; with few extra blocks, two seldom do.
        num_blocks = -(-MAX_LEN // block_size) + extra_blocks
        self.time = 0.0
        ahead = mode != "in step"
        self.executor = FakeExecutor(num_blocks, block_size, seed, max(budget, seqs), ahead)
        self.scheduler = Scheduler(
            SchedulerConfig(seqs, max(budget, seqs), chunks, max_adapters=places),
            KVManager(num_blocks, block_size, caching),
            StaticController(),
            self.clock,
            rounds,
        )
        device = LateExecutor(self.executor) if mode == "late" else self.executor
        self.core = EngineCore(self.scheduler, device, self.clock, ahead=ahead)
        self.core.adapters.update((adapter, {}) for adapter in range(1, 5))
        self.requests: list[Request] = []
        self.added: dict[int, int] = {}

    def clock(self) -> float:
        self.time += 1e-4  # there is time for several rounds
        return self.time

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
        shared=st.booleans(),
        max_tokens=st.integers(1, 25),
        k=st.integers(0, 8),
        priority=st.integers(0, 1),
        adapter=st.sampled_from([0, 0, 1, 2, 3, 4]),
    )
    def add(
        self, prompt: list[int], shared: bool, max_tokens: int, k: int, priority: int, adapter: int
    ) -> None:
        if shared:  # a prefix that others have too
            prompt = ([1, 2, 3, 4] * 4 + prompt)[:30]
        rid = len(self.requests)
        request = Request(
            rid,
            np.asarray(prompt, np.int32),
            SamplingParams(temperature=0, max_tokens=max_tokens),
            Speculation("fake" if k else "none", k),
            max_total=min(len(prompt) + max_tokens, MAX_LEN),
            seed=0,
            arrival_time=self.time,
            priority=priority,
            adapter=adapter,
        )
        if not self.scheduler.config.chunked_prefill and len(prompt) > self.executor.max_rows:
            with pytest.raises(RequestError, match="chunked prefill is off"):
                self.core.add(request)
            return
        self.requests.append(request)
        self.core.add(request)

    @rule(steps=st.integers(1, 2))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self._one_step()

    def _one_step(self) -> None:
        for update in self.core.step():
            self.added[update.request.rid] = self.added.get(update.request.rid, 0) + update.num_new

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.requests:
            self.core.cancel(data.draw(st.integers(0, len(self.requests) - 1)))

    @rule(adapter=st.integers(1, 4))
    def forget_adapter(self, adapter: int) -> None:
        if adapter not in self.scheduler.adapters_in_use():
            self.scheduler.adapters.forget(adapter)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "core"):
            self.core.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(10_000):
            if not self.core.has_work:
                break
            self._one_step()
        assert not self.core.has_work, "requests do not come to an end"
        self.core.check_integrity()
        assert self.scheduler.kv.num_used == 0
        self._one_step()  # the executor learns of the last ones
        while self.core.has_work:
            self._one_step()
        assert not self.executor.rows, "the executor keeps finished requests"
        assert self.executor.most_adapters <= self.scheduler.config.max_adapters
        for request in self.requests:
            prompt = request.tokens_np[: request.num_prompt].tolist()
            output = request.output_ids()
            assert output == expected_output(prompt, len(output)), "a token was lost, doubled or wrong"
            assert self.added.get(request.rid, 0) == len(output), "updates and output disagree"
            if request.finish_reason != "abort":
                assert request.finish_reason == "length" and request.num_tokens == request.max_total


Engine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestEngine = Engine.TestCase
_MANY = {"settings": settings(max_examples=120, stateful_step_count=40)}
TestManyEngines = pytest.mark.slow(type("TestManyEngines", (Engine.TestCase,), _MANY))
