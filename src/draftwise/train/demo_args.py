"""Command line of `draftwise train demo`. No torch, so that `--help` is quick."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from draftwise.errors import ConfigError

from .demo_recipe import DemoRecipe, RunOptions, Schedule, recipe_from_json

# What is left of a budget after these shares is for compiling, the last evaluation and the export.
_JOINT_SHARE, _DISTIL_SHARE = 0.78, 0.17


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `draftwise train demo`."""
    parser.add_argument("--out", type=Path, required=True, help="folder for the two models")
    parser.add_argument("--work", type=Path, help="folder for the checkpoint (default: OUT/work)")
    parser.add_argument("--root", type=Path, help="library folder to learn from (default: this Python's own)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--budget-minutes", type=float, default=100.0, help="wall-clock time (default: 100)")
    length.add_argument("--steps", type=int, help="steps of the target, instead of a time budget")
    length.add_argument("--recipe", type=Path, help="repeat the recipe in this provenance.json")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order (default: 0)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--threads", type=int, default=0, help="threads for torch (default: its own choice)")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile: half as fast")


def add_head_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `draftwise train demo-heads`."""
    parser.add_argument("--out", type=Path, required=True, help="folder for the heads")
    parser.add_argument("--work", type=Path, help="folder for checkpoint and text (default: OUT/work)")
    parser.add_argument("--target", type=Path, help="a target of the demo recipe (default: the embedded one)")
    parser.add_argument(
        "--heads", default="eagle3,mtp,medusa", help="which ones, dspark too (default: %(default)s)"
    )
    parser.add_argument("--root", type=Path, help="library folder to learn from (default: this Python's own)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--budget-minutes", type=float, default=45.0, help="wall-clock time (default: 45)")
    length.add_argument("--steps", type=int, default=0, help="steps, instead of a time budget")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order (default: 0)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads for torch (default: 1, see the guide)"
    )
    parser.add_argument(
        "--own-texts", type=int, default=4000, help="continuations by the target (default: 4000)"
    )
    parser.add_argument("--no-compile", action="store_true", help="do not compile the loss")


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that make no sense, of `demo` and of `demo-heads`.

    Raises:
        ConfigError: names the option.
    """
    for name, least in (("steps", 0), ("seed", 0), ("threads", 0), ("own_texts", 1)):
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    if not 0 < args.budget_minutes < math.inf:
        raise ConfigError(f"--budget-minutes must be a number above 0, not {args.budget_minutes}")


def _read_recipe(path: Path) -> DemoRecipe:
    try:
        return recipe_from_json(json.loads(path.read_text(encoding="utf-8"))["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"no recipe in it ({error!r})"
        raise ConfigError(f"--recipe {path}: {why}") from None


def options_from(args: argparse.Namespace) -> tuple[DemoRecipe, RunOptions]:
    """Translate the command line.

    Raises:
        ConfigError: a number that makes no sense, or a file without a recipe.
    """
    check_numbers(args)
    recipe = DemoRecipe(seed=args.seed)
    budget = args.budget_minutes
    if args.recipe:
        recipe = _read_recipe(args.recipe)
    elif args.steps:
        decay = max(1, round(recipe.decay_share * args.steps))
        distil = max(1, args.steps // 4)
        recipe = replace(
            recipe,
            joint=Schedule(args.steps, decay),
            long_steps=round(recipe.long_share * args.steps),
            distil=Schedule(distil, distil, warmup_steps=1),
        )
    options = RunOptions(
        work=args.work or args.out / "work",
        root=args.root,
        joint_minutes=budget * _JOINT_SHARE,
        distil_minutes=budget * _DISTIL_SHARE,
        resume=args.resume,
        compile=not args.no_compile,
    )
    return recipe, options
