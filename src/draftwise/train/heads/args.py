"""Command lines of `draftwise train eagle3 | dspark | ..`. No torch, so that `--help` is quick."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftwise.errors import ConfigError

KINDS = {
    "eagle3": "an EAGLE-3 head, by training-time test",
    "eagle": "an EAGLE head",
    "medusa": "Medusa heads",
    "mtp": "a multi-token-prediction layer in DeepSeek-V3's form",
    "dflash": "a DFlash block drafter",
    "dspark": "a DSpark block drafter, with a Markov head",
    "draft": "a small dense draft model",
}
"""The kinds of drafters that can be trained, and their lines in `--help`."""

BLOCK_KINDS = ("dflash", "dspark")
MARKOV_KINDS = ("vanilla", "gated", "rnn")
_FROM_ZERO = (
    "steps",
    "unrolls",
    "anchors",
    "markov_rank",
    "layers",
    "draft_vocab_size",
    "hidden_size",
    "intermediate_size",
    "own_text",
    "threads",
    "seed",
)  # 0: the default
_FROM_ONE = (
    "batch_size",
    "max_length",
    "stride",
    "heads",
    "evaluate_every",
    "accumulate",
    "data_parallel_size",
)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The user's options. Fields are the options' names."""

    kind: str
    target: str
    out: Path
    data: tuple[Path, ...] = ()
    shards: Path | None = None
    work: Path | None = None
    steps: int = 0
    budget_minutes: float = 0.0
    batch_size: int = 4
    max_length: int = 512
    own_text: int = 0
    unrolls: int = 0
    decay: float = 0.8
    stride: int = 1
    variation: float = 1.0
    muon_lr: float = 0.02
    adam_lr: float = 0.002
    weight_decay: float = 0.1
    draft_vocab_size: int = 0
    feature_layers: tuple[int, ...] = ()
    heads: int = 3
    layers: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    block_size: int = 8
    anchors: int = 0
    causal: bool = False
    mask_token: int = -1
    markov_rank: int = 0
    markov_head: str = "vanilla"
    no_confidence_head: bool = False
    accumulate: int = 1
    device: str = "cpu"
    data_parallel_size: int = 1
    heldout_share: float = 0.05
    seed: int = 0
    dtype: str = "bfloat16"
    threads: int = 0
    resume: bool = False
    compile: bool = False
    evaluate_every: int = 100
    checkpoint_seconds: float = 180.0
    json: bool = False

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ConfigError: names the option.
        """
        if bool(self.data) == (self.shards is not None):
            raise ConfigError("give either --data (text files) or --shards (what `draftwise extract` wrote)")
        if bool(self.steps) == bool(self.budget_minutes):
            raise ConfigError("give either --steps or --budget-minutes")
        if self.shards is not None and self.own_text:
            raise ConfigError("--own-text needs --data: shards hold the text they were extracted from")
        for name in (*_FROM_ZERO, *_FROM_ONE):
            value = getattr(self, name)
            if value < (0 if name in _FROM_ZERO else 1):
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {value}")
        for name in ("budget_minutes", "variation", "muon_lr", "adam_lr", "weight_decay"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be a number from 0 on, not {value}")
        if self.mask_token < -1:
            raise ConfigError(f"--mask-token must be the id of a token, not {self.mask_token}")
        if self.kind in BLOCK_KINDS and not 2 <= self.block_size <= min(64, self.max_length // 2):
            raise ConfigError(
                f"--block-size must be from 2 to {min(64, self.max_length // 2)} (half of --max-length, 64 at most), "
                f"not {self.block_size}"
            )
        if self.markov_head not in MARKOV_KINDS:
            raise ConfigError(f"--markov-head must be {', '.join(MARKOV_KINDS)}, not {self.markov_head!r}")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"--decay must be in (0, 1], not {self.decay}")
        if not 0 <= self.heldout_share < 1:
            raise ConfigError(f"--heldout-share must be in [0, 1), not {self.heldout_share}")
        if self.max_length < 16:
            raise ConfigError(f"--max-length must be at least 16, not {self.max_length}")


def add_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Declare the options of one kind."""
    defaults = TrainOptions(kind=kind, target="", out=Path())
    add = parser.add_argument
    add("--target", default="", help="folder or hub id of the target (default: the embedded model)")
    add("--data", type=Path, action="append", metavar="FILE", help="text, .jsonl or chats; may be repeated")
    add(
        "--shards",
        type=Path,
        metavar="FOLDER",
        help="hidden states from `draftwise extract`, instead of --data",
    )
    add("--out", type=Path, required=True, help="folder of the result")
    add("--work", type=Path, help="folder of the checkpoint (default: OUT/work)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=0, help="steps to train")
    length.add_argument("--budget-minutes", type=float, default=0.0, help="time to train, instead of steps")
    add("--batch-size", type=int, default=defaults.batch_size, help="texts per step (%(default)s)")
    add("--max-length", type=int, default=defaults.max_length, help="tokens per text, at most (%(default)s)")
    add("--stride", type=int, default=defaults.stride, help="train one of so many rows (%(default)s)")
    add(
        "--variation",
        type=float,
        default=defaults.variation,
        help="weight of the total variation (%(default)s)",
    )
    add("--muon-lr", type=float, default=defaults.muon_lr, help="learning rate of matrices (%(default)s)")
    add(
        "--adam-lr",
        type=float,
        default=defaults.adam_lr,
        help="learning rate of everything else (%(default)s)",
    )
    add(
        "--weight-decay",
        type=float,
        default=defaults.weight_decay,
        help="weight decay of matrices (%(default)s)",
    )
    add("--heldout-share", type=float, default=defaults.heldout_share, help="measured on only (%(default)s)")
    add("--own-text", type=int, default=0, metavar="N", help="learn N continuations by the target, too")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of texts (0)")
    add(
        "--dtype", choices=("bfloat16", "float32"), default=defaults.dtype, help="to compute in (%(default)s)"
    )
    add("--threads", type=int, default=0, help="threads for torch (default: its own choice)")
    add("--device", default=defaults.device, help="cpu, cuda or cuda:N (%(default)s)")
    add(
        "--data-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="processes that learn from --batch-size texts each (1; torchrun's are found by themselves)",
    )
    add(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="batches per step and process, one after the other (1)",
    )
    add("--resume", action="store_true", help="continue from the checkpoint")
    add("--compile", action="store_true", help="compile the loss: pays after some hundred steps")
    add("--evaluate-every", type=int, default=defaults.evaluate_every, help="steps (%(default)s)")
    add("--json", action="store_true", help="print the result as JSON")
    if kind in ("eagle3", "eagle", "mtp"):
        add(
            "--unrolls",
            type=int,
            default=0,
            help="steps over the head's own output (eagle3: 7, mtp: 4, eagle: 1)",
        )
        add(
            "--decay",
            type=float,
            default=defaults.decay,
            help="weight of a step to the one before (%(default)s)",
        )
        add("--intermediate-size", type=int, default=0, help="width of the MLP (default: the target's)")
    if kind == "eagle3":
        add(
            "--draft-vocab-size",
            type=int,
            default=0,
            help="most frequent tokens that are drafted (default: 32000)",
        )
        add(
            "--feature-layers",
            type=_layers,
            default=(),
            metavar="I,J,K",
            help="default: 2, middle, last but two",
        )
    if kind in BLOCK_KINDS:
        _add_block_arguments(add, kind, defaults)
    if kind == "medusa":
        add("--heads", type=int, default=defaults.heads, help="(%(default)s)")
        add("--layers", type=int, default=0, help="residual layers per head (1)")
        add(
            "--decay",
            type=float,
            default=defaults.decay,
            help="weight of a head to the one before (%(default)s)",
        )
    if kind == "draft":
        add("--layers", type=int, default=0, help="decoder layers (2)")
        add("--hidden-size", type=int, default=0, help="default: the target's, 512 at most")
        add(
            "--intermediate-size",
            type=int,
            default=0,
            help="width of the MLP (default: 2.5 times the hidden size)",
        )


def _add_block_arguments(add: Callable[..., object], kind: str, defaults: TrainOptions) -> None:
    add("--layers", type=int, default=0, help="decoder layers (one for six of the target's, 1 to 5)")
    add(
        "--block-size",
        type=int,
        default=defaults.block_size,
        help="rows of a block, the root's included (%(default)s)",
    )
    add(
        "--anchors", type=int, default=0, help="blocks per text and step, at random places (one for 4 tokens)"
    )
    add(
        "--decay",
        type=float,
        default=defaults.decay,
        help="weight of a draft to the one before (%(default)s)",
    )
    add("--causal", action="store_true", help="rows do not see those behind them (JetSpec)")
    add("--intermediate-size", type=int, default=0, help="of the MLPs (default: the target's)")
    add("--mask-token", type=int, default=-1, metavar="ID", help="default: one that the text has no use for")
    add(
        "--draft-vocab-size", type=int, default=0, help="most frequent tokens that are drafted (default: all)"
    )
    add(
        "--feature-layers",
        type=_layers,
        default=(),
        metavar="I,J,..",
        help="target layers whose entering states are read; its number of layers: what leaves the last one "
        "(default: up to 5, evenly)",
    )
    if kind == "dspark":
        add("--markov-rank", type=int, default=0, help="default: a quarter of the hidden size, 256 at most")
        add("--markov-head", choices=MARKOV_KINDS, default=defaults.markov_head, help="(%(default)s)")
        add(
            "--no-confidence-head",
            action="store_true",
            help="(other engines may stop by it; this one does not)",
        )


def options_from(args: argparse.Namespace, kind: str) -> TrainOptions:
    """Translate a parsed command line.

    Raises:
        ConfigError: options that contradict each other, or are out of range.
    """
    given = vars(args)
    names = TrainOptions.__dataclass_fields__
    chosen = {name: given[name] for name in names if name in given and given[name] is not None}
    chosen["data"] = tuple(chosen.get("data") or ())
    options = TrainOptions(**{**chosen, "kind": kind})
    options.check()
    return options


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layer numbers such as 2,6,9, not {text!r}") from None
