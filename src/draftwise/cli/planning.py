"""Options that ``simulate`` and ``plan`` share: times of steps, acceptance, the load, and limits on waiting."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwise.cli.errors import UsageError
from draftwise.cli.numbers import positive

if TYPE_CHECKING:
    from draftwise.plan.acceptance import AcceptanceModel
    from draftwise.plan.operating import Sla
    from draftwise.plan.times import StepTimes
    from draftwise.plan.traces import Trace


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def from_zero(text: str) -> float:
    """A finite number from 0 on."""
    return 0.0 if text.strip() in ("0", "0.0") else above_zero(text)


def from_zero_int(text: str) -> int:
    """An integer from 0 on."""
    return 0 if text.strip() == "0" else positive(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Options for times of steps and acceptance."""
    group = parser.add_argument_group(
        "what steps take (one of --profile, --device, --interpolation, --polynomial)"
    )
    group.add_argument("--profile", type=Path, metavar="FILE", help="a file made by draftwise profile")
    group.add_argument(
        "--device",
        metavar="NAME",
        help="a device by its peaks: a100, h100, h200, b200, mi300x, epyc-2, xeon-amx-2",
    )
    group.add_argument(
        "--interpolation",
        type=Path,
        metavar="FOLDER",
        help="files of NVIDIA Dynamo's profiler, or of draftwise profile --dynamo: plain steps only",
    )
    group.add_argument(
        "--polynomial", type=positive, metavar="TOKENS", help="Dynamo's polynomials, with a cache of TOKENS"
    )
    group.add_argument("--model", metavar="MODEL", help="a folder, hub id, or llama-1b, llama-8b, llama-70b")
    group.add_argument("--weights", metavar="FORMAT", help="bfloat16, fp8, int8, int4")
    group.add_argument("--parallel", type=positive, default=1, metavar="N", help="devices per engine (1)")
    group.add_argument(
        "--drafter",
        metavar="MODEL",
        default="head",
        help="with --device: head (one layer of the model), lookup, or a draft model (head)",
    )
    group.add_argument(
        "--method", metavar="NAME", help="the method that drafts (default: the first with a known acceptance)"
    )
    group.add_argument(
        "--acceptance",
        metavar="RATES",
        help="chances per position, given those before it (0.85,0.3,0), or a JSON file of bench accept or profile",
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Options for the load and for limits on waiting."""
    group = parser.add_argument_group("load")
    group.add_argument("--trace", type=Path, metavar="FILE", help="own CSV or JSONL, Mooncake's, or Azure's")
    group.add_argument("--rate", type=above_zero, metavar="R", help="requests per second, at random times")
    group.add_argument(
        "--duration", type=above_zero, default=60.0, metavar="S", help="seconds of such a load (60)"
    )
    group.add_argument("--isl", type=positive, default=1000, metavar="N", help="tokens of a prompt (1000)")
    group.add_argument("--osl", type=positive, default=100, metavar="N", help="tokens of an output (100)")
    group.add_argument(
        "--spread",
        type=from_zero,
        default=0.0,
        metavar="X",
        help="standard deviation of lengths' logarithms (0)",
    )
    group.add_argument(
        "--shape", default="flat", metavar="NAME", help="flat, day, tenfold or peak: the rate over time"
    )
    group.add_argument(
        "--faster",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="X times as many of the same requests per second",
    )
    group.add_argument(
        "--sample",
        type=above_zero,
        default=1.0,
        metavar="SHARE",
        help="this share of requests and replicas (1)",
    )
    group.add_argument("--requests", type=positive, metavar="N", help="the first N requests alone")
    group.add_argument(
        "--ttft", type=above_zero, metavar="MS", help="limit: arrival to first token, milliseconds"
    )
    group.add_argument(
        "--itl", type=above_zero, metavar="MS", help="limit: mean time between tokens after it"
    )
    group.add_argument(
        "--seed", type=from_zero_int, default=0, metavar="N", help="same seed, same result (0)"
    )


@dataclass(frozen=True, slots=True)
class Modelled:
    """The performance that the options name. ``source``: its description. ``kv_bytes``: bytes of K/V per token."""

    times: StepTimes
    acceptance: AcceptanceModel
    method: str
    source: str
    kv_bytes: float


def modelled(args: argparse.Namespace) -> Modelled:
    """Raises UsageError, ConfigError, ModelLoadError."""
    given = [
        name
        for name in ("profile", "device", "interpolation", "polynomial")
        if getattr(args, name) is not None
    ]
    if len(given) != 1:
        one_of = "--profile, --device, --interpolation and --polynomial"
        raise UsageError(f"expected one of {one_of}, got {' and '.join(given) or 'none'}")
    from draftwise.plan.acceptance_files import read_acceptance
    from draftwise.plan.times import check_methods

    kind = given[0]
    if kind != "device" and args.parallel != 1:
        raise UsageError(f"--parallel: --{kind} says what one engine takes, on however many devices")
    acceptance: AcceptanceModel | None = None
    kv_bytes = 131_072.0
    if kind == "profile":
        from draftwise.plan.profile import Profile

        profile = Profile.load(args.profile)
        profile.check_of(args.model)
        setting = profile.setting(args.weights)
        times: StepTimes = profile.times(args.weights)
        if args.acceptance is None and profile.accepted:
            acceptance = profile.acceptance()
        kv_bytes = setting.kv_bytes
        args.parallel = setting.devices  # of one engine
        source = (
            f"{profile.model} in {setting.weights}, measured on {profile.machine.get('cpu', 'some machine')}"
        )
    elif kind == "device":
        times, kv_bytes, source = _roofline(args)
    elif kind == "interpolation":
        from draftwise.plan.interpolation import read_interpolation, times_of

        for name in ("weights", "model", "method", "acceptance"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name}: Dynamo's files name no model and know no drafts")
        times, args.parallel = times_of(read_interpolation(args.interpolation))
        source = f"Dynamo's files in {args.interpolation}, {args.parallel} devices per engine"
    else:
        from draftwise.plan.times import Polynomial

        if args.weights or args.model:
            raise UsageError("--model, --weights: a polynomial describes no particular model")
        times = Polynomial(args.polynomial, methods=(args.method or "model",))
        source = f"Dynamo's polynomials, {args.polynomial} tokens of cache"
    if acceptance is None:
        methods = times.methods or ("model",)
        acceptance = read_acceptance("0.85,0.3,0" if args.acceptance is None else args.acceptance, methods)
    method = args.method or next((m for m in times.methods if m in acceptance.methods), "none")
    check_methods(times, [method])
    if method != "none":
        acceptance.survival(method)
    return Modelled(times, acceptance, method, source, kv_bytes)


def _roofline(args: argparse.Namespace) -> tuple[StepTimes, float, str]:
    from draftwise.plan.devices import device
    from draftwise.plan.roofline import Roofline
    from draftwise.plan.sizes import model_sizes

    found = device(args.device)
    if args.model is None:
        raise UsageError("--device: expected --model as well")
    sizes = model_sizes(args.model)
    weights = args.weights or "bfloat16"
    drafting = {"head": sizes.head(), "lookup": None}
    drafter = drafting[args.drafter] if args.drafter in drafting else model_sizes(args.drafter)
    name = args.method or {"head": "eagle3", "lookup": "ngram"}.get(args.drafter, "draft_model")
    made = Roofline(found, sizes, weights=weights, parallel=args.parallel, drafters={name: drafter})
    source = f"{sizes.name} in {weights} on {args.parallel} x {found.name}, by its peaks"
    return made, made.kv_bytes, source


def sla_of(args: argparse.Namespace) -> Sla:
    """Limits in seconds."""
    from draftwise.plan.operating import Sla

    return Sla(*(None if ms is None else ms / 1000 for ms in (args.ttft, args.itl)))


def trace_of(args: argparse.Namespace) -> tuple[Trace, str]:
    """The load and its description. Raises UsageError, ConfigError."""
    if (args.trace is None) == (args.rate is None):
        raise UsageError("expected one of --trace and --rate")
    from draftwise.plan.traces import poisson_trace, read_trace

    if args.trace is not None:
        trace, words = read_trace(args.trace), str(args.trace)
    else:
        trace = poisson_trace(
            args.rate * min(args.sample, 1.0),
            args.duration,
            args.isl,
            args.osl,
            seed=args.seed,
            shape=args.shape,
            spread=args.spread,
        )
        words = f"{args.rate:g} requests/s ({args.shape}) of about {args.isl} + {args.osl} tokens"
    if args.requests is not None:
        trace = trace.first(args.requests)
    if args.faster != 1:
        trace = trace.faster(args.faster)
    if args.trace is not None or args.sample > 1:
        trace = trace.thinned(args.sample, args.seed)
    elif args.sample != 1 and args.faster != 1:
        raise UsageError("--sample and --faster: with --rate, say the rate")
    return trace, words


def table(title: str, columns: list[str], rows: list[list[str]], notes: list[str]) -> None:
    """Print a table that fits 80 columns, with lines below it."""
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    print(title)
    for cells in [columns, *rows]:
        first, *others = zip(cells, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(w) for cell, w in others)]).rstrip())
    for line in notes:
        print(line)


def ms(value: Any) -> str:
    """Seconds as milliseconds, four digits. Example: 0.01234 is 12.3."""
    if value is None:
        return "-"
    shown = 1000 * float(value)
    return f"{shown:.0f}" if shown >= 100 else f"{shown:.3g}"
