"""``draftwise profile``: measures times of a model's steps and acceptance of its drafters on this machine, and
reports the consequences."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.cli.errors import UsageError
from draftwise.cli.numbers import positive
from draftwise.cli.options import ENGINE_BOOLEANS, add_engine_options, engine_kwargs
from draftwise.cli.planning import above_zero, ms, table
from draftwise.cli.report import note, print_json, progress

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers
    from draftwise.engine.builder import Engine
    from draftwise.plan.acceptance import AcceptanceModel
    from draftwise.plan.operating import OperatingPoint, Sla
    from draftwise.plan.profile import Profile

BOOLEANS = ENGINE_BOOLEANS
_TEXT = "measure times of steps and acceptance, and pick the best setting"
_KINDS = ("code", "edit")
_PROMPT_TOKENS = 128


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser("profile", help=_TEXT, description=_TEXT)
    parser.add_argument(
        "model_name", nargs="?", metavar="MODEL", help="folder or hub id (the embedded model)"
    )
    group = parser.add_argument_group("profile")
    group.add_argument(
        "--output",
        type=Path,
        default=Path("profile.json"),
        metavar="FILE",
        help="file to write; points that it has already are not measured again (profile.json)",
    )
    group.add_argument(
        "--budget",
        type=above_zero,
        metavar="MINUTES",
        help="time limit in minutes; the most informative points come first",
    )
    group.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        help="formats of weights, each an engine: auto, float32, bfloat16, int8, int4 (as the engine is configured)",
    )
    group.add_argument(
        "--parallel",
        nargs="+",
        type=positive,
        metavar="N",
        help="numbers of devices or processes that share the model, one engine each (as configured)",
    )
    group.add_argument("--methods", nargs="+", metavar="METHOD", help="drafters (all that are loaded)")
    group.add_argument(
        "--drafts",
        nargs="+",
        type=positive,
        default=[1, 3, 5, 7],
        metavar="K",
        help="numbers of drafts (1 3 5 7)",
    )
    group.add_argument(
        "--concurrency",
        nargs="+",
        type=positive,
        default=[1, 2, 4, 8, 16, 32],
        metavar="N",
        help="requests at once (1 2 4 8 16 32)",
    )
    group.add_argument(
        "--contexts", nargs="+", type=positive, metavar="N", help="tokens per request (4 up to the longest)"
    )
    group.add_argument(
        "--rounds",
        type=positive,
        default=3,
        metavar="N",
        help="measurements of each size, spread over the run because machines are not steady (3)",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="texts whose continuation acceptance is measured on: JSONL with prompt, or one per line",
    )
    group.add_argument(
        "--isl", type=positive, default=128, metavar="N", help="report: tokens of a prompt (128)"
    )
    group.add_argument(
        "--osl", type=positive, default=128, metavar="N", help="report: tokens of an output (128)"
    )
    group.add_argument("--ttft", type=above_zero, metavar="MS", help="report: limit to the first token")
    group.add_argument("--itl", type=above_zero, metavar="MS", help="report: limit per token after it")
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="write charts (.svg)")
    group.add_argument("--dynamo", type=Path, metavar="FOLDER", help="write Dynamo's interpolation files")
    group.add_argument("--report", action="store_true", help="measure nothing, report on the file")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise profile``."""
    from draftwise.plan.operating import Sla
    from draftwise.plan.profile import Profile

    sla = Sla(*(None if limit is None else limit / 1000 for limit in (args.ttft, args.itl)))
    for flag, folder in (("--plots", args.plots), ("--dynamo", args.dynamo)):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(f"{flag}: {folder} is not a folder")
    if args.report:
        profile = Profile.load(args.output)
        profile.check_of(args.model_name or engine_kwargs(args).get("model"))
    else:
        profile = _measure(args)
    if not profile.tells:
        if args.report:
            raise UsageError(f"--report: {args.output} holds too little for a report; continue measuring")
        note("too little was measured for a report")
        return 0
    if args.plots is not None:
        from draftwise.profile.report import draw

        note("charts: " + ", ".join(str(path) for path in draw(profile, args.plots)))
    if args.dynamo is not None:
        from draftwise.plan.interpolation import of_profile, write_interpolation

        weights = next(iter(profile.settings))
        found = of_profile(profile.setting(weights), profile.times(weights))
        note("written: " + ", ".join(str(path) for path in write_interpolation(found, args.dynamo)))
    if args.json:
        print_json(_as_json(args, profile, sla))
    else:
        _print(args, profile, sla)
    return 0


def _measure(args: argparse.Namespace) -> Profile:
    from draftwise.config import resolve_engine_config
    from draftwise.plan.profile import Profile
    from draftwise.profile.run import Profiler, ProfileSettings, machine, model_name

    options = engine_kwargs(args)
    if args.model_name is not None:
        options["model"] = args.model_name
    options["speculation_control"] = "static"
    if args.prompts is not None:
        _read_prompts(args.prompts)  # before anything is loaded
    configs = {}
    for name in args.formats or ["configured"]:
        more: dict[str, Any] = {}
        if name in ("int8", "int4"):
            more["quantization"] = name
        elif name in ("auto", "float32", "bfloat16"):
            more["dtype"] = name
        elif name != "configured":
            raise UsageError(f"--formats: expected auto, float32, bfloat16, int8 or int4, got {name!r}")
        for size in args.parallel or [None]:
            if size is not None:
                more["tensor_parallel_size"] = size
            config = resolve_engine_config(**{**options, **more})
            weights = config.quantization or config.dtype if name == "configured" else name
            size = config.tensor_parallel_size
            configs[weights if size == 1 else f"{weights}/{size}"] = config
    first = next(iter(configs.values()))
    known = {d.method for d in first.drafters}
    for method in args.methods or ():
        if method not in known:
            raise UsageError(f"--methods: {method!r} is not loaded; there are {', '.join(sorted(known))}")
    here, model = machine(first.device, first.num_threads), model_name(first)
    if args.output.exists():
        profile = Profile.load(args.output)
        profile.check_of(model, here)
        note(
            f"going on with {args.output}: {sum(len(s.steps) for s in profile.settings.values())} sizes known"
        )
    else:
        profile = Profile(here, model)
        profile.save(args.output)
    settings = ProfileSettings(
        args.output,
        sorted(set(args.drafts)),
        sorted(set(args.concurrency)),
        args.contexts,
        args.methods,
        None if args.budget is None else 60 * args.budget,
        rounds=args.rounds,
    )
    profiler = Profiler(profile, settings, lambda engine, tokens: _texts(args, engine, tokens))
    logging.getLogger("draftwise").setLevel(logging.WARNING)
    done = True
    for weights, config in configs.items():
        with ExitStack() as stack:
            done = profiler.measure(config, weights, partial(_bar, stack, f"profile {weights}"))
        if not done:
            note(
                f"the budget of {args.budget:g} minutes is spent: {profile.left} points are left; run it again"
            )
            break
    return profile


def _bar(stack: ExitStack, text: str, total: int) -> Callable[[str], None]:
    """A progress bar that stays until the exit stack closes."""
    return stack.enter_context(progress(total, text))


def _read_prompts(path: Path) -> list[str]:
    """Texts of a file: JSONL with ``prompt`` (or ``text``), or one per line."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts: {path} cannot be read: {error}") from None
    if not lines:
        raise UsageError(f"--prompts: {path} is empty")
    out = []
    for number, line in enumerate(lines, 1):
        if not line.lstrip().startswith("{"):
            out.append(line)
            continue
        try:
            value = json.loads(line)
            text = value.get("prompt", value.get("text"))
        except (ValueError, AttributeError):
            text = None
        if not isinstance(text, str) or not text:
            raise UsageError(f"--prompts: line {number} of {path} has no prompt")
        out.append(text)
    return out


def _texts(
    args: argparse.Namespace, engine: Engine, tokens: int | None
) -> Mapping[str, Sequence[Sequence[int]]]:
    """Prompts by kind, as `Profiler` asks for them."""
    from draftwise.bench.workloads import make_workload
    from draftwise.encoding import encode_text
    from draftwise.engine.builder import tokenizer_of
    from draftwise.errors import ConfigError
    from draftwise.profile.run import OWN

    tokenizer = tokenizer_of(engine)
    if args.prompts is not None:
        own = [tuple(encode_text(tokenizer, text, "--prompts")) for text in _read_prompts(args.prompts)]
        return {OWN: [prompt for prompt in own if prompt]}
    if tokens is None:
        return {kind: make_workload(kind, tokenizer, 8, _PROMPT_TOKENS).prompts for kind in _KINDS}
    found: dict[str, Sequence[Sequence[int]]] = {}
    for kind in _KINDS:
        with suppress(ConfigError):  # the held-out files have no definitions so long
            found[kind] = make_workload(kind, tokenizer, 8, max(tokens, 16)).prompts
    return found


# ------------------------------------------------------------------------------------------------ report


def _as_json(args: argparse.Namespace, profile: Profile, sla: Sla) -> dict[str, Any]:
    from draftwise.plan.times import Infeasible
    from draftwise.profile.report import best_settings, choices

    best: dict[str, Any] = {}
    for weights, found in best_settings(profile, sla, args.isl, args.osl):
        if isinstance(found, Infeasible):
            nearest = found.nearest
            best[weights] = {
                "fits": False,
                "why": found.reason,
                "nearest": nearest.as_dict() if nearest is not None else None,  # type: ignore[attr-defined]
            }
        else:
            best[weights] = {"fits": True, **found.as_dict()}
    chosen = {
        weights: [{"requests": n, **point.as_dict()} for _, n, point in choices(profile, weights)]
        for weights in profile.settings
    }
    return {"profile": str(args.output), "left": profile.left, "best": best, "choices": chosen}


def _print(args: argparse.Namespace, profile: Profile, sla: Sla) -> None:
    from draftwise.plan.operating import OperatingPoint
    from draftwise.plan.times import Infeasible
    from draftwise.profile.report import best_settings, break_even, choices, most_drafts

    print(f"{profile.model} on {profile.machine.get('gpu', profile.machine.get('cpu'))}: {args.output}")
    acceptance = profile.acceptance()
    for method in acceptance.methods:
        print(
            f"  {method}: {_accepted(acceptance, method, max(map(most_drafts, profile.settings.values())))}"
        )
    for weights, setting in profile.settings.items():
        chosen = choices(profile, weights)
        requests = sorted({n for _, n, _ in chosen})
        contexts = sorted({c for c, _, _ in chosen})
        cells = {(c, n): point for c, n, point in chosen}
        rows = [
            [str(c), *(_setting(cells[c, n]) if (c, n) in cells else "-" for n in requests)] for c in contexts
        ]
        title = f"\n{weights}: best setting by context (down) and requests at once; cache {setting.kv_tokens} tokens"
        if setting.devices > 1:
            title += f"; {setting.devices} devices"
        table(title, ["context", *map(str, requests)], rows, [])
        for method in profile.times(weights).methods:
            drafts = min(3, most_drafts(setting))
            lines = []
            for c, row in break_even(profile, weights, method, drafts):
                cells_at = [f"{dict(row)[n].break_even:.2f}" if n in dict(row) else "-" for n in requests]
                got = f"{row[0][1].accepted_length - 1:.2f}" if method in acceptance.methods else "-"
                lines.append([str(c), *cells_at, got])
            table(
                f"{method}, K={drafts}: accepted drafts per step from which on it pays, and accepted ones",
                ["context", *map(str, requests), "accepted"],
                lines,
                [],
            )
    print(f"\nrequests of {args.isl} + {args.osl} tokens under {sla}:")
    for weights, found in best_settings(profile, sla, args.isl, args.osl):
        if isinstance(found, Infeasible):
            print(f"  {weights}: none fits: {found.reason}")
            if isinstance(found.nearest, OperatingPoint):
                print(f"    nearest: {_sentence(found.nearest)}")
        else:
            print(f"  {weights}: {_sentence(found)}")
    fitting = [
        (found.tokens_per_second / profile.settings[weights].devices, weights)
        for weights, found in best_settings(profile, sla, args.isl, args.osl)
        if isinstance(found, OperatingPoint)
    ]
    if len(fitting) > 1:
        rate, weights = max(fitting)
        print(f"  most per device: {weights}, {rate:.0f} tokens/s")


def _accepted(acceptance: AcceptanceModel, method: str, drafts: int) -> str:
    """What is known of a method's drafts, in words."""
    rates = ", ".join(f"{r:.2f}" for r in acceptance.rates[""][method][:5])
    words = f"{acceptance.length(method, drafts):.2f} tokens per step; chances by position {rates}"
    draws = acceptance.draws(method)
    if draws.offered is not None and draws.offered[0] > 0:
        size = draws.proposed(drafts) / draws.offered[0]
        words += f"; finds drafts in {100 * draws.offered[0]:.0f} % of the steps, {size:.1f} of {drafts}"
    return words


def _setting(point: OperatingPoint) -> str:
    return "plain" if point.method == "none" else f"{point.method} {point.drafts}"


def _sentence(point: OperatingPoint) -> str:
    how = "plain decoding" if point.method == "none" else f"{point.method} with K={point.drafts}"
    return (
        f"{how}, {point.concurrency} at once: {ms(point.itl)} ms per token, {point.tokens_per_second:.0f} tokens/s "
        f"({point.accepted_length:.2f} tokens per step of {ms(point.step)} ms)"
    )
