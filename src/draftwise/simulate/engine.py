"""One simulated engine: everything of a real one but the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.controller import Controller, StaticController
from draftwise.engine.core import EngineCore
from draftwise.errors import ConfigError
from draftwise.kv.manager import KVManager
from draftwise.plan.acceptance import AcceptanceModel
from draftwise.plan.times import StepTimes
from draftwise.sampling.params import SamplingParams
from draftwise.sched.request import Request, RequestUpdate
from draftwise.sched.scheduler import Scheduler, SchedulerConfig
from draftwise.simulate.executor import Clock, SimulatedExecutor
from draftwise.types import IntArray, Speculation

_PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
ADAPTIVE = "adaptive"
_MOST_BLOCKS = 1 << 22
"""Each block takes some 40 bytes in each simulated engine."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The drafting policy: ``drafts`` per step with one method, always ("static") or where it pays ("adaptive")."""

    method: str = "none"
    drafts: int = 0
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.drafts <= 63:
            raise ConfigError(f"drafts: expected 0 to 63, got {self.drafts}")

    @property
    def name(self) -> str:
        if self.adaptive:
            return ADAPTIVE
        return "plain" if self.method == "none" or not self.drafts else f"K={self.drafts}"

    def speculation(self) -> Speculation:
        """The speculation of each request."""
        if self.method == "none" or not self.drafts:
            return Speculation()
        return Speculation(self.method, self.drafts)

    def controller(self) -> Controller:
        """A fresh one."""
        return AdaptiveController() if self.adaptive else StaticController()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of an engine, as `EngineConfig` names them. ``num_kv_blocks`` None: as many as the performance model
    says."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    num_kv_blocks: int | None = None
    block_size: int = 16
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        numbers = (self.max_num_seqs, self.max_num_batched_tokens, self.block_size, self.num_kv_blocks or 1)
        if min(numbers) < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "engine: expected sizes of at least 1, and max_num_batched_tokens of at least max_num_seqs"
            )

    def blocks(self, times: StepTimes) -> int:
        """Blocks of the cache. Raises ConfigError if their number is not given, or is too large to simulate."""
        found = self.num_kv_blocks
        if found is None:
            if times.kv_tokens is None:
                raise ConfigError(
                    "num_kv_blocks: the performance model does not say how much the cache holds"
                )
            found = max(times.kv_tokens // self.block_size, 1)
        if found > _MOST_BLOCKS:
            raise ConfigError(
                f"num_kv_blocks: at most {_MOST_BLOCKS:,} blocks can be simulated, got {found:,}"
            )
        return found


class SimulatedEngine:
    """Scheduler, cache and controller of one replica, on a clock of its own."""

    def __init__(
        self,
        times: StepTimes,
        acceptance: AcceptanceModel,
        policy: Policy,
        settings: EngineSettings,
        seed: int = 0,
    ) -> None:
        self.clock = Clock()
        self.policy = policy
        self._speculation = policy.speculation()
        self.executor = SimulatedExecutor(times, acceptance, self.clock, seed)
        self.kv = KVManager(settings.blocks(times), settings.block_size, settings.prefix_caching)
        config = SchedulerConfig(settings.max_num_seqs, settings.max_num_batched_tokens)
        self.scheduler = Scheduler(config, self.kv, policy.controller(), self.clock)
        self.core = EngineCore(self.scheduler, self.executor, self.clock)

    def add(self, rid: int, tokens_np: IntArray, output: int, arrived: float, kind: str = "") -> Request:
        """Queue a request with a prompt ``tokens_np`` [n] that ends after ``output`` tokens; the scheduler's record
        of it.

        Raises:
            RequestError: it can never be served here.
        """
        request = Request(
            rid,
            tokens_np,
            _PARAMS,
            self._speculation,
            max_total=len(tokens_np) + output,
            seed=0,
            arrival_time=arrived,
        )
        self.core.add(request)
        if kind:
            self.executor.kinds[rid] = kind
        return request

    def step(self, now: float) -> list[RequestUpdate]:
        """Begin a step at ``now``; afterwards the clock stands at its end."""
        self.clock.now = now
        updates = self.core.step()
        if self.executor.kinds:
            for update in updates:
                if update.finished:
                    self.executor.kinds.pop(update.request.rid, None)
        return updates

    def bring(self, tokens_np: IntArray) -> bool:
        """Write the K/V of a prompt that was computed elsewhere into the cache, as far as it fills blocks. False: there
        is no room now. What is brought is found by `add` of the same tokens, unless it was evicted before."""
        kv = self.kv
        cached, _ = kv.open(_BROUGHT, tokens_np)
        count = (len(tokens_np) - 1) // kv.block_size * kv.block_size - cached
        if count > 0 and kv.reserve(_BROUGHT, count) is None:
            kv.release(_BROUGHT)
            return False
        if count > 0:
            kv.commit(_BROUGHT, count, tokens_np)
        kv.release(_BROUGHT)
        return True

    @property
    def drafts_wanted(self) -> float:
        """Drafts per request that decodes, as the controller has it now."""
        if not self.policy.adaptive:
            return float(self.policy.drafts)
        groups = self.scheduler.control_stats().groups
        requests = sum(g.num_requests for g in groups)
        return sum(g.cap * g.num_drafting for g in groups) / requests if requests else 0.0


_BROUGHT = -1
"""The request that brings blocks: it is open only while it does."""


def prompt_tokens(length: int, name: int, blocks: tuple[int, ...] = (), block: int = 512) -> IntArray:
    """[length] int32: tokens of a prompt that shares nothing with others of another ``name``, but for its ``blocks`` of
    ``block`` tokens, which are equal where their names are.

    Example: length 5, blocks (8, 9) of 2: 8 8 9 9 and one token of its own.
    """
    own = np.full(length, (name * 2_654_435_761 + 1) & 0x7FFFFFFF, np.int32)
    if blocks:
        shared_np = np.repeat(np.asarray(blocks, np.int64) & 0x7FFFFFFF, block)[:length]
        own[: len(shared_np)] = shared_np
    return own
