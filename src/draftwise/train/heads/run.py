"""From options to a trained head in its folder: data, target, head, loop, export."""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError
from draftwise.models.tokenizer import load_tokenizer
from draftwise.train.continuations import continue_prompts
from draftwise.train.demo_recipe import LlamaShape, Schedule
from draftwise.train.progress import RunBar

from .args import TrainOptions
from .data import Split, TextSource, coverage, cut, draft_vocabulary, split
from .export import export_draft, export_head, write_json
from .medusa import MedusaHeads
from .plot import draw_history
from .sequential import Eagle3Head, EagleHead, MtpHead
from .shards import ShardSource, read_shards
from .student import DraftStudent
from .teacher import EngineTeacher, default_feature_layers, head_shape
from .text import Tokens, read_documents, tokenize
from .trainer import BatchSource, HeadPlan, HeadRecipe, HeadTrainer, RunOptions

_UNROLLS = {"eagle3": 7, "mtp": 4, "eagle": 1}
_STUDENT_MEASURED = 4
"""Drafts that evaluation of a draft model looks ahead."""
_DECAY_SHARE = 0.45


def train_head(options: TrainOptions, console: Console) -> dict[str, Any]:
    """Carry out one training run and return what is known of it; the folder is `options.out`.

    Raises:
        ConfigError, ModelLoadError: bad options, text, shards or target; named.
    """
    options.check()
    if options.threads:
        torch.set_num_threads(options.threads)
    target = Path(options.target) if options.target else embedded_path("target")
    layers = options.feature_layers if options.kind == "eagle3" else ()
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    teacher = EngineTeacher(options.target or target, (), dtype, torch.device("cpu"))
    if options.kind == "eagle3":
        teacher.choose_features(layers or default_feature_layers(teacher.config.num_layers))
    source, pieces = _source(options, teacher)
    head, made = build_head(options, teacher, pieces)
    run = RunOptions(
        work=options.work or options.out / "work",
        budget_minutes=options.budget_minutes,
        compile=options.compile,
        checkpoint_seconds=options.checkpoint_seconds,
        evaluate_every=options.evaluate_every,
    )
    trainer = HeadTrainer({options.kind: head}, recipe_of(options), run, source)
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
    counts = {side: sum(len(p.ids) for p in getattr(pieces, side)) for side in ("train", "heldout")}
    console.print(f"tokens: {counts['train']:,} to learn, {counts['heldout']:,} held out", highlight=False)
    run_watched(trainer, console)
    record = provenance(options, trainer, counts)
    _export(options, head, teacher, trainer, record)
    return record


def run_watched(trainer: HeadTrainer, console: Console) -> None:
    """Train to the end and show it; an interruption says how to go on."""
    try:
        with Monitor(console) as monitor:
            trainer.run(monitor.report)
    except KeyboardInterrupt:
        console.print(
            f"interrupted at step {trainer.state.step}; {trainer.checkpoint} is saved, --resume continues",
            highlight=False,
        )
        raise


def recipe_of(options: TrainOptions) -> HeadRecipe:
    """Return the recipe that the options describe."""
    unrolls = options.unrolls or _UNROLLS.get(options.kind, _STUDENT_MEASURED)
    if options.kind == "medusa":
        unrolls = options.heads
    plan = HeadPlan(unrolls, options.decay, options.variation, options.muon_lr, options.adam_lr)
    recipe = HeadRecipe(
        plans={options.kind: plan},
        seed=options.seed,
        stride=options.stride,
        decay_share=_DECAY_SHARE,
        weight_decay=options.weight_decay,
    )
    if options.steps:
        warm = max(1, min(30, options.steps // 10))
        decay = max(1, round(_DECAY_SHARE * options.steps))
        recipe = replace(recipe, schedule=Schedule(options.steps, decay, warm))
    return recipe


def build_head(
    options: TrainOptions, teacher: EngineTeacher, pieces: Split
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a head with its initial weights, and what was chosen for it.

    Raises:
        ConfigError: sizes that do not fit the target.
    """
    config = teacher.config
    shape = head_shape(config, options.intermediate_size or None)
    matrices = teacher.embedding, teacher.lm_head
    generator = torch.Generator().manual_seed(options.seed)
    if options.kind == "eagle3":
        size = min(options.draft_vocab_size or 32000, config.vocab_size)
        ids = draft_vocabulary(pieces.train, config.vocab_size, size)
        head = Eagle3Head(
            shape, *matrices, generator, num_features=len(teacher.feature_layers), draft_ids=ids
        )
        return head, {
            "draft_vocab_size": size,
            "draft_vocab_coverage": round(coverage(pieces.heldout, ids), 4),
            "feature_layers": list(teacher.feature_layers),
        }
    if options.kind == "eagle":
        return EagleHead(shape, *matrices, generator), {}
    if options.kind == "mtp":
        return MtpHead(shape, *matrices, generator), {}
    if options.kind == "medusa":
        heads = MedusaHeads(options.heads, options.layers or 1, teacher.lm_head)
        return heads, {"heads": options.heads, "layers": options.layers or 1}
    student = _student_shape(options, teacher)
    return DraftStudent(student, options.seed, teacher.dtype), {"shape": asdict(student)}


def _student_shape(options: TrainOptions, teacher: EngineTeacher) -> LlamaShape:
    config = teacher.config
    hidden = options.hidden_size or min(512, config.hidden_size)
    heads = max(1, hidden // config.head_dim)
    if hidden % config.head_dim:
        raise ConfigError(
            f"--hidden-size {hidden} is no multiple of the target's head size {config.head_dim}"
        )
    return LlamaShape(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        num_layers=options.layers or 2,
        num_heads=heads,
        num_kv_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=config.head_dim,
        intermediate_size=options.intermediate_size or hidden * 5 // 2,
        max_positions=config.max_model_len,
    )


def _source(options: TrainOptions, teacher: EngineTeacher) -> tuple[BatchSource, Split]:
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
        pieces = Split(pieces.train + _own_text(options, teacher, pieces, limit), pieces.heldout)
    return TextSource(pieces, teacher, options.batch_size, least), pieces


def _own_text(options: TrainOptions, teacher: EngineTeacher, pieces: Split, limit: int) -> list[Tokens]:
    """Return prompts from the training text with what the target says after them; kept in the work folder."""
    work = options.work or options.out / "work"
    file = work / "own-text.json"
    length = min(limit, 256)
    start = length // 4
    if file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))
    else:
        train = [p.ids for p in pieces.train if len(p.ids) >= start] or [p.ids for p in pieces.train]
        prompts = []
        for i in range(options.own_text):
            ids = train[i % len(train)]
            first = (i // len(train) * start) % max(1, len(ids) - start + 1)
            prompts.append(ids[first : first + start])
        rows = continue_prompts(teacher.folder, prompts, length - start, seed=options.seed)
        work.mkdir(parents=True, exist_ok=True)
        write_json(file, rows)
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
        )
    picture = draw_history(trainer.state.history, trainer.options.work)
    shutil.copyfile(picture, out / picture.name)
