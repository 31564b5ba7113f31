"""``draftwise plan``: how many replicas over time, which method and how many drafts; tried on a recorded load."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from draftwise.cli.errors import UsageError
from draftwise.cli.numbers import positive
from draftwise.cli.planning import (
    Modelled,
    add_load_options,
    add_model_options,
    from_zero,
    modelled,
    ms,
    sla_of,
    table,
    trace_of,
)
from draftwise.cli.report import note, print_json, progress
from draftwise.cli.simulate import (
    adaptive_policy,
    add_engine_sizes,
    add_planner_options,
    engine_settings,
    make_planner,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from draftwise.cli.options import Subparsers
    from draftwise.plan.planner import Planner
    from draftwise.plan.traces import Trace
    from draftwise.simulate.engine import Policy
    from draftwise.simulate.outcome import Outcome

_TEXT = "plan replicas over a recorded load, in a simulated cluster that carries the plan out"
_SHOWN = 24


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser("plan", help=_TEXT, description=_TEXT)
    add_model_options(parser)
    add_load_options(parser)
    add_planner_options(parser)
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--replicas", type=positive, default=1, metavar="N", help="replicas of each pool at the beginning (1)"
    )
    group.add_argument("--pools", action="store_true", help="separate replicas for prompts and for decoding")
    group.add_argument(
        "--startup",
        type=from_zero,
        default=60.0,
        metavar="S",
        help="seconds until a new replica serves (60)",
    )
    group.add_argument("--advisory", action="store_true", help="decide only, change nothing")
    group.add_argument(
        "--compare",
        action="store_true",
        help="compare with Dynamo's rule (--drafts) and fixed numbers of replicas",
    )
    group.add_argument(
        "--drafts",
        type=positive,
        default=3,
        metavar="K",
        help="drafts for --compare's rule, which does not know the acceptance (3)",
    )
    group.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="file with the planner's state, read at the start and written at the end",
    )
    add_engine_sizes(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the run over time into a .svg file")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise plan``."""
    from draftwise.charts import check_svg, write_svg
    from draftwise.plan.live import read_state, write_state

    if args.plot is not None:
        check_svg(args.plot)
    if args.compare and (args.pools or args.advisory):
        raise UsageError("--compare: works only with plans of whole engines that are carried out")
    args.prefill = 1 if args.pools else 0
    found = modelled(args)
    trace, words = trace_of(args)
    adaptive = adaptive_policy(found, None)
    planner = make_planner(args, found, True)
    if args.state is not None and args.state.exists():
        planner.restore(read_state(args.state))
    runs: dict[str, Callable[[], Outcome]] = {
        "planner": lambda: _run(args, found, trace, adaptive, args.replicas, planner)
    }
    if args.compare:
        runs |= _others(args, found, trace, adaptive)
    outcomes: dict[str, Outcome] = {}
    with progress(len(runs), "plan") as advance:
        for name, one in runs.items():
            outcomes[name] = one()
            advance(name)
    if args.state is not None:
        write_state(args.state, planner)
    if args.plot is not None:
        from draftwise.simulate.plots import timeline_svg

        write_svg(timeline_svg([replace(o, policy=name) for name, o in outcomes.items()]), args.plot)
    if args.json:
        results = {name: outcome.as_dict() for name, outcome in outcomes.items()}
        print_json({"times": found.source, "load": words, "sample": args.sample, "results": results})
    else:
        _print(args, found, trace, words, outcomes)
    return 0


def _others(
    args: argparse.Namespace, found: Modelled, trace: Trace, adaptive: Policy
) -> dict[str, Callable[[], Outcome]]:
    from draftwise.simulate.engine import Policy

    fixed = Policy(found.method, args.drafts) if found.method != "none" else Policy()

    def dynamo() -> Outcome:
        rule = make_planner(argparse.Namespace(**{**vars(args), "dynamo": True}), found, True)
        return _run(args, found, trace, fixed, args.replicas, rule)

    def always(replicas: int) -> Callable[[], Outcome]:
        return lambda: _run(args, found, trace, adaptive, replicas, None)

    most = max(round(args.budget * min(args.sample, 1.0)) // args.parallel, 1)
    return {f"dynamo K={args.drafts}": dynamo, **{f"{n} always": always(n) for n in range(1, most + 1)}}


def _run(
    args: argparse.Namespace,
    found: Modelled,
    trace: Trace,
    policy: Policy,
    replicas: int,
    planner: Planner | None,
) -> Outcome:
    from draftwise.simulate.cluster import Cluster
    from draftwise.simulate.settings import ClusterSettings

    settings = ClusterSettings(
        replicas=replicas,
        prefill=replicas if args.pools else 0,
        decode=replicas if args.pools else 0,
        startup=args.startup,
        kv_bytes=found.kv_bytes,
        devices=args.parallel,
        sla=sla_of(args),
    )
    cluster = Cluster(
        trace,
        found.times,
        found.acceptance,
        policy,
        engine_settings(args),
        settings,
        planner=planner,
        advisory=args.advisory,
        seed=args.seed,
    )
    return cluster.run()


def _print(
    args: argparse.Namespace, found: Modelled, trace: Trace, words: str, outcomes: dict[str, Outcome]
) -> None:
    planned = outcomes["planner"]
    print(f"{len(trace):,} requests, {words}\n{found.source}")
    before: dict[str, int] = {}
    changes = []
    for moment in planned.moments:
        if dict(moment.wanted) != before:
            before = dict(moment.wanted)
            changes.append(moment)
    for moment in changes[:_SHOWN]:
        counts = " + ".join(str(n) for n in moment.wanted.values())
        print(textwrap.shorten(f"{_time(moment.time)}  {counts}: {moment.why}", 80, placeholder=" ..."))
    if len(changes) > _SHOWN:
        print(f"... {len(changes) - _SHOWN} more changes (--json has all)")
    rows = []
    for name, o in outcomes.items():
        rows.append(
            [
                name,
                f"{100 * o.attainment:.2f}%",
                f"{o.device_seconds / 3600 / min(args.sample, 1.0):.3g}",
                ms(o.percentile(o.ttft_np, 95)),
                ms(o.percentile(o.itl_np, 95)),
                f"{sum(m.drafts for m in o.moments) / max(len(o.moments), 1):.1f}",
            ]
        )
    table(
        "",
        ["", "in SLA", "device h", "TTFT p95", "ITL p95", "K"],
        rows,
        [f"SLA: {sla_of(args)}; times in ms"],
    )
    if planned.num_refused:
        note(f"{planned.num_refused} requests refused: {planned.refused}")


def _time(seconds: float) -> str:
    """Example: 3725 is 1:02:05."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
