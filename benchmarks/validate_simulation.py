"""Real runs of a model against the simulation of the same requests.

    python benchmarks/validate_simulation.py profile.json [--model FOLDER --method ngram] [--rates 2 8 24]
        [--burst 32] [--drafts 0 2 4] [--passes 3] [--seconds 4] [--clock cpu]

Each load is served by an engine in real time (requests come at random times; prompts of held-out code, greedy, fixed
number of drafts), then simulated from the profile with the same arrivals, and compared: mean time between tokens,
output tokens per second, 95th percentile of the time to the first token. ``--burst``: so many requests come at once and
fill the engine.

The profile is measured as well, unless the file is there already: its rounds alternate with passes over all loads,
since a machine may be slower for minutes. Nothing of a run reaches the profile. With ``--clock cpu`` both are timed by
the processor time of the process (an engine of one thread), and idle time is skipped: what else runs on the machine
then disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from draftwise import SamplingParams, lifetime
from draftwise.bench.workloads import code_prompts
from draftwise.config import resolve_engine_config
from draftwise.engine.builder import build_engine, tokenizer_of
from draftwise.plan.profile import Profile
from draftwise.plan.traces import Trace, make_trace, poisson_trace
from draftwise.profile.run import Profiler, ProfileSettings, machine, model_name
from draftwise.sched.request import Request
from draftwise.simulate.cluster import Cluster
from draftwise.simulate.engine import EngineSettings, Policy
from draftwise.simulate.outcome import Outcome

MOST = 16
"""Requests at once."""
LIMITS = {"itl": (1000, 0.1), "rate": (1, 0.1), "ttft": (1000, 0.2)}
"""What is compared: scale to milliseconds, and by how much the simulation may differ."""


class Clock:
    """Time of the wall, or of this process's processor, to which waits are added."""

    def __init__(self, cpu: bool) -> None:
        self._cpu, self._waited = cpu, 0.0

    def __call__(self) -> float:
        return time.process_time() + self._waited if self._cpu else time.perf_counter()

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""
        if self._cpu:
            self._waited += max(seconds, 0.0)
        else:
            time.sleep(min(max(seconds, 0.0), 0.001))


class Run(NamedTuple):
    """Of one trace, real or simulated. Seconds per request; ``accepted`` drafts of so many ``proposals``."""

    ttft: list[float]
    itl: list[float]
    tokens: int
    seconds: float
    proposals: int
    accepted: int


class Bench:
    """One engine, whose profile and whose runs take turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clock = Clock(args.clock == "cpu")
        options: dict[str, Any] = (
            {} if args.model is None else {"model": args.model, "tokenizer": args.tokenizer}
        )
        self.config = resolve_engine_config(
            **options,
            speculative_config={"method": args.method, "num_speculative_tokens": max(args.drafts)},
            speculation_control="static",
            num_threads=1,
            max_num_seqs=MOST,
            max_model_len=args.longest,
            enable_prefix_caching=False,  # prompts come more than once, and are read each time
            rounds_per_step=1,  # simulations have no others
        )
        with lifetime.computing():
            self.engine = build_engine(self.config, self.clock)
        tokenizer = tokenizer_of(self.engine)
        self.prompts = self._prompts(tokenizer, 64, 7)
        self._known = args.profile.exists()
        if self._known:
            self.profile = Profile.load(args.profile)
            self.profile.check_of(model_name(self.config))
        else:
            self.profile = Profile(machine(self.config.device, 1), model_name(self.config))

    def _prompts(
        self, tokenizer: Any, count: int, seed: int, tokens: int | None = None
    ) -> list[tuple[int, ...]]:
        tokens = tokens or self.args.prompt
        found = list(code_prompts(tokenizer, count, tokens, seed=seed))
        if self.args.repeat:  # a quarter of it four times: what a drafter that looks things up is good at
            quarter = tokens // 4
            found = [p[:quarter] * 4 for p in found]
        return found

    def measure(self, rounds: int) -> None:
        """Go on with the profile until every size was visited so often."""
        if self._known:
            return
        drafts = [k for k in self.args.drafts if k]
        settings = ProfileSettings(
            self.args.profile,
            drafts,
            self.args.concurrency,
            self.args.contexts,
            [self.args.method],
            rounds=rounds,
            pause=0.0 if self.args.clock == "cpu" else 0.4,
        )
        profiler = Profiler(
            self.profile,
            settings,
            lambda engine, tokens: {"code": self._prompts(tokenizer_of(engine), 24, 0, tokens)},
            engine_clock=self.clock,
        )
        profiler.measure_engine(self.engine, "auto", lambda total: lambda point: None)

    def real(self, trace: Trace, drafts: int) -> Run:
        """Serve the trace as time passes."""
        core, clock, args = self.engine.core, self.clock, self.args
        speculation = (
            {"method": args.method, "num_speculative_tokens": drafts} if drafts else {"method": "none"}
        )
        params = SamplingParams(
            temperature=0, max_tokens=args.output, ignore_eos=True, detokenize=False, speculation=speculation
        )
        core.executor.forget()
        core.scheduler.kv.reset_prefix_cache()
        arrivals = trace.times_np.tolist()
        requests: list[Request] = []
        with lifetime.computing(), torch.inference_mode():
            start = clock()
            while len(requests) < len(arrivals) or core.has_work:
                now = clock() - start
                while len(requests) < len(arrivals) and arrivals[len(requests)] <= now:
                    prompt = {"prompt_token_ids": list(self.prompts[len(requests) % len(self.prompts)])}
                    (request,) = self.engine.processor.group(prompt, params).requests
                    requests.append(request)
                    core.add(request)
                if core.has_work:
                    core.step()
                else:
                    clock.wait(arrivals[len(requests)] - now)
            seconds = clock() - start
        ttft, itl = [], []
        for request, arrived in zip(requests, arrivals, strict=True):
            first, end = request.first_token_time, request.finished_time
            assert first is not None and end is not None
            ttft.append(first - start - arrived)
            itl.append((end - first) / (args.output - 1))
        proposals = sum(r.counts.num_drafts for r in requests)
        accepted = sum(r.counts.num_accepted_tokens for r in requests)
        return Run(ttft, itl, len(requests) * args.output, seconds, proposals, accepted)

    def simulated(self, trace: Trace, drafts: int) -> Run:
        """The same from the profile."""
        config, kv = self.engine.core.scheduler.config, self.engine.core.scheduler.kv
        policy = Policy(self.args.method, drafts) if drafts else Policy()
        sizes = EngineSettings(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_kv_blocks=kv.num_blocks,
            block_size=kv.block_size,
        )
        found: Outcome = Cluster(trace, self.profile.times(), self.profile.acceptance(), policy, sizes).run()
        if found.num_outside:
            print(f"{found.num_outside} of {found.num_steps} steps beyond the profile: {found.outside}")
        return Run(
            found.ttft_np.tolist(),
            found.itl_np.tolist(),
            found.tokens,
            found.seconds,
            found.num_proposals,
            found.num_accepted,
        )


def summary(runs: list[Run]) -> dict[str, float]:
    """What is compared, and the tokens per step that drafted."""
    return {
        "itl": float(np.mean([x for run in runs for x in run.itl])),
        "rate": sum(run.tokens for run in runs) / sum(run.seconds for run in runs),
        "ttft": float(np.percentile([x for run in runs for x in run.ttft], 95)),
        "accepted": 1 + sum(run.accepted for run in runs) / max(sum(run.proposals for run in runs), 1),
    }


def loads(args: argparse.Namespace, number: int) -> list[tuple[str, Trace]]:
    """Name and arrivals of each, in a pass."""
    found = [
        (
            f"{rate:g}/s",
            poisson_trace(
                rate, args.seconds, args.prompt, args.output, seed=round(100 * rate) + 7919 * number
            ),
        )
        for rate in args.rates
    ]
    if args.burst:
        n = args.burst
        found.append((f"{n} at once", make_trace([0.0] * n, [args.prompt] * n, [args.output] * n)))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profile", type=Path)
    parser.add_argument("--model", help="folder (the embedded model)")
    parser.add_argument("--tokenizer", help="of that model")
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 8.0, 24.0])
    parser.add_argument("--burst", type=int, default=32)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--seconds", type=float, default=4.0, help="of a load in each pass (4)")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeat", action="store_true", help="prompts that repeat themselves")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    bench = Bench(args)
    bench.measure(1)
    for drafts in args.drafts:
        bench.real(poisson_trace(20, 0.2, args.prompt, args.output), drafts)
    served: dict[tuple[str, int], list[tuple[Trace, Run]]] = {}
    for number in range(args.passes):
        for name, trace in loads(args, number):
            for drafts in args.drafts:
                served.setdefault((name, drafts), []).append((trace, bench.real(trace, drafts)))
        bench.measure(number + 2)
    rows: list[dict[str, Any]] = []
    for (name, drafts), runs in served.items():
        rows.append({"load": name, "drafts": drafts, "real": summary([run for _, run in runs])})
        rows[-1]["simulated"] = summary([bench.simulated(trace, drafts) for trace, _ in runs])
    within = dict.fromkeys(LIMITS, 0)
    for row in rows:
        said = row["simulated"]
        cells = []
        for name, (scale, limit) in LIMITS.items():
            a, b = scale * row["real"][name], scale * said[name]
            within[name] += abs(b / a - 1) <= limit
            cells.append(f"{name} {a:7.2f} {b:7.2f} {b / a - 1:+5.0%}")
        if not args.json:
            tokens = f"{row['real']['accepted']:.2f} {said['accepted']:.2f}"
            print(f"{row['load']:>10} K={row['drafts']}  " + "   ".join([*cells, tokens]), flush=True)
    bench.engine.core.close()
    if args.json:
        print(json.dumps(rows))
    else:
        print(
            "within the limits: "
            + ", ".join(f"{name} {n} of {len(rows)} (to {LIMITS[name][1]:.0%})" for name, n in within.items())
        )


if __name__ == "__main__":
    main()
