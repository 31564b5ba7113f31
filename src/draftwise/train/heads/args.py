"""Command lines of `draftwise train eagle3 | eagle | medusa | mtp | draft`. No torch, so that `--help` is quick."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from draftwise.errors import ConfigError

KINDS = {
    "eagle3": "an EAGLE-3 head, by training-time test",
    "eagle": "an EAGLE head",
    "medusa": "Medusa heads",
    "mtp": "a multi-token-prediction layer in DeepSeek-V3's form",
    "draft": "a small dense draft model",
}
"""What can be trained, and what `--help` says of it."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What the user asked for. Fields are the options' names."""

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
        positive = ("steps", "batch_size", "max_length", "stride", "heads", "unrolls", "evaluate_every")
        for name in positive:
            value = getattr(self, name)
            if value < (0 if name in ("steps", "unrolls") else 1):
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {value}")
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
    add("--adam-lr", type=float, default=defaults.adam_lr, help="of everything else (%(default)s)")
    add("--weight-decay", type=float, default=defaults.weight_decay, help="of matrices (%(default)s)")
    add("--heldout-share", type=float, default=defaults.heldout_share, help="measured on only (%(default)s)")
    add("--own-text", type=int, default=0, metavar="N", help="learn N continuations by the target, too")
    add("--seed", type=int, default=0, help="of weights and order (0)")
    add(
        "--dtype", choices=("bfloat16", "float32"), default=defaults.dtype, help="to compute in (%(default)s)"
    )
    add("--threads", type=int, default=0, help="threads for torch (default: its own choice)")
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
        add("--intermediate-size", type=int, default=0, help="of the MLP (default: the target's)")
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
            "--intermediate-size", type=int, default=0, help="of the MLP (default: 2.5 times the hidden size)"
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
