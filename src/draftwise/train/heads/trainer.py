"""The training loop of draft heads: one or several heads on one pass of the target."""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from draftwise.errors import ConfigError
from draftwise.train.demo_optim import MuonAdam
from draftwise.train.demo_recipe import Schedule

from .batch import HeadBatch, chosen_rows
from .evaluate import evaluate_head
from .losses import Distillation


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """How one head is trained."""

    unrolls: int
    """Steps over the head's own outputs; for Medusa the number of heads."""
    decay: float = 0.8
    """Weight of an unroll relative to the one before."""
    variation: float = 1.0
    """Weight of the total variation distance beside the cross-entropy."""
    muon_lr: float = 0.02
    adam_lr: float = 0.002


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """What decides the weights, beside the data. Steps of 0 are chosen from the time budget."""

    plans: dict[str, HeadPlan]
    seed: int = 0
    stride: int = 2
    """One of so many rows is trained; all give keys and values."""
    schedule: Schedule = field(default_factory=lambda: Schedule(steps=0, decay_steps=0))
    decay_share: float = 0.45
    """Share of the run in which the learning rate falls, where a budget decides."""
    weight_decay: float = 0.1


def recipe_from_json(data: dict[str, Any]) -> HeadRecipe:
    """Undo `dataclasses.asdict` of a recipe."""
    plans = {name: HeadPlan(**plan) for name, plan in data["plans"].items()}
    return HeadRecipe(**{**data, "plans": plans, "schedule": Schedule(**data["schedule"])})


@dataclass(slots=True)
class HeadState:
    """What is known while training runs; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where and how to run: nothing here changes the weights that given steps lead to."""

    work: Path
    budget_minutes: float = 0.0
    compile: bool = False
    checkpoint_seconds: float = 180.0
    evaluate_every: int = 200
    stop_after: int = 0
    """Stop, as if interrupted, after so many steps of this process (0: never)."""


class BatchSource(Protocol):
    """Gives batches; which one a step gets depends on the step alone."""

    def batch(self, step: int, recipe: HeadRecipe) -> HeadBatch:
        """Return the batch of 0-based `step`."""
        ...

    def heldout(self) -> Mapping[str, Iterable[HeadBatch]]:
        """Return what evaluation runs on, by name."""
        ...


class TrainedHead(Protocol):
    """What the trainer needs of a head."""

    def loss(
        self,
        batch: HeadBatch,
        rows: Tensor,
        unrolls: int,
        decay: float,
        variation: float,
        distil: Distillation,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and [unrolls, 2]: cross-entropy and chance of acceptance of each."""
        ...


class _Interrupts(AbstractContextManager["_Interrupts"]):
    """Takes note of Ctrl-C instead of breaking a step in two; only the main thread can."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class HeadTrainer:
    """Holds heads, optimisers and state of one run, and moves them on step by step.

    Args:
        heads: by name; each has a plan in the recipe.
    """

    def __init__(
        self, heads: dict[str, nn.Module], recipe: HeadRecipe, options: RunOptions, source: BatchSource
    ) -> None:
        self.heads, self.recipe, self.options, self.source = heads, recipe, options, source
        self.state = HeadState()
        self.identity: dict[str, Any] = {}
        """What a checkpoint must agree on to be resumed: the target, the text."""
        self.optims = {
            name: MuonAdam(
                head,
                recipe.plans[name].muon_lr,
                recipe.plans[name].adam_lr,
                recipe.weight_decay,
                adam=("embed", "lm_head", *_medusa_outputs(head)),
            )
            for name, head in heads.items()
        }
        self._distil = Distillation(options.compile)

    def train_step(self, batch: HeadBatch, factor: float) -> dict[str, Tensor]:
        """Move every head one step on; returns each one's statistics [unrolls, 2]."""
        recipe, seen = self.recipe, {}
        for name, head in self.heads.items():
            plan = recipe.plans[name]
            # a fixed function of the step, so that a resumed run takes the same rows
            offset = (self.state.step * 7 + recipe.seed) % recipe.stride
            rows = chosen_rows(batch.ids.shape[1], plan.unrolls, recipe.stride, offset)
            loss, statistics = cast(TrainedHead, head).loss(
                batch, rows, plan.unrolls, plan.decay, plan.variation, self._distil
            )
            loss.backward()  # type: ignore[no-untyped-call]
            self.optims[name].step(factor)
            seen[name] = statistics
        return seen

    def evaluate(self) -> dict[str, Any]:
        """Evaluate every head on the held-out batches: {data: {head: numbers}}."""
        return {
            data: {
                name: evaluate_head(head, batches, self.recipe.plans[name].unrolls)
                for name, head in self.heads.items()
            }
            for data, batches in self.source.heldout().items()
        }

    @property
    def checkpoint(self) -> Path:
        """Where the run is saved."""
        return self.options.work / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        path = self.checkpoint
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = {
            "recipe": asdict(self.recipe),
            "identity": self.identity,
            "state": asdict(self.state),
            "heads": {name: head.state_dict() for name, head in self.heads.items()},
            "optims": {name: optim.state_dict() for name, optim in self.optims.items()},
        }
        torch.save(saved, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self) -> None:
        """Continue from the checkpoint, with the recipe that it was written with.

        Raises:
            ConfigError: it cannot be read, or is of another run; what differs is named.
        """
        try:
            saved = torch.load(self.checkpoint, weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{self.checkpoint} cannot be read: {error}") from error
        before = saved.get("identity", {})
        other = sorted(name for name in before | self.identity if before.get(name) != self.identity.get(name))
        if other:
            raise ConfigError(
                f"{self.checkpoint} is of another run: {', '.join(other)} differ; choose another --work"
            )
        self.recipe = recipe_from_json(saved["recipe"])
        self.state = HeadState(**saved["state"])
        for name, head in self.heads.items():
            head.load_state_dict(saved["heads"][name])
            self.optims[name].load_state_dict(saved["optims"][name])

    def run(self, report: Callable[[HeadTrainer, dict[str, Tensor]], None]) -> bool:
        """Train to the end; returns False if `stop_after` stopped it first.

        Ctrl-C takes effect between two steps, after a checkpoint; a second one at once, without.
        """
        state, done_here, saved = self.state, 0, time.monotonic()
        clock = saved
        with _Interrupts() as interrupts:
            while True:
                steps = self._plan_steps()
                if steps and state.step >= steps:
                    break
                seen = self._one_step(steps)
                done_here += 1
                if state.step % self.options.evaluate_every == 0 or state.step == steps:
                    state.history.append({"step": state.step, "tokens": state.tokens, **self.evaluate()})
                report(self, seen)
                now = time.monotonic()
                state.seconds += now - clock
                clock = now
                stop = interrupts.asked or done_here == self.options.stop_after
                if stop or now - saved > self.options.checkpoint_seconds:
                    self.save()
                    saved = now
                if interrupts.asked:
                    raise KeyboardInterrupt
                if stop:
                    return False
        self.save()
        return True

    def _one_step(self, steps: int) -> dict[str, Tensor]:
        state, schedule = self.state, self.recipe.schedule
        warm = min(1.0, (state.step + 1) / schedule.warmup_steps)
        batch = self.source.batch(state.step, self.recipe)
        seen = self.train_step(batch, schedule.factor(state.step) if steps else warm)
        state.step += 1
        state.tokens += int((batch.segments >= 0).sum())
        return seen

    def _plan_steps(self) -> int:
        """Return the number of steps; 0 until the time budget has fixed it."""
        state, recipe = self.state, self.recipe
        if recipe.schedule.steps:
            return recipe.schedule.steps
        budget = self.options.budget_minutes * 60
        if state.seconds < budget * (1 - recipe.decay_share) or state.step < 2:
            return 0
        decay = max(1, round((budget - state.seconds) * state.step / state.seconds))
        schedule = replace(recipe.schedule, steps=state.step + decay, decay_steps=decay)
        self.recipe = replace(recipe, schedule=schedule)
        return schedule.steps


def _medusa_outputs(head: nn.Module) -> tuple[str, ...]:
    layers = getattr(head, "num_layers", None)
    return () if layers is None else (f".{layers}.weight",)
