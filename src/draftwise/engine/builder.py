"""Builds an engine from its configuration: models, drafters, cache size, scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftwise.adapt.adaptive import AdaptiveController
from draftwise.adapt.controller import Controller, StaticController
from draftwise.adapt.performance import PerformanceModel
from draftwise.collector import collector_paused
from draftwise.config import EngineConfig
from draftwise.engine.adapters import Adapters
from draftwise.engine.core import EngineCore
from draftwise.engine.device import Device, build_device, load_engine_tokenizer, make_grammars
from draftwise.engine.facts import DeviceFacts
from draftwise.engine.outputs import Guarantees
from draftwise.engine.processor import Processor
from draftwise.engine.publishing import CachePublisher
from draftwise.engine.ranks import start_ranks
from draftwise.engine.surroundings import building, check_real, own_device
from draftwise.errors import ConfigError
from draftwise.kv.manager import KVManager
from draftwise.models.base import DecoderModel
from draftwise.propose.grammar import GrammarProposer
from draftwise.runner.executor import Executor
from draftwise.runner.threaded import ThreadedExecutor
from draftwise.sched.scheduler import Scheduler, SchedulerConfig

logger = logging.getLogger("draftwise")

_ROUNDS = 32
"""Rounds of a step at most, unless `EngineConfig.rounds_per_step` says so: of more, each saves little."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that `LLM` and `AsyncLLM` share."""

    config: EngineConfig
    core: EngineCore
    processor: Processor
    device: Device | None  # None: it is in other processes
    guarantees: Guarantees
    kv_cache_bytes: int
    adapters: Adapters

    @property
    def model(self) -> DecoderModel:
        """The target model of an engine in this process."""
        assert self.device is not None, "the model is in other processes"
        return self.device.model


def check_alone(config: EngineConfig) -> EngineConfig:
    """The configuration of an engine that a program makes. Raises ConfigError if it asks for several engines."""
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size: {config.data_parallel_size} engines behind one port need draftwise serve; in "
            "a program, make several engines"
        )
    return config


@collector_paused()
def build_engine(
    config: EngineConfig, clock: Callable[[], float] = time.perf_counter, *, keep_trace: bool = False
) -> Engine:
    """Load everything a config names. Raises ConfigError or ModelLoadError."""
    check_real(ConfigError)
    with building.take(), own_device():
        return _build(config, clock, keep_trace)


def _build(config: EngineConfig, clock: Callable[[], float], keep_trace: bool) -> Engine:
    device: Device | None = None
    executor: Executor
    if config.has_ranks:
        executor, facts = start_ranks(config)
        tokenizer = load_engine_tokenizer(config)
        grammars = make_grammars(config, facts, tokenizer)
    else:
        device = build_device(config, clock)
        executor, facts = device.executor, device.facts
        tokenizer, grammars = device.tokenizer, device.grammars
    recurrent = facts.most_drafts is not None
    if config.async_scheduling:
        executor = ThreadedExecutor(executor)
    rounds = config.rounds_per_step or _ROUNDS
    if config.rounds_per_step and rounds > executor.most_rounds:
        executor.close()
        raise ConfigError(
            "rounds_per_step: only native code on a CPU computes several rounds in a step, in one process and without "
            "async_scheduling; leave it at 1"
        )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=facts.num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunked_prefill=config.enable_chunked_prefill,
            max_adapters=config.max_loras,
        ),
        # A prefix's keys are no use without the state behind it.
        KVManager(
            facts.num_blocks,
            config.block_size,
            config.enable_prefix_caching and not recurrent,
            window=_window(facts),
        ),
        _controller(config, facts),
        clock,
        min(rounds, executor.most_rounds),
    )
    processor = Processor(
        facts.model,
        tokenizer,
        config.drafters,
        facts.drafters,
        default_method=config.default_method,
        max_model_len=facts.max_model_len,
        seed=config.seed,
        clock=clock,
        keep_trace=keep_trace,
        grammars=grammars,
        limits=config.request_limits,
        most_drafts=facts.most_drafts,
        elsewhere=device is None,
    )
    if not config.speculative:
        logger.info("no speculative_config: decoding plainly; try speculative_config={'method': 'ngram'}")
    core = EngineCore(scheduler, executor, clock, ahead=bool(config.async_scheduling))
    if config.kv_events_config.publishes:
        publisher = CachePublisher(config.kv_events_config, config.block_size, config.data_parallel_rank)
        core.at_close(publisher.close)
        if not core.observe_cache(publisher.publish):
            logger.warning("kv_events_config has no effect: this engine caches no prefixes")
    return Engine(
        config=config,
        core=core,
        processor=processor,
        device=device,
        guarantees=_guarantees(facts, config),
        kv_cache_bytes=facts.cache_bytes,
        adapters=Adapters(
            core,
            enabled=config.enable_lora,
            most=config.max_cpu_loras or config.max_loras,
            max_rank=config.max_lora_rank,
        ),
    )


def _window(facts: DeviceFacts) -> int | None:
    """The most tokens that a row reads, if all layers of the target have a window and no drafter stores keys."""
    windows = facts.model.sliding_window
    if any(window is None for window in windows) or any(t.has_storage for t in facts.drafters.values()):
        return None
    return max((window for window in windows if window is not None), default=None)


def _controller(config: EngineConfig, facts: DeviceFacts) -> Controller:
    drafters = facts.drafters
    tables = {
        d.method: d.num_speculative_tokens_per_batch_size
        for d in config.drafters
        if d.num_speculative_tokens_per_batch_size
    }
    if config.speculation_control == "static":
        return StaticController(tables)
    evident = {name for name, drafter in drafters.items() if drafter.evident}
    # A drafter that stores nothing of past tokens, such as Medusa, is not told of them.
    observing = {name for name, d in drafters.items() if d.observes and d.has_storage}
    model = PerformanceModel()
    model.teach_passes(facts.pass_times or ())
    return AdaptiveController(
        tables,
        evident | {GrammarProposer.name},
        observing,
        ahead=bool(config.async_scheduling),
        seated=facts.pass_times is not None,
        model=model,
    )


def _guarantees(facts: DeviceFacts, config: EngineConfig) -> Guarantees:
    reasons: list[str] = []
    lossy = [d.rule for d in config.drafters if d.rule in ("typical", "synthetic")]
    if lossy:
        reasons.append(f"rule {lossy[0]!r} changes the distribution")
    if not facts.same_bits and config.batch_invariant:
        reasons.append(
            "every sum has one order, but that this kind of device computes all rows of a tile alike has not been shown"
        )
    elif not facts.same_bits:
        reasons.append(
            "plain torch products round differently for different numbers of rows: outputs are equal in distribution, "
            "and equal in text unless two tokens tie within rounding"
        )
    if facts.most_drafts is not None:
        reasons.append(
            "recurrent state is kept behind every draft and taken up where drafts end; drafts and plain tokens are "
            "computed one by one in the same way"
        )
    exact = facts.same_bits and not lossy
    return Guarantees(lossless=not lossy, same_bits=exact, same_seed_same_text=exact, reasons=tuple(reasons))


def tokenizer_of(engine: Engine) -> Any:
    """The engine's tokenizer; raises ConfigError if it was built without."""
    if engine.processor.tokenizer is None:
        raise ConfigError("the engine has no tokenizer (skip_tokenizer_init)")
    return engine.processor.tokenizer
