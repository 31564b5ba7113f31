"""The whole of `draftwise profile`: points in their order, within a budget, written down as they come."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftwise import cpus, lifetime
from draftwise.config.engine import EngineConfig
from draftwise.engine.builder import Engine, build_engine
from draftwise.plan.acceptance import AcceptanceCounts
from draftwise.plan.profile import Profile, length_name
from draftwise.profile.measure import Measurer
from draftwise.profile.points import AcceptPoint, Point, PromptPoint, RestPoint, StepPoint, plan_points

OWN = "own"
"""The kind of text of a user's own prompts."""
_OUTPUT = 64
_SKIPPED = ("extract_hidden_states", "synthetic", "none")


@dataclass(frozen=True)
class ProfileSettings:
    """``budget``: seconds; None: until all is measured. ``rounds``: visits to each size. They lie apart in time, since
    a machine may be slow for a while. ``pause``: seconds; it is measured what comes after one; 0: it is not."""

    path: Path
    drafts: Sequence[int]
    requests: Sequence[int]
    contexts: Sequence[int] | None
    methods: Sequence[str] | None
    budget: float | None = None
    with_acceptance: bool = True
    rounds: int = 3
    pause: float = 0.4


def machine(device: str, threads: int | None = None) -> dict[str, Any]:
    """The facts that times depend on: processor, cores, threads of an engine (None: its own choice), GPU."""
    found: dict[str, Any] = {
        "cpu": cpus.model().name,
        "cores": cpus.processors().allowed,
        "platform": platform.machine(),
        "device": device,
        "threads": threads or cpus.default_threads(torch.get_num_threads()),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return found


def model_name(config: EngineConfig) -> str:
    """The engine and machine that a profile names."""
    return "embedded" if config.embedded else str(config.model)


@contextmanager
def _engine(config: EngineConfig, clock: Callable[[], float]) -> Iterator[Engine]:
    # What steps take is measured step by step; plans and simulations have no rounds.
    with lifetime.computing():
        engine = build_engine(replace(config, rounds_per_step=1), clock)
    try:
        yield engine
    finally:
        engine.core.close()


def ladder(most: int) -> list[int]:
    """1, 2, 4, ... up to and with ``most``."""
    out = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return out if out[-1] == most else [*out, most]


def lengths(longest: int, count: int = 8) -> list[int]:
    """Up to ``count`` lengths from 32 on, by equal factors. Example: up to 1000 in 4: 32, 101, 317, 1000."""
    least = min(32, longest)
    factor = (longest / least) ** (1 / max(count - 1, 1))
    return sorted({round(least * factor**i) for i in range(count)})


class Profiler:
    """Measures one engine into a `Profile`; several, one after the other, for several formats of weights."""

    def __init__(
        self,
        profile: Profile,
        settings: ProfileSettings,
        texts: Callable[[Engine, int | None], Mapping[str, Sequence[Sequence[int]]]],
        clock: Callable[[], float] = time.monotonic,
        engine_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``texts``: prompts by kind of text, token ids, for an engine's tokenizer, of so many tokens; none of a kind
        that has none so long; None: as long as they usually are, and every kind. `OWN` are as they are.
        ``clock``: of the budget; ``engine_clock``: what steps are timed by."""
        self._engine_clock = engine_clock
        self.profile = profile
        self._settings, self._texts, self._clock = settings, texts, clock
        self._until = math.inf if settings.budget is None else clock() + settings.budget
        self._start = clock()
        self._before = profile.seconds

    def measure(
        self, config: EngineConfig, weights: str, total: Callable[[int], Callable[[str], None]]
    ) -> bool:
        """Measure what is missing. ``total``: told how many points there are, answers what is to be called after each.
        False: the budget ran out before all was measured."""
        with _engine(config, self._engine_clock) as engine:
            return self.measure_engine(engine, weights, total)

    def measure_engine(
        self, engine: Engine, weights: str, total: Callable[[int], Callable[[str], None]]
    ) -> bool:
        """The same with an engine that is there, has nothing to do, and is timed by ``engine_clock``."""
        texts = self._texts(engine, None)
        stream = [token for prompts in texts.values() for prompt in prompts for token in prompt]
        measurer = Measurer(engine, stream)
        setting = self.profile.settings.setdefault(weights, measurer.setting(weights))
        methods = self._methods(engine.config)
        points = self._points(engine, methods, list(texts), setting.kv_tokens)
        todo: list[Point] = []
        for n in range(self._settings.rounds):
            visits = [p for p in points if self._visits(p, weights) <= n]
            todo += [p for p in visits if n == 0 or not isinstance(p, AcceptPoint)]
        advance = total(len(todo))
        if todo and self._clock() < self._until:
            measurer.warm(methods, max(self._settings.drafts, default=1))
        for number, point in enumerate(todo):
            if self._clock() >= self._until:
                self._note(len(todo) - number)
                return False
            self._one(measurer, point, weights)
            self._note(len(todo) - number - 1)
            advance(_words(point))
        return True

    def _methods(self, config: EngineConfig) -> list[str]:
        loaded = [d.method for d in config.drafters if d.method not in _SKIPPED]
        asked = self._settings.methods
        return loaded if asked is None else [m for m in loaded if m in asked]

    def _points(self, engine: Engine, methods: list[str], kinds: list[str], kv_tokens: int) -> list[Point]:
        s = self._settings
        longest = min(engine.processor.max_model_len, kv_tokens) - 96
        contexts = [c for c in (s.contexts or lengths(longest, 4)) if c <= longest]
        most = engine.core.scheduler.config.max_num_seqs
        return plan_points(
            methods,
            s.drafts,
            [n for n in s.requests if n <= most],
            contexts or [min(32, longest)],
            lengths(longest),
            [kind for kind in kinds if kind != OWN] if s.with_acceptance else [],
            kv_tokens,
            engine.processor.max_model_len,
            s.pause,
            [kind for kind in kinds if kind == OWN] if s.with_acceptance else [],
        )

    def _visits(self, point: Point, weights: str) -> float:
        """How often this was measured. Acceptance does not hang on the moment: once is enough."""
        setting = self.profile.settings[weights]
        if isinstance(point, AcceptPoint):
            parts = self.profile.accepted.get(point.kind, {}).get(point.method, {})
            known = parts if point.context is None else length_name(point.context) in parts
            return math.inf if known else 0
        if isinstance(point, RestPoint):
            return 0 if setting.rest is None else setting.rest.rounds
        if isinstance(point, PromptPoint):
            prompt = setting.prompt(point.method, point.tokens)
            return 0 if prompt is None else prompt.rounds
        step = setting.step(point.method, point.drafts, point.requests, point.context)
        return 0 if step is None else step.rounds

    def _one(self, measurer: Measurer, point: Point, weights: str) -> None:
        setting = self.profile.settings[weights]
        if isinstance(point, RestPoint):
            setting.add_rest(measurer.rest(point.pause))
        elif isinstance(point, PromptPoint):
            setting.add_prompt(measurer.prompt(point))
        elif isinstance(point, StepPoint):
            sample = measurer.step(point)
            if sample is not None:
                setting.add_step(sample)
        else:
            prompts = self._texts(measurer.engine, point.context).get(point.kind, ())
            parts = self.profile.accepted.setdefault(point.kind, {}).setdefault(point.method, {})
            if point.context is not None:
                parts.setdefault(length_name(point.context), AcceptanceCounts())
            for tokens, counts in measurer.accepted(
                point.method, max(self._settings.drafts), prompts, _OUTPUT
            ):
                parts.setdefault(length_name(tokens), AcceptanceCounts()).merge(counts)

    def _note(self, left: int) -> None:
        self.profile.left = left
        self.profile.seconds = self._before + self._clock() - self._start
        self.profile.save(self._settings.path)


def _words(point: Point) -> str:
    if isinstance(point, PromptPoint):
        return f"prompt of {point.tokens}" + ("" if point.method == "none" else f" read by {point.method}")
    if isinstance(point, RestPoint):
        return f"after a pause of {point.pause:g} s"
    if isinstance(point, AcceptPoint):
        behind = "" if point.context is None else f" behind {point.context} tokens"
        return f"{point.method} on {point.kind}{behind}"
    how = "plain" if point.method == "none" else f"{point.method} K={point.drafts}"
    return f"{how}, {point.requests} x {point.context}"
