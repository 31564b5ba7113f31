"""``draftwise simulate``: simulates a cluster with the real scheduler and controller and no device."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from draftwise.cli.errors import UsageError
from draftwise.cli.numbers import positive
from draftwise.cli.planning import (
    Modelled,
    above_zero,
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

if TYPE_CHECKING:
    from draftwise.cli.options import Subparsers
    from draftwise.plan.planner import Planner
    from draftwise.plan.traces import Trace
    from draftwise.simulate.engine import EngineSettings, Policy
    from draftwise.simulate.outcome import Outcome
    from draftwise.simulate.settings import Failure

_TEXT = "simulate a cluster under a load: the real scheduler, on simulated devices"
_PARTS = 50


def add_parser(subparsers: Subparsers) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser("simulate", help=_TEXT, description=_TEXT)
    add_model_options(parser)
    add_load_options(parser)
    group = parser.add_argument_group("policies")
    group.add_argument(
        "--policies",
        nargs="+",
        default=["0", "adaptive"],
        metavar="K",
        help="numbers of drafts (0: plain), ranges as 0-7, adaptive; with +plan behind it, the planner chooses the "
        "number of replicas (0 adaptive)",
    )
    group.add_argument(
        "--most-drafts",
        type=positive,
        metavar="K",
        help="most drafts of the adaptive policy (as many as the acceptance is known for, or 7)",
    )
    add_engine_sizes(parser)
    group = parser.add_argument_group("cluster")
    group.add_argument("--replicas", type=positive, default=1, metavar="N", help="whole engines (1)")
    group.add_argument(
        "--prefill", type=positive, default=0, metavar="N", help="replicas for prompts, with --decode"
    )
    group.add_argument(
        "--decode", type=positive, default=0, metavar="N", help="replicas for decoding, with --prefill"
    )
    group.add_argument(
        "--bandwidth",
        type=above_zero,
        default=25.0,
        metavar="GB/S",
        help="bandwidth for K/V between the two kinds (25)",
    )
    group.add_argument("--router", default="load", metavar="NAME", help="load, prefix or round_robin (load)")
    group.add_argument(
        "--startup", type=from_zero, default=60.0, metavar="S", help="seconds until a new replica serves (60)"
    )
    group.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="TIME:REPLICA:SECONDS",
        help="a replica stops and comes back; may be repeated",
    )
    group.add_argument("--price", type=from_zero, metavar="X", help="price of a device for an hour")
    add_planner_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw the run over time into a .svg file")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.set_defaults(run=run)


def add_engine_sizes(parser: argparse.ArgumentParser) -> None:
    """Sizes of a simulated engine."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--max-num-seqs", type=positive, default=256, metavar="N", help="requests at once (256)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=positive, default=8192, metavar="N", help="rows of a step (8192)"
    )
    group.add_argument("--num-kv-blocks", type=positive, metavar="N", help="blocks of the cache (what fits)")
    group.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens of a block (16)")
    group.add_argument(
        "--enable-prefix-caching", action="store_true", help="cache prefixes also if the trace records none"
    )


def add_planner_options(parser: argparse.ArgumentParser) -> None:
    """Options for planning replicas."""
    group = parser.add_argument_group("planner")
    group.add_argument(
        "--budget", type=positive, default=8, metavar="N", help="most devices that may be used (8)"
    )
    group.add_argument(
        "--interval", type=above_zero, default=60.0, metavar="S", help="time between decisions (60)"
    )
    group.add_argument(
        "--least", type=positive, default=1, metavar="N", help="replicas of each pool, at least (1)"
    )
    group.add_argument(
        "--predictor",
        default="constant",
        metavar="NAME",
        help="how the load is predicted: constant, arima, kalman or seasonal (constant)",
    )
    group.add_argument(
        "--margin",
        type=from_zero,
        default=0.0,
        metavar="X",
        help="share of each replica's capacity to keep free (0)",
    )
    group.add_argument(
        "--goal",
        type=above_zero,
        default=0.95,
        metavar="X",
        help="share of requests that must get a place within the limits (0.95)",
    )
    group.add_argument(
        "--hold",
        type=positive,
        metavar="N",
        help="intervals for which fewer replicas must suffice before some are removed (as many as a start takes)",
    )
    group.add_argument(
        "--dynamo", action="store_true", help="Dynamo's rule instead: no queue, hysteresis, speculation"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out ``draftwise simulate``."""
    from draftwise.charts import check_svg, write_svg

    if args.plot is not None:
        check_svg(args.plot)
    found = modelled(args)
    trace, words = trace_of(args)
    policies = _policies(args, found)
    start = time.process_time()
    outcomes: list[Outcome] = []
    with progress(_PARTS * len(policies), "simulate") as advance:
        for policy, planned in policies:
            outcomes.append(_simulate(args, found, trace, policy, planned, advance))
    seconds = time.process_time() - start
    if args.plot is not None:
        from draftwise.simulate.plots import timeline_svg

        write_svg(timeline_svg(outcomes), args.plot)
    if args.json:
        print_json(
            {
                "times": found.source,
                "load": words,
                "sample": args.sample,
                "seconds": seconds,
                "results": [outcome.as_dict() for outcome in outcomes],
            }
        )
        return 0
    _print(args, found, trace, words, outcomes)
    rows = sum(o.num_rows for o in outcomes)
    note(f"{rows:,} rows scheduled in {seconds:.1f} s of processor time ({rows / max(seconds, 1e-9):,.0f}/s)")
    return 0


def adaptive_policy(found: Modelled, most: int | None) -> Policy:
    """The adaptive controller, with as many drafts as the acceptance is known for, or ``most``."""
    from draftwise.simulate.engine import Policy

    if found.method == "none":
        return Policy(adaptive=True)
    known = 7 if found.times.most_drafts is None else found.times.most_drafts
    return Policy(found.method, most or known, adaptive=True)


def _policies(args: argparse.Namespace, found: Modelled) -> list[tuple[Policy, bool]]:
    """Each with whether a planner chooses the number of replicas. Raises UsageError."""
    from draftwise.simulate.engine import Policy

    out: list[tuple[Policy, bool]] = []
    for text in args.policies:
        how, plus, rest = text.partition("+")
        planned = bool(plus)
        if rest != ("plan" if plus else ""):
            raise UsageError(f"--policies: {text!r}: only plan may follow a +")
        if how == "adaptive":
            out.append((adaptive_policy(found, args.most_drafts), planned))
            continue
        low, _, high = how.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal():
            raise UsageError(f"--policies: expected a number of drafts, a range or adaptive, got {text!r}")
        for drafts in range(int(low), int(high or low) + 1):
            if drafts and found.method == "none":
                raise UsageError("--policies: no method drafts here; name one with --method")
            out.append((Policy(found.method if drafts else "none", drafts), planned))
    if not out:
        raise UsageError(f"--policies: {' '.join(args.policies)} names none")
    most = found.times.most_drafts
    for policy, _ in out:
        if most is not None and policy.drafts > most:
            note(f"{policy.name}: {policy.drafts} drafts are beyond what was measured ({most})")
    return out


def _simulate(
    args: argparse.Namespace, found: Modelled, trace: Trace, policy: Policy, planned: bool, advance: object
) -> Outcome:
    from draftwise.simulate.cluster import Cluster
    from draftwise.simulate.settings import ClusterSettings

    done = 0
    name = policy.name + ("+plan" if planned else "")

    def moved(share: float) -> None:
        nonlocal done
        while done < int(share * _PARTS):
            done += 1
            advance(name)  # type: ignore[operator]

    settings = ClusterSettings(
        replicas=_sampled(args.replicas, args.sample),
        prefill=_sampled(args.prefill, args.sample),
        decode=_sampled(args.decode, args.sample),
        router=args.router,
        startup=args.startup,
        bandwidth=args.bandwidth * 1e9,
        kv_bytes=found.kv_bytes,
        devices=args.parallel,
        failures=_failures(args.fail),
        sla=sla_of(args),
    )
    planner = make_planner(args, found, policy.adaptive or policy.drafts > 0) if planned else None
    cluster = Cluster(
        trace,
        found.times,
        found.acceptance,
        policy,
        engine_settings(args),
        settings,
        planner=planner,
        seed=args.seed,
        advance=moved,
    )
    outcome = cluster.run()
    moved(1.0)
    return replace(outcome, policy=name)


def _sampled(count: int, share: float) -> int:
    """The share of ``count`` replicas or devices. Raises UsageError if it is no whole number, to within a tenth."""
    found = count * min(share, 1.0)
    if abs(round(found) - found) > 0.1 * found:
        raise UsageError(
            f"--sample: {share:g} of {count} is {found:.3g}, no whole number of replicas or devices"
        )
    return round(found)


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """Sizes of an engine."""
    from draftwise.simulate.engine import EngineSettings

    return EngineSettings(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_kv_blocks=args.num_kv_blocks,
        block_size=args.block_size,
        prefix_caching=args.enable_prefix_caching,
    )


def make_planner(args: argparse.Namespace, found: Modelled, speculating: bool) -> Planner:
    """A planner by the options, with the performance model as its capacity."""
    from draftwise.plan.capacity import ModelCapacity
    from draftwise.plan.planner import Planner, PlannerConfig

    config = PlannerConfig(
        interval=args.interval,
        mode="pools" if args.prefill else "engines",
        budget=_sampled(args.budget, args.sample),
        devices=dict.fromkeys(("engines", "prefill", "decode"), args.parallel),
        least=args.least,
        margin=args.margin,
        goal=args.goal,
        hold=args.hold,
        startup=args.startup,
        predictor=args.predictor,
        period=max(round(86_400 / args.interval), 2),
        dynamo=args.dynamo,
    )
    capacity = ModelCapacity(
        found.times,
        found.acceptance,
        sla_of(args),
        most_requests=args.max_num_seqs,
        methods=[found.method],
        ignore_speculation=args.dynamo or not speculating,
    )
    return Planner(config, capacity)


def _failures(given: list[str]) -> tuple[Failure, ...]:
    from draftwise.simulate.settings import Failure

    out = []
    for text in given:
        parts = text.split(":")
        try:
            out.append(Failure(float(parts[0]), int(parts[1]), float(parts[2]) if len(parts) > 2 else 60.0))
        except (ValueError, IndexError):
            raise UsageError(f"--fail: expected TIME:REPLICA:SECONDS, got {text!r}") from None
    return tuple(out)


def _print(
    args: argparse.Namespace, found: Modelled, trace: Trace, words: str, outcomes: list[Outcome]
) -> None:
    sla = outcomes[0].sla
    rows = []
    for o in outcomes:
        cost = o.device_seconds / 3600 / min(args.sample, 1.0)
        rows.append(
            [
                o.policy,
                ms(o.mean(o.ttft_np)),
                ms(o.percentile(o.ttft_np, 95)),
                ms(o.mean(o.itl_np)),
                ms(o.percentile(o.itl_np, 95)),
                f"{o.tokens / max(o.seconds, 1e-9) / min(args.sample, 1.0):.0f}",
                f"{o.good_np.sum() / max(o.seconds, 1e-9) / min(args.sample, 1.0):.3g}",
                f"{100 * o.attainment:.1f}%",
                "-" if o.accepted_length is None else f"{o.accepted_length:.2f}",
                f"{cost * args.price:.4g}" if args.price is not None else f"{cost:.3g}",
            ]
        )
    columns = ["policy", "TTFT", "p95", "ITL", "p95", "tok/s", "good/s", "in SLA", "acc.", ""]
    columns[-1] = "cost" if args.price is not None else "dev.h"
    notes = [f"times: {found.source}", f"SLA: {sla}; TTFT and ITL in ms, mean and 95th percentile"]
    if args.sample < 1:
        notes.append(
            f"a sample: {100 * args.sample:g} % of requests and replicas; rates and cost are for all"
        )
    for o in outcomes:
        if o.num_refused:
            notes.append(f"{o.policy}: {o.num_refused} requests refused: {o.refused}")
        waiting = len(o.arrived_np) - o.num_ended - o.num_refused
        if waiting:
            notes.append(f"{o.policy}: {waiting} requests were never served")
        if o.num_outside:
            share = 100 * o.num_outside / max(o.num_steps, 1)
            notes.append(f"{o.policy}: {share:.1f} % of steps beyond what the times know: {o.outside}")
        if o.num_preemptions or o.num_moved:
            notes.append(
                f"{o.policy}: {o.num_preemptions} preemptions, {o.num_moved} requests moved by failures"
            )
    table(f"{len(trace):,} requests, {words}", columns, rows, notes)
