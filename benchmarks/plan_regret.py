"""The planner against Dynamo's rule and against fixed numbers of replicas, on loads that change tenfold in an hour.

    python benchmarks/plan_regret.py [--traces 5] [--rate 0.5] [--seconds 3600] [--budget 6] [--seed 0] [--json]

A simulated cluster of small, slow engines (Dynamo's polynomials times 20, eight requests at once, prompts of about 100
tokens and as many out), so that an hour takes seconds. Limits: 4 s to the first token, 200 ms per token.
Three rules per trace: ours (engines with the adaptive controller), Dynamo's (engines with a fixed K = 3, planned for as
if nothing were drafted, constant predictor), and each fixed number of replicas. "fixed": the smallest number that keeps
at least as many requests within the limits as ours, known only afterwards; device hours are to be compared.
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


def run(trace: Trace, replicas: int, adaptive: bool, planner: Planner | None) -> Outcome:
    """One hour."""
    policy = Policy("eagle3", 5, adaptive=True) if adaptive else Policy("eagle3", 3)
    engine = EngineSettings(max_num_seqs=8, max_num_batched_tokens=512)
    settings = ClusterSettings(replicas=replicas, startup=45.0, sla=SLA)
    return Cluster(trace, TIMES, ACCEPTANCE, policy, engine, settings, planner=planner).run()


def planned(trace: Trace, budget: int, dynamo: bool) -> Outcome:
    """Ours or Dynamo's rule."""
    capacity = ModelCapacity(
        TIMES, ACCEPTANCE, SLA, most_requests=8, most_drafts=5, ignore_speculation=dynamo
    )
    config = PlannerConfig(interval=INTERVAL, budget=budget, startup=45.0, dynamo=dynamo)
    return run(trace, 1, not dynamo, Planner(config, capacity))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--budget", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    for number, (shape, spread) in enumerate(LOADS[: args.traces]):
        trace = poisson_trace(
            args.rate, args.seconds, 100, 100, shape=shape, spread=spread, seed=args.seed + number
        )
        ours, theirs = planned(trace, args.budget, False), planned(trace, args.budget, True)
        fixed = (0, ours)
        for n in range(1, args.budget + 1):
            fixed = (n, run(trace, n, True, None))
            if fixed[1].attainment >= ours.attainment:
                break
        found = [("planner", ours), ("dynamo", theirs), (f"{fixed[0]} fixed", fixed[1])]
        for name, outcome in found:
            row = {
                "trace": f"{shape} {spread:g}",
                "requests": len(trace),
                "rule": name,
                "in_sla": outcome.attainment,
                "device_hours": outcome.device_seconds / 3600,
            }
            results.append(row)
            if not args.json:
                print(
                    f"{row['trace']:<12}{row['requests']:>6}  {name:<10}{100 * outcome.attainment:>7.2f} %"
                    f"{outcome.device_seconds / 3600:>8.2f} device hours",
                    flush=True,
                )
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
