"""The planner against Dynamo's rule and against fixed numbers of replicas, on loads that change tenfold in an hour.

    python benchmarks/plan_regret.py [--traces 5] [--rate 0.5] [--seconds 3600] [--budget 6] [--goal 0.99] [--seed 0]
        [--only N ...] [--json]

A simulated cluster of small, slow engines (Dynamo's polynomials times 20, eight requests at once, prompts of about 100
tokens and as many out), so that an hour takes seconds. Limits: 4 s to the first token, 200 ms per token.
Three rules per trace:

- planner: ours, engines with the adaptive controller;
- dynamo: its rule, engines with a fixed K = 3, planned for as if nothing were drafted, constant predictor;
- fixed: of all numbers of replicas and of drafts (K = 0, 1, 3, 5) that stay the same for the hour, the one that
  reaches the goal (``--goal``: share of requests within the limits) with the fewest device hours, and of these the one
  with most requests within them. It is known only afterwards.

Better on both: at least as many requests within the limits, with fewer device hours.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from draftwise.plan.acceptance import AcceptanceModel
from draftwise.plan.capacity import ModelCapacity
from draftwise.plan.operating import Sla
from draftwise.plan.planner import Planner, PlannerConfig
from draftwise.plan.times import Polynomial
from draftwise.plan.traces import Trace, poisson_trace
from draftwise.simulate.cluster import Cluster
from draftwise.simulate.engine import EngineSettings, Policy
from draftwise.simulate.outcome import Outcome
from draftwise.simulate.settings import ClusterSettings

TIMES = Polynomial(
    8000, prefill=(8.42e-6, 0.3036, 330.0), decode=(-514.8, 1080.2, 114.8), draft_ms=10.0, methods=("eagle3",)
)
ACCEPTANCE = AcceptanceModel.constant((0.8, 0.7, 0.6, 0.5), "eagle3")
SLA = Sla(ttft=4.0, itl=0.2)
LOADS = (("tenfold", 0.3), ("peak", 0.3), ("day", 0.3), ("tenfold", 0.6), ("peak", 0.6))
INTERVAL = 30.0


FIXED_DRAFTS = (0, 1, 3, 5)
ADAPTIVE = Policy("eagle3", 5, adaptive=True)


def run(trace: Trace, replicas: int, policy: Policy, planner: Planner | None) -> Outcome:
    """One hour."""
    engine = EngineSettings(max_num_seqs=8, max_num_batched_tokens=512)
    settings = ClusterSettings(replicas=replicas, startup=45.0, sla=SLA)
    return Cluster(trace, TIMES, ACCEPTANCE, policy, engine, settings, planner=planner).run()


def planned(trace: Trace, budget: int, dynamo: bool) -> Outcome:
    """Ours or Dynamo's rule."""
    capacity = ModelCapacity(
        TIMES, ACCEPTANCE, SLA, most_requests=8, most_drafts=5, ignore_speculation=dynamo
    )
    config = PlannerConfig(interval=INTERVAL, budget=budget, startup=45.0, dynamo=dynamo)
    return run(trace, 1, Policy("eagle3", 3) if dynamo else ADAPTIVE, Planner(config, capacity))


def best_fixed(trace: Trace, budget: int, goal: float) -> tuple[str, Outcome]:
    """In hindsight; if nothing reaches the goal, the one with most requests within the limits."""
    found: list[tuple[float, str, Outcome]] = []
    for n in range(1, budget + 1):
        for drafts in FIXED_DRAFTS:
            outcome = run(trace, n, Policy("eagle3", drafts) if drafts else Policy(), None)
            found.append((outcome.attainment, f"{n} x K={drafts}", outcome))
        if max(found)[0] >= goal:  # more replicas cost more
            break
    return max(found, key=lambda one: one[0])[1:]


def better(ours: Outcome, other: Outcome) -> bool:
    """On both."""
    return ours.attainment >= other.attainment and ours.device_seconds < other.device_seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--budget", type=int, default=6)
    parser.add_argument("--goal", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of traces, from 0")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    wins = {"dynamo": 0, "fixed": 0, "fixed, device hours alone": 0}
    chosen = [n for n in range(args.traces) if not args.only or n in args.only]
    for number in chosen:
        shape, spread = LOADS[number]
        trace = poisson_trace(
            args.rate, args.seconds, 100, 100, shape=shape, spread=spread, seed=args.seed + number
        )
        ours, theirs = planned(trace, args.budget, False), planned(trace, args.budget, True)
        name, fixed = best_fixed(trace, args.budget, args.goal)
        wins["dynamo"] += better(ours, theirs)
        wins["fixed"] += better(ours, fixed)
        wins["fixed, device hours alone"] += ours.device_seconds < fixed.device_seconds
        for rule, outcome in (("planner", ours), ("dynamo", theirs), (f"fixed {name}", fixed)):
            row = {
                "trace": f"{shape} {spread:g}",
                "requests": len(trace),
                "rule": rule,
                "in_sla": outcome.attainment,
                "device_hours": outcome.device_seconds / 3600,
            }
            results.append(row)
            if not args.json:
                print(
                    f"{row['trace']:<12}{row['requests']:>6}  {rule:<14}{100 * outcome.attainment:>7.2f} %"
                    f"{outcome.device_seconds / 3600:>8.2f} device hours",
                    flush=True,
                )
    if args.json:
        print(json.dumps({"results": results, "wins": wins}))
        return
    for rule, count in wins.items():
        print(f"planner better than {rule}: {count} of {len(chosen)}")


if __name__ == "__main__":
    main()
