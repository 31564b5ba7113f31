"""The planner against Dynamo's rule and against fixed settings, on loads that change tenfold in an hour.

    python benchmarks/plan_regret.py [--traces 5] [--rate 2] [--seconds 3600] [--budget 14] [--goal 0.99] [--seed 0]
        [--only N ...] [--no-fixed] [--json]

A simulated cluster of small, slow engines (Dynamo's polynomials times 20, eight requests at once, prompts of about 100
tokens and as many out), so that an hour takes seconds. Limits: 4 s to the first token, 200 ms per token.
Three rules per trace:

- planner: ours, engines with the adaptive controller, planned for ``--goal``;
- dynamo: its rule, engines with a fixed K = 3, planned for as if nothing were drafted, constant predictor;
- fixed: numbers of replicas and of drafts (``--drafts``) that stay the same for the hour. Which of them is best is
  known only afterwards.

A fixed setting may have whatever share of requests within the limits one pays for: enough replicas for the peak have
all. So three questions are asked of fixed settings:

- as good: does the cheapest one with at least the planner's share of requests within the limits take more device hours?
- as dear: has the best one with no more device hours than the planner a smaller share?
- goal: of those that reach ``--goal``, the one with the fewest device hours (of equals the one with the larger share):
  is the planner better on both, that is, has it at least that share with fewer hours?

Against Dynamo's rule: better on both as well. ``--no-fixed`` asks only this, which is a fifth of the work.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

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
ADAPTIVE = Policy("eagle3", 5, adaptive=True)


class Point(NamedTuple):
    """What a rule came to. ``in_sla``: share of requests within the limits."""

    rule: str
    in_sla: float
    hours: float

    def better(self, other: Point) -> bool:
        """On both."""
        return self.in_sla >= other.in_sla and self.hours < other.hours


def point(rule: str, outcome: Outcome) -> Point:
    """Of a run."""
    return Point(rule, outcome.attainment, outcome.device_seconds / 3600)


def run(trace: Trace, replicas: int, policy: Policy, planner: Planner | None) -> Outcome:
    """One hour."""
    engine = EngineSettings(max_num_seqs=8, max_num_batched_tokens=512)
    settings = ClusterSettings(replicas=replicas, startup=45.0, sla=SLA)
    return Cluster(trace, TIMES, ACCEPTANCE, policy, engine, settings, planner=planner).run()


def planned(trace: Trace, budget: int, dynamo: bool, goal: float = 0.99) -> Outcome:
    """Ours or Dynamo's rule. ``goal``: ours plans for this share of requests within the limits."""
    capacity = ModelCapacity(
        TIMES, ACCEPTANCE, SLA, most_requests=8, most_drafts=5, ignore_speculation=dynamo
    )
    config = PlannerConfig(interval=INTERVAL, budget=budget, startup=45.0, goal=goal, dynamo=dynamo)
    return run(trace, 1, Policy("eagle3", 3) if dynamo else ADAPTIVE, Planner(config, capacity))


def fixed(trace: Trace, drafts: Iterable[int], least: int, most: int, goal: float) -> list[Point]:
    """Fixed settings from ``least`` replicas on, as long as more of them can matter: until one reaches ``goal``."""
    found: list[Point] = []
    for n in range(least, most + 1):
        for k in drafts:
            policy = Policy("eagle3", k) if k else Policy()
            found.append(point(f"fixed {n} x K={k}", run(trace, n, policy, None)))
        if max(p.in_sla for p in found) >= goal:
            break
    return found


def judged(ours: Point, others: list[Point], goal: float) -> tuple[dict[str, bool], list[Point]]:
    """The three questions of the module's text, and the settings that they were about.

    Example: ours has 99 % in 2 h, fixed ones 90 % in 2 h, 98 % in 3 h and 99.5 % in 4 h; goal 97 %: as good (4 h), as
    dear (90 %), and better than the second on both.
    """
    as_good = min((p for p in others if p.in_sla >= ours.in_sla), key=lambda p: p.hours, default=None)
    as_dear = max((p for p in others if p.hours <= ours.hours), key=lambda p: p.in_sla, default=None)
    best = min(
        (p for p in others if p.in_sla >= goal), key=lambda p: (round(p.hours, 1), -p.in_sla), default=None
    )
    won = {
        "as good": as_good is None or as_good.hours > ours.hours,
        "as dear": as_dear is None or as_dear.in_sla < ours.in_sla,
        "goal": best is None or ours.better(best),
    }
    return won, [p for p in dict.fromkeys((as_dear, best, as_good)) if p is not None]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=int, default=5)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--budget", type=int, default=14)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5], help="of fixed settings (3 5)")
    parser.add_argument("--goal", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of traces, from 0")
    parser.add_argument("--no-fixed", action="store_true", help="compare with Dynamo's rule alone")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    wins: dict[str, int] = {}
    chosen = [n for n in range(args.traces) if not args.only or n in args.only]
    for number in chosen:
        shape, spread = LOADS[number]
        trace = poisson_trace(
            args.rate, args.seconds, 100, 100, shape=shape, spread=spread, seed=args.seed + number
        )
        ours, theirs = (
            point(name, planned(trace, args.budget, name == "dynamo", args.goal))
            for name in ("planner", "dynamo")
        )
        won: dict[str, bool] = {"dynamo": ours.better(theirs)}
        shown: list[Point] = []
        if not args.no_fixed:
            goal = max(ours.in_sla, args.goal)
            others = fixed(trace, args.drafts, max(int(ours.hours), 1), args.budget, goal)
            asked, shown = judged(ours, others, args.goal)
            won |= asked
        for name, is_won in won.items():
            wins[name] = wins.get(name, 0) + is_won
        for p in (ours, theirs, *shown):
            results.append({"trace": f"{shape} {spread:g}", "requests": len(trace), **p._asdict()})
            if not args.json:
                print(
                    f"{shape + f' {spread:g}':<12}{len(trace):>6}  {p.rule:<14}{100 * p.in_sla:>7.2f} %"
                    f"{p.hours:>8.2f} device hours",
                    flush=True,
                )
    if args.json:
        print(json.dumps({"results": results, "wins": wins}))
        return
    for name, count in wins.items():
        against = "dynamo" if name == "dynamo" else f"fixed settings ({name})"
        print(f"planner better than {against}: {count} of {len(chosen)}")


if __name__ == "__main__":
    main()
