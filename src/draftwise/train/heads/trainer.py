"""The training loop of draft heads: one or several heads on one pass of the target."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from draftwise.errors import ConfigError, DraftwiseError
from draftwise.train.checkpoint import read_checkpoint, write_checkpoint
from draftwise.train.demo_optim import MuonAdam
from draftwise.train.demo_recipe import Schedule

from .batch import HeadBatch, chosen_rows, random_rows
from .evaluate import evaluate_head
from .losses import Distillation
from .parallel import Learning, Ranks

_SAME = ("seed", "stride", "weight_decay")
"""Fields of `HeadRecipe` that a resumed run must be given as before."""


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
    anchors: int = 0
    """Rows of each text that are trained, chosen at random at every step; 0: one in `HeadRecipe.stride`."""


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """The settings that decide the weights, beside the data. Steps of 0 are chosen from the time budget."""

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
    """The state of training; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where and how to run: with `accumulate` and processes multiplied out, nothing here changes the weights that given
    steps lead to by more than rounding."""

    work: Path
    budget_minutes: float = 0.0
    compile: bool = False
    checkpoint_seconds: float = 180.0
    evaluate_every: int = 200
    stop_after: int = 0
    """Stop, as if interrupted, after so many steps of this process (0: never)."""
    accumulate: int = 1
    """Parts that a step's batch is computed in, one after the other: each process has one part's worth of memory."""


class BatchSource(Protocol):
    """Gives batches; which one a step gets depends on the step and the number of parts alone."""

    def batch(self, step: int, recipe: HeadRecipe, part: int = 0, parts: int = 1) -> HeadBatch:
        """Return one of `parts` parts of what 0-based `step` learns from: texts number `part`, `part + parts`, ..

        A part is as large as a whole batch is where there is one part.
        """
        ...

    def heldout(self) -> Mapping[str, Iterable[HeadBatch]]:
        """Return what evaluation runs on, by name."""
        ...


class _Interrupts(AbstractContextManager["_Interrupts"]):
    """Takes note of Ctrl-C instead of breaking a step in two; only the main thread can."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> _Interrupts:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # a shell's background job: it stays so
        if threading.current_thread() is threading.main_thread() and not ignored:
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
        ranks: the processes that train together.
    """

    def __init__(
        self,
        heads: dict[str, nn.Module],
        recipe: HeadRecipe,
        options: RunOptions,
        source: BatchSource,
        ranks: Ranks | None = None,
    ) -> None:
        self.heads, self.recipe, self.options, self.source = heads, recipe, options, source
        self.ranks = ranks or Ranks()
        self.state = HeadState()
        self.saved_step: int | None = None
        """The step that the checkpoint has; None: this run has none yet."""
        self.identity: dict[str, Any] = {}
        """The settings that a resumed checkpoint must share: the target, the text."""
        self.optims = {
            name: MuonAdam(
                head,
                recipe.plans[name].muon_lr,
                recipe.plans[name].adam_lr,
                recipe.weight_decay,
                adam=("embed", "lm_head", "markov_w", "confidence_head", *_medusa_outputs(head)),
            )
            for name, head in heads.items()
        }
        self._learning = {name: self.ranks.wrap(Learning(head)) for name, head in heads.items()}
        self._distil = Distillation(options.compile)

    def train_step(self, factor: float) -> dict[str, Tensor]:
        """Move every head one step on; returns each one's statistics [unrolls, 2], of this process's last part."""
        recipe, state, world = self.recipe, self.state, self.ranks.world
        seen: dict[str, Tensor] = {}
        weights = dict.fromkeys(self.heads, 0.0)
        accumulate = self.options.accumulate
        parts, tokens = accumulate * world, 0
        for number in range(accumulate):
            part = number * world + self.ranks.rank
            batch = self.source.batch(state.step, recipe, part, parts)
            tokens += int((batch.segments >= 0).sum())
            for name, learning in self._learning.items():
                plan = recipe.plans[name]
                rows = self._rows(plan, batch, part, parts)
                with self.ranks.hold(learning, number == accumulate - 1):
                    loss, weight, seen[name] = learning(
                        batch, rows, plan.unrolls, plan.decay, plan.variation, self._distil
                    )
                    loss.backward()
                weights[name] += float(weight)
        *totals, everything = self.ranks.sum(*weights.values(), tokens)
        for (name, head), total in zip(self.heads.items(), totals, strict=True):
            for parameter in head.parameters():
                if parameter.grad is not None:  # averaged over processes, added up over parts
                    parameter.grad.mul_(world / max(total, 1.0))
            self.optims[name].step(factor)
        state.tokens += int(everything)
        return seen

    def _rows(self, plan: HeadPlan, batch: HeadBatch, part: int, parts: int) -> Tensor:
        """The rows of a batch that are trained: a fixed function of the step, so that a resumed run takes the same
        rows."""
        step, recipe = self.state.step, self.recipe
        if plan.anchors:
            return random_rows(batch, plan.unrolls, plan.anchors, (recipe.seed, 3, step), part, parts)
        offset = (step * 7 + recipe.seed) % recipe.stride
        return chosen_rows(batch.ids.shape[1], plan.unrolls, recipe.stride, offset)

    def evaluate(self) -> dict[str, Any]:
        """Evaluate every head on the held-out batches: {data: {head: numbers}}."""
        return {
            data: {
                name: evaluate_head(head, batches, self.recipe.plans[name].unrolls)
                for name, head in self.heads.items()
            }
            for data, batches in self.source.heldout().items()
        }

    def _evaluate(self) -> dict[str, Any]:
        """As `evaluate`. Raises DraftwiseError if a head has come apart: nothing that follows would repair it."""
        found = self.evaluate()
        for name, numbers in (pair for heads in found.values() for pair in heads.items()):
            if not math.isfinite(numbers["loss"]):
                raise DraftwiseError(
                    f"the loss of {name} at step {self.state.step} is {numbers['loss']}: the run came apart; smaller "
                    "rates (--muon-lr, --adam-lr) and another --work begin anew"
                )
        return found

    @property
    def checkpoint(self) -> Path:
        """Where the run is saved."""
        return self.options.work / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        saved = {
            "recipe": asdict(self.recipe),
            "identity": self.identity,
            "texts": self._texts_per_step,
            "budget_minutes": self.options.budget_minutes,
            "state": asdict(self.state),
            "heads": {name: head.state_dict() for name, head in self.heads.items()},
            "optims": {name: optim.state_dict() for name, optim in self.optims.items()},
        }
        write_checkpoint(self.checkpoint, saved)
        self.saved_step = self.state.step

    def load(self) -> None:
        """Continue from the checkpoint, with the recipe that it was written with.

        Raises:
            ConfigError: it cannot be read, is of another run, or was begun with other settings; what differs is named.
        """
        saved = read_checkpoint(self.checkpoint, "heads")
        before = saved.get("identity", {})
        other = sorted(name for name in before | self.identity if before.get(name) != self.identity.get(name))
        if other:
            raise ConfigError(
                f"{self.checkpoint} is of another run: {', '.join(other)} differ; choose another --work"
            )
        self.recipe = self._same_settings(saved)
        self.state = HeadState(**saved["state"])
        self.saved_step = self.state.step
        for name, head in self.heads.items():
            head.load_state_dict(saved["heads"][name])
            self.optims[name].load_state_dict(saved["optims"][name])

    @property
    def _texts_per_step(self) -> int:
        return getattr(self.source, "batch_size", 1) * self.options.accumulate * self.ranks.world

    def _same_settings(self, saved: dict[str, Any]) -> HeadRecipe:
        """The recipe of a checkpoint, after a look at whether this run was asked for the same. Steps that a budget of
        time fixed stay; until then the budget may change."""
        before, asked = recipe_from_json(saved["recipe"]), self.recipe
        pairs: dict[str, tuple[Any, Any]] = {
            name: (getattr(before, name), getattr(asked, name)) for name in _SAME
        }
        for head, plan in asked.plans.items():
            old = asdict(before.plans[head]) if head in before.plans else {}
            pairs |= {
                name: (old.get(name), now) for name, now in asdict(plan).items() if old.get(name) != now
            }
        if before.schedule.steps:
            pairs["steps"] = before.schedule.steps, asked.schedule.steps or before.schedule.steps
        budget = saved.get("budget_minutes", self.options.budget_minutes)
        if before.schedule.steps or not (budget and self.options.budget_minutes):
            pairs["budget_minutes"] = budget, self.options.budget_minutes
        pairs["texts per step"] = saved.get("texts", self._texts_per_step), self._texts_per_step
        told = [
            f"{name.replace('_', '-')} {was}, not {now}" for name, (was, now) in pairs.items() if was != now
        ]
        if told:
            raise ConfigError(
                f"{self.checkpoint} was begun with {'; '.join(told)}: give what it was begun with, or another --work"
            )
        return before

    def run(self, report: Callable[[HeadTrainer, dict[str, Tensor]], None]) -> bool:
        """Train to the end; returns False if `stop_after` stopped it first.

        Ctrl-C takes effect between two steps, after a checkpoint; a second one at once, without. Of several processes
        the first one measures, reports and saves.
        """
        state, ranks, done_here, saved = self.state, self.ranks, 0, time.monotonic()
        clock = saved
        with _Interrupts() as interrupts:
            while True:
                steps = self._plan_steps()
                if steps and state.step >= steps:
                    break
                seen = self._one_step(steps)
                done_here += 1
                if ranks.first:
                    if state.step % self.options.evaluate_every == 0 or state.step == steps:
                        point = {"step": state.step, "tokens": state.tokens}
                        state.history.append(point | self._evaluate())
                    report(self, seen)
                now = time.monotonic()
                state.seconds += ranks.first_says(now - clock)  # all go by one clock
                clock = now
                asked = ranks.sum(interrupts.asked)[0] > 0
                stop = asked or done_here == self.options.stop_after
                if ranks.first and (stop or now - saved > self.options.checkpoint_seconds):
                    self.save()
                    saved = now
                if asked:
                    raise KeyboardInterrupt
                if stop:
                    return False
            if ranks.first:
                self.save()
            if interrupts.asked:
                raise KeyboardInterrupt
        return True

    def _one_step(self, steps: int) -> dict[str, Tensor]:
        state, schedule = self.state, self.recipe.schedule
        warm = min(1.0, (state.step + 1) / schedule.warmup_steps)
        seen = self.train_step(schedule.factor(state.step) if steps else warm)
        state.step += 1
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
