"""The recipe of heads for the embedded target: EAGLE-3, Medusa and an MTP layer, which ship, and a DSpark drafter.

Run it with `draftwise train demo-heads`. One pass of the frozen target serves all heads of a run. The text is half the
demo recipe's, half the target's own continuations of pieces of it: acceptance is about what the target says, not
about what it was taught. See `docs/demo-models.md`.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor, nn

from draftwise.config.embedded import embedded_path
from draftwise.errors import ConfigError
from draftwise.models.checkpoint import read_json
from draftwise.models.rope import RopeConfig

from .continuations import continue_prompts
from .demo import keep_freed_memory
from .demo_args import check_numbers
from .demo_data import Corpus, build_corpus, heldout_prompts, stdlib_files
from .demo_recipe import TARGET, Schedule
from .demo_teacher import BLOCK_LAYERS, FEATURE_LAYERS, DemoTeacher
from .folders import make_folder, whole_file
from .heads.batch import HeadBatch, block_mask, causal_mask
from .heads.block import BlockDrafter, BlockForm
from .heads.build import least_used
from .heads.export import export_head
from .heads.layers import HeadShape
from .heads.medusa import MedusaHeads
from .heads.run import run_watched
from .heads.sequential import Eagle3Head, MtpHead
from .heads.trainer import HeadPlan, HeadRecipe, HeadTrainer, RunOptions

WINDOW = 512
"""Tokens of a training window."""
BATCH = 4
"""Windows per step."""
OWN_PROMPT, OWN_LENGTH = 64, 256
"""Tokens of a prompt, and of it with the target's continuation: a window holds two."""
OWN_EVERY = 2
"""One batch of so many is of the target's own text."""
HELDOUT_TEXTS, HELDOUT_WINDOWS = 48, 12
"""What is measured on: own texts, and windows of the library's."""
DRAFT_VOCABULARY = 3072
"""Holds 98% of what the target says; 2048 tokens would hold 92%."""
MEDUSA_HEADS = 3
"""Each has an output matrix of 2 MB of its own."""
BLOCK_MLP, BLOCK_RANK, BLOCK_DRAFTS = 512, 48, 4
"""Sizes of the DSpark drafter's two layers, its recurrent Markov head (3.8 MB in all), and its block: of eight drafts
the
last four were hardly ever accepted."""
_DECAY_SHARE = 0.45

PLANS = {
    "eagle3": HeadPlan(unrolls=5),
    "mtp": HeadPlan(unrolls=4),
    "medusa": HeadPlan(unrolls=MEDUSA_HEADS),
    "dspark": HeadPlan(unrolls=BLOCK_DRAFTS, anchors=WINDOW // 4),
}
LAYERS = {"eagle3": FEATURE_LAYERS, "dspark": BLOCK_LAYERS}
"""The target's layers that heads read."""


def head_shape() -> HeadShape:
    """Return the sizes of the heads' decoder layer: the target's."""
    return HeadShape(
        hidden_size=TARGET.hidden_size,
        num_heads=TARGET.num_heads,
        num_kv_heads=TARGET.num_kv_heads,
        head_dim=TARGET.head_dim,
        intermediate_size=TARGET.intermediate_size,
        norm_eps=TARGET.norm_eps,
        rope=RopeConfig(kind="default", theta=TARGET.rope_theta, head_dim=TARGET.head_dim),
    )


def build_heads(teacher: DemoTeacher, draft_ids: Tensor, mask_token: int, seed: int) -> dict[str, nn.Module]:
    """Return the heads with their initial weights."""
    shape, matrix = head_shape(), teacher.embedding
    form = BlockForm(
        layers=2,
        drafts=BLOCK_DRAFTS,
        mask_token=mask_token,
        from_root=True,
        markov_kind="rnn",
        markov_rank=BLOCK_RANK,
        confidence=True,
    )

    def generator(i: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed * 10 + i)

    return {
        "eagle3": Eagle3Head(
            shape, matrix, matrix, generator(0), num_features=len(FEATURE_LAYERS), draft_ids=draft_ids
        ),
        "mtp": MtpHead(shape, matrix, matrix, generator(1)),
        "medusa": MedusaHeads(MEDUSA_HEADS, 1, matrix),
        "dspark": BlockDrafter(
            replace(shape, intermediate_size=BLOCK_MLP),
            form,
            matrix,
            matrix,
            generator(3),
            num_features=len(BLOCK_LAYERS),
        ),
    }


def draft_vocabulary(corpus: Corpus, own: npt.NDArray[np.uint16], size: int) -> Tensor:
    """Return the most frequent tokens of what is trained on, ascending: int64 [size]."""
    vocab = TARGET.vocab_size
    counts = np.bincount(np.concatenate(corpus.library), minlength=vocab).astype(np.float64)
    if corpus.test:  # some interpreters are packaged without
        counts += 0.5 * np.bincount(np.concatenate(corpus.test), minlength=vocab)
    counts /= counts.sum()
    said = np.bincount(own.ravel(), minlength=vocab).astype(np.float64)
    counts += said / max(1.0, said.sum())
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size])).long()


@dataclass(slots=True)
class DemoHeadData:
    """Batches of library text and of the target's own text.

    Args:
        own: int [n, OWN_LENGTH]: prompts with the target's continuations.
        own_heldout: the same from held-out files, greedy.
    """

    corpus: Corpus
    own: npt.NDArray[np.uint16]
    own_heldout: npt.NDArray[np.uint16]
    teacher: DemoTeacher
    _windows: Iterator[npt.NDArray[np.uint16]] | None = None
    _next: int = -1
    _cache: dict[str, Sequence[HeadBatch]] | None = None

    def batch(self, step: int, recipe: HeadRecipe, part: int = 0, parts: int = 1) -> HeadBatch:
        """Return the batch of 0-based `step`, which has one part."""
        assert parts == 1
        if step % OWN_EVERY == OWN_EVERY - 1:
            rng = np.random.Generator(np.random.PCG64([recipe.seed, 1, step]))
            rows = self.own[rng.integers(0, len(self.own), 2 * BATCH)].astype(np.int64)
            return self._batch(torch.from_numpy(rows).view(BATCH, WINDOW), 2)
        text = torch.from_numpy(self._text(step, recipe.seed).astype(np.int64))
        return self._batch(text.view(-1, WINDOW), 1)

    def _text(self, step: int, seed: int) -> npt.NDArray[np.uint16]:
        """Return windows [BATCH / 2, 2 * WINDOW] for this step, whatever steps were asked for before."""
        if self._windows is None or step < self._next:
            self._windows, self._next = self._all_text(seed), 0
        while True:
            rows = next(self._windows)
            self._next += 1
            if self._next == step + 1:
                return rows

    def _all_text(self, seed: int) -> Iterator[npt.NDArray[np.uint16]]:
        # another seed than the demo recipe's, so that windows are cut elsewhere
        for epoch in self.corpus.window_epochs(2 * WINDOW, seed + 100, 2):
            for start in range(0, len(epoch) - BATCH // 2 + 1, BATCH // 2):
                yield epoch[start : start + BATCH // 2, :-1]

    def _batch(self, ids: Tensor, parts: int) -> HeadBatch:
        tokens = ids.shape[1]
        positions = torch.arange(tokens) % (tokens // parts)
        mask = causal_mask(tokens) if parts == 1 else block_mask(tokens, parts)
        segments = (torch.arange(tokens) // (tokens // parts)).expand(len(ids), -1)
        hidden, features, probs = self.teacher(ids, positions, mask)
        counted = torch.ones_like(ids, dtype=torch.bool)
        return HeadBatch(ids, positions, mask, segments, counted, hidden, features, probs)

    def heldout(self) -> Mapping[str, Sequence[HeadBatch]]:
        """Return `own`: greedy continuations after held-out prompts (the prompts not counted), and `text`."""
        if self._cache is None:
            said = self._batch(torch.from_numpy(self.own_heldout.astype(np.int64)), 1)
            said.counted[:, : OWN_PROMPT - 1] = False
            stream = np.concatenate(self.corpus.heldout)
            starts = np.linspace(0, len(stream) - WINDOW, HELDOUT_WINDOWS).astype(int)
            rows = np.stack([stream[s : s + WINDOW] for s in starts]).astype(np.int64)
            self._cache = {"own": [said], "text": [self._batch(torch.from_numpy(rows), 1)]}
        return self._cache


def own_texts(corpus: Corpus, target: Path, count: int, seed: int) -> npt.NDArray[np.uint16]:
    """Return pieces of training files with the target's continuations: [count, OWN_LENGTH].

    Four of five pieces are of library files, the others of tests.
    """
    rng = np.random.Generator(np.random.PCG64([seed, 2]))
    groups = [
        [f for f in group if len(f) > OWN_LENGTH] for group in (corpus.library, corpus.test or corpus.library)
    ]
    prompts = []
    for _ in range(count):
        group = groups[0] if rng.random() < 0.8 else groups[1]
        file = group[int(rng.integers(len(group)))]
        start = int(rng.integers(0, len(file) - OWN_PROMPT))
        prompts.append([int(t) for t in file[start : start + OWN_PROMPT]])
    rows = continue_prompts(target, prompts, OWN_LENGTH - OWN_PROMPT, seed=seed)
    return np.array(rows, dtype=np.uint16)


def prepare(
    target: Path, work: Path, seed: int, own: int, root: Path | None = None
) -> tuple[DemoHeadData, Tensor, int]:
    """Return the data, the draft vocabulary and the mask token; the target's own text is kept in the work folder."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    corpus = build_corpus(tokenizer, stdlib_files(root))
    work.mkdir(parents=True, exist_ok=True)
    learned, measured = work / "own.npy", work / "own-heldout.npy"
    if not learned.exists():
        _save(learned, own_texts(corpus, target, own, seed))
    if not measured.exists():
        prompts = [
            p.token_ids for p in heldout_prompts(tokenizer, HELDOUT_TEXTS, OWN_PROMPT, seed=5, root=root)
        ]
        if not prompts:
            raise ConfigError(
                "--root: there is no held-out file to measure on, with a definition long enough"
            )
        rows = continue_prompts(target, prompts, 2 * OWN_PROMPT, temperatures=(0.0,), seed=seed)
        _save(measured, np.array(rows, dtype=np.uint16))
    data = DemoHeadData(corpus, np.load(learned), np.load(measured), DemoTeacher(target))
    mask = least_used([*corpus.library, *corpus.test, data.own.ravel()], TARGET.vocab_size)
    return data, draft_vocabulary(corpus, data.own, DRAFT_VOCABULARY), mask


def _save(path: Path, rows: npt.NDArray[np.uint16]) -> None:
    with whole_file(path) as partial, partial.open("wb") as file:
        np.save(file, rows)


def provenance(
    trainer: HeadTrainer, name: str, data: DemoHeadData, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what `provenance.json` of one head holds; `measured` is `HeadTrainer.evaluate`'s answer."""
    state = trainer.state
    return {
        "made_by": f"draftwise train demo-heads --heads {','.join(trainer.heads)}",
        "date": datetime.now(UTC).date().isoformat(),
        "text": "CPython standard library, " + platform.python_version(),
        "own_text_tokens": int(data.own.size),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokens": state.tokens,
        "training_seconds": round(state.seconds),
        "feature_layers": list(LAYERS.get(name, ())),
        "measured": {where: heads[name] for where, heads in measured.items()},
        "recipe": asdict(trainer.recipe),
        "history": [
            {"step": point["step"], "tokens": point["tokens"]}
            | {where: heads[name] for where, heads in point.items() if isinstance(heads, dict)}
            for point in state.history
        ],
    }


def export(trainer: HeadTrainer, data: DemoHeadData, target: Path, out: Path) -> dict[str, Any]:
    """Write `out/{head}` for every head of the run; returns what was measured."""
    config, measured = read_json(target / "config.json"), trainer.evaluate()
    for name, head in trainer.heads.items():
        record = provenance(trainer, name, data, measured)
        export_head(head, out / name, config, feature_layers=LAYERS.get(name, ()), provenance=record)
    return measured


def run(args: argparse.Namespace, console: Console) -> int:
    """Carry out `draftwise train demo-heads`."""
    names = args.heads.split(",")
    unknown = [name for name in names if name not in PLANS]
    if unknown:
        raise ConfigError(f"--heads: unknown head {unknown[0]!r} (known: {', '.join(PLANS)})")
    check_numbers(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    keep_freed_memory()
    target = args.target or embedded_path("target")
    work = args.work or args.out / "work"
    make_folder(args.out, "--out")
    make_folder(work, "--work")
    data, draft_ids, mask = prepare(target, work, args.seed, args.own_texts, args.root)
    made = build_heads(data.teacher, draft_ids, mask, args.seed)
    heads = {name: head for name, head in made.items() if name in names}
    recipe = HeadRecipe({name: PLANS[name] for name in names}, seed=args.seed, decay_share=_DECAY_SHARE)
    if args.steps:
        decay = max(1, round(_DECAY_SHARE * args.steps))
        recipe = replace(recipe, schedule=Schedule(args.steps, decay))
    options = RunOptions(
        work / "-".join(names),
        0.0 if args.steps else args.budget_minutes,
        not args.no_compile,
        evaluate_every=200,
    )
    trainer = HeadTrainer(heads, recipe, options, data)
    if args.resume and trainer.checkpoint.exists():
        trainer.load()
        console.print(f"resumed at step {trainer.state.step}", highlight=False)
    run_watched(trainer, console)
    console.print_json(data=export(trainer, data, target, args.out))
    return 0
