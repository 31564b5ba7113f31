"""From options to a trained head in its folder: data, target, head, loop, export."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError
from draftwise.models.tokenizer import load_tokenizer
from draftwise.train.continuations import continue_prompts
from draftwise.train.folders import make_folder, whole_file
from draftwise.train.progress import RunBar

from .args import TrainOptions
from .build import build_head, feature_layers, recipe_of
from .data import Split, TextSource, cut, split
from .export import export_draft, export_head, write_json
from .parallel import Ranks, joined, with_ranks
from .plot import draw_history
from .shards import ShardSource, read_shards
from .student import DraftStudent
from .teacher import EngineTeacher
from .text import Tokens, read_documents, tokenize
from .trainer import BatchSource, HeadTrainer, RunOptions


def train_head(options: TrainOptions, console: Console) -> dict[str, Any]:
    """Carry out one training run and return what is known of it; the folder is `options.out`.

    With several processes (`options.data_parallel_size`, or torchrun's) the first one answers; torchrun's others give
    an empty record.

    Raises:
        ConfigError, ModelLoadError: bad options, text, shards or target; named.
        DraftwiseError: another process failed.
    """
    options.check()
    others = partial(_join, options)
    return with_ranks(options.data_parallel_size, options.device, partial(_train, options, console), others)


def _join(options: TrainOptions, rank: int, address: str) -> None:
    """The work of a process that `with_ranks` started."""
    with joined(options.device, rank, options.data_parallel_size, address) as ranks:
        _train(options, Console(quiet=True), ranks)


def _train(options: TrainOptions, console: Console, ranks: Ranks) -> dict[str, Any]:
    if not ranks.first:
        console = Console(quiet=True)
    if options.threads:
        torch.set_num_threads(options.threads)
    target = Path(options.target) if options.target else embedded_path("target")
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    teacher = EngineTeacher(options.target or target, (), dtype, ranks.device)
    teacher.choose_features(feature_layers(options, teacher.config.num_layers))
    if ranks.first:
        make_folder(options.out, "--out")
        make_folder(options.work or options.out / "work", "--work")
    source, pieces = _source(options, teacher, ranks)
    head, made = build_head(options, teacher, pieces)
    head.to(ranks.device)
    run = RunOptions(
        work=options.work or options.out / "work",
        accumulate=options.accumulate,
        budget_minutes=options.budget_minutes,
        compile=options.compile,
        checkpoint_seconds=options.checkpoint_seconds,
        evaluate_every=options.evaluate_every,
    )
    trainer = HeadTrainer({options.kind: head}, recipe_of(options), run, source, ranks)
    trainer.identity = {
        "kind": options.kind,
        "target": _describe(teacher),
        "data": pieces.fingerprint(),
        **made,
    }
    if options.resume and trainer.checkpoint.exists():
        trainer.load()
        console.print(f"resumed at step {trainer.state.step}", highlight=False)
    elif trainer.checkpoint.exists() and not options.resume:
        raise ConfigError(f"{trainer.checkpoint} exists: --resume continues it, another --work starts anew")
    ranks.wait()  # no rank writes a checkpoint before all have looked for one
    counts = {side: sum(len(p.ids) for p in getattr(pieces, side)) for side in ("train", "heldout")}
    console.print(f"tokens: {counts['train']:,} to learn, {counts['heldout']:,} held out", highlight=False)
    run_watched(trainer, console)
    if not ranks.first:
        return {}
    record = provenance(options, trainer, counts)
    _export(options, head, teacher, trainer, record)
    return record


def run_watched(trainer: HeadTrainer, console: Console) -> None:
    """Train to the end and show it; an interruption says how to go on."""
    try:
        with Monitor(console) as monitor:
            trainer.run(monitor.report)
    except KeyboardInterrupt:
        kept = f"{trainer.checkpoint} is saved, --resume continues"
        if trainer.saved_step is None:
            kept = "nothing is saved"
        elif trainer.saved_step != trainer.state.step:
            kept = f"{trainer.checkpoint} has step {trainer.saved_step}, --resume continues there"
        console.print(f"interrupted at step {trainer.state.step}; {kept}", highlight=False)
        raise


def _source(options: TrainOptions, teacher: EngineTeacher, ranks: Ranks) -> tuple[BatchSource, Split]:
    recipe = recipe_of(options)
    least = max(plan.unrolls for plan in recipe.plans.values()) + 2 * options.stride + 1
    if options.shards is not None:
        shards = read_shards(options.shards, teacher, options.max_length)
        pieces = split(shards.pieces, options.heldout_share)
        return ShardSource(pieces, teacher, options.batch_size, least, shards=shards), pieces
    tokenizer = load_tokenizer(str(teacher.folder))
    documents = [tokenize(document, tokenizer) for document in read_documents(options.data)]
    limit = min(options.max_length, teacher.config.max_model_len)
    pieces = split(cut(documents, limit), options.heldout_share)
    if options.own_text:
        if not ranks.first:
            ranks.wait()  # for the first process to write it
        own = _own_text(options, teacher, pieces, limit)
        if ranks.first:
            ranks.wait()
        pieces = Split(pieces.train + own, pieces.heldout)
    return TextSource(pieces, teacher, options.batch_size, least), pieces


def _own_text(options: TrainOptions, teacher: EngineTeacher, pieces: Split, limit: int) -> list[Tokens]:
    """Return prompts from the training text with what the target says after them; kept in the work folder, for
    the next run that asks for the same."""
    work = options.work or options.out / "work"
    file = work / "own-text.json"
    length = min(limit, 256)
    start = length // 4
    train = [p.ids for p in pieces.train if len(p.ids) >= start] or [p.ids for p in pieces.train]
    prompts = []
    for i in range(options.own_text):
        ids = train[i % len(train)]
        first = (i // len(train) * start) % max(1, len(ids) - start + 1)
        prompts.append(ids[first : first + start])
    told = json.dumps([str(teacher.folder.resolve()), prompts, length, options.seed])
    asked = hashlib.sha256(told.encode()).hexdigest()
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if isinstance(kept, dict) and kept["asked"] == asked:
        rows = kept["rows"]
    else:
        rows = continue_prompts(teacher.folder, prompts, length - start, seed=options.seed)
        work.mkdir(parents=True, exist_ok=True)
        write_json(file, {"asked": asked, "rows": rows})
    return [Tokens(ids, [i >= start for i in range(len(ids))]) for ids in rows]


class Monitor(RunBar):
    """Shows a run: a bar on a terminal, a line now and then elsewhere; every evaluation on a line of its own."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._last = time.monotonic()

    def report(self, trainer: HeadTrainer, seen: Mapping[str, Tensor]) -> None:
        """Take note of one step."""
        state, steps = trainer.state, trainer.recipe.schedule.steps
        shown = " ".join(f"{name}: loss {s[0, 0]:.3f}, accepted {s[0, 1]:.3f}" for name, s in seen.items())
        speed = state.tokens / max(1e-9, state.seconds) if state.seconds else 0.0
        numbers = f"{state.step}/{steps or '?'}  {shown}  {speed:,.0f} tokens/s"
        self._bar.update(self._task, completed=state.step, total=steps or None, numbers=numbers)
        now = time.monotonic()
        if self._bar.disable and (now - self._last > 10 or state.step == steps):
            self._last = now
            self._say(numbers)
        if state.history and state.history[-1]["step"] == state.step:
            for data, heads in state.history[-1].items():
                if isinstance(heads, dict):
                    for name, s in heads.items():
                        self._say(
                            f"{name} on {data}: {s['greedy_length']:.3f} tokens per step greedy, "
                            f"{s['sampled_length']:.3f} at temperature 1, loss {s['loss']:.3f}"
                        )

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)


def provenance(options: TrainOptions, trainer: HeadTrainer, counts: Mapping[str, int]) -> dict[str, Any]:
    """Return what `provenance.json` holds."""
    state = trainer.state
    return {
        "made_by": f"draftwise train {options.kind}",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokens_trained": state.tokens,
        "training_seconds": round(state.seconds),
        "text_tokens": dict(counts),
        **trainer.identity,
        "measured": {k: v for k, v in state.history[-1].items() if isinstance(v, dict)}
        if state.history
        else {},
        "recipe": asdict(trainer.recipe),
        "history": state.history,
    }


def _describe(teacher: EngineTeacher) -> dict[str, Any]:
    c = teacher.config
    return {
        "architecture": c.architecture,
        "num_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
    }


def _export(
    options: TrainOptions,
    head: nn.Module,
    teacher: EngineTeacher,
    trainer: HeadTrainer,
    record: Mapping[str, Any],
) -> None:
    out = options.out
    if isinstance(head, DraftStudent):
        export_draft(head, teacher.folder, out, teacher.config.eos_token_ids, record)
    else:
        export_head(
            head,
            out,
            teacher.config.raw,
            feature_layers=teacher.feature_layers,
            provenance=record,
            dtype=teacher.dtype,
            verifier=str(Path(options.target).absolute())
            if Path(options.target).is_dir()
            else options.target,
        )
    picture = draw_history(trainer.state.history, trainer.options.work)
    with whole_file(out / picture.name) as partial:
        shutil.copyfile(picture, partial)
