"""The training loop of the demo recipe: joint training of target and draft model, then distillation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .checkpoint import read_checkpoint, write_checkpoint
from .demo_data import Corpus, join_files
from .demo_model import DemoLlama
from .demo_optim import MuonAdam
from .demo_recipe import DemoRecipe, RunOptions, TrainState, recipe_from_json, recipe_to_json


def windows(corpus: Corpus, recipe: DemoRecipe, first_step: int) -> Iterator[Tensor]:
    """Yield batches (batch_windows, max_positions + 1) int64 from `first_step` on; what step i gets never varies."""
    length, size = recipe.target.max_positions, recipe.batch_windows
    step = 0
    for epoch in corpus.window_epochs(length, recipe.seed, recipe.test_parts):
        for start in range(0, len(epoch) - size + 1, size):
            if step >= first_step:
                yield torch.from_numpy(epoch[start : start + size].astype("int64"))
            step += 1


def cut(batch: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """Split windows (n, length + 1) into inputs and labels of shape (n * pieces, length / pieces)."""
    length = (batch.shape[1] - 1) // pieces
    return batch[:, :-1].reshape(-1, length), batch[:, 1:].reshape(-1, length)


class Trainer:
    """Holds models, optimisers and state of one run, and moves them on step by step."""

    def __init__(self, recipe: DemoRecipe, options: RunOptions, corpus: Corpus) -> None:
        self.recipe, self.options, self.corpus = recipe, options, corpus
        self.state = TrainState()
        self.target = DemoLlama(recipe.target, recipe.seed)
        self.draft = DemoLlama(recipe.draft, recipe.seed + 1)
        self.target_optim = MuonAdam(self.target, recipe.muon_lr, recipe.adam_lr, recipe.weight_decay)
        self.draft_optim = MuonAdam(
            self.draft, recipe.draft_muon_lr, recipe.draft_adam_lr, recipe.weight_decay
        )
        self._compiled_at = 0.0
        maybe_compile: Callable[[Any], Any] = (
            (lambda fn: torch.compile(fn, dynamic=False)) if options.compile else (lambda fn: fn)
        )
        self._target_loss = maybe_compile(self._target_loss_plain)
        self._draft_loss = maybe_compile(self._draft_loss_plain)
        self._target_logits = maybe_compile(self._target_logits_plain)

    def _target_loss_plain(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.target(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits.detach()

    def _target_logits_plain(self, inputs: Tensor) -> Tensor:
        return self.target(inputs)  # type: ignore[no-any-return]

    def _draft_loss_plain(self, inputs: Tensor, teacher: Tensor, variation: float) -> tuple[Tensor, Tensor]:
        """Return (loss, total variation distance) of the draft model to the teacher's logits."""
        log_q = F.log_softmax(self.draft(inputs).float(), -1)
        log_p = F.log_softmax(teacher.float(), -1)
        p = log_p.exp()
        divergence = (p * (log_p - log_q)).sum(-1).mean()
        distance = 0.5 * (p - log_q.exp()).abs().sum(-1).mean()
        return divergence + variation * distance, distance.detach()

    def joint_step(self, batch: Tensor, factor: float, draft_factor: float, pieces: int) -> dict[str, float]:
        """Move target and draft model one step on; returns the losses."""
        inputs, labels = cut(batch, pieces)
        loss, logits = self._target_loss(inputs, labels)
        loss.backward()
        self.target_optim.step(factor)
        draft_loss, distance = self._draft_loss(inputs, logits, 0.0)
        draft_loss.backward()
        self.draft_optim.step(draft_factor)
        return {"loss": loss.item(), "draft": draft_loss.item(), "accept": 1 - distance.item()}

    def distil_step(self, batch: Tensor, factor: float) -> dict[str, float]:
        """Move the draft model one step on, the target standing still."""
        inputs, _ = cut(batch, 1)
        with torch.no_grad():
            logits = self._target_logits(inputs)
        draft_loss, distance = self._draft_loss(inputs, logits, self.recipe.variation_weight)
        draft_loss.backward()
        self.draft_optim.step(factor)
        return {"draft": draft_loss.item(), "accept": 1 - distance.item()}

    @property
    def checkpoint(self) -> Path:
        """Where the run is saved."""
        return self.options.work / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        saved = {
            "recipe": recipe_to_json(self.recipe),
            "progress": asdict(self.state),
            "target": self.target.state_dict(),
            "draft": self.draft.state_dict(),
            "target_optim": self.target_optim.state_dict(),
            "draft_optim": self.draft_optim.state_dict(),
        }
        write_checkpoint(self.checkpoint, saved)

    def load(self) -> None:
        """Continue from the checkpoint, with the schedule that was fixed when it was written. Raises ConfigError."""
        saved = read_checkpoint(self.checkpoint, "progress")
        self.recipe = recipe_from_json(saved["recipe"])
        self.state = TrainState(**saved["progress"])
        self.target.load_state_dict(saved["target"])
        self.draft.load_state_dict(saved["draft"])
        self.target_optim.load_state_dict(saved["target_optim"])
        self.draft_optim.load_state_dict(saved["draft_optim"])

    def validate(self, count: int) -> dict[str, float]:
        """Evaluate on the first `count` held-out windows (0: all), one after the other, in bfloat16.

        Returns the target's loss (nats per token), the draft model's loss, the share of positions where both
        have the same argmax, and the mean chance that a draft token drawn at temperature 1 is accepted.
        """
        length = self.recipe.target.max_positions
        stream = torch.from_numpy(join_files(self.corpus.heldout).astype("int64"))
        starts = list(range(0, len(stream) - length - 1, length))
        if count:
            starts = starts[:: max(1, len(starts) // count)][:count]
        sums = torch.zeros(4)
        with torch.no_grad():
            for start in starts:
                inputs, labels = stream[None, start : start + length], stream[start + 1 : start + length + 1]
                p = F.log_softmax(self.target(inputs)[0].float(), -1)
                q = F.log_softmax(self.draft(inputs)[0].float(), -1)
                same = (p.argmax(-1) == q.argmax(-1)).float().mean()
                overlap = torch.minimum(p.exp(), q.exp()).sum(-1).mean()
                sums += torch.stack([F.nll_loss(p, labels), F.nll_loss(q, labels), same, overlap])
        loss, draft_loss, same_, overlap_ = (sums / max(1, len(starts))).tolist()
        return {"loss": loss, "draft_loss": draft_loss, "agreement": same_, "overlap": overlap_}

    def run(self, report: Callable[[TrainState, int, dict[str, float]], None]) -> bool:
        """Train to the end; returns False if `stop_after` stopped it first."""
        done_here = 0
        for stage in ("joint", "distil"):
            if self.state.stage != stage:
                continue
            clock = time.monotonic()
            batches = windows(self.corpus, self.recipe, self._first_batch(stage))
            while True:
                steps = self._plan(stage)
                if steps and self.state.step >= steps:
                    break
                losses = self._one_step(stage, next(batches))
                done_here += 1
                report(self.state, steps, losses)
                # Validation and checkpoints inside `report` count: the budget is one of wall-clock time.
                now = time.monotonic()
                self.state.seconds += now - clock
                self.state.stage_seconds += now - clock
                clock = now
                if done_here == self.options.stop_after:
                    self.save()
                    return False
            if stage == "joint":
                self.state.stage, self.state.step, self.state.stage_seconds = "distil", 0, 0.0
                self.save()
        self.state.stage = "done"
        self.save()
        return True

    def _first_batch(self, stage: str) -> int:
        # The distil stage reads on where the joint stage stopped.
        return self.state.step + (self.recipe.joint.steps if stage == "distil" else 0)

    def _one_step(self, stage: str, batch: Tensor) -> dict[str, float]:
        recipe, state = self.recipe, self.state
        tokens = batch.shape[0] * (batch.shape[1] - 1)
        if stage == "joint":
            warm = min(1.0, (state.step + 1) / recipe.joint.warmup_steps)
            factor, pieces = warm, recipe.short_cut
            if recipe.joint.steps:
                factor = recipe.joint.factor(state.step)
                pieces = 1 if state.step >= recipe.joint.steps - recipe.long_steps else recipe.short_cut
            # The draft model keeps enough of its rate to follow the target; it settles in the distil stage.
            draft_factor = max(factor, recipe.distil_factor * warm)
            losses = self.joint_step(batch, factor, draft_factor, pieces)
            state.tokens += tokens
        else:
            factor = recipe.distil.factor(state.step) if recipe.distil.steps else 1.0
            losses = self.distil_step(batch, recipe.distil_factor * factor)
        state.draft_tokens += tokens
        state.step += 1
        return losses

    def _plan(self, stage: str) -> int:
        """Return the stage's number of steps; 0 until the time budget has fixed it."""
        state, options, recipe = self.state, self.options, self.recipe
        if stage == "joint":
            if recipe.joint.steps:
                return recipe.joint.steps
            budget = options.joint_minutes * 60
            if state.stage_seconds < budget * (1 - recipe.decay_share) or state.step < 2:
                return 0
            left = (budget - state.stage_seconds) * state.step / state.stage_seconds
            decay = max(1, round(left))
            steps = state.step + decay
            joint = replace(recipe.joint, steps=steps, decay_steps=decay)
            self.recipe = replace(recipe, joint=joint, long_steps=round(recipe.long_share * steps))
            return steps
        if not recipe.distil.steps:
            compiled, measured = 5, 25
            if state.step <= compiled:
                self._compiled_at = state.stage_seconds
            if state.step < measured and options.distil_minutes > 0:
                return 0
            left = options.distil_minutes * 60 - state.stage_seconds
            rate = (measured - compiled) / max(1e-9, state.stage_seconds - self._compiled_at)
            steps = state.step + max(0, round(left * rate))
            # The steps that measured the speed ran at the full rate.
            distil = replace(recipe.distil, steps=steps, decay_steps=max(1, steps - measured))
            self.recipe = replace(recipe, distil=distil)
        return self.recipe.distil.steps
