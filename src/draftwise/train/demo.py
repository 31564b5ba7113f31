"""The recipe of the embedded demo models: a target and a draft model, trained on the standard library.

Run it with `draftwise train demo`. Stages:

1. tokenizer: byte-level BPE on the training files.
2. joint: the target learns the text; in the same step the draft model learns the target's distribution. The
   learning rate is held, then falls to zero; the last steps use sequences as long as the advertised context.
3. distil: the draft model alone, on the target that no longer changes.
4. export: both models as Hugging Face folders, with what was measured on files neither model has seen.

With a time budget the lengths of the stages follow from the speed that is seen. They are recorded in
`provenance.json`, and `--recipe provenance.json` repeats them. See `docs/demo-models.md`.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from .acceptance import measure_acceptance
from .demo_args import add_arguments, options_from
from .demo_data import Corpus, build_corpus, heldout_prompts, read_source, stdlib_files, train_tokenizer
from .demo_export import export_model
from .demo_recipe import DemoRecipe, RunOptions, TrainState, recipe_to_json
from .demo_trainer import Trainer
from .folders import make_folder, whole_file
from .progress import RunBar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LINE_EVERY = 10
_VALIDATE_EVERY = 200


def prepare(recipe: DemoRecipe, options: RunOptions) -> tuple[Tokenizer, Corpus]:
    """Train the tokenizer, or take it from the work folder if it is there, and tokenise the corpus."""
    from tokenizers import Tokenizer

    files = stdlib_files(options.root)
    path = options.work / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        training = (read_source(f) for f in files if f.kind == "library" and not f.heldout)
        tokenizer = train_tokenizer((text for text in training if text), recipe.target.vocab_size)
        options.work.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            tokenizer.save(str(partial))
    return tokenizer, build_corpus(tokenizer, files)


class Monitor(RunBar):
    """Shows a run: a progress bar on a terminal, a line now and then elsewhere; validates and checkpoints."""

    def __init__(self, console: Console, trainer: Trainer) -> None:
        super().__init__(console)
        self._trainer = trainer
        self._saved = time.monotonic()
        self._recent = [(self._saved, trainer.state.draft_tokens)]

    def report(self, state: TrainState, steps: int, losses: dict[str, float]) -> None:
        """Take note of one step: `steps` is the stage's length, 0 while unknown."""
        now = time.monotonic()
        self._recent.append((now, state.draft_tokens))
        del self._recent[:-21]
        (then, before), (_, tokens) = self._recent[0], self._recent[-1]
        speed = (tokens - before) / max(1e-9, now - then)
        left = self._seconds_left(state, steps)
        shown = " ".join(f"{key} {value:.3f}" for key, value in losses.items())
        numbers = f"{state.step}/{steps or '?'}  {shown}  {speed:,.0f} tokens/s  {left / 60:.1f} min left"
        done = state.stage_seconds / max(1e-9, state.stage_seconds + left)
        self._bar.update(self._task, description=state.stage, completed=done, total=1.0, numbers=numbers)
        last = state.step == steps
        if self._bar.disable and (state.step % _LINE_EVERY == 0 or last):
            self._say(f"{state.stage} {numbers}")
        if state.step % _VALIDATE_EVERY == 0 or last:
            scores = self._trainer.validate(self._trainer.options.validation_windows)
            state.history.append({"step": state.step, "tokens": state.draft_tokens, **scores})
            self._say("held out: " + " ".join(f"{key} {value:.4f}" for key, value in scores.items()))
        if now - self._saved > self._trainer.options.checkpoint_seconds:
            self._trainer.save()
            self._saved = now

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def _seconds_left(self, state: TrainState, steps: int) -> float:
        if steps:
            return (steps - state.step) * state.stage_seconds / max(1, state.step)
        minutes = self._trainer.options.minutes(state.stage)
        return max(0.0, minutes * 60 - state.stage_seconds)


def keep_freed_memory() -> None:
    """Have glibc reuse freed memory instead of returning it: steps are a third faster. A no-op elsewhere."""
    m_trim_threshold, m_mmap_max = -1, -4
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def train(recipe: DemoRecipe, options: RunOptions, console: Console) -> tuple[Trainer, Tokenizer]:
    """Run or continue the recipe; the checkpoint is in `options.work`."""
    tokenizer, corpus = prepare(recipe, options)
    counts = [sum(map(len, group)) for group in (corpus.library, corpus.test, corpus.heldout)]
    console.print("tokens: library {:,}, tests {:,}, held out {:,}".format(*counts), highlight=False)
    trainer = Trainer(recipe, options, corpus)
    if options.resume and trainer.checkpoint.exists():
        trainer.load()
        console.print(f"resumed in stage {trainer.state.stage} at step {trainer.state.step}")
    with Monitor(console, trainer) as monitor:
        trainer.run(monitor.report)
    return trainer, tokenizer


def measure(
    trainer: Trainer, tokenizer: Tokenizer, prompts: int = 24, num_tokens: int = 128
) -> dict[str, Any]:
    """Evaluate both models on the held-out files: loss, agreement, acceptance of chains of 4."""
    corpus = trainer.corpus
    scores = trainer.validate(0)
    tokens = sum(map(len, corpus.heldout))
    bits = scores["loss"] / 0.6931471805599453
    chosen = [p.token_ids for p in heldout_prompts(tokenizer, prompts, 64, root=trainer.options.root)]
    acceptance = {
        f"temperature_{temperature:g}": measure_acceptance(
            trainer.target, trainer.draft, chosen, num_tokens=num_tokens, num_draft=4, temperature=temperature
        ).as_json()
        for temperature in (0.0, 0.8)
    }
    return {
        "heldout_tokens": tokens,
        "heldout_bytes": corpus.heldout_bytes,
        "target_nats_per_token": round(scores["loss"], 4),
        "target_bits_per_byte": round(bits * tokens / corpus.heldout_bytes, 4),
        "draft_nats_per_token": round(scores["draft_loss"], 4),
        "argmax_agreement": round(scores["agreement"], 4),
        "overlap_temperature_1": round(scores["overlap"], 4),
        "acceptance_k4": acceptance,
    }


def provenance(trainer: Trainer, measured: dict[str, Any]) -> dict[str, Any]:
    """Return what `provenance.json` holds: how the weights came to be and what was measured."""
    state = trainer.state
    return {
        "made_by": "draftwise train demo",
        "date": datetime.now(UTC).date().isoformat(),
        "text": "CPython standard library, " + platform.python_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "target_tokens": state.tokens,
        "draft_tokens": state.draft_tokens,
        "training_seconds": round(state.seconds),
        "measured": measured,
        "recipe": recipe_to_json(trainer.recipe),
        "history": [{k: round(v, 4) for k, v in point.items()} for point in state.history],
    }


def export(trainer: Trainer, tokenizer: Tokenizer, out: Path, record: dict[str, Any]) -> None:
    """Write `out/target` and `out/draft`."""
    export_model(trainer.target, tokenizer, out / "target", record)
    export_model(trainer.draft, tokenizer, out / "draft", record)


def run(args: argparse.Namespace) -> int:
    """Carry out `draftwise train demo`."""
    console = Console(file=sys.stdout)
    recipe, options = options_from(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    keep_freed_memory()
    make_folder(args.out, "--out")
    make_folder(options.work, "--work")
    trainer, tokenizer = train(recipe, options, console)
    measured = measure(trainer, tokenizer)
    export(trainer, tokenizer, args.out, provenance(trainer, measured))
    console.print_json(data=measured)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m draftwise.train.demo`."""
    parser = argparse.ArgumentParser(prog="draftwise train demo", description="Train the demo models.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
